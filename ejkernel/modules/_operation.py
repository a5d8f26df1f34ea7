"""A built-in operation as a `Kernel`: the config of each of its primitives is chosen by the Executor, like any other's.

The canonical form of a call, which caches, recordings and tuning see, is that of the primitive: the present operands as
`args`, and `operands`, `results`, `spec` and `platform` as `kwargs`. What users write is brought to it by `prepare`.
"""

import contextlib
import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jax

from ..errors import type_error, value_error
from ..kernels._dispatch import candidates, select
from ..kernels._registry import config_refusal, kernel_registry
from ..ops import Executor, Invocation, Kernel, default_executor, policy_override
from ..ops.recording import named_kernels
from ..ops.utils.devices import local_target
from ..ops.utils.operands import abstract, is_array, random_like
from ..primitives._factory import KernelPrimitive, Trio
from ..types import Backend, KernelConfig, Platform, ShortRepr, Target, checked_config
from ..xla_utils.symbolic import with_known_sizes
from .operations._arguments import config_of

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Prepared(Generic[Result]):
    """A call that was checked: operands by name, what to compute, and how to hand the results back.

    The function that prepares the arguments of an operation says by `-> Prepared[Float[Array, "…"]]` what type the
    result of the operation has.
    """

    named: Mapping[str, Any]
    spec: Any
    finish: Callable[[Mapping[str, Any]], Result]


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
        config = entry.implementation.heuristic(spec, with_known_sizes(operands), target)
        return self._placed(entry, config, target)

    def config_space(self, inv: Invocation) -> list[KernelConfig]:
        """The configs of every implementation that takes this call; one alone where the batch may not change it."""
        operands, spec, platform = self.primitive.operands(self.arrays(inv)), inv.kwargs["spec"], inv.kwargs["platform"]
        if getattr(spec, "batch_invariant", False):
            return [self.heuristic_cfg(inv)]
        known = with_known_sizes(operands)
        return [
            self._placed(entry, config, inv.target)
            for entry, reason in candidates(self.name, spec, operands, inv.target, platform)
            if reason is None
            for config in entry.implementation.space(spec, known, inv.target)
        ]

    @staticmethod
    def _placed(entry, config: KernelConfig, target: Target) -> KernelConfig:
        """A config says where it was chosen for."""
        return replace(config, platform=entry.platform, backend=target.backend)

    def checked_config(self, cfg: Any) -> KernelConfig:
        """A config that an implementation can be run with; where none of those it is for can, the first says why."""
        return self._checked(cfg, None)

    def checked_for(self, cfg: Any, inv: Invocation) -> KernelConfig:
        """The same for one call: what its operands have against it counts, too."""
        return self._checked(cfg, self.primitive.operands(self.arrays(inv)))

    def _checked(self, cfg: Any, operands: Any) -> KernelConfig:
        cfg = checked_config(self.name, cfg)
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

    def repeats(self, inv: Invocation, cfg: KernelConfig) -> bool:
        """Whether the implementation that the config names would take the call where `deterministic` is asked for."""
        spec = inv.kwargs["spec"]
        if not hasattr(spec, "deterministic"):
            return True
        strict = replace(spec, deterministic=True)
        of = candidates(self.name, strict, self.primitive.operands(self.arrays(inv)), inv.target, cfg.platform)
        return any(reason is None for _, reason in of)

    def cost(self, inv: Invocation) -> tuple[float, float] | None:
        """The operations that the operation tells, and each operand and result moved once."""
        named, results = self.arrays(inv), inv.kwargs["results"]
        spec = inv.kwargs["spec"]
        operations = OPERATIONS[TRIOS[self.name].name].operations(named, results, spec)
        if operations is None:
            return None
        moved = [(x.shape, x.dtype) for x in inv.args] + list(
            self.primitive.result_shapes(named, results, spec).values()
        )
        return operations, sum(math.prod(shape) * dtype.itemsize for shape, dtype in moved)

    def source_fingerprint(self) -> str:
        """A hash of the files of every implementation, and of those that its room shares."""
        return _source_of(self.name)

    def synthetic_inputs(self, inv: Invocation) -> tuple[tuple, dict[str, Any]]:
        """Operands that the operation makes (valid lengths, tables, counters), and the results that belong to them."""
        trio, named = TRIOS[self.name], self.arrays(inv)
        operands = {name: x for name, x in named.items() if name in trio.operands._fields}
        values = OPERATIONS[trio.name].synthetic_operands(operands, inv.kwargs["spec"])
        if any(name in trio.outputs._fields for name in named):
            forward = KERNELS[trio.name].invocation(values, inv.kwargs["spec"])
            config = forward.kernel.heuristic_cfg(forward)
            values |= jax.jit(lambda *args: forward.kernel.bind(args, forward.kwargs, config))(*forward.args)
        rest = random_like({name: x for name, x in named.items() if name not in values})
        return tuple({**values, **rest}[name] for name in named), inv.kwargs

    def bind(
        self,
        args: tuple,
        kwargs: Mapping[str, Any],
        cfg: KernelConfig,
        target: Target | None = None,
        executor: Executor | None = None,
    ) -> dict[str, Any]:
        """Binds the primitive and returns its results by name; the config itself says what it was chosen for.

        A config that names a platform and no backend is a user's: it asks for that platform as `platform` does.
        """
        del target
        cfg, platform = self.checked_config(cfg), kwargs["platform"]
        if platform == "auto" and cfg.backend == Backend.ANY:
            platform = cfg.platform
        named = dict(zip(kwargs["operands"], args, strict=True))
        chooser = ExecutorOfForward(platform, executor)
        return self.primitive.bind(named, spec=kwargs["spec"], config=cfg, chooser=chooser, results=kwargs["results"])

    def run(self, *args: Any, cfg: KernelConfig, **kwargs: Any) -> dict[str, Any]:
        """The results by name, as `bind` gives them."""
        return self.bind(args, kwargs, cfg)

    def invocation(self, named: Mapping[str, Any], spec: Any, results=None, platform: str = "auto") -> Invocation:
        """A call in canonical form."""
        kwargs = dict(
            operands=tuple(named), results=tuple(results or self.primitive.results), spec=spec, platform=platform
        )
        target = self._target_of(platform, named, spec)
        return Invocation(kernel=self, args=tuple(named.values()), kwargs=kwargs, target=target)

    def _target_of(self, platform: str, named: Mapping[str, Any], spec: Any) -> Target | None:
        """What a call is for where a platform is asked for that nothing here can run: it is traced for elsewhere."""
        of_platform = [e for e in kernel_registry.list_implementations(self.name) if platform == e.platform]
        if not of_platform or any(e.backend in (Backend.ANY, local_target().backend) for e in of_platform):
            return None
        operands = self.primitive.operands(named)
        backends = {e.backend for e in of_platform}
        elsewhere = [t for t in map(Target, ("cuda", "rocm", "tpu", "cpu")) if t.backend in backends]
        takes = lambda target: any(
            reason is None for _, reason in candidates(self.name, spec, operands, target, platform)
        )
        return next(filter(takes, elsewhere), elsewhere[0])


@dataclass(frozen=True, repr=False)
class ExecutorOfForward(ShortRepr):
    """The configs of tangents and backwards are chosen by the executor of their forward: the `Chooser` of every call.

    Attributes:
        platform: the platform that was asked for, or "auto".
        executor: None for the default one.
    """

    platform: Platform | str = "auto"
    executor: Executor | None = None

    def config(self, primitive: KernelPrimitive, named: Mapping[str, Any], spec: Any, results) -> KernelConfig:
        """A tangent is not measured here: a gradient asks for it too, only to transpose it away."""
        inv = KERNELS[primitive.name].invocation(named, spec, results, self.platform)
        is_tangent = primitive is TRIOS[primitive.name].tangent
        with policy_override(autotune=False) if is_tangent else contextlib.nullcontext():
            return (self.executor or default_executor()).choose(inv.kernel, inv)


@functools.cache
def _source_of(operation: str) -> str:
    digest = hashlib.sha256()
    for path in source_files(operation):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def source_files(operation: str) -> list[Path]:
    """The files of its implementations: a module or a whole package, and what the other modules of a room share."""
    files = set()
    for entry in kernel_registry.list_implementations(operation):
        module = sys.modules[entry.implementation.__module__]
        file = Path(module.__file__)
        is_package = hasattr(module, "__path__")
        room = file.parent.parent if is_package else file.parent
        files.update(file.parent.glob("*.py") if is_package else [file], room.glob("_*.py"))
    return sorted(files)


KERNELS: dict[str, PrimitiveKernel] = {}
TRIOS: dict[str, Trio] = {}
OPERATIONS: dict[str, type["Operation"]] = {}


class Operation(Kernel):
    """A built-in operation under its public arguments.

    A subclass says which trio it is of and how its arguments are prepared; the two faces follow from that.

    Attributes:
        trio: its primitives.
        prepare_arguments: checks the arguments of the lax face and gives `Prepared`. Its signature and docstring are
            those of the lax face.
        renamed: lax name → modules name, where the modules' face has another one.
        retyped: lax name → type in the modules' API, where `convert` takes another one.
    """

    trio: ClassVar[Trio]
    prepare_arguments: ClassVar[Callable[..., Prepared[Any]]]
    renamed: ClassVar[Mapping[str, str]] = {}
    retyped: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **how: Any):
        super().__init_subclass__(**how)
        for primitive in cls.trio.primitives:
            kernel = PrimitiveKernel(primitive)
            KERNELS[primitive.name], TRIOS[primitive.name] = kernel, cls.trio
            named_kernels[primitive.name] = kernel
        cls.prepare_arguments.__qualname__ = cls.trio.name  # as which Python names it to who forgets an argument
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
    def example(cls) -> Mapping[str, Any]:
        """The arguments of a small call of the lax face, arrays as `jax.ShapeDtypeStruct`: `ejkernel doctor` runs it.

        Every implementation that is worth having should take it. Values are those of `synthetic_operands`.
        """
        raise NotImplementedError(f"{cls.trio.name} has no example")

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Values to measure with in the place of operands without: here random numbers."""
        del spec
        return random_like(dict(operands))

    @classmethod
    def operations(cls, named: Mapping[str, Any], results: Sequence[str], spec: Any) -> float | None:
        """Multiplications and additions in the matrix products of a call (forward, tangent or backward), at the least.

        None where they are not known from the shapes.
        """
        del named, results, spec
        return None

    @classmethod
    def invocation(cls, *args: Any, platform: str | None = None, **kwargs: Any) -> tuple[Invocation, Callable]:
        """A call under the arguments of the lax face in canonical form, and what makes its result."""
        prepared = cls.prepare_arguments(*args, **kwargs)
        inv = KERNELS[cls.trio.name].invocation(prepared.named, prepared.spec, platform=platform or "auto")
        return inv, prepared.finish

    @classmethod
    def call(cls, *args: Any, config: Any = None, platform: str | None = None, **kwargs: Any) -> Any:
        """The operation under the arguments of the lax face."""
        config = config_of(cls.trio.name, config, platform)
        inv, finish = cls.invocation(*args, platform=platform, **kwargs)
        return finish(default_executor().run(inv, config))

    def prepare(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Invocation, Callable]:
        """The call under the arguments of the modules' face, as an Executor is given it."""
        return self.invocation(**lax_arguments(type(self), args, kwargs))

    def canonical(self, inv: Invocation) -> Invocation:
        """A call under the arguments of the modules' API as that of the kernel over the primitive, by its types."""
        leaves, structure = jax.tree.flatten((inv.args, inv.kwargs))
        found = []

        def capture(*arrays):
            given = iter(arrays)
            args, kwargs = structure.unflatten([next(given) if is_array(leaf) else leaf for leaf in leaves])
            found.append(self.prepare(args, kwargs)[0])

        jax.eval_shape(capture, *(leaf for leaf in leaves if is_array(leaf)))
        (primitive_call,) = found
        return replace(primitive_call, args=abstract(primitive_call.args), target=inv.target)

    def heuristic_cfg(self, inv: Invocation) -> KernelConfig:
        """The config of the forward where none was measured."""
        call = self.canonical(inv)
        return call.kernel.heuristic_cfg(call)

    def config_space(self, inv: Invocation) -> list[KernelConfig]:
        """The configs of the forward that are worth measuring, as `config=` of the lax API takes them."""
        call = self.canonical(inv)
        return call.kernel.config_space(call)


def lax_arguments(operation: type[Operation], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What was given under the modules' names, under those of the lax face."""
    try:
        bound = inspect.Signature(modules_parameters(operation)).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise type_error(operation.trio.name, str(error)) from None
    back = {new: old for old, new in operation.renamed.items()}
    return operation.convert({back.get(name, name): x for name, x in bound.items()})


def modules_parameters(operation: type[Operation]) -> list[inspect.Parameter]:
    """The parameters of the lax face under the modules' names."""
    of = inspect.signature(operation.prepare_arguments).parameters.items()
    return [
        parameter.replace(
            name=operation.renamed.get(name, name), annotation=operation.retyped.get(name, parameter.annotation)
        )
        for name, parameter in of
    ]
