"""Dense attention in the form of ejkernel 0.0.78: flash, plain, of `jax.nn`, block-sparse and over a ring.

All call `ejkernel.lax.flash_attention` or `ring_attention`, with the visibility from `mask_info`, `causal` and
`sliding_window`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..errors import shown, value_error
from ..types import MaskInfo
from ..types.mask_info import Visibility
from ._over_mesh import placed
from ._release import Present, arrays_of, entries_of, platform_and_config, run, sinks_of_heads, translates
from ._release_visibility import dense, given_mask_info, lax_band, specs_of_masks, visibility_of


@translates
def flash_attention(flash: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """`flash_attention` with the visibility of `mask_info`, causal and sliding_window together.

    With `block_tables` [B, pages], k and v are pools [P, page, G, D], from which the keys of each batch element are
    gathered. Packed sequences may be [1, T, H, D].
    """
    if call["block_tables"] is not None:
        call, specs = _of_pages(call, specs)
    if call["cum_seqlens_q"] is not None or call["cum_seqlens_k"] is not None:
        return _packed(flash, call, specs)
    return _attend("flash_attention", flash, call, specs)


def _of_pages(call: Mapping[str, Any], specs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call with keys and values [B, pages · page, G, D], gathered by block_tables [B, pages] from their pools."""
    k, v, tables = arrays_of(call, "k", "v", "block_tables")
    of_table = lambda pool: pool.at[tables].get(mode="clip").reshape(tables.shape[0], -1, *pool.shape[2:])
    batch, *_ = entries_of(specs, "q", 4)
    if call.get("mesh") is not None:
        of_pool = {name: entries_of(specs, name, 4) for name in "kv"}
        if any(entries[0] is not None for entries in of_pool.values()):
            raise value_error("flash_attention", "the pages of a pool are split over devices; split their heads")
        specs = specs | {name: PartitionSpec(batch, None, *entries[2:]) for name, entries in of_pool.items()}
    return {**call, "k": of_table(k), "v": of_table(v), "block_tables": None}, dict(specs)


def _packed(flash: Present, call: Mapping[str, Any], specs: Mapping[str, Any]) -> Any:
    """Attention within packed sequences, in arrays [1, T, H, D] too; causality is relative to each one's last token."""
    name = "flash_attention"
    if call["mask_info"] is not None:
        raise value_error(name, "mask_info and cum_seqlens both divide the tokens into sequences; give one of them")
    q, k, v, bias = arrays_of(call, "q", "k", "v", "bias")
    batched = q.ndim == 4
    if batched and q.shape[0] != 1:
        raise value_error(name, f"q has batch {q.shape[0]}; with cum_seqlens it must be [1, T, H, D] or [T, H, D]", q=q)
    q, k, v = (x[0] if batched else x for x in (q, k, v))
    window = visibility_of(name, {**call, "causal": False}, 1, q.shape[0], k.shape[0]).band
    arguments = _options(call, q.shape[1], k.shape[1]) | dict(
        q=q,
        k=k,
        v=v,
        bias=bias,
        cum_seqlens_q=call["cum_seqlens_q"],
        cum_seqlens_k=call["cum_seqlens_k"],
        causal=call["causal"],
        sliding_window=None if window == (None, None) else (None if window[0] is None else -window[0], window[1]),
    )
    if batched:
        specs = specs | {n: PartitionSpec(*entries_of(specs, n, 4)[1:]) for n in "qkv"}
        if call.get("out_specs") is not None:
            call = {**call, "out_specs": PartitionSpec(*tuple(call["out_specs"])[1:])}
    o = run(flash, call, arguments, specs)
    return o[None] if batched else o


@translates
def scaled_dot_product_attention(flash: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Softmax attention of q [B, S, H, D], k and v [B, K, G, D], by `flash_attention`.

    cum_seqlens_q and cum_seqlens_k are the numbers of queries and of keys of each batch element, [B] integers.
    `init_bias` makes a bias if none is given.
    """
    name = "scaled_dot_product_attention"
    call |= dict(logits_soft_cap=None)
    q, k = arrays_of(call, "q", "k")
    ends = {"q": (call["cum_seqlens_q"], q.shape[1]), "kv": (call["cum_seqlens_k"], k.shape[1])}
    if any(lengths is not None for lengths, _ in ends.values()):
        valid = [
            jnp.ones((q.shape[0], n), bool) if lengths is None else jnp.arange(n) < jnp.asarray(lengths)[:, None]
            for lengths, n in ends.values()
        ]
        call |= dict(mask_info=_both(given_mask_info(name, call), MaskInfo.from_segments(*valid, is_attn_mask=True)))
    return _attend(name, flash, call, specs)


@translates
def attention(flash: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Softmax attention and its weights, by `flash_attention` and exp(s − lse).

    q [B, S, H, D], k [B, K, G, D] and v [B, K, G, V] are converted to `dtype` (bfloat16 by default; None leaves them
    unchanged). Returns (o [B, S, H, V], weights [B, H, S, K]); under `jax.jit` unused weights are not computed. The
    weights are those before dropout, which is applied if `deterministic` is False.
    """
    name = "attention"
    if call["dtype"] is not None:
        cast = lambda x: None if x is None else x.astype(call["dtype"])
        call |= dict(zip("qkv", map(cast, arrays_of(call, "q", "k", "v")), strict=True)) | dict(bias=cast(call["bias"]))
    if call["deterministic"]:
        call |= dict(dropout_prob=0.0)
    return _attend(name, flash, call, specs, with_weights=True)


@translates
def blocksparse_attention(flash: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Attention of arrays [B, H, S, D] by `flash_attention`, which skips blocks that the visibility masks.

    Lengths need not be multiples of the blocks. `chunk_size` is the argument of `MaskInfo.apply_chunked`.
    """
    name = "blocksparse_attention"
    call |= dict(zip("qkv", (x.swapaxes(1, 2) for x in arrays_of(call, "q", "k", "v")), strict=True))
    specs |= {n: _swapped(specs[n]) for n in "qkv" if n in specs}
    if call.get("out_specs") is not None:
        call |= dict(out_specs=_swapped(call["out_specs"]))
    call = _with_mask_and_chunks(name, call)
    return _attend(name, flash, call, specs).swapaxes(1, 2)


def _swapped(spec: PartitionSpec) -> PartitionSpec:
    """The spec for [B, S, H, D] from one for [B, H, S, D]."""
    batch, heads, rows, features = (*spec, None, None, None, None)[:4]
    return PartitionSpec(batch, rows, heads, features)


def _with_mask_and_chunks(name: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with `attention_mask` and `chunk_size` combined into mask_info."""
    (batch, queries, *_), keys = call["q"].shape, call["k"].shape[1]
    info = given_mask_info(name, call)
    if (mask := call.get("attention_mask")) is not None:
        info = _both(info, MaskInfo.from_attention_mask(mask))
    if call["chunk_size"] is not None:
        if info is None or info.kv_len is None:
            info = _both(info, MaskInfo.from_segments(*(jnp.zeros((batch, n)) for n in (queries, keys))))
        info = info.apply_chunked(call["chunk_size"])
    return {**call, "mask_info": info}


def _both(info: MaskInfo | None, other: MaskInfo) -> MaskInfo:
    """What both let a query see, of the queries and keys of the other, with the flags of the first."""
    if info is None:
        return other
    mask = other.get_or_compute_attention_mask()
    if info.kv_len is not None:
        mask &= info.get_or_compute_attention_mask()[..., : mask.shape[-2], : mask.shape[-1]]
    return info.replace(attention_mask=mask)


@translates
def ring_attention(composed: tuple[Present, Present], call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """Ring attention on a mesh over tokens in their natural order: layout "contiguous", and the strategy "auto".

    If the queries are not split over `axis_name`, as in a step of decoding, each device gets all keys.
    """
    ring, flash = composed
    name = "ring_attention"
    call = _with_mask_and_chunks(name, call)
    axis = call["axis_name"]
    of_q = entries_of(specs, "q", 4)
    inside = call.get("mesh") is None and axis is not None
    if not inside and (axis is None or of_q[1] is None or call["q"].shape[1] != call["k"].shape[1]):
        drop = lambda entries: PartitionSpec(entries[0], None, *entries[2:])
        specs |= {n: drop(entries_of(specs, n, 4)) for n in "qkv" if n in specs}
        if call.get("out_specs") is not None:
            call |= dict(out_specs=drop((*tuple(call["out_specs"]), None, None)[:4]))
        return _attend(name, flash, call, specs)
    if not inside and of_q[1] not in (axis, (axis,)):
        raise value_error(name, f"in_specs split the queries over {of_q[1]!r}; axis_name is {axis!r}")
    return _ring_of(ring, call, specs, inside)


def _ring_of(ring: Present, call: Mapping[str, Any], specs: Mapping[str, Any], inside: bool) -> Any:
    name, axis = "ring_attention", call["axis_name"]
    q, k, v, bias = arrays_of(call, "q", "k", "v", "bias")
    size = jax.lax.axis_size(axis) if inside else 1  # inside a shard_map the arrays are a part of the whole
    length = q.shape[1] * size
    seen_by = visibility_of(name, call, q.shape[0], q.shape[1] if inside else length, length)
    options, _, seen_by = lax_band(seen_by, length, length)
    if (window := options.pop("sliding_window", None)) is not None:
        options["window"] = window
    _refuse_capped_bias(name, call)
    platform, config = platform_and_config(name, call)
    if platform not in (None, "auto"):
        raise value_error(
            name, f"platform is {shown(platform)}; that of each hop of a ring is chosen where it is lowered"
        )
    options |= dict(softcap=call["logits_soft_cap"], softmax_scale=call["softmax_scale"], axis_name=axis, config=config)
    arrays = dict(q=q, k=k, v=v, bias=bias, sinks=sinks_of_heads(call["softmax_aux"], q.shape[2], k.shape[2]))
    arrays |= dict(zip(("mask", "q_segment_ids", "kv_segment_ids"), seen_by[:3], strict=True))
    arrays = {n: x for n, x in arrays.items() if x is not None}
    attend = lambda arrays: ring(**arrays, **options, layout="contiguous")
    if inside:
        return attend(arrays)
    batch, rows, heads, _ = entries_of(specs, "q", 4)
    specs = {n: specs.get(n, PartitionSpec()) for n in "qkv"} | specs_of_masks(seen_by, batch, heads, rows, rows)
    specs |= dict(sinks=PartitionSpec(heads), bias=_rows_of_bias(bias, batch, heads, rows))
    local = jax.shard_map(
        attend, mesh=call["mesh"], in_specs=({n: specs[n] for n in arrays},), out_specs=call["out_specs"]
    )
    return local(placed(arrays, specs, call["mesh"]))


def _rows_of_bias(bias: Any, *entries: Any) -> PartitionSpec:
    """The spec of a bias from the entries of batch, heads and rows, with None for its axes of size 1."""
    sizes = () if bias is None else bias.shape[-1 - len(entries) : -1]
    of_last = entries[len(entries) - len(sizes) :]
    return PartitionSpec(*(e if n > 1 else None for e, n in zip(of_last, sizes, strict=True)))


def _refuse_capped_bias(name: str, call: Mapping[str, Any]) -> None:
    """Raises for a bias with a cap where 0.0.78 adds it after the cap; in flash_attention it is before, as here."""
    if call["bias"] is not None and call["logits_soft_cap"] is not None:
        raise value_error(
            name, "bias and logits_soft_cap are given: 0.0.78 adds a bias after the cap, and this library before it"
        )


def _options(call: Mapping[str, Any], heads: int, groups: int) -> dict[str, Any]:
    """The options that have the same meaning in flash_attention, and the sinks of each head."""
    options = {n: call[n] for n in ("softmax_scale", "logits_soft_cap", "dropout_prob", "dropout_seed") if n in call}
    return options | dict(softmax_aux=sinks_of_heads(call.get("softmax_aux"), heads, groups))


def _attend(
    name: str, flash: Present, call: Mapping[str, Any], specs: Mapping[str, Any], with_weights: bool = False
) -> Any:
    """flash_attention of arrays [B, S, H, D] with the visibility of the call."""
    q, k, v, bias = arrays_of(call, "q", "k", "v", "bias")
    if bias is None and call.get("init_bias") is not None:
        bias = call["init_bias"]()
    if name in ("attention", "ring_attention"):
        _refuse_capped_bias(name, {**call, "bias": bias})
    queries, keys = q.shape[1], k.shape[1]
    _check_keys(name, k, v, bias)
    seen_by = visibility_of(name, call, q.shape[0], queries, keys)
    options, kept, left = lax_band(seen_by, queries, keys)
    cut = bias[..., :kept] if bias is not None and bias.shape[-1:] == (keys,) else bias
    arguments = dict(q=q, k=k[:, :kept], v=v[:, :kept], bias=cut, mask=left.mask)
    arguments |= dict(q_segment_ids=left.q_segment_ids, kv_segment_ids=left.kv_segment_ids)
    arguments |= options | _options(call, q.shape[2], k.shape[2])
    if call.get("dropout_rng") is not None and call["dropout_prob"]:
        arguments |= dict(dropout_seed=jax.random.bits(call["dropout_rng"], (), jnp.uint32))
    batch, _, heads, _ = entries_of(specs, "q", 4)
    specs = {**specs, **specs_of_masks(left, batch, heads), "softmax_aux": PartitionSpec(heads)}
    if not with_weights:
        return run(flash, call, arguments, specs)
    o, lse = run(flash, call, arguments | dict(return_lse=True), specs)
    return o, _weights(q, k, bias, lse, seen_by, call).astype(o.dtype)


def _check_keys(name: str, k: Any, v: Any, bias: Any) -> None:
    """Raises unless values and columns of a bias are as many as keys, of which those that no query sees are cut off."""
    keys = k.shape[1]
    if v.shape[1] != keys:
        raise value_error(name, f"v has length {v.shape[1]} but k has {keys}; they must be equal", k=k, v=v)
    if bias is not None and bias.shape[-1:] not in ((), (1,), (keys,)):
        raise value_error(name, f"bias has {bias.shape[-1]} columns; it must have 1 or {keys}, as k", bias=bias, k=k)


def _weights(q: Any, k: Any, bias: Any, lse: Any, seen_by: Visibility, call: Mapping[str, Any]) -> Any:
    """exp(s − lse), [B, H, S, K], 0 where a query does not see a key.

    There s may exceed lse by far, which is −∞ in a row that sees nothing: exp(s − lse) = ∞ would make gradients NaN.
    """
    (_, queries, heads, depth), keys = q.shape, k.shape[1]
    scale = depth**-0.5 if call["softmax_scale"] is None else call["softmax_scale"]
    k = jnp.repeat(k, heads // k.shape[2], axis=2)
    s = scale * jnp.einsum("bihd,bjhd->bhij", q, k, preferred_element_type=lse.dtype)
    s = s if bias is None else s + bias
    if (cap := call["logits_soft_cap"]) is not None:
        s = cap * jnp.tanh(s / cap)
    lse = jnp.where(jnp.isneginf(lse), 0, lse)
    return jnp.exp(jnp.where(dense(seen_by, queries, keys), s - lse[..., None], -jnp.inf))
