"""Measuring by hand: `autotune` finds the fastest config of a call, `benchmark` times any function."""

import warnings
from collections.abc import Sequence
from typing import Any

from ..core.kernel import Kernel
from ..core.tuner import Tuner
from ..core.types import Cfg
from ..utils.timing import benchmark

__all__ = ["Autotuner", "Tuner", "autotune", "benchmark"]

Autotuner = Tuner
"""Another name of `Tuner`."""


def autotune(
    kernel: Kernel[Cfg, Any],
    *args: Any,
    configs: Sequence[Cfg] | None = None,
    num_warmup: int = 2,
    num_iters: int = 5,
    **kwargs: Any,
) -> Cfg:
    """The fastest of `configs` (by default the kernel's `config_space`) for `kernel(*args, **kwargs)`.

    Nothing is stored. If measuring is not possible (see `Tuner.refusal`), it warns and returns the heuristic config.

    Raises:
        EjkernelRuntimeError: no config ran with right results; the message gives the reason for each.
        TypeError, ValueError: one of `configs` is not a config of the kernel.
    """
    (inv, _), tuner = kernel.prepare(args, kwargs), Tuner(num_warmup, num_iters)
    kernel = inv.kernel
    configs = None if configs is None else [kernel.checked_config(config) for config in configs]
    if reason := tuner.refusal(inv):
        warnings.warn(f"{kernel.op_id}: {reason}; the heuristic config is used", UserWarning, stacklevel=2)
        return kernel.heuristic_cfg(inv)
    return tuner.fastest(kernel, inv, configs)
