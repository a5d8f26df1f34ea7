"""Attention over caches in the form of ejkernel 0.0.78: decoding, pages, and pages of latents."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..errors import value_error
from ..kernels._places import places, slots
from ._release import TRANSLATIONS, Present, arrays_of, entries_of, run, sinks_of_heads, translates
from ._release_table import FORMS


@translates
def ragged_decode_attention(decode: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Decoding: q and o may be [B, 1, H, D], but lse is [B, H]; softmax_aux [n] is shared unless n is that of heads."""
    q, k = arrays_of(call, "q", "k")
    one_row = q.ndim == 4
    if one_row:
        if q.shape[1] != 1:
            raise value_error(
                "ragged_decode_attention", f"q has {q.shape[1]} queries of each sequence; it must be one", q=q
            )
        call |= dict(q=q[:, 0])
        q, without = call["q"], lambda spec: PartitionSpec(*(*spec, None, None)[:1], *tuple(spec)[2:])
        specs |= {"q": without(specs["q"])} if "q" in specs else {}
        if (of_results := call["out_specs"]) is not None:
            of_o, *of_lse = of_results if isinstance(of_results, list | tuple) else [of_results]
            call |= dict(out_specs=(without(of_o), *of_lse) if of_lse else without(of_o))
    names = ("k", "v", "sequence_start", "sequence_end", "softmax_scale", "logits_soft_cap", "sliding_window")
    arguments = {name: call[name] for name in (*names, "num_splits", "return_lse")}
    arguments |= dict(q=q, softmax_aux=sinks_of_heads(call["softmax_aux"], q.shape[1], k.shape[2]))
    specs |= dict(softmax_aux=PartitionSpec(entries_of(specs, "q", 3)[1]))
    found = run(decode, call, arguments, specs)
    o, *lse = found if call["return_lse"] else [found]
    o = o[:, None] if one_row else o
    return (o, *lse) if lse else o


@translates
def ragged_page_attention_v2(paged: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """A step of serving over a paged cache: `ragged_page_attention`, with k at even and v at odd heads of the pages."""
    q, kv_pages = arrays_of(call, "q", "kv_pages")
    arguments = {name: call[name] for name in (*_TABLES, "num_seqs", *_OPTIONS)}
    arguments |= dict(q=q, kv_pages=kv_pages)
    arguments |= dict(softmax_aux=sinks_of_heads(call["softmax_aux"], q.shape[1], kv_pages.shape[2] // 2))
    return run(paged, call, arguments, specs | dict(softmax_aux=PartitionSpec(entries_of(specs, "q", 3)[1])))


_TABLES = ("context_lens", "block_tables", "query_start_loc")
_OPTIONS = ("softmax_scale", "logits_soft_cap", "sliding_window")


@translates
def ragged_page_attention_v3(paged: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """A step of serving by `ragged_page_attention_v3`; returns (o, kv_pages).

    block_tables may be flat, [N · pages of a sequence]; num_seqs may be a distribution [3], whose last number is the
    number of sequences; kv_pages may be [P, page, ⌈2G / packing⌉, packing, padded features]. softmax_scale is 1 if not
    given, and D**-0.5 if None.
    """
    q, k, v, pool = arrays_of(call, "q", "k", "v", "kv_pages")
    (_, heads, features), groups = q.shape, k.shape[1]
    pages = pool.reshape(*pool.shape[:2], -1, pool.shape[-1])
    more_groups, more = pages.shape[2] // 2 - groups, pages.shape[3] - features
    if more_groups < 0 or more < 0 or pages.shape[2] % 2:
        rule = f"[P, page, …, …] of at least {2 * groups} heads with {features} features"
        raise value_error("ragged_page_attention_v3", f"kv_pages must be {rule}", k=k, kv_pages=pool)
    scale = features**-0.5 if call["softmax_scale"] is None else call["softmax_scale"]
    padded = lambda x, heads: jnp.pad(x, ((0, 0), (0, heads), (0, more))) if heads or more else x
    sinks = sinks_of_heads(call["softmax_aux"], heads, groups)
    if sinks is not None and more_groups:
        sinks = jnp.pad(sinks, ((0, more_groups * (heads // groups)), *((0, 0),) * (sinks.ndim - 1)))
    arguments = {name: call[name] for name in ("context_lens", "query_start_loc", *_OPTIONS)}
    arguments |= dict(q=padded(q, more_groups * (heads // groups)), k=padded(k, more_groups), v=padded(v, more_groups))
    arguments |= dict(
        kv_pages=pages, block_tables=_two_axes("ragged_page_attention_v3", call), num_seqs=_count(call["num_seqs"])
    )
    arguments |= dict(softmax_aux=sinks, softmax_scale=scale)
    specs, call = _of_four_axes(call, specs, pool.ndim)
    o, pages = run(paged, call, arguments, specs)
    return o[:, :heads, :features] if more_groups or more else o, pages.reshape(pool.shape)


def _two_axes(name: str, call: dict[str, Any]) -> Any:
    """block_tables as [N, pages of a sequence], also from flat ones."""
    tables, lens = arrays_of(call, "block_tables", "context_lens")
    if tables.ndim == 1 and (tables.size == 0 or tables.size % max(1, lens.size)):
        rule = f"block_tables has {tables.size} entries; they must be as many for each of {lens.size} sequences"
        raise value_error(name, rule, block_tables=tables, context_lens=lens)
    return tables.reshape(lens.shape[0], -1) if tables.ndim == 1 else tables


def _count(distribution: Any) -> Any:
    """The number of sequences, the last entry of a distribution [decodes, prefills, all]; other values as they are."""
    is_three = getattr(distribution, "shape", ()) == (3,)
    return jnp.asarray(distribution)[2:] if is_three else distribution


def _of_four_axes(call: dict[str, Any], specs: dict[str, Any], axes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call, and specs of pages with one axis of heads, from pages with two."""
    specs = specs | dict(softmax_aux=PartitionSpec(entries_of(specs, "q", 3)[1]))
    if axes == 4 or call["mesh"] is None:
        return specs, call
    of_pool = entries_of(specs, "kv_pages", 5)
    if of_pool[3] is not None:
        raise value_error(
            "ragged_page_attention_v3", "in_specs split the packed heads of kv_pages; split the axis before"
        )
    specs |= dict(kv_pages=PartitionSpec(*of_pool[:3], of_pool[4]))
    o, pages = call["out_specs"]
    pages = (*(() if pages is None else pages), None, None, None, None, None)
    return specs, {**call, "out_specs": (o, PartitionSpec(*pages[:3], pages[4]))}


@translates
def ragged_page_attention_v2_turboquant(paged: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """A step of serving over a quantised cache.

    bits and qjl_dim must agree with the codebooks and the projection. platform="pallas", written for TPUs, selects any
    implementation that exists.
    """
    platform = None if call["platform"] == "pallas" else call["platform"]
    return _over_quantised("ragged_page_attention_v2_turboquant", paged, call | dict(platform=platform), specs)


@translates
def ragged_page_attention_v3_turboquant(paged: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """A step of serving that writes its keys and values into a quantised cache.

    block_tables may be flat, [N · pages of a sequence]; num_seqs may be a distribution [3], whose last number is the
    number of sequences. bits and qjl_dim must agree with the codebooks and the projection.
    """
    call |= dict(block_tables=_two_axes("ragged_page_attention_v3_turboquant", call), num_seqs=_count(call["num_seqs"]))
    return _over_quantised("ragged_page_attention_v3_turboquant", paged, call, specs)


def _over_quantised(name: str, paged: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Calls the operation after checking that bits and qjl_dim agree with the matrices."""
    q, pool, projection = arrays_of(call, "q", "value_norms_pages", "qjl_projection")
    bits, rows = call["bits"], call["qjl_dim"]
    for of, most in (("key_codebook", 1), ("value_codebook", 0)):
        entries = call[of].shape[0]
        if bits is not None and entries not in (2**bits, 2 ** (bits - most)):
            wanted = " or ".join(str(2 ** (bits - n)) for n in range(most + 1))
            raise value_error(
                name, f"bits is {bits} but {of} has {entries} entries; it must have {wanted}", **{of: call[of]}
            )
    if rows is not None and rows != projection.shape[0]:
        raise value_error(name, f"qjl_dim is {rows} but qjl_projection has {projection.shape[0]} rows", q=q)
    arguments = {n: call[n] for n in FORMS[name].arrays} | {n: call[n] for n in _OPTIONS}
    arguments |= dict(softmax_aux=sinks_of_heads(call["softmax_aux"], q.shape[1], pool.shape[2]))
    return run(paged, call, arguments, specs | dict(softmax_aux=PartitionSpec(entries_of(specs, "q", 3)[1])))


@translates
def unified_attention(paged: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """A step of serving over keys and values in two pools [P, page, G, D], by `ragged_page_attention`.

    That operation needs keys and values in one pool, so each call copies the pages in the tables, or the whole pools if
    these are smaller, into one. A cache that is kept as one pool is read in place by ragged_page_attention_v2.
    """
    for name in ("alibi_slopes", "qq_bias"):
        if call[name] is not None:
            raise value_error("unified_attention", f"{name} is given; attention over pages takes no bias")
    q, keys, values, tables = arrays_of(call, "q", "key_cache", "value_cache", "block_tables")
    if tables.size < keys.shape[0]:
        keys, values = (pool.at[tables.reshape(-1)].get(mode="clip") for pool in (keys, values))
        tables = jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape)
    both = jnp.stack([keys, values], axis=3).reshape(*keys.shape[:2], -1, keys.shape[-1])
    arguments = {name: call[name] for name in ("context_lens", "query_start_loc", *_OPTIONS)}
    arguments |= dict(q=q, kv_pages=both, block_tables=tables, num_seqs=tables.shape[0])
    arguments |= dict(softmax_aux=sinks_of_heads(call["softmax_aux"], q.shape[1], keys.shape[2]))
    of_keys = entries_of(specs, "key_cache", 4)
    if of_keys[0] is not None:
        raise value_error("unified_attention", "the pages of a pool are split over devices; split their heads")
    specs |= dict(kv_pages=PartitionSpec(*of_keys), softmax_aux=PartitionSpec(entries_of(specs, "q", 3)[1]))
    return run(paged, call, arguments, specs)


@translates
def multi_latent_ragged_page_attention(latent: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Scatters the step's latents and rotary parts into a paged cache, then calls `multi_latent_page_attention` on it.

    The queries are [T, H, R] and [T, H, Dr], the latents [T, R], the rotary parts [T, Dr], and the pool is [P, page,
    R + Dr], or [P, page / packing, packing, ⌈R⌉ + ⌈Dr⌉] with both padded to multiples of 128; block_tables may be flat.
    softmax_scale is (R + Dr)**-0.5 by default. Returns (o [T, H, R], kv_pages).
    """
    name = "multi_latent_ragged_page_attention"
    q, q_rope, c, r, pool = arrays_of(call, "queries_nope", "queries_pe", "keys_values", "keys_pe", "kv_pages")
    if c.ndim != 2 or r.ndim != 2:
        raise value_error(name, "keys_values and keys_pe must be [T, features], which all heads share", keys_values=c)
    (tokens, _, depth), rotary = q.shape, q_rope.shape[2]
    pages = pool.reshape(pool.shape[0], -1, pool.shape[-1])
    exact = pages.shape[2] == depth + rotary
    wide = depth if exact else -(-depth // 128) * 128
    if pages.shape[2] < wide + rotary:
        raise value_error(
            name, f"kv_pages has {pages.shape[2]} features; it must have {wide} and {rotary}", kv_pages=pool
        )
    padded = lambda x, to: jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, to - x.shape[-1])))
    widths = wide, pages.shape[2] - wide
    lens, starts = (jnp.asarray(call[n], jnp.int32) for n in ("context_lens", "query_start_loc"))
    tables, count = _two_axes(name, call), _count(call["distribution"])
    new = jnp.concatenate([padded(x, to) for x, to in zip((c, r), widths, strict=True)], -1)
    pages = _written(pages, new, tables, places(tokens, lens, starts, jnp.asarray(count).reshape(1)))
    arguments = dict(zip(("q_latent", "q_rope"), map(padded, (q, q_rope), widths), strict=True))
    arguments |= dict(pages=pages, context_lens=lens, block_tables=tables, query_start_loc=starts, num_seqs=count)
    arguments |= {n: call[n] for n in _OPTIONS}
    if call["softmax_scale"] is None:
        arguments["softmax_scale"] = (depth + rotary) ** -0.5
    if call["mesh"] is not None:
        raise value_error(name, "a mesh is given; call it inside jax.shard_map")
    return run(latent, call, arguments, specs)[..., :depth], pages.reshape(pool.shape)


TRANSLATIONS["multi_latent_ragged_page_attention_v2"] = multi_latent_ragged_page_attention


def _written(pages: jax.Array, new: jax.Array, tables: jax.Array, at: Any) -> jax.Array:
    """The pages after writing the rows of the step's tokens; tokens without a slot are not written."""
    return pages.at[slots(at, tables, *pages.shape[:2])].set(new.astype(pages.dtype), mode="drop")
