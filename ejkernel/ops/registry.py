"""The registry of recorded calls for measuring them later: device → operation → call → (kernel, args, kwargs).

`record_invocation` has two forms:

    record_invocation("gpu|NVIDIA H200", "matmul@v1", call_key, kernel, args, kwargs)
    record_invocation(kernel, invocation)

With `EJKERNEL_OPS_RECORD=1` every call for which an executor chooses a config is recorded, also the backwards of
gradients. Arrays are recorded as their types, so no array is kept alive and no tracer leaks. The registry exists as
long as the process; `save_invocations` writes it to a file.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, overload

from ..errors import a_type
from .core.kernel import Invocation
from .utils.devices import device_fingerprint
from .utils.operands import abstract

Calls = dict[str, tuple[Any, tuple, dict[str, Any]]]

_recorded: dict[str, dict[str, Calls]] = {}
_lock = threading.Lock()
_listener: ContextVar[dict[str, Calls] | None] = ContextVar("ejkernel_recording", default=None)


@overload
def record_invocation(dev: str, op_id_v: str, call_key: str, kernel: Any, args: Any, kwargs: Any) -> None: ...
@overload
def record_invocation(kernel: Any, inv: Invocation) -> None: ...


def record_invocation(*call: Any, **named: Any) -> None:
    """Records a call, in one of the two forms.

    Args:
        dev: a device fingerprint, e.g. "gpu|NVIDIA H200".
        op_id_v: the operation with its version, e.g. "matmul@v1".
        call_key: the structure of the call, `Invocation.call_key`.
        kernel: the kernel that was called.
        args, kwargs: its arguments; they are copied, arrays as `jax.ShapeDtypeStruct`.
        inv: the invocation, which has all of these.

    Raises:
        TypeError: the arguments have neither form.
    """
    if len(call) + len(named) not in (2, 6):
        forms = "(kernel, inv) or (dev, op_id_v, call_key, kernel, args, kwargs)"
        raise TypeError(f"record_invocation takes {forms}, not {len(call) + len(named)} arguments")
    form = _of_invocation if len(call) + len(named) == 2 else _explicit
    device, operation, call_key, kernel, args, kwargs = form(*call, **named)
    with _lock:
        _keep(_recorded.setdefault(device, {}), operation, call_key, kernel, args, kwargs)


def _explicit(dev, op_id_v, call_key, kernel, args, kwargs):
    return dev, op_id_v, call_key, kernel, args, kwargs


def _of_invocation(kernel, inv):
    if not isinstance(inv, Invocation):
        raise TypeError(f"record_invocation: inv is {a_type(inv)}; it must be an Invocation")
    return inv.device_fingerprint, kernel.op_id, inv.call_key, kernel, inv.args, inv.kwargs


def _keep(calls, operation, call_key, kernel, args, kwargs):
    calls.setdefault(operation, {})[call_key] = (kernel, *abstract((tuple(args), dict(kwargs))))


@contextmanager
def recording() -> Iterator[dict[str, Calls]]:
    """Collects the calls that are traced within this context, in the form of `get_invocations`.

        with recording() as calls:
            jax.eval_shape(jax.grad(loss), q, k, v)
        autotune_recorded(calls)

    A jitted function that was called before is not traced again, and records nothing.
    """
    calls: dict[str, Calls] = {}
    before = _listener.set(calls)
    try:
        yield calls
    finally:
        _listener.reset(before)


def overheard(inv: Invocation) -> None:
    """Adds a call to the `recording` in progress, if there is one."""
    if (calls := _listener.get()) is not None:
        _keep(calls, inv.kernel.op_id, inv.call_key, inv.kernel, inv.args, inv.kwargs)


def recorded_devices() -> list[str]:
    """The devices that calls were recorded for."""
    with _lock:
        return list(_recorded)


def get_invocations(dev: str | None = None) -> dict[str, Calls]:
    """The calls recorded for a device (by default the one in use): operation → call → (kernel, args, kwargs)."""
    with _lock:
        recorded = _recorded.get(device_fingerprint() if dev is None else dev, {})
        return {operation: dict(calls) for operation, calls in recorded.items()}
