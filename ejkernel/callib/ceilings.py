"""The ceilings of a device: the bandwidth of a copy, and the rate of matrix products in each dtype.

A kernel that does F operations and moves B bytes takes at least max(F / matrix rate, B / copy bandwidth): its roofline
(Williams, Waterman and Patterson, 2009).
"""

import dataclasses
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._cache_directory import cache_directory

_DTYPES = ("bfloat16", "float16", "float32")
# Sizes that fill the device and take some milliseconds: elements copied, and the side of the matrices.
_SIZES = {"gpu": (2**29, 8192), "tpu": (2**28, 8192), "cpu": (2**25, 1024)}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The rates measured on one kind of device.

    Attributes:
        device_kind: the `jax.Device.device_kind`.
        copy: bytes that a large copy reads and writes a second.
        matmul: operations a second of a large matrix product, 2·m·n·k in all, by the name of the dtype.
        jax: the version of JAX it was measured with.
    """

    device_kind: str
    copy: float
    matmul: Mapping[str, float]
    jax: str

    def seconds(self, operations: float, bytes_moved: float, dtype: Any) -> float:
        """The least time that work can take; in a dtype that was not measured, at the rate of float32."""
        rate = self.matmul.get(jnp.dtype(dtype).name, self.matmul["float32"])
        return max(operations / rate, bytes_moved / self.copy)


class Probe(NamedTuple):
    """A call that runs at a ceiling, and its work: bytes or operations."""

    function: Callable[..., Any]
    operands: tuple[jax.Array, ...]
    work: float


def calibrate(device: jax.Device | None = None, *, tell: Callable[[str], None] = lambda line: None) -> Ceilings:
    """Measures the ceilings of a device (by default the first) and keeps them for `known_ceilings`. Takes seconds.

    Args:
        device: a device of this process.
        tell: called with a line for each measurement.
    """
    device = device or jax.local_devices()[0]
    with jax.default_device(device):
        probe = copy_probe(device)
        copy = probe.work / _seconds(probe)
        tell(f"copy of {probe.work / 2e9:.2f} GB: {copy / 1e9:.0f} GB/s")
        matmul = {}
        for name in _DTYPES:
            probe = product_probe(device, name)
            matmul[name] = probe.work / _seconds(probe)
            tell(f"matrix product {probe.operands[0].shape[0]}³ {name}: {matmul[name] / 1e12:.2f} TFLOP/s")
    ceilings = Ceilings(device.device_kind, copy, matmul, jax.__version__)
    _keep(ceilings)
    return ceilings


def known_ceilings(device_kind: str) -> Ceilings | None:
    """The ceilings that were measured for this kind of device; None if none were, or if the file is damaged."""
    path = _path(device_kind)
    try:
        return Ceilings(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"the calibration in {path} cannot be read and is not used: {error}", stacklevel=2)
        return None


def copy_probe(device: jax.Device) -> Probe:
    """A copy that is bound by memory alone; its work is the bytes read and written."""
    x = jax.random.normal(jax.random.key(0), (_sizes(device)[0],), jnp.float32)
    return Probe(jax.jit(jnp.negative), (x,), 2 * x.nbytes)


def product_probe(device: jax.Device, dtype: Any) -> Probe:
    """A product of matrices that is bound by multiplication alone; its work is its operations."""
    side = _sizes(device)[1]
    factors = (jax.random.normal(jax.random.key(i), (side, side), jnp.float32).astype(dtype) for i in (1, 2))
    return Probe(jax.jit(jnp.matmul), tuple(factors), 2 * side**3)


def _sizes(device: jax.Device) -> tuple[int, int]:
    return _SIZES["gpu" if device.platform in ("gpu", "cuda", "rocm") else device.platform]


def _seconds(probe: Probe, calls: int = 5, repeats: int = 7) -> float:
    """The median over repeats of a call's time, `calls` of them issued together and waited for once."""
    jax.block_until_ready(probe.function(*probe.operands))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([probe.function(*probe.operands) for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(times))


def _path(device_kind: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_kind).strip("-").lower()
    return Path(cache_directory()) / "calibration" / f"{name}.json"


def _keep(ceilings: Ceilings) -> None:
    """Writes a temporary file and renames it, so that a reader finds either the old file or the new one."""
    path = _path(ceilings.device_kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(dataclasses.asdict(ceilings), file)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"the calibration cannot be kept in {path}: {error}", stacklevel=2)
