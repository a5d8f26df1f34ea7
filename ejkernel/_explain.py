"""`explain`: which implementation would run for a call, with which config, and why not the others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from .errors import shown, value_error
from .kernels._dispatch import Candidate, candidates, table
from .modules._composed import COMPOSED, told
from .modules._operation import OPERATIONS, types_of_call
from .modules._primitive_kernel import KERNELS
from .modules.operations._configs import platform_of
from .ops import default_executor
from .ops.utils.devices import device_target, target_of
from .ops.utils.operands import is_traced
from .types import OperationConfig, Platform, Target

_TARGETS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; `str` of it is the table.

    Attributes:
        operation: the operation.
        target: the target that it would be lowered for.
        candidates: every implementation by priority, with the reason why it cannot run, or None.
        config: the config of the implementation that runs; None if none does.
        origin: where that config comes from, or why there is none.
        parts: for a composed operation, the explanations of the different calls that it makes.
    """

    operation: str
    target: Target
    candidates: Sequence[Candidate]
    config: OperationConfig | None
    origin: str
    parts: tuple["Explanation", ...] = ()

    def __str__(self) -> str:
        lines = table(self.candidates).splitlines() if self.candidates else []
        what = self.origin
        if self.config is not None:
            what = f"{self.config.platform}/{self.target.backend} with {self.config}, {self.origin}"
            lines[self._runs()] = f"→{lines[self._runs()][1:]}"
        return "\n".join((f"{self.operation} on {self.target}: {what}", *lines, *map(str, self.parts)))

    @property
    def runs(self) -> bool:
        """Whether the call runs on the target."""
        return all(part.runs for part in self.parts) if not self.candidates else self.config is not None

    def _runs(self) -> int:
        """The index of the implementation that runs: the first that can of the config's platform, else of all."""
        can = [i for i, (_, reason) in enumerate(self.candidates) if reason is None]
        return next((i for i in can if self.candidates[i][0].platform == self.config.platform), can[0])


def explain(
    operation: str,
    *args: Any,
    target: str | Target | None = None,
    platform: Platform | str | None = None,
    **kwargs: Any,
) -> Explanation:
    """What `ejkernel.lax.<operation>(*args, **kwargs)` would run on a target, by default this process's.

    For an operation over a mesh axis call it inside `jax.shard_map`, where the operation is called.

    Args:
        operation: the name of the operation.
        *args: arrays or `jax.ShapeDtypeStruct`s, as in the lax API.
        target: "cpu", "cuda", "rocm", "tpu" or a `Target`.
        platform: only implementations of this platform.
        **kwargs: further arrays and options, as in the lax API.

    Raises:
        ValueError: there is no such operation, target or platform, or the arguments do not fit it.
    """
    if operation not in (known := {**OPERATIONS, **COMPOSED}):
        raise ValueError(f"no such operation: {operation}; known are {', '.join(sorted(known))}")
    if isinstance(target, str):
        if target not in _TARGETS:
            raise value_error(operation, f"target is {shown(target)}; it must be {', '.join(_TARGETS)} or a Target")
        target = target_of(target)
    target, platform = target or device_target(), platform_of(operation, platform)
    if operation in COMPOSED:
        return _of_composed(operation, args, kwargs, target, platform)
    named, spec = types_of_call(operation, *args, **kwargs)
    return _of_call(operation, named, spec, target, platform)


def _of_call(operation: str, named: dict[str, Any], spec: Any, target: Target, platform: str) -> Explanation:
    """The explanation of a call of one primitive, from its operands by name."""
    kernel = KERNELS[operation]
    looked_at = candidates(operation, spec, kernel.primitive.operands(named), target, platform)
    config, origin = None, "nothing can run"
    if any(reason is None for _, reason in looked_at):
        config, origin = _config(kernel, named, spec, platform, target)
    return Explanation(operation, target, looked_at, config, origin)


def _of_composed(operation: str, args: tuple, kwargs: dict[str, Any], target: Target, platform: str) -> Explanation:
    """The explanation of a composed operation, by its calls of primitives of this library."""
    values, structure = jax.tree.flatten((args, kwargs))
    arrays = [x for x in values if is_traced(x)]

    def call(arrays):
        given = iter(arrays)
        args, kwargs = structure.unflatten(next(given) if is_traced(x) else x for x in values)
        return COMPOSED[operation](*args, **kwargs)

    with told() as choices:
        program = jax.make_jaxpr(call)(arrays)
    calls = {}
    for equation in _equations(program.jaxpr):
        if (name := equation.primitive.name) in KERNELS and "operands" in equation.params:
            types = [x.aval for x in equation.invars]
            key = name, equation.params["spec"], tuple(map(str, types))
            calls.setdefault(key, dict(zip(equation.params["operands"], types, strict=True)))
    parts = tuple(_of_call(name, named, spec, target, platform) for (name, spec, _), named in calls.items())
    others = " and of what follows" if parts else ", which XLA computes"
    origin = "; ".join((f"composed of operations of JAX{others}", *choices))
    return Explanation(operation, target, (), None, origin, parts)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


_ORIGINS = {
    "overlay_hit": "from an overlay",
    "cache_hit": "from the cache in memory",
    "persistent_hit": "measured on this machine",
    "table_hit": "from a table that is shipped",
}


def _config(kernel, named, spec, platform, target) -> tuple[OperationConfig | None, str]:
    """The config of the call and where it comes from: stored, or by heuristics; None if the call would raise."""
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}
    inv = replace(kernel.invocation(arrays, spec, platform=platform), target=target)
    selector = default_executor().selector
    if found := selector.stored(kernel, inv, inv.key):
        return found[1], _ORIGINS[found[0]]
    config, policy = kernel.heuristic_cfg(inv), selector.policy
    space = kernel.config_space(inv) if policy.allow_autotune and not selector.tuner.refusal(inv) else ()
    if (number := len({config, *space})) > 1:
        origin = f"by heuristics, until the first call measures {number} configs"
        outdated = selector.outdated(kernel, inv, inv.key, space)
        first = "" if outdated is None else f", first {outdated}, once the fastest with another source or versions"
        return config, origin + first
    if policy.allow_heuristics:
        return config, "by heuristics"
    return (
        None,
        "the call raises ConfigMissError, as no config is stored and the autotuning policy is to raise an error",
    )
