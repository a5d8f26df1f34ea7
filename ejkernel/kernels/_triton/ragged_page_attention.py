"""ragged_page_attention in Triton: decodes split over their keys, and prefills of larger tiles, in two launches."""

import math
from collections.abc import Callable
from typing import Any

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._registry import configured_by, emits, kernel_registry, supported_if
from . import _launch, _paged

ROWS_BESIDE_PREFILLS = 32
"""Of a tile of decodes: tokens × heads of a group."""


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    return _paged.refusal(target, _shapes(spec, operands, None))


def space(
    spec: CacheSpec, operands: Operands, target: Target, tokens: int | None = None
) -> list[RaggedPageAttentionConfig]:
    """Configs that may be best, the likeliest first, of decodes with up to so many tokens, if not by the average."""
    keys = operands.block_tables.shape[2] * operands.kv_pages.shape[2]
    found = _paged.choices(spec, target, _shapes(spec, operands, tokens), keys)
    return _paged.configs(RaggedPageAttentionConfig, found)


def excess(operands: Operands, config: RaggedPageAttentionConfig, tokens: int | None = None) -> str | None:
    """What the kernels have against a config for these operands where the environment limits shared memory, or None."""
    shapes = _shapes(CacheSpec(), operands, tokens)
    return _paged.excess(shapes, _paged.tiles_of(shapes, config))


@kernel_registry.register("ragged_page_attention", Platform.TRITON, Backend.GPU, priority=100)
@_paged.limited_by(excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def ragged_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_page_attention, by the Triton kernels."""
    x = Operands(*operands)
    _paged.check("ragged_page_attention", excess(x, config))
    return attended(x, spec, config)


def attended(
    x: Operands,
    spec: CacheSpec,
    config: RaggedPageAttentionConfig,
    prefill: Callable[[int], tuple[dict[str, Array], Array | None]] | None = None,
    tokens: int | None = None,
) -> Outputs:
    """o and lse; `prefill` computes the sequences that are not decoded, as `launch.attend` has it: those with more than
    `tokens`, if these are given.
    """
    from ._paged.launch import attend

    tiles, splits = _paged.tiles_of(_shapes(spec, x, tokens), config), spec.num_splits or config.num_splits
    return Outputs(*attend(_step(x), spec, x.block_tables.shape[1], splits, tiles, prefill=prefill))


def with_drafts(x: Operands, spec: CacheSpec, of_cached: Outputs) -> Outputs:
    """o and lse, from those of the sinks and of the keys before the drafts: the cached ones, and `causal_drafts`."""
    from ._paged.launch import with_drafts

    return Outputs(**with_drafts(_step(x), spec, x.block_tables.shape[1], of_cached._asdict()))


def _step(x: Operands) -> Any:
    """The arrays as the launches have them."""
    from ._paged.drafts import in_words
    from ._paged.launch import Step

    return Step(
        x.q, x.kv_pages, x.kv_pages, x.context_lens, x.query_start_loc, x.num_seqs, None, x.block_tables, x.sinks,
        x.k_scale, x.v_scale, None if x.draft_mask is None else in_words(x.draft_mask), x.plan,
    )  # fmt: skip


def _shapes(spec: CacheSpec, x: Operands, tokens: int | None) -> _paged.Shapes:
    """With rows for so many tokens, or for those of an average sequence, or for a single one where they may not depend
    on the step.

    Where an average sequence is more than a tile there are prefills, beside which sequences have one token or few.
    """
    sequences, heads = x.block_tables.shape[1], x.q.shape[2] // max(1, x.kv_pages.shape[3])
    if tokens is None:
        tokens = 1 if spec.batch_invariant else math.ceil(x.q.shape[1] / max(1, sequences))
    if tokens * heads > _paged.LARGEST_DECODE_TILE:
        tokens = max(1, ROWS_BESIDE_PREFILLS // max(1, heads))
    return _paged.Shapes(x.q, x.kv_pages, x.kv_pages, sequences, tokens, drafts=x.draft_mask is not None)
