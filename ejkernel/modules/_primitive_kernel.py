"""The kernel over one primitive, for which the Executor chooses configs, with calls in canonical form.

The canonical form, which caches, recordings and tuning use, is that of the primitive: the operands that are present as
`args`, and `operands`, `results`, `spec` and `platform` as `kwargs`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from ..errors import value_error
from ..kernels._dispatch import Dispatch
from ..kernels._registry import config_refusal, kernel_registry
from ..kernels._sources import files_of, fingerprint
from ..ops import Executor, Invocation, Kernel, default_executor, policy_override
from ..ops.core.kernel import KERNELS
from ..ops.utils.devices import local_target
from ..ops.utils.operands import random_like
from ..primitives._factory import KernelPrimitive
from ..types import Backend, BwdParams, FwdParams, OperationConfig, Platform, ShortRepr, Target, checked_config
from ..xla_utils.symbolic import with_known_sizes


class PrimitiveKernel(Kernel):
    """The kernel over one primitive: heuristics and config space are those of its implementations."""

    def __init__(self, primitive: KernelPrimitive, operation: type[Kernel]) -> None:
        super().__init__(name=primitive.name)
        self.primitive, self.operation, self.algorithm = primitive, operation, operation.algorithm

    @property
    def config_class(self) -> type[OperationConfig]:
        return self.operation.config_class

    def arrays(self, inv: Invocation) -> dict[str, Any]:
        """The operands of a call by name."""
        return dict(zip(inv.kwargs["operands"], inv.args, strict=True))

    def examine(self, inv: Invocation) -> tuple[Any, Dispatch]:
        """The operands, and the answers of those implementations that were asked."""
        operands = self.primitive.operands(self.arrays(inv))
        return operands, Dispatch(self.name, inv.kwargs["spec"], operands, inv.target, inv.kwargs["platform"])

    def heuristic_cfg(self, inv: Invocation) -> OperationConfig:
        """The config that the chosen implementation proposes for these shapes."""
        operands, dispatch = inv.examined
        entry = dispatch.first()
        config = entry.implementation.heuristic(inv.kwargs["spec"], with_known_sizes(operands), inv.target)
        return self._placed(entry, config, inv.target)

    def config_space(self, inv: Invocation) -> list[OperationConfig]:
        """The configs of every implementation that supports this call; a single one if calls are batch-invariant."""
        spec, (operands, dispatch) = inv.kwargs["spec"], inv.examined
        if getattr(spec, "batch_invariant", False):
            return [self.heuristic_cfg(inv)]
        known = with_known_sizes(operands)
        return [
            self._placed(entry, config, inv.target)
            for entry in dispatch.taking()
            for config in entry.implementation.space(spec, known, inv.target)
        ]

    @staticmethod
    def _placed(entry, config: OperationConfig, target: Target) -> OperationConfig:
        """Fills in the platform and the backend that a config was chosen for."""
        return replace(config, platform=entry.platform, backend=target.backend)

    def checked_config(self, cfg: Any) -> OperationConfig:
        """The config, if some implementation can run with it; else the error of the first one that it is meant for."""
        return self._checked(cfg, None)

    def checked_for(self, cfg: Any, inv: Invocation) -> OperationConfig | tuple[OperationConfig, OperationConfig]:
        """`checked_config` with the limits of these operands, too. A pair is (forward, backward)."""
        operands, _ = inv.examined
        if not isinstance(cfg, tuple):
            return self._checked(cfg, operands)
        if len(cfg) != 2 or self.primitive is not self.algorithm.forward or not self.algorithm.differentiable:
            raise value_error(self.name, f"config is a tuple of {len(cfg)}; a pair is for what has a gradient")
        forward, backward = cfg
        forward = self._checked(forward, operands)
        backward = KERNELS[self.algorithm.backward.name].checked_config(backward)
        if backward.platform != "auto":
            raise value_error(self.name, "the config of the backward names a platform; it has that of its forward")
        return forward, backward

    def _checked(self, cfg: Any, operands: Any) -> OperationConfig:
        is_backward = self.algorithm.differentiable and self.primitive is self.algorithm.backward
        cfg = checked_config(self.name, cfg, self.config_class, BwdParams if is_backward else FwdParams)
        entries = [
            entry
            for entry in kernel_registry.list_implementations(self.name)
            if cfg.platform in ("auto", entry.platform)
            and (cfg.backend == entry.backend or Backend.ANY in (cfg.backend, entry.backend))
        ]
        wrong = [config_refusal(entry.implementation, cfg, operands) for entry in entries]
        if wrong and all(wrong):
            raise value_error(self.name, wrong[0])
        return cfg

    def repeats(self, inv: Invocation, cfg: OperationConfig) -> bool:
        """Whether the implementation that the config names gives the same bits in every run of this call.

        It does if it would also take the call with `deterministic=True`, unless it repeats only when that is set.
        """
        spec = inv.kwargs["spec"]
        if not hasattr(spec, "deterministic"):
            return True
        strict = replace(spec, deterministic=True)
        of = Dispatch(self.name, strict, inv.examined[0], inv.target, cfg.platform)
        asked = spec.deterministic or getattr(spec, "batch_invariant", False)
        return any(asked or not getattr(entry.implementation, "repeats_if_asked", False) for entry in of.taking())

    def cost(self, inv: Invocation) -> tuple[float, float] | None:
        """The flops of the operation, and the bytes of all operands and results."""
        named, results = self.arrays(inv), inv.kwargs["results"]
        spec = inv.kwargs["spec"]
        flops = self.operation.flops(named, results, spec)
        if flops is None:
            return None
        moved = [(x.shape, x.dtype) for x in inv.args] + list(
            self.primitive.result_shapes(named, results, spec).values()
        )
        return flops, sum(math.prod(shape) * dtype.itemsize for shape, dtype in moved)

    def source_fingerprint(self, target: Target | None = None) -> str:
        """A hash of the files of every implementation that may be chosen on the target, and of what these import."""
        return _source_of(self.name, (target or local_target()).backend)

    def synthetic_inputs(self, inv: Invocation) -> tuple[tuple, dict[str, Any]]:
        """The operation's synthetic operands (valid lengths, tables, counters), and the results that belong to them."""
        named, algorithm = self.arrays(inv), self.algorithm
        operands = {name: x for name, x in named.items() if name in algorithm.operands._fields}
        values = self.operation.synthetic_operands(operands, inv.kwargs["spec"])
        if any(name in algorithm.outputs._fields for name in named):
            forward = KERNELS[algorithm.name].invocation(values, inv.kwargs["spec"])
            config = forward.kernel.heuristic_cfg(forward)
            values |= jax.jit(lambda *args: forward.kernel.bind(args, forward.kwargs, config))(*forward.args)
        rest = random_like({name: x for name, x in named.items() if name not in values})
        return tuple({**values, **rest}[name] for name in named), inv.kwargs

    def bind(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        cfg: OperationConfig | tuple[OperationConfig, OperationConfig],
        target: Target | None = None,
        executor: Executor | None = None,
    ) -> dict[str, Any]:
        """Binds the primitive and returns its results by name; the config has the target that it was chosen for.

        A config with a platform and no backend is from a user, and requests that platform as `platform` does.
        """
        del target
        cfg, chooser = self.chooser_of(cfg, kwargs["platform"], executor)
        named = dict(zip(kwargs["operands"], args, strict=True))
        return self.primitive.bind(named, spec=kwargs["spec"], config=cfg, chooser=chooser, results=kwargs["results"])

    def chooser_of(
        self,
        cfg: OperationConfig | tuple[OperationConfig, OperationConfig],
        platform: Platform | str = "auto",
        executor: Executor | None = None,
    ) -> tuple[OperationConfig, "ExecutorOfForward"]:
        """The config of a forward, checked, and the chooser for what JAX derives from it."""
        cfg, backward = cfg if isinstance(cfg, tuple) else (cfg, None)
        cfg = self.checked_config(cfg)
        if platform == "auto" and cfg.backend == Backend.ANY:
            platform = cfg.platform
        return cfg, ExecutorOfForward(platform, executor, backward)

    def run(
        self, *args: Any, cfg: OperationConfig | tuple[OperationConfig, OperationConfig], **kwargs: Any
    ) -> dict[str, Any]:
        """The results by name, as `bind` gives them."""
        return self.bind(args, kwargs, cfg)

    def invocation(self, named: Mapping[str, Any], spec: Any, results=None, platform: str = "auto") -> Invocation:
        """The invocation of a call in canonical form."""
        kwargs = dict(
            operands=tuple(named), results=tuple(results or self.primitive.results), spec=spec, platform=platform
        )
        target = self._target_of(platform, named, spec)
        return Invocation(kernel=self, args=tuple(named.values()), kwargs=kwargs, target=target)

    def _target_of(self, platform: str, named: Mapping[str, Any], spec: Any) -> Target:
        """The target of a call that asks for a platform which this machine cannot run: it is traced for another one."""
        of_platform = [e for e in kernel_registry.list_implementations(self.name) if platform == e.platform]
        here = local_target()
        if not of_platform or any(e.backend in (Backend.ANY, here.backend) for e in of_platform):
            return here
        operands = self.primitive.operands(named)
        backends = {e.backend for e in of_platform}
        elsewhere = [t for t in map(Target, ("cuda", "rocm", "tpu", "cpu")) if t.backend in backends]
        takes = lambda target: any(True for _ in Dispatch(self.name, spec, operands, target, platform).taking())
        return next(filter(takes, elsewhere), elsewhere[0])


@dataclass(frozen=True, repr=False)
class ExecutorOfForward(ShortRepr):
    """The `Chooser` of every call: the executor of a forward chooses the configs of its tangent and backward, too.

    Attributes:
        platform: the platform that was asked for, or "auto".
        executor: None for the default one.
        backward: the config that a user gave for the backward.
    """

    platform: Platform | str = "auto"
    executor: Executor | None = None
    backward: OperationConfig | None = None

    def config(self, primitive: KernelPrimitive, named: Mapping[str, Any], spec: Any, results) -> OperationConfig:
        """Tangents are neither measured nor refused here: a gradient traces one too, and transposes it away.

        One that no implementation of the platform takes is refused when it is lowered.
        """
        inv = KERNELS[primitive.name].invocation(named, spec, results, self.platform)
        executor = self.executor or default_executor()
        if primitive is not inv.kernel.algorithm.tangent:
            return executor.choose(inv.kernel, inv, self.backward)
        if next(iter(inv.examined[1].taking()), None) is None:
            return inv.kernel.config_class(platform=self.platform)
        with policy_override(autotune=False):
            return executor.choose(inv.kernel, inv, None)


@functools.cache
def _source_of(operation: str, backend: Backend) -> str:
    return fingerprint(source_files(operation, backend))


def source_files(operation: str, backend: Backend) -> list[Path]:
    """The files of the operation's implementations that may be chosen on a backend."""
    entries = kernel_registry.list_implementations(operation)
    return files_of(entry for entry in entries if entry.backend in (Backend.ANY, backend))
