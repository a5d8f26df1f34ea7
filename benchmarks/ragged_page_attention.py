"""ragged_page_attention beside FlashAttention-3, whose keys and values are two arrays: prefills and decodes."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from jax import Array

from ejkernel.types.shapes.ragged_page_attention import RaggedPageAttentionShape

from . import _pages, _vllm
from ._contenders import arrays_of
from ._driver import Case
from ._harness import Check, Contender, Prepared

_CHAIN = 4
_JUDGED = 16  # tokens, the last of the first sequence


def case(shape: RaggedPageAttentionShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """A chain of steps."""
    del mode
    arrays = arrays_of(shape, dtype)
    contenders = [
        *_pages.chains("ragged_page_attention", _CHAIN, arrays, platforms),
        Contender("FlashAttention-3", lambda: _flash_attention_3(shape, arrays)),
    ]
    return Case(contenders, cache(lambda: _check(shape, arrays)), chained=_CHAIN)


def _check(shape: RaggedPageAttentionShape, arrays: dict[str, Array]) -> Check:
    """Judges the last tokens of the first sequence."""
    tokens = slice(max(0, shape.new - _JUDGED), shape.new)
    q = arrays["q"][tokens].reshape(1, -1, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    kv = _pages.pages_of(arrays["kv_pages"], arrays["block_tables"][:1])
    return _pages.check(q, kv[:, :, ::2], kv[:, :, 1::2], shape.context, shape.head_dim**-0.5, tokens)


def _flash_attention_3(shape: RaggedPageAttentionShape, arrays: dict[str, Array]) -> Prepared:
    k, v = (arrays["kv_pages"][:, :, n::2] + 0 for n in range(2))
    q, attend = _vllm.flash_attention_3_of_pages(arrays, k, v, arrays["query_start_loc"], shape.new)
    return _vllm.graph(attend, q, _CHAIN)
