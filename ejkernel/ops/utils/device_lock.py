"""A lock on a device: processes that measure on it time their programs one at a time, and alone.

    with device_lock(path):                 # times programs
    with device_lock(path, shared=True):    # computes something else, beside others that do

Compiling needs no lock. XLA may time products of matrices on the device while it compiles; that cannot be locked out.
"""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from .devices import default_device
from .shared_file import locked

# Each is a list of the devices that a process sees, in the order of their numbers there.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def lock_path() -> str:
    """The file whose lock stands for the device that this process computes on by default.

    All processes of a user on this machine find the same one. It is a temporary file, as machines with devices of their
    own may share a home directory.
    """
    device = default_device()
    visible = next((names.split(",") for name in _VISIBLE if (names := os.environ.get(name))), [])
    number = getattr(device, "local_hardware_id", None) or 0
    name = visible[number] if device.platform == "gpu" and number < len(visible) else number
    return os.path.join(tempfile.gettempdir(), f"ejkernel-{os.getuid()}", f"measuring-{device.platform}-{name}.lock")


@contextmanager
def device_lock(path: str | None, shared: bool = False) -> Iterator[None]:
    """Holds the lock of a device, however long it takes to get it; without a path it does nothing."""
    if path is None:
        yield
        return
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with locked(path, math.inf, shared):
        yield
