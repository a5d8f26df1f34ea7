"""What would run for a call, with what config, and why every other implementation was passed over."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from .kernels._dispatch import Candidate, candidates, table
from .modules._operation import KERNELS, OPERATIONS
from .ops import default_executor
from .ops.utils.devices import device_target, target_of
from .types import KernelConfig, Target


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; `str` of it is the table.

    Attributes:
        operation: the operation.
        target: what it would be lowered for.
        candidates: every implementation by priority with the reason against it, or None.
        config: the config of the one that runs; None if none does.
        origin: where that config comes from; "" if there is none.
    """

    operation: str
    target: Target
    candidates: Sequence[Candidate]
    config: KernelConfig | None
    origin: str

    def __str__(self) -> str:
        what = f"{self.config.platform}/{self.target.backend} with {self.config}" if self.config else "nothing can run"
        what += f", {self.origin}" if self.config else ""
        return f"{self.operation} on {self.target}: {what}\n{table(self.candidates)}"


def explain(operation: str, *args: Any, target: str | Target | None = None, platform: str | None = None, **kwargs: Any):
    """What `ejkernel.lax.<operation>(*args, **kwargs)` would run on a target, by default this process's.

    Args:
        operation: its name.
        *args: arrays or `jax.ShapeDtypeStruct`s, as the lax face takes them.
        target: "cpu", "cuda", "rocm", "tpu" or a `Target`.
        platform: only implementations of this platform.
        **kwargs: further arrays and options.

    Raises:
        ValueError: there is no such operation, or the arguments do not fit it.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"no such operation: {operation}; known are {', '.join(sorted(OPERATIONS))}")
    target = target_of(target) if isinstance(target, str) else target or device_target()
    found = {}

    def capture(arrays, named_arrays):
        prepared = OPERATIONS[operation].prepare_arguments(*arrays, **named_arrays, **static)
        found["named"] = {name: jax.typeof(x) for name, x in prepared.named.items()}
        found["spec"] = prepared.spec

    static = {name: x for name, x in kwargs.items() if not hasattr(x, "shape")}
    jax.eval_shape(capture, args, {name: x for name, x in kwargs.items() if name not in static})
    kernel = KERNELS[operation]
    platform = platform or "auto"
    looked_at = candidates(operation, found["spec"], kernel.primitive.operands(found["named"]), target, platform)
    runs = any(reason is None for _, reason in looked_at)
    config, origin = _config(kernel, found["named"], found["spec"], platform, target) if runs else (None, "")
    return Explanation(operation, target, looked_at, config, origin)


_ORIGINS = {
    "overlay_hit": "from an overlay",
    "cache_hit": "from the cache in memory",
    "persistent_hit": "measured on this machine",
    "table_hit": "from a table that is shipped",
}


def _config(kernel, named, spec, platform, target) -> tuple[KernelConfig, str]:
    """The config that is stored for the call, else that of heuristics, and where it comes from."""
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}
    inv = replace(kernel.invocation(arrays, spec, platform=platform), target=target)
    if found := default_executor().selector.stored(kernel, inv, kernel.key_builder(inv)):
        return found[1], _ORIGINS[found[0]]
    return kernel.heuristic(named, spec, platform, target), "by heuristics"
