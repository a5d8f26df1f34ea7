"""Executor: chooses the config of a call, records the call if requested, and binds the kernel's primitive."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Protocol, runtime_checkable

from ejkernel.errors import EjkernelRuntimeError

from ..config.cache import ConfigCache
from ..config.persistent import PersistentCache
from ..config.selection import ConfigSelectorChain
from ..config.tables import SHIPPED
from ..core.kernel import Invocation, Kernel
from ..core.types import Cfg, Out
from ..recording import record_if_asked
from ..registry import Calls


@runtime_checkable
class ConfigChooser(Protocol[Cfg]):
    """The protocol of an executor's selector; `ConfigSelectorChain` implements it."""

    def choose(self, kernel: Kernel[Cfg, Any], inv: Invocation, override: Cfg | None = None) -> Cfg:
        """The config for `inv`; `override` if that is given."""


class Executor(Generic[Cfg, Out]):
    """Runs kernels, each with the config that `selector` chooses for the call.

    The choice is made while the call is traced and becomes a parameter of the primitive, which a jaxpr shows. The
    executor also chooses the configs of the tangents and backwards that JAX derives from the call.
    """

    def __init__(self, selector: ConfigChooser[Cfg] | None = None) -> None:
        self.selector = ConfigSelectorChain() if selector is None else selector

    def __call__(self, kernel: Kernel[Cfg, Out], *args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        """Calls `kernel` with the config `cfg`, or with the chosen one if it is None."""
        return kernel.called_by(self, args, kwargs, cfg)

    def call(self, prepare: Callable[[], tuple[Invocation[Cfg, Any], Callable[[Any], Out]]], cfg: Any = None) -> Out:
        """Runs the invocation that `prepare` makes; the operations that it consists of see it as `call_context`."""
        with _calling(CallContext(self, cfg)):
            inv, finish = prepare()
            return finish(self.run(inv, cfg))

    def run(self, inv: Invocation[Cfg, Out], cfg: Cfg | None = None) -> Any:
        """Binds the primitive of an invocation whose arguments are prepared, and returns its results."""
        chosen = self.choose(inv.kernel, inv, cfg)
        return inv.kernel.bind(inv.args, inv.kwargs, chosen, inv.target if cfg is None else None, executor=self)

    def choose(self, kernel: Kernel[Cfg, Out], inv: Invocation[Cfg, Out], cfg: Cfg | None = None) -> Cfg:
        """The config that a call runs with. Records the call if `EJKERNEL_OPS_RECORD` requests it."""
        record_if_asked(inv)
        return self.selector.choose(kernel, inv, cfg)

    def __repr__(self) -> str:
        return "Executor"


@dataclass(frozen=True)
class CallContext:
    """What a call was asked to run with, which holds for the operations that it consists of, too.

    Attributes:
        executor: the executor that was called.
        cfg: the config that was given for the call itself.
    """

    executor: Executor
    cfg: Any = None


_context: ContextVar[CallContext | None] = ContextVar("_context", default=None)


def call_context() -> CallContext:
    """The context of the call that is being prepared or finished."""
    return _context.get() or CallContext(default_executor())


@contextlib.contextmanager
def _calling(context: CallContext) -> Iterator[None]:
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


@functools.cache
def default_executor() -> Executor:
    """The executor of kernels that are called without one.

    It keeps configs in memory and on disk, reads the shipped tables, and on a miss follows `EJKERNEL_AUTOTUNE_POLICY`
    as it is then.
    """
    return Executor(ConfigSelectorChain(cache=ConfigCache(), persistent=PersistentCache(), tables=(SHIPPED,)))


def autotune_recorded(invocations: Mapping[str, Calls], executor: Executor | None = None) -> dict[tuple[str, str], Any]:
    """Measures every recorded call (`ejkernel.ops.get_invocations()`) and stores its fastest config with an executor.

    Returns:
        The configs by (operation, call). Programs that were traced with others are traced again at their next call.

    Raises:
        EjkernelRuntimeError: a call cannot be measured here, or none of its configs computes the right numbers. The
            configs of the others are stored nevertheless.
    """
    selector = (executor or default_executor()).selector
    found, failed = {}, {}
    for operation, calls in invocations.items():
        for call_key, (kernel, args, kwargs) in calls.items():
            try:
                inv = kernel.canonical(Invocation(kernel, args, kwargs))
                found[operation, call_key] = selector.measure(inv.kernel, inv)
            except Exception as error:  # of any kind: the other recorded calls are still measured
                failed[operation, call_key] = error
    if failed:
        reasons = "".join(f"\n  {operation}: {error}" for (operation, _), error in failed.items())
        count = f"{len(failed)} of {len(failed) + len(found)} recorded calls"
        raise EjkernelRuntimeError(f"{count} cannot be measured{reasons}") from next(iter(failed.values()))
    return found
