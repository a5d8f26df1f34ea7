"""A built-in operation as a `Kernel`, whose configs the Executor chooses for each of its primitives.

`prepare` brings a user's call to the canonical form, that of the primitive.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import jax

from ..errors import value_error
from ..lowering import register as register_lowering
from ..ops import Executor, Invocation, Kernel, default_executor
from ..ops.core.kernel import KERNELS
from ..ops.utils.operands import abstract, is_array, is_traced, random_like
from ..primitives._factory import TANGENT
from ..primitives._forward_only import ForwardOnly
from ..primitives._trio import Trio
from ..types import KernelConfig, OperationConfig, Platform
from ._argument_names import lax_arguments, modules_names
from ._over_mesh import over_mesh
from ._primitive_kernel import ExecutorOfForward, PrimitiveKernel
from .operations._arguments import align
from .operations._configs import agreed_platform, asked, config_of, platform_of

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Prepared(Generic[Result]):
    """A checked call: operands by name, the spec, and a function from the primitive's results to the result.

    The function that prepares the arguments of an operation declares the type of its result, as
    `-> Prepared[Float[Array, "…"]]`.
    """

    named: Mapping[str, Any]
    spec: Any
    finish: Callable[[Mapping[str, Any]], Result]


# What a subclass of a built-in operation may override; the rest is asked of the kernels over its primitives.
_OF_A_CALL = ("convert", "invocation", "place", "prepare_arguments", "renamed", "retyped")
_OF_MESH = ("mesh", "in_specs", "out_specs")
OPERATIONS: dict[str, type["Operation"]] = {}

_platform: ContextVar[Platform | str] = ContextVar("_platform", default="auto")


def platform_of_call() -> Platform | str:
    """The platform that the call whose arguments are being prepared was asked for, or "auto"."""
    return _platform.get()


class Operation(Kernel):
    """A built-in operation under its public arguments.

    A subclass defines its primitives and the preparation of arguments; both public functions are made from these. A
    subclass of that is the same operation, whose calls may prepare their arguments in another way.

    Attributes:
        algorithm: its primitives, and their common properties.
        config_class: the class of its configs.
        prepare_arguments: checks the arguments of the lax API and returns `Prepared`. Its signature and docstring are
            those of the lax API.
        renamed: lax name → modules name, for arguments whose names differ in the modules API.
        retyped: lax name → type in the modules API, for arguments of which `convert` takes another type.
    """

    algorithm: ClassVar[Trio | ForwardOnly]
    config_class: ClassVar[type[OperationConfig]] = KernelConfig
    prepare_arguments: ClassVar[Callable[..., Prepared[Any]]]
    renamed: ClassVar[Mapping[str, str]] = {}
    retyped: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **how: Any) -> None:
        super().__init_subclass__(**how)
        if (base := OPERATIONS.get(cls.algorithm.name)) in cls.__mro__:
            return _refuse_overrides(cls, base)
        for primitive in cls.algorithm.primitives:
            register_lowering(primitive)
            KERNELS[primitive.name] = PrimitiveKernel(primitive, cls)
        cls.prepare_arguments.__qualname__ = cls.algorithm.name  # the name in Python's error for a missing argument
        OPERATIONS[cls.algorithm.name] = cls

    def __init__(self) -> None:
        super().__init__(name=self.algorithm.name)

    @classmethod
    def convert(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the lax API from those of the modules API, which already have the lax names."""
        return dict(arguments)

    @classmethod
    def place(cls, arrays: Mapping[str, Any], given: Mapping[str, Any], specs: Mapping[str, Any]) -> tuple[dict, dict]:
        """The arrays and specs of a call before it is split over a mesh, with what depends on the whole arrays."""
        del given
        return dict(arrays), dict(specs)

    @classmethod
    def example(cls) -> Mapping[str, Any]:
        """The arguments of a small call of the lax API, arrays as `jax.ShapeDtypeStruct`: `ejkernel doctor` runs it.

        Every optimised implementation should support it. Values are those of `synthetic_operands`.
        """
        raise NotImplementedError(f"{cls.algorithm.name} has no example")

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Values for measuring a call whose operands have none: random numbers by default."""
        del spec
        return random_like(dict(operands))

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: Any) -> float | None:
        """The least flops of the matrix products of a call (forward, tangent or backward); None if they are unknown."""
        del named, results, spec
        return None

    @classmethod
    def invocation(cls, *args: Any, platform: str | None = None, **kwargs: Any) -> tuple[Invocation, Callable]:
        """A call of the lax API in canonical form, and the function that makes its result."""
        platform = platform_of(cls.algorithm.name, platform)
        token = _platform.set(platform)
        try:
            prepared = cls.prepare_arguments(*args, **kwargs)
        finally:
            _platform.reset(token)
        inv = KERNELS[cls.algorithm.name].invocation(prepared.named, prepared.spec, platform=platform)
        return inv, prepared.finish

    @classmethod
    def call(cls, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """The operation under the arguments of the lax API."""
        platform, config = asked(cls.algorithm.name, kwargs.pop("platform", None), config, cls.config_class)
        return default_executor().call(lambda: cls.invocation(*args, platform=platform, **kwargs), config)

    @classmethod
    def run_prepared(cls, prepared: Prepared[Result], config: Any = None) -> Result:
        """The result of a call that is prepared, and to which operands may have been added since."""
        platform, config = asked(cls.algorithm.name, None, config, cls.config_class)
        named = align(cls.algorithm.forward, prepared.named)
        inv = KERNELS[cls.algorithm.name].invocation(named, prepared.spec, platform=platform)
        return prepared.finish(default_executor().run(inv, config))

    @classmethod
    def tangent(
        cls, prepared: Prepared, outputs: Mapping[str, Any], tangents: Mapping[str, Any], config: Any = None
    ) -> dict[str, Any]:
        """The tangents of the outputs by name, linear in the `tangents` of operands, with outputs that are known.

        The tangent and the backward, which is its transpose, have configs as those of a call with this `config` have.
        """
        primitive, chooser = cls.algorithm.tangent, ExecutorOfForward(executor=default_executor())
        if config is not None:
            config = config_of(cls.algorithm.name, config, cls.config_class)
            _, chooser = KERNELS[cls.algorithm.name].chooser_of(config, executor=chooser.executor)
        moved = {name + TANGENT: x for name, x in tangents.items()}
        named = align(primitive, {**prepared.named, **outputs, **moved})
        chosen = chooser.config(primitive, named, prepared.spec, primitive.results)
        found = primitive.bind(named, spec=prepared.spec, config=chosen, chooser=chooser)
        return {name.removesuffix(TANGENT): x for name, x in found.items()}

    def prepare(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Invocation, Callable]:
        """A call of the modules API, with `platform=`, in the form that an Executor takes."""
        given = lax_arguments(type(self), args, {name: x for name, x in kwargs.items() if name != "platform"})
        with modules_names(type(self)):
            return self.invocation(**given, platform=kwargs.get("platform"))

    def called_by(self, executor: Executor, args: tuple, kwargs: Mapping[str, Any], cfg: Any = None) -> Any:
        """A call of the modules API, with `platform=` and `mesh=`, by an Executor."""
        name, own = self.algorithm.name, dict.fromkeys(("platform", *_OF_MESH)) | kwargs
        platform, mesh, in_specs, out_specs = (own.pop(n) for n in ("platform", *_OF_MESH))
        platform = agreed_platform(name, platform, cfg)
        given = lax_arguments(type(self), args, own)
        run = lambda arguments: executor.call(lambda: self.invocation(**arguments, platform=platform), cfg)
        with modules_names(type(self)):
            if mesh is not None:
                if in_specs is None or out_specs is None:
                    raise value_error(name, "a mesh is given without in_specs and out_specs")
                return over_mesh(type(self), run, given, mesh, in_specs, out_specs)
            if in_specs is not None or out_specs is not None:
                raise value_error(name, "in_specs and out_specs are given without a mesh")
            return run(given)

    def canonical(self, inv: Invocation) -> Invocation:
        """A call of the modules API as an invocation of the kernel over the primitive, from its types."""
        leaves, structure = jax.tree.flatten((inv.args, inv.kwargs))
        found = []

        def capture(*arrays):
            given = iter(arrays)
            args, kwargs = structure.unflatten([next(given) if is_array(leaf) else leaf for leaf in leaves])
            found.append(self.prepare(args, kwargs)[0])

        jax.eval_shape(capture, *(leaf for leaf in leaves if is_array(leaf)))
        (primitive_call,) = found
        return replace(primitive_call, args=abstract(primitive_call.args), target=inv.target)

    def heuristic_cfg(self, inv: Invocation) -> OperationConfig:
        """The config of the forward if none was measured."""
        call = self.canonical(inv)
        return call.kernel.heuristic_cfg(call)

    def config_space(self, inv: Invocation) -> list[OperationConfig]:
        """The configs of the forward that are worth measuring, as `config=` of the lax API takes them."""
        call = self.canonical(inv)
        return call.kernel.config_space(call)


def _refuse_overrides(cls: type[Operation], base: type[Operation]) -> None:
    """Raises if a subclass of a built-in operation overrides what a call does not ask its class for."""
    name = base.algorithm.name
    for of in dir(Operation):
        inherited = inspect.getattr_static(cls, of) is inspect.getattr_static(base, of)
        if not inherited and not of.startswith("_") and of not in _OF_A_CALL:
            raise TypeError(
                f"{cls.__name__}: {name} does not honour {of} of a subclass; a kernel of one's own is a subclass of "
                f"ejkernel.ops.Kernel, and an implementation of {name} is registered by kernel_registry.register"
            )


def types_of_call(operation: str, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
    """The operands of a call by name, as their types, and its spec. Nothing is computed."""
    found = {}

    def capture(arrays, named_arrays):
        prepared = OPERATIONS[operation].prepare_arguments(*arrays, **named_arrays, **static)
        found["named"] = {name: jax.typeof(x) for name, x in prepared.named.items()}
        found["spec"] = prepared.spec

    static = {name: x for name, x in kwargs.items() if not is_traced(x)}
    jax.eval_shape(capture, args, {name: x for name, x in kwargs.items() if name not in static})
    return found["named"], found["spec"]
