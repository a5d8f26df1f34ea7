"""A kernel over many examples or devices with one config, which is chosen once for one of them."""

from collections.abc import Callable
from typing import Any

import jax

from ..core.kernel import Kernel
from ..core.types import Cfg, Out
from .executor import Executor, default_executor


def vmap_with_config(
    kernel: Kernel[Cfg, Out], in_axes: Any = 0, out_axes: Any = 0, *, executor: Executor | None = None
) -> Callable[..., Out]:
    """`jax.vmap(kernel, in_axes, out_axes)` with the config for one example. Keyword arguments are not mapped."""
    return _with_one_config(kernel, lambda run: jax.vmap(run, in_axes, out_axes), in_axes, executor)


def pmap_with_config(
    kernel: Kernel[Cfg, Out],
    axis_name: str | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    executor: Executor | None = None,
) -> Callable[..., Out]:
    """`jax.pmap(kernel, axis_name)` with the config for one device. Keyword arguments are not mapped."""
    return _with_one_config(
        kernel, lambda run: jax.pmap(run, axis_name, in_axes=in_axes, out_axes=out_axes), in_axes, executor
    )


def _with_one_config(kernel, transform, in_axes, executor):
    def batched(*args: Any, cfg: Cfg | None = None, **kwargs: Any) -> Out:
        run_kernel = executor or default_executor()
        chosen = [] if cfg is None else [cfg]
        if cfg is None:

            def choose(*example):
                inv, _ = kernel.prepare(example, kwargs)
                chosen.append(run_kernel.choose(inv.kernel, inv))

            jax.eval_shape(jax.vmap(choose, in_axes), *args)
        return transform(lambda *args: run_kernel(kernel, *args, cfg=chosen[0], **kwargs))(*args)

    return batched
