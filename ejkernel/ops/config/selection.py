"""ConfigSelectorChain chooses the config of a call.

    override → overlay → cache → persistent → tables → autotune → heuristics

The first level that has a config decides. Measured configs are kept in memory and on disk; those of heuristics never
are. `EJKERNEL_AUTOTUNE_BUDGET_S` bounds the seconds that measuring may delay a call (0: nothing is measured);
the forward and the backward of a gradient are two calls. When the budget ends, the best config timed so far is stored,
with the number of configs that were tried: it is used until `ejkernel tune` or `autotune_recorded`, which have no
budget, replace it. If there was no time to compare two configs, the budget is too short for this machine: heuristics
choose, and from then on without a search.
"""

import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import jax

from ejkernel.errors import ConfigMissError, EjkernelRuntimeError

from ..core.budget import BudgetSpent, budget_of_environment
from ..core.kernel import Invocation, Kernel
from ..core.progress import tell_once
from ..core.tuner import Tuner
from ..core.types import Cfg, hashable
from ..utils.devices import device_target
from .cache import ConfigCache, autotune_override, overlays
from .persistent import PersistentCache


@dataclass(frozen=True)
class AutotunePolicy:
    """What to do if no config is stored.

    Attributes:
        allow_autotune: measuring the kernel's `config_space` and storing the fastest.
        allow_heuristics: using `heuristic_cfg`. If neither is allowed, a missing config is an error.
    """

    allow_autotune: bool = True
    allow_heuristics: bool = True


_POLICIES = {
    "autotune": AutotunePolicy(),
    "heuristics": AutotunePolicy(allow_autotune=False),
    "error": AutotunePolicy(allow_autotune=False, allow_heuristics=False),
}


def policy_of_environment() -> AutotunePolicy:
    """The policy named by `EJKERNEL_AUTOTUNE_POLICY` now: "autotune" (the default), "heuristics" or "error"."""
    name = os.environ.get("EJKERNEL_AUTOTUNE_POLICY") or "autotune"
    if name not in _POLICIES:
        raise ValueError(f"EJKERNEL_AUTOTUNE_POLICY is {name!r}; it has to be one of {', '.join(_POLICIES)}")
    return _POLICIES[name]


class ConfigSelectorChain(Generic[Cfg]):
    """Chooses configs in the order above, with the same key (`Kernel.key_builder`) at each level.

    Args:
        cache: configs in memory; by default a new cache.
        policy: what to do on a miss; by default the policy of `EJKERNEL_AUTOTUNE_POLICY` at that time.
        tuner: how to measure.
        persistent: configs on disk; None for none.
        tables: configs on disk that are only read.
        autotune: short for `policy=AutotunePolicy(allow_autotune=autotune)`.
        on_event: called as `on_event(event, operation, key, config)` with each choice. The events are override,
            overlay_hit, cache_hit, persistent_hit, table_hit, autotune_start (config None), autotune_finish,
            heuristics, and error (config None).
    """

    def __init__(
        self,
        cache: ConfigCache | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache | None = None,
        *,
        tables: Sequence[PersistentCache] = (),
        autotune: bool | None = None,
        on_event: Callable[[str, str, str, Cfg | None], Any] | None = None,
    ) -> None:
        if policy is not None and autotune is not None:
            raise ValueError("ConfigSelectorChain: give policy or autotune, not both")
        self.cache = ConfigCache() if cache is None else cache
        self.tuner = Tuner() if tuner is None else tuner
        self.persistent = persistent
        self.tables = tables
        self._policy = policy if autotune is None else AutotunePolicy(allow_autotune=autotune)
        self._on_event = on_event
        self._measurements = _LockByKey()
        self._not_measurable: set[str] = set()
        self._warned: set[str] = set()

    @property
    def policy(self) -> AutotunePolicy:
        """The policy in force: that of `policy_override`, else the given one, else that of the environment."""
        policy = self._policy or policy_of_environment()
        override = autotune_override()
        return policy if override is None else replace(policy, allow_autotune=override)

    def choose(self, kernel: Kernel[Cfg, Any], inv: Invocation, override: Cfg | None = None) -> Cfg:
        """The config for `inv`; `override` if that is given.

        A config from the user, as `override` or in a cache in memory, must be one that the kernel can run with. An
        invalid config in a file causes a warning, and the next level is asked.

        Raises:
            ConfigMissError: none is stored, and the policy allows neither measuring nor heuristics.
            TypeError, ValueError: the user's config is not one of the kernel.
        """
        if override is not None:
            override = kernel.checked_for(override, inv)
            key = None if self._on_event is None else inv.key
            return self._tell("override", kernel, key, override)
        key = inv.key
        for find in (self._stored, self._measured, self._guessed):
            if (config := find(kernel, inv, key)) is not None:
                break
        for cache in (*overlays(), self.cache):
            if key not in cache:
                cache.answered_by_another(key)
        return config

    def measure(
        self,
        kernel: Kernel[Cfg, Any],
        inv: Invocation,
        budget: float = math.inf,
        configs: Sequence[Cfg] | None = None,
    ) -> Cfg:
        """Measures `inv`, whatever the policy, for at most `budget` seconds, and stores the fastest config.

        `configs` is `config_space` in another order.

        Raises:
            EjkernelRuntimeError: it cannot be measured here, or no config computes the right numbers.
            BudgetSpent: the budget was spent before two configs could be compared; nothing is stored.
        """
        if reason := self.tuner.refusal(inv):
            raise EjkernelRuntimeError(f"{kernel.op_id}: {reason}")
        key = inv.key
        self._tell("autotune_start", kernel, key, None)
        measured = self.tuner.measure(kernel, inv, configs, budget=budget)
        self.cache.put(key, measured.fastest)
        if self.persistent is not None:
            tried = (measured.tried, measured.candidates) if measured.cut_short else None
            self.persistent.put(key, measured.fastest, inv.device_fingerprint, tried)
        return self._tell("autotune_finish", kernel, key, measured.fastest)

    def stored(self, kernel: Kernel[Cfg, Any], inv: Invocation, key: str) -> tuple[str, Cfg] | None:
        """The event and the config that `choose` would find stored for `inv`, or None. Changes nothing."""
        for overlay in overlays():
            if (config := overlay.get(key)) is not None:
                return "overlay_hit", kernel.checked_for(config, inv)
        if (config := self.cache.get(key)) is not None:
            return "cache_hit", kernel.checked_for(config, inv)
        # Files of several hosts may differ, and all hosts must have the same config.
        own = [] if self.persistent is None or jax.process_count() > 1 else [("persistent_hit", self.persistent)]
        for event, store in own + [("table_hit", table) for table in self.tables]:
            if (config := store.get(key, inv.device_fingerprint, kernel.config_class)) is not None:
                try:
                    return event, kernel.checked_for(config, inv)
                except (TypeError, ValueError) as error:
                    self._warn_once(
                        f"{error}; this config, stored in {store.path_of(inv.device_fingerprint)}, is ignored"
                    )
        return None

    def outdated(self, kernel: Kernel[Cfg, Any], inv: Invocation, key: str, space: Sequence[Cfg]) -> Cfg | None:
        """A config of the space that was measured for `inv` with another source or other versions, or None.

        It is the first to be measured, and never used unmeasured, as it may no longer be the best.
        """
        for store in (*filter(None, [self.persistent]), *self.tables):
            config = store.outdated(key, inv.device_fingerprint, kernel.config_class)
            if config is not None and config in space:
                return config
        return None

    def _stored(self, kernel: Kernel, inv: Invocation, key: str) -> Cfg | None:
        if (found := self.stored(kernel, inv, key)) is None:
            return None
        event, config = found
        if event in ("persistent_hit", "table_hit"):
            self.cache.put(key, config)
        return self._tell(event, kernel, key, config)

    def _measured(self, kernel: Kernel, inv: Invocation, key: str) -> Cfg | None:
        if not self.policy.allow_autotune or key in self._not_measurable or inv.target != device_target():
            return None
        budget = budget_of_environment()
        if not budget or self._was_too_short(budget, key, inv):
            return None
        space = [hashable(kernel.name, config) for config in kernel.config_space(inv)]  # imports all implementations
        if set(space) <= {hashable(kernel.name, kernel.heuristic_cfg(inv))}:
            return None
        if reason := self.tuner.refusal(inv):
            self._warn_once(f"{reason}; the heuristic ones are used")
            return None
        first = self.outdated(kernel, inv, key, space)
        space = space if first is None else list(dict.fromkeys([first, *space]))
        with self._measurements.of(key):
            if (config := self.cache.get(key)) is not None:  # another thread has measured it meanwhile
                return self._tell("cache_hit", kernel, key, config)
            try:
                return self.measure(kernel, inv, budget, space)
            except BudgetSpent as spent:
                self._not_measurable.add(key)
                if self.persistent is not None:
                    self.persistent.put_budget_spent(key, budget, inv.device_fingerprint)
                tell_once(f"{spent}, and heuristics choose from now on (`ejkernel tune` takes its time)")
                return None
            except EjkernelRuntimeError as error:
                self._not_measurable.add(key)
                self._warn_once(f"{error}; the heuristic config is used")
                return None

    def _was_too_short(self, budget: float, key: str, inv: Invocation) -> bool:
        """Whether an earlier search on this machine, with at least this budget, found no config."""
        return self.persistent is not None and self.persistent.budget_spent(key, inv.device_fingerprint) >= budget

    def _guessed(self, kernel: Kernel, inv: Invocation, key: str) -> Cfg:
        if self.policy.allow_heuristics:
            return self._tell("heuristics", kernel, key, kernel.heuristic_cfg(inv))
        self._tell("error", kernel, key, None)
        raise ConfigMissError(f"{kernel.op_id}: no config is stored for {key}, and the policy is to raise an error")

    def _tell(self, event: str, kernel: Kernel, key: str | None, config: Cfg | None) -> Cfg | None:
        if self._on_event is not None:
            self._on_event(event, kernel.op_id, key, config)
        return config

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=2)


class _LockByKey:
    """A lock for each key, so that each config is measured once without blocking other keys."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}

    def of(self, key: str) -> threading.Lock:
        return self._locks.setdefault(key, threading.Lock())
