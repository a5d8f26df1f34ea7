"""blocksparse_attention beside its rivals; dense flash_attention, which computes all blocks, is one of them.

Each call of ours makes its lists of blocks from a block mask, which is an argument of the program; flex_attention of
torch gets its block mask, made in advance, in which full blocks are separate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jax import Array

import ejkernel
from ejkernel.types.shapes.blocksparse_attention import BlockSparseShape

from . import _referee
from ._attention import heads_first, inputs, without_others
from ._contenders import Inputs, imported, of_jax, of_ours, of_torch, torch_on_gpu
from ._driver import Case
from ._harness import Check, Contender, Prepared

_DENSE = "dense"


def case(shape: BlockSparseShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One layer in one mode."""
    given = inputs(shape, dtype)

    def ours(platform: str | None) -> Callable[..., Array]:
        config = None if platform is None else dict(platform=platform)
        return partial(ejkernel.lax.blocksparse_attention, **shape.options, config=config)

    dense = without_others(partial(ejkernel.lax.flash_attention, causal=True))
    contenders = [
        *of_ours("blocksparse_attention", platforms, ours, mode, given),
        _marked(of_jax("ejkernel, dense", lambda: dense, mode, given, "flash_attention")),
        of_torch("torch flex_attention", lambda: _flex(shape), mode, given),
    ]
    return Case(contenders, cache(partial(_check, shape, mode, given)))


def _marked(contender: Contender) -> Contender:
    """The dense contender with a marker before its results, so that the check compares them without a block mask."""

    def prepare() -> Prepared:
        prepared = contender.prepare()
        return replace(prepared, results=[_DENSE, *prepared.results])

    return replace(contender, prepare=prepare)


def _check(shape: BlockSparseShape, mode: str, given: Inputs) -> Check:
    """Judges the first head, of the dense contender by the formula without a block mask."""
    columns = jnp.arange(shape.length)
    kept = given.others["block_mask"][0]

    def judge(dense: bool) -> Check:
        visible = lambda i: (columns <= i) & (dense | kept[i // shape.block, columns // shape.block])
        formula = lambda q, k, v: _referee.attention(q, k[:, 0], v[:, 0], visible, scale=shape.head_dim**-0.5)
        return _referee.check_of_a_head(mode, given, shape.heads, formula)

    judges = judge(False), judge(True)

    def error(results: Sequence[Any]) -> float:
        is_dense = results[0] is _DENSE
        return judges[is_dense](list(results[is_dense:]))

    return error


def _flex(shape: BlockSparseShape) -> Callable[..., Any]:
    torch = torch_on_gpu()
    flex = imported("torch.nn.attention.flex_attention")
    kept = torch.from_numpy(shape.indices()["block_mask"]).cuda()[None]
    diagonal = torch.eye(kept.shape[-1], dtype=torch.bool, device="cuda")

    def listed(kept: Any) -> tuple[Any, Any]:
        order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
        return kept.sum(-1).to(torch.int32), order.to(torch.int32)

    masks = (*listed(kept & diagonal), *listed(kept & ~diagonal))
    block_mask = flex.BlockMask.from_kv_blocks(*masks, BLOCK_SIZE=shape.block, mask_mod=lambda b, h, i, j: i >= j)
    attend = torch.compile(flex.flex_attention, dynamic=False)
    return lambda *qkv: heads_first(attend(*map(heads_first, qkv), block_mask=block_mask))
