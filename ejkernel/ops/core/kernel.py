"""Kernel, the building block of the framework, and Invocation, one call of a kernel."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from ejkernel.errors import a_type, type_error
from ejkernel.types import Target

from ..utils.devices import device_fingerprint, local_target
from ..utils.fingerprints import key_of, source_fingerprint, structure_fingerprint
from ..utils.operands import abstract, is_array, random_like
from .types import Cfg, Out
from .user_call import refuse_platform
from .user_primitive import bind


@dataclasses.dataclass(frozen=True, eq=False)
class Invocation(Generic[Cfg, Out]):
    """A call for which a config is chosen: a kernel, its operands and options, and the target on which it is to run.

    Attributes:
        kernel: the kernel that is called.
        args: positional operands: arrays, tracers or `jax.ShapeDtypeStruct`, and static values.
        kwargs: keyword operands and options.
        metadata: any values that a caller wants to keep with the call; the library does not read them.
        target: the target of the program; by default the device in use.
    """

    kernel: "Kernel[Cfg, Out]"
    args: tuple
    kwargs: dict[str, Any]
    metadata: Mapping[str, Any] | None = None
    target: Target = dataclasses.field(default_factory=local_target)

    @property
    def abstract_args(self) -> tuple:
        """`args` with a `jax.ShapeDtypeStruct` instead of each array."""
        return abstract(self.args)

    @functools.cached_property
    def examined(self) -> Any:
        """The result of `Kernel.examine`, computed once for each call."""
        return self.kernel.examine(self)

    @property
    def device_fingerprint(self) -> str:
        """The target in the form of `ejkernel.ops.device_fingerprint`."""
        return device_fingerprint(self.target)

    @property
    def call_key(self) -> str:
        """The structure of the call: types and shardings of the arrays, and the options. Values do not matter."""
        return structure_fingerprint((self.args, self.kwargs))

    @property
    def key(self) -> str:
        """The key under which the config of the call is stored, which `Kernel.key_builder` makes.

        Raises:
            TypeError: a kernel's own `key_builder` made something else than a str.
        """
        key = self.kernel.key_builder(self)
        if not isinstance(key, str):
            raise type_error(self.kernel.name, f"key_builder returned {a_type(key)}; it has to return a str")
        return key


class Kernel(Generic[Cfg, Out]):
    """An operation that runs with a config: subclass it, give it `run` and `heuristic_cfg`, and call it.

    A call becomes a primitive of JAX named after the kernel, whose parameters show the config: `jax.jit`, `jax.vmap`,
    `jax.jvp`, `jax.grad` and their compositions all apply to it, by the rules of `run` unless the kernel has its own.

    Array operands may be given by position or by keyword; all other arguments are static and must be hashable.
    """

    version = 1
    """Part of the key of stored configs. Increase it to invalidate all configs that are stored for the kernel."""

    run_triton = None
    """`run_triton(*args, cfg, **kwargs)`, used on CUDA and ROCm. If it is None, `run_xla` is used, else `run`."""
    run_cuda = None
    """`run_cuda(*args, cfg, **kwargs)`, used on CUDA if there is no `run_triton`."""
    run_cute = None
    """`run_cute(*args, cfg, **kwargs)`, used on CUDA if there is neither `run_triton` nor `run_cuda`."""
    run_pallas = None
    """`run_pallas(*args, cfg, **kwargs)`, used on TPU. If it is None, `run_xla` is used, else `run`."""
    run_xla = None
    """`run_xla(*args, cfg, **kwargs)`, used on CPU and where a platform has no method of its own; if None, `run` is."""
    custom_vjp = None
    """`custom_vjp(primals, cfg, kwargs, cotangents)` gives a gradient for each positional operand, None for none.

    `cotangents` is a tuple with one for each array that `run` returns, None for one of integers. A kernel without
    `custom_vjp` has the gradients of `run`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Runs the kernel with the config that the default executor chooses, or with `cfg`."""
        from ejkernel.ops import default_executor  # here, as it imports this module

        return default_executor()(self, *args, cfg=cfg, **kwargs)

    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """The operation itself, in JAX: arrays in, an array or a tree of arrays out."""
        raise NotImplementedError(f"{self.name}: a kernel needs run(*args, cfg, **kwargs)")

    def heuristic_cfg(self, inv: Invocation[Cfg, Out]) -> Cfg:
        """The config for `inv` on the device `inv.target` if none was measured."""
        raise NotImplementedError(f"{self.name}: a kernel needs heuristic_cfg(inv)")

    def config_space(self, inv: Invocation[Cfg, Out]) -> Sequence[Cfg]:
        """The configs that are worth measuring for `inv`, the most promising first."""
        return [self.heuristic_cfg(inv)]

    def examine(self, inv: Invocation[Cfg, Out]) -> Any:
        """A value that the kernel derives once from a call, kept as `inv.examined`; by default None."""
        del inv

    def synthetic_inputs(self, inv: Invocation[Cfg, Out]) -> tuple[tuple, dict[str, Any]]:
        """`(args, kwargs)` with values to measure with, instead of arrays of `inv` without values: by default random.

        A kernel whose time depends on values (lengths, group sizes, tables of indices) overrides this.
        """
        return random_like((inv.args, inv.kwargs))

    def repeats(self, inv: Invocation[Cfg, Out], cfg: Cfg) -> bool:
        """Whether results of `inv` with `cfg` repeat bit for bit; if so, the tuner rejects a config that does not."""
        del inv, cfg
        return True

    def cost(self, inv: Invocation[Cfg, Out]) -> tuple[float, float] | None:
        """(operations, bytes moved) that every config of `inv` needs at least, None if unknown.

        With the ceilings of the device (`ejkernel.callib`) they give a lower bound of the time, near which the tuner
        stops.
        """
        del inv
        return None

    def key_builder(self, inv: Invocation[Cfg, Out]) -> str:
        """The key under which the config of `inv` is stored, at every level of caching."""
        return key_of(self, inv.args, inv.kwargs, inv.target)

    def source_fingerprint(self, target: Target | None = None) -> str:
        """A hash of the source that a time measured on `target` depends on: by default that of the kernel's class."""
        del target
        return _source_of_class(type(self))

    def checked_config(self, cfg: Any) -> Cfg:
        """A config from a user or from storage, if the kernel can run with it; by default every config is accepted.

        A subclass that overrides it raises `TypeError` or `ValueError` with the reason. A user's config then raises it,
        and a stored one is skipped with a warning.
        """
        return cfg

    def checked_for(self, cfg: Any, inv: Invocation) -> Cfg:
        """`checked_config`, and the checks of a built-in kernel that depend on the call."""
        return self.checked_config(cfg)

    def heuristic_on(self, jax_platform: str, args: tuple, kwargs: dict[str, Any]) -> Cfg:
        """The heuristic config of a call for a platform of JAX, whatever devices this process has."""
        return self.heuristic_cfg(Invocation(self, abstract(args), abstract(kwargs), target=Target(jax_platform)))

    @property
    def op_id(self) -> str:
        """`name@v1`."""
        return f"{self.name}@v{self.version}"

    @property
    def config_class(self) -> type | None:
        """The class of the configs, as `class MyKernel(Kernel[MyConfig, Out])` declares it; None if it does not."""
        return _declared_config_class(type(self))

    def prepare(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Invocation, Callable[[Any], Out]]:
        """The invocation for which a config is chosen, and a function from the result of `bind` to that of the call.

        A kernel whose primitive has other arguments than its call translates them here.
        """
        return Invocation(self, args, kwargs), lambda result: result

    def called_by(self, executor: Any, args: tuple, kwargs: dict[str, Any], cfg: Cfg | None = None) -> Out:
        """A call by an `Executor`, with the config `cfg`, or with the one that the executor chooses if it is None."""
        if "platform" in kwargs:
            refuse_platform(self)
        return executor.call(lambda: self.prepare(args, kwargs), cfg)

    def canonical(self, inv: Invocation[Cfg, Out]) -> Invocation[Cfg, Out]:
        """The invocation under whose key configs are stored: of the kernel to which `prepare` passes the call."""
        return inv

    def bind(
        self, args: tuple, kwargs: dict[str, Any], cfg: Cfg, target: Target | None = None, executor: Any = None
    ) -> Out:
        """Binds the primitive of this kernel. `target` is what `cfg` was chosen for, None if a user gave it.

        If the program is lowered for another platform than that of `target`, heuristics choose again. A kernel whose
        gradient has configs of its own gets these from `executor`, which chose `cfg`; by default the gradient has the
        config of the call.
        """
        del executor
        return bind(self, args, kwargs, cfg, target)

    # Kernels are parameters of a primitive: equal ones share traces and compiled programs.
    def __eq__(self, other: Any) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        ours, theirs = vars(self), vars(other)
        if any(map(is_array, (*ours.values(), *theirs.values()))):
            return False
        return ours == theirs

    def __hash__(self) -> int:
        return hash((type(self), self.name))

    def __repr__(self) -> str:
        return self.op_id


KERNELS: dict[str, Any] = {}
"""The kernels over the primitives of operations, by name; each operation registers its own when it is defined."""


@functools.cache
def _source_of_class(cls: type) -> str:
    return source_fingerprint(*(base for base in cls.__mro__ if issubclass(base, Kernel) and base is not Kernel))


@functools.cache
def _declared_config_class(cls: type) -> type | None:
    for base in cls.__mro__:
        for declared in vars(base).get("__orig_bases__", ()):
            parameters = typing.get_args(declared)
            if parameters and isinstance(parameters[0], type) and issubclass(typing.get_origin(declared), Kernel):
                return parameters[0]
    return None
