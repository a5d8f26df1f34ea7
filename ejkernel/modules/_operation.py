"""A built-in operation as a `Kernel`: the config of each of its primitives is chosen by the Executor, like any other's.

The canonical form of a call, which caches, recordings and tuning see, is that of the primitive: the present operands as
`args`, and `operands`, `results`, `spec` and `platform` as `kwargs`. What users write is brought to it by `prepare`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..kernels._dispatch import candidates, select
from ..ops import Invocation, Kernel, default_executor
from ..primitives._factory import KernelPrimitive, Trio
from ..types import Backend, KernelConfig, Target
from .operations._arguments import config_of


@dataclass(frozen=True)
class Prepared:
    """A call that was checked: operands by name, what to compute, and how to hand the results back."""

    named: Mapping[str, Any]
    spec: Any
    finish: Callable[[Mapping[str, Any]], Any]


class PrimitiveKernel(Kernel):
    """The kernel over one primitive: heuristics and config space are those of its implementations."""

    def __init__(self, primitive: KernelPrimitive):
        super().__init__(name=primitive.name)
        self.primitive = primitive

    def arrays(self, inv: Invocation) -> dict[str, Any]:
        """The operands of a call by name."""
        return dict(zip(inv.kwargs["operands"], inv.args, strict=True))

    def heuristic_cfg(self, inv: Invocation) -> KernelConfig:
        """The config that the chosen implementation proposes for these shapes."""
        return self.heuristic(self.arrays(inv), inv.kwargs["spec"], inv.kwargs["platform"], inv.target)

    def heuristic(self, named: Mapping[str, Any], spec: Any, platform: str, target: Target) -> KernelConfig:
        """As `heuristic_cfg`, from operands by name."""
        operands = self.primitive.operands(named)
        entry = select(self.name, spec, operands, target, platform)
        return self._placed(entry, entry.implementation.heuristic(spec, operands, target), target, platform)

    def config_space(self, inv: Invocation) -> list[KernelConfig]:
        """The configs of every implementation that takes this call."""
        operands, spec, platform = self.primitive.operands(self.arrays(inv)), inv.kwargs["spec"], inv.kwargs["platform"]
        return [
            self._placed(entry, config, inv.target, platform)
            for entry, reason in candidates(self.name, spec, operands, inv.target, platform)
            if reason is None
            for config in entry.implementation.space(spec, operands, inv.target)
        ]

    @staticmethod
    def _placed(entry, config: KernelConfig, target: Target, platform: str) -> KernelConfig:
        """A config says where it was chosen for; one for a platform that was asked for holds on every backend."""
        backend = target.backend if platform == "auto" else Backend.ANY
        return replace(config, platform=entry.platform, backend=backend)

    def bind(self, args: tuple, kwargs: Mapping[str, Any], cfg: KernelConfig) -> dict[str, Any]:
        """Binds the primitive and returns its results by name."""
        named = dict(zip(kwargs["operands"], args, strict=True))
        return self.primitive.bind(named, spec=kwargs["spec"], config=cfg, results=kwargs["results"])

    def run(self, *args: Any, cfg: KernelConfig, **kwargs: Any) -> dict[str, Any]:
        """The results by name, as `bind` gives them."""
        return self.bind(args, kwargs, cfg)

    def invocation(self, named: Mapping[str, Any], spec: Any, results=None, platform: str = "auto") -> Invocation:
        """A call in canonical form."""
        kwargs = dict(
            operands=tuple(named), results=tuple(results or self.primitive.results), spec=spec, platform=platform
        )
        return Invocation(kernel=self, args=tuple(named.values()), kwargs=kwargs)


def _choose_config(primitive: KernelPrimitive, named: Mapping[str, Any], spec: Any, results, served: KernelConfig):
    """The config of a tangent or backward, while tracing: on the platform that its forward was forced to, if it was."""
    kernel = KERNELS[primitive.name]
    forced = served.platform if served.backend == Backend.ANY else "auto"
    return default_executor().choose(kernel, kernel.invocation(named, spec, results, forced))


def _heuristic_config(primitive: KernelPrimitive, named: Mapping[str, Any], spec: Any, platform: str, target: Target):
    """The config for another target than the one the equation was traced for."""
    return KERNELS[primitive.name].heuristic(named, spec, platform, target)


KERNELS: dict[str, PrimitiveKernel] = {}


class Operation(Kernel):
    """A built-in operation under its public arguments.

    A subclass says which trio it is of and how its arguments are prepared; the two faces follow from that.

    Attributes:
        trio: its primitives.
        prepare_arguments: checks the arguments of the lax face and gives `Prepared`. Its signature and docstring are
            those of the lax face.
        renamed: lax name → modules name, where the modules' face has another one.
    """

    trio: ClassVar[Trio]
    prepare_arguments: ClassVar[Callable[..., Prepared]]
    renamed: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **how: Any):
        super().__init_subclass__(**how)
        for primitive in (cls.trio.forward, cls.trio.tangent, cls.trio.backward):
            KERNELS[primitive.name] = PrimitiveKernel(primitive)
            primitive.choose_config, primitive.heuristic_config = _choose_config, _heuristic_config
        OPERATIONS[cls.trio.name] = cls

    def __init__(self):
        super().__init__(name=self.trio.name)

    @classmethod
    def convert(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the lax face from those of the modules' face, under the lax names already."""
        return dict(arguments)

    @classmethod
    def place(cls, arrays: Mapping[str, Any], given: Mapping[str, Any], specs: Mapping[str, Any]) -> tuple[dict, dict]:
        """The arrays and specs of a call that is about to be split over a mesh, and whatever depends on the whole."""
        del given
        return dict(arrays), dict(specs)

    @classmethod
    def call(cls, *args: Any, config: Any = None, platform: str | None = None, **kwargs: Any) -> Any:
        """The operation under the arguments of the lax face."""
        config = config_of(cls.trio.name, config, platform)
        prepared = cls.prepare_arguments(*args, **kwargs)
        kernel = KERNELS[cls.trio.name]
        if config is None:
            inv = kernel.invocation(prepared.named, prepared.spec, platform=platform or "auto")
            config = default_executor().choose(kernel, inv)
        elif platform not in (None, "auto"):
            config = replace(config, platform=platform)
        return prepared.finish(kernel.primitive.bind(prepared.named, spec=prepared.spec, config=config))


OPERATIONS: dict[str, type[Operation]] = {}
