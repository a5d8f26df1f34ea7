"""native_sparse_attention beside flash-linear-attention, and with selected blocks beside dense flash_attention.

With given blocks, results and gradients of full size are compared with float64. With selected blocks contenders may
select different ones, so that results only have to be finite.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import ejkernel
from ejkernel.types.shapes.native_sparse_attention import NativeSparseShape

from . import _referee
from ._attention import inputs, without_others
from ._contenders import Inputs, imported, of_jax, of_ours, of_torch, torch_on_gpu
from ._driver import Case
from ._harness import Check


def case(shape: NativeSparseShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One call in one mode."""
    given = inputs(shape, dtype)

    def ours(platform: str | None) -> Callable[..., Array]:
        return partial(ejkernel.modules.native_sparse_attention, **shape.options, platform=platform)

    contenders = [
        *of_ours("native_sparse_attention", platforms, ours, mode, given),
        of_torch("fla", lambda: _fla(shape, given), mode, given),
    ]
    if shape.whole:
        dense = without_others(partial(ejkernel.lax.flash_attention, causal=True))
        contenders.append(of_jax("dense flash_attention", lambda: dense, mode, given, "flash_attention"))
    return Case(contenders, cache(lambda: _finite if shape.whole else _check(shape, mode, given)), largest_error=3.0)


def _finite(results: Sequence[Any]) -> float:
    return 0.0 if all(bool(abs(x).sum() < np.inf) for x in results) else float("nan")


def _check(shape: NativeSparseShape, mode: str, given: Inputs) -> Check:
    """Judges the first group of heads, by the formula over the blocks of its lists."""
    lists, block = given.others["block_indices"][0, :, 0], jnp.arange(shape.length) // shape.size
    visible = lambda i: (jnp.arange(shape.length) <= i) & (block[:, None] == lists[i]).any(-1)
    formula = lambda q, k, v: _referee.attention(q, k[:, 0], v[:, 0], visible, scale=shape.head_dim**-0.5)
    return _referee.check_of_a_head(mode, given, shape.kv_heads, formula)


def _fla(shape: NativeSparseShape, given: Inputs) -> Callable[..., Any]:
    torch = torch_on_gpu()
    attend = imported("fla.ops.nsa.parallel").parallel_nsa
    options = dict(block_counts=shape.blocks, block_size=shape.size)
    others = {name: torch.from_dlpack(x) for name, x in given.others.items()}
    if shape.whole:
        return partial(attend, **others, **options)
    lists = others["block_indices"]
    lists = torch.where(lists < 0, shape.length, lists).long()  # its kernels skip blocks after the query
    ones = torch.ones((1, shape.length, shape.heads), dtype=torch.bfloat16, device="cuda")
    return partial(attend, g_slc=ones, block_indices=lists, **options)
