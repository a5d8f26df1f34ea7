"""multi_latent_page_attention beside FlashMLA: decoding over pages of latents."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.types.shapes.multi_latent_page_attention import LatentPagesShape

from . import _pages, _vllm
from ._contenders import arrays_of, torch_on_gpu
from ._driver import Case
from ._harness import Contender, Gate, Prepared

_CHAIN = 8
_JUDGED = 2  # sequences


def case(shape: LatentPagesShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """A chain of steps."""
    del mode
    arrays = arrays_of(shape, dtype)
    contenders = [
        *_pages.chains("multi_latent_page_attention", _CHAIN, arrays, platforms),
        Contender("FlashMLA", lambda: _flash_mla(shape, arrays)),
    ]
    return Case(contenders, cache(lambda: _gate(shape, arrays)), chained=_CHAIN)


def _gate(shape: LatentPagesShape, arrays: dict[str, Array]) -> Gate:
    """Judges the first sequences; all heads share one of keys, the latents with their rotary parts."""
    judged = min(_JUDGED, shape.sequences)
    tokens = slice(judged * shape.tokens)
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)[tokens]
    q = q.reshape(judged, shape.tokens, 1, shape.heads, -1)
    keys = _pages.pages_of(arrays["pages"], arrays["block_tables"][:judged])[:, :, None]
    scale = (shape.latent + shape.rope) ** -0.5
    return _pages.gate(q, keys, keys[..., : shape.latent], shape.context, scale, tokens)


def _flash_mla(shape: LatentPagesShape, arrays: dict[str, Array]) -> Prepared:
    """Each call has the queries of the first: its output lacks the rotary parts."""
    torch = torch_on_gpu()
    decode = _vllm.library("_flashmla_C").dense_decode_fwd
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)
    q = q.reshape(shape.sequences, shape.tokens, shape.heads, -1)
    q, pages, used, table = map(
        torch.from_dlpack, (q, arrays["pages"][:, :, None], arrays["context_lens"], arrays["block_tables"])
    )
    options = shape.latent, used, table, (shape.latent + shape.rope) ** -0.5, shape.tokens > 1
    _, _, plan, splits = decode(q, pages, *options, None, None, None)
    first, last = (
        prepared := _vllm.graph(lambda _: decode(q, pages, *options, plan, splits, None)[0], q, _CHAIN)
    ).results
    return Prepared([x.flatten(0, 1) for x in (first, last)], prepared.batch)
