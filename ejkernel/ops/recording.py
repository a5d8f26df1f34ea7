"""Files of recorded calls, with which the calls of a program can be measured later and without the program.

    EJKERNEL_OPS_RECORD=calls.json python train.py       # the file is written when the process ends
    python -m ejkernel tune --recorded calls.json

A file holds types and static options, but no values and no code. A reader finds a built-in kernel by its name, and a
user's kernel by its class if it has imported that. Many processes may write to one file.
"""

import atexit
import functools
import os
import warnings
from typing import Any

import jax

from .core.kernel import KERNELS, Invocation, Kernel
from .registry import Calls, get_invocations, overheard, record_invocation, recorded_devices
from .utils.operands import is_array
from .utils.packing import pack_tree, unpack_tree
from .utils.serialization import class_name, class_named
from .utils.shared_file import SharedFile, read_entries


def record_if_asked(inv: Invocation) -> None:
    """Records a call in memory if `EJKERNEL_OPS_RECORD` is set, and in that file if it is a path to a ".json"."""
    overheard(inv)
    where = os.environ.get("EJKERNEL_OPS_RECORD", "0")
    if where not in ("", "0"):
        record_invocation(inv.kernel, inv)
        if where.endswith(".json"):
            _save_at_exit(os.path.abspath(os.path.expanduser(where)))


@functools.cache
def _save_at_exit(path: str) -> None:
    def save():
        try:
            save_invocations(path)
        except (OSError, ValueError) as error:
            warnings.warn(f"ejkernel: {path}: the recorded calls are lost: {error}", UserWarning, stacklevel=1)

    atexit.register(save)


def save_invocations(path: str | os.PathLike) -> None:
    """Adds the recorded calls of all devices to a file.

    A call that cannot be written as JSON (with a function among its options, say) is skipped with a warning.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file exists and is not a file of recorded calls.
    """
    entries = {}
    for device in recorded_devices():
        for operation, calls in get_invocations(device).items():
            for call_key, (kernel, args, kwargs) in calls.items():
                try:
                    packed = pack_call(kernel, args, kwargs)
                except TypeError as error:
                    _left_out(path, operation, error)
                    continue
                where = {"device": device, "operation": operation, "call": call_key}
                entries["|".join(where.values())] = where | packed
    SharedFile(path, "calls").add(entries)


def load_invocations(path: str | os.PathLike, dev: str | None = None) -> dict[str, Calls]:
    """The calls in a file: operation → call → (kernel, args, kwargs), in the form of `get_invocations`.

    With `dev`, only the calls that were recorded for that device. `autotune_recorded` measures them on the device in
    use, whatever device they were recorded for. A call of a kernel whose class is not imported is skipped with a
    warning.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or not a file of recorded calls.
    """
    found: dict[str, Calls] = {}
    for entry in read_entries(path, "calls").values():
        try:
            device, operation, call_key = (entry[name] for name in ("device", "operation", "call"))
            call = unpack_call(entry)
            if dev in (None, device):
                found.setdefault(operation, {})[call_key] = call
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            _left_out(path, entry.get("operation") if isinstance(entry, dict) else None, error)
    return found


def _left_out(path: str | os.PathLike, operation: Any, error: Exception) -> None:
    warnings.warn(f"ejkernel: {os.fspath(path)}: a call of {operation} is left out: {error}", UserWarning, stacklevel=3)


# --- Calls and kernels


def pack_call(kernel: Kernel, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call as it stands in a file, without the values of its arrays.

    Raises:
        TypeError: it cannot be written as JSON.
    """
    return {"kernel": _pack_kernel(kernel), "args": pack_tree(args), "kwargs": pack_tree(kwargs)}


def unpack_call(packed: Any) -> tuple[Kernel, tuple, dict[str, Any]]:
    """The call that was packed.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no packed call, or one of a class that is not imported.
    """
    return _unpack_kernel(packed["kernel"]), unpack_tree(packed["args"]), unpack_tree(packed["kwargs"])


def _pack_kernel(kernel: Kernel) -> dict[str, Any]:
    if KERNELS.get(kernel.name) is kernel:
        return {"name": kernel.name}
    if any(map(is_array, jax.tree.leaves(vars(kernel)))):
        raise TypeError("the kernel holds arrays")
    return {"class": class_name(type(kernel)), "attributes": pack_tree(vars(kernel))}


def _unpack_kernel(packed: Any) -> Kernel:
    """A kernel equal to the one that was packed. No code of a user's class is run, not even its constructor."""
    if "name" in packed:
        if packed["name"] not in KERNELS:
            raise ValueError(f"there is no built-in kernel {packed['name']}")
        return KERNELS[packed["name"]]
    cls = class_named(packed["class"])
    if cls is None or not issubclass(cls, Kernel):
        raise ValueError(f"the kernel {packed['class']} is not imported here")
    kernel = object.__new__(cls)
    vars(kernel).update(unpack_tree(packed["attributes"]))
    return kernel
