"""The release of ejkernel on PyPI as a process that trains the model of `_training_model` (see _release.py).

It uses the fastest of its configs: that of its heuristics and those that its tuner tries, each timed with the backward.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from ._serve import serve, version_of
from ._training_model import Attention, Sizes, Training, as_easydel_calls

version_of("EJKERNEL_RELEASE")
modules = importlib.import_module("ejkernel.modules")
MaskInfo = importlib.import_module("ejkernel.types").MaskInfo


def attentions(mask_info: bool, shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> Iterator[tuple[str, Attention]]:
    """The calls by config; on a CPU, without Triton, the default call of the release."""
    of = lambda **options: as_easydel_calls(modules.flash_attention, MaskInfo if mask_info else None, **options)
    if jax.default_backend() != "gpu":
        yield "xla", of(platform="xla")
        return
    kernel = importlib.import_module("ejkernel.modules.operations.flash_attention").FlashAttention()
    avals = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (shape, kv_shape)]
    inv = SimpleNamespace(kwargs=dict(query=avals[0], key=avals[1], value=avals[1], causal=True))
    for config in (kernel.heuristic_cfg_gpu(inv), *kernel.candidate_cfgs_gpu(inv)):
        names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
        told = "; ".join(
            f"{part} {[getattr(getattr(config, f'{part}_params'), n) for n in names]}" for part in ("fwd", "bwd")
        )
        yield told, of(platform="triton", cfg=config)


def fastest(sizes: Sizes, mask_info: bool) -> tuple[str, Attention]:
    """The config that takes the least time for the attention of a layer with its backward."""
    shapes = [(sizes.batch, sizes.length, heads, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads)]
    q, k, v = (jax.random.normal(jax.random.key(i), shapes[i > 0], jnp.float32).astype(jnp.bfloat16) for i in range(3))

    def compiled(attention: Attention) -> Callable[..., Any] | Exception:
        try:
            loss = lambda *x: attention(*x).astype(jnp.float32).sum()
            return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
        except Exception as error:
            return error

    def seconds(program: Callable[..., Any]) -> float:
        jax.block_until_ready(program(q, k, v))
        began = time.perf_counter()
        jax.block_until_ready([program(q, k, v) for _ in range(3)])
        return time.perf_counter() - began

    calls = list(attentions(mask_info, *shapes))
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, [attention for _, attention in calls]))
    # Configs that failed in parallel are tried again alone: compilation in the release is not thread-safe.
    programs = [compiled(x) if isinstance(f, Exception) else f for f, (_, x) in zip(programs, calls, strict=True)]
    ran = [(seconds(f), call) for f, call in zip(programs, calls, strict=True) if not isinstance(f, Exception)]
    if not ran:
        raise programs[0]
    return min(ran, key=lambda timed: timed[0])[1]


@cache
def training(mask_info: bool, **sizes: Any) -> tuple[Training, str]:
    """The model in training, and the config."""
    of = Sizes(**sizes)
    config, attention = fastest(of, mask_info)
    return Training(of, attention), config


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the requested steps."""
    model, config = training(request["mask_info"], **request["sizes"])
    return model.run(request["steps"]) | dict(compile_seconds=model.compile_seconds, detail=config)


if __name__ == "__main__":
    serve(answer)
