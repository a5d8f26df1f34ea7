"""multi_latent_page_attention beside FlashMLA: decoding over pages of latents, and lists of keys for each token."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.types.shapes.multi_latent_page_attention import LatentPagesShape

from . import _pages, _referee, _vllm
from ._contenders import arrays_of, torch_on_gpu
from ._driver import Case
from ._harness import Check, Contender, Prepared

_CHAIN = 8
_JUDGED = 2  # sequences
_JUDGED_LISTS = 16  # tokens


def case(shape: LatentPagesShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """A chain of steps."""
    del mode
    arrays = arrays_of(shape, dtype)
    contenders = [
        *_pages.chains("multi_latent_page_attention", _CHAIN, arrays, platforms),
        Contender("FlashMLA", lambda: (_flash_mla if shape.top_k is None else _sparse_flash_mla)(shape, arrays)),
    ]
    judge = _check if shape.top_k is None else _check_of_lists
    return Case(contenders, cache(lambda: judge(shape, arrays)), chained=_CHAIN)


def _check(shape: LatentPagesShape, arrays: dict[str, Array]) -> Check:
    """Judges the first sequences; all heads share one key head, the latents with their rotary parts."""
    judged = min(_JUDGED, shape.sequences)
    tokens = slice(judged * shape.tokens)
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)[tokens]
    q = q.reshape(judged, shape.tokens, 1, shape.heads, -1)
    keys = _pages.pages_of(arrays["pages"], arrays["block_tables"][:judged])[:, :, None]
    scale = (shape.latent + shape.rope) ** -0.5
    return _pages.check(q, keys, keys[..., : shape.latent], shape.context, scale, tokens)


def _check_of_lists(shape: LatentPagesShape, arrays: dict[str, Array]) -> Check:
    """Judges some tokens, by the formula over the keys of their lists."""
    count = arrays["indices"].shape[0]
    tokens = np.linspace(0, count - 1, min(_JUDGED_LISTS, count), dtype=np.int32)
    q, slots = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)[tokens], _slots(shape, arrays)[tokens]
    keys = arrays["pages"].reshape(-1, arrays["pages"].shape[2])[jnp.maximum(slots, 0)]

    def of_token(q: Array, keys: Array, slots: Array) -> Array:
        visible, scale = lambda _: slots >= 0, (shape.latent + shape.rope) ** -0.5
        return _referee.attention(q[None], keys, keys[:, : shape.latent], visible, scale=scale)[0]

    def formula(dtype: Any) -> list[Array]:
        exact = (jnp.asarray(np.asarray(x), dtype) for x in (q, keys))
        return [jax.jit(jax.vmap(of_token))(*exact, jnp.asarray(np.asarray(slots)))]

    return _referee.check(lambda results: [results[0][tokens]], formula, q.dtype)


def _slots(shape: LatentPagesShape, arrays: dict[str, Array]) -> Array:
    """The lists as slots of the pool."""
    lists = arrays["indices"]
    sequence = np.repeat(np.arange(shape.sequences), shape.tokens)[:, None]
    page = arrays["block_tables"][sequence, jnp.maximum(lists, 0) // shape.page]
    return jnp.where(lists < 0, -1, page * shape.page + lists % shape.page)


def _sparse_flash_mla(shape: LatentPagesShape, arrays: dict[str, Array]) -> Prepared:
    """Its sparse prefill, with the pool as one sequence, and heads padded to the 64 that it takes at once.

    Each call has the queries of the first, as in `_flash_mla`.
    """
    torch = torch_on_gpu()
    attend = _vllm.library("_flashmla_C").sparse_prefill_fwd
    pool = arrays["pages"].reshape(-1, 1, arrays["pages"].shape[2])
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)
    q = jnp.pad(q, ((0, 0), (0, -shape.heads % 64), (0, 0)))
    q, pool, slots = map(torch.from_dlpack, (q, pool, _slots(shape, arrays)[:, None]))
    options = (shape.latent + shape.rope) ** -0.5, shape.latent, None, None, None
    return _vllm.graph(lambda _: attend(q, pool, slots, *options)[0][:, : shape.heads], q, _CHAIN)


def _flash_mla(shape: LatentPagesShape, arrays: dict[str, Array]) -> Prepared:
    """Its dense decode. Each call has the queries of the first, as its output has no rotary parts."""
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
