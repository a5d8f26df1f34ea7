"""page_attention beside FlashAttention-3: decoding over pages."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.types.shapes.page_attention import PageAttentionShape

from . import _pages, _vllm
from ._contenders import arrays_of
from ._driver import Case
from ._harness import Check, Contender, Prepared

_CHAIN = 32  # as many as a model has layers
_JUDGED = 2  # sequences


def case(shape: PageAttentionShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """A chain of steps."""
    del mode
    arrays = arrays_of(shape, dtype)
    contenders = [
        *_pages.chains("page_attention", _CHAIN, arrays, platforms),
        Contender("FlashAttention-3", lambda: _flash_attention_3(shape, arrays)),
    ]
    return Case(contenders, cache(lambda: _check(shape, arrays)), chained=_CHAIN)


def _check(shape: PageAttentionShape, arrays: dict[str, Array]) -> Check:
    """Judges the first sequences."""
    judged = min(_JUDGED, shape.sequences)
    q = arrays["q"][:judged].reshape(judged, 1, shape.kv_heads, -1, shape.head_dim)
    k, v = (_pages.pages_of(arrays[name], arrays["block_tables"][:judged]) for name in ("k_pages", "v_pages"))
    return _pages.check(q, k, v, shape.context, shape.head_dim**-0.5, slice(judged))


def _flash_attention_3(shape: PageAttentionShape, arrays: dict[str, Array]) -> Prepared:
    ends = jnp.arange(shape.sequences + 1, dtype=jnp.int32)
    q, attend = _vllm.flash_attention_3_of_pages(arrays, arrays["k_pages"], arrays["v_pages"], ends, 1)
    return _vllm.graph(attend, q, _CHAIN)
