"""ring_attention: attention over a sequence that is sharded over devices, composed of flash_attention."""

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from ...callib import Ceilings, known_ceilings
from ...errors import shown, value_error
from ...ops.utils.devices import local_target
from ...primitives.flash_attention import Operands
from ...types import ConfigLike, CuSeqlens, DropoutKey, Scale, Sinks, Window, band
from .._composed import composed, tell
from ._arguments import (
    array,
    axis_size,
    require_known,
    size_or_none,
    static_bool,
    vary_alike,
    window_pair,
)
from ._attention import attention_call, pairwise
from ._configs import config_of_parts
from ._ring import ring
from ._ring_exchange import all_gather, no_pairs, one_device, ulysses, usp
from ._ring_hop import Ring
from ._ring_packed import unpacked
from ._ring_strategy import STRATEGIES, Problem, choose, refusal
from .flash_attention import FlashAttention
from .ring_order import check_halves, check_layout

NAME = "ring_attention"

# The rows of a device and the columns of all: what broadcasts to [batch, q_heads, q_len, all_keys].
RowsOfBias: TypeAlias = (
    Float[Array, "#batch #q_heads #q_len #all_keys"]
    | Float[Array, "#q_heads #q_len #all_keys"]
    | Float[Array, "#q_len #all_keys"]
    | Float[Array, "#all_keys"]
    | Float[Array, ""]
)
RowsOfMask: TypeAlias = (
    Bool[Array, "#batch #q_heads #q_len #all_keys"]
    | Bool[Array, "#q_heads #q_len #all_keys"]
    | Bool[Array, "#q_len #all_keys"]
    | Bool[Array, "#all_keys"]
    | Bool[Array, ""]
)


@composed
def ring_attention(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    bias: RowsOfBias | None = None,
    mask: RowsOfMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    sinks: Sinks | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    dropout_key: DropoutKey | None = None,
    *,
    axis_name: str | tuple[str, ...],
    layout: Literal["zigzag", "striped", "contiguous"] = "zigzag",
    strategy: Literal["auto", "ring", "all_gather", "ulysses", "usp"] = "auto",
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_rate: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Literal["e4m3"] | None = None,
    config: ConfigLike | None = None,
) -> (
    Float[Array, "batch q_len q_heads v_head_dim"]
    | Float[Array, "q_tokens q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Float[Array, "batch q_heads q_len"]]
    | tuple[Float[Array, "q_tokens q_heads v_head_dim"], Float[Array, "q_heads q_tokens"]]
):
    """Attention inside `jax.shard_map`, over a sequence that is sharded on a mesh axis (context parallelism).

        order, inverse = ring_order(length, size, layout)   # of the whole sequence; q[:, order], …, o[:, inverse]
        jax.shard_map(lambda q, k, v: ring_attention(q, k, v, axis_name="x", layout=layout, causal=True), …)

    o, lse and all derivatives equal those of `flash_attention` on the whole sequence: causality, window and segments
    refer to positions in it, and the last query is aligned with the last key. Differentiable like flash_attention, to
    any order. With n devices, the strategies are:

    "ring": k and v are passed around in n − 1 hops, a `ppermute` of k and one of v each, which overlaps the computation
    of the hop before; fully masked hops, and parts of hops, are neither sent nor computed. q, k, v, o, lse and what
    rounding has left of o or lse are saved for the backward, and no device ever has the keys of more than two others:
    the memory of a gradient does not grow with n. The backward sends k and v around again, computes the gradients of
    each hop from o and lse of all keys, and returns dk and dv to their devices. In float32 and float64 each hop has a
    second call, which sums its weights exp(s − lse), as the rounding of lse would be seen in the weights of hops.
    "all_gather": k and v of all devices are gathered, and again in the backward, and attended to in one call, or two in
    zigzag. o, lse and the local arrays are saved for the backward, which does not run the forward kernels again.
    "ulysses": `all_to_all` gives each device all tokens of a part of the heads, and sends o and lse back. Query and
    key/value heads must be multiples of n, and a bias or mask must have one row for all queries.
    "usp": over two mesh axes, `axis_name=(across, within)`, an `all_to_all` within as in ulysses, and then a ring
    across, of fewer hops. The heads must be multiples of the devices within; the layout, over the devices of both axes,
    is zigzag or contiguous.
    "auto": the strategy whose forward takes the least time by a model, in which a hop takes the longer of computing and
    sending, or their sum if its calls are short, and each collective has a latency. The rates are those that
    `ejkernel.callib` measured on this device, or those of an H200, so that several processes agree. `ejkernel.explain`,
    called inside the same `shard_map`, says which and why.

    Under `jax.checkpoint` the policy `jax.checkpoint_policies.save_only_these_names("ring_attention_o",
    "ring_attention_lse")` saves o and lse of the whole ring, so that the forward is not run again; so does
    `ejkernel.checkpoint_policies.save_kernels`.

    Args:
        q: the queries of this device [B, S, H, D]; those of all devices, n·S, are sharded in the order of `layout`.
        k: its keys [B, K, G, D]; H is a multiple of G.
        v: its values [B, K, G, V]. q, k and v have one float dtype.
        bias: floats, broadcastable to [B, H, S, n·K]: the rows of this device, and the columns of all keys in the order
            in which they are sharded; of the whole bias, `bias[..., order, :][..., order]` split by rows.
        mask: bool, likewise.
        q_segment_ids: [B, S] integers of this device.
        kv_segment_ids: [B, K] integers of this device.
        sinks: [H] or [H, x] float logits, the same on each device; counted once.
        cu_seqlens_q: [N + 1] integers, the same on each device: sequence n is the tokens of all devices, in order, from
            entry n to entry n + 1. q, k and v are then [T, heads, features], o [T, H, V] and lse [H, T].
        cu_seqlens_k: likewise for keys and values; with causal or a window it is to be cu_seqlens_q, the same array.
        dropout_key: a `jax.random.key`, the same on each device of the axis. The kept set is that of flash_attention on
            the whole sequence; heads and batches of other axes are as there. Not with cu_seqlens.
        axis_name: the manual mesh axis, or axes, over which the sequence is sharded.
        layout: which tokens a device has, see `ring_order`. With a causal mask zigzag and striped give each device the
            same work in a ring.
        strategy: one of the above.
        causal: as in flash_attention, on the whole sequence.
        window: likewise.
        softcap: as in flash_attention.
        softmax_scale: as in flash_attention.
        dropout_rate: as in flash_attention.
        max_seqlen_q: static bound of the lengths in cu_seqlens_q. Hops between tokens farther apart are not computed;
            in striped there are none.
        max_seqlen_k: likewise of cu_seqlens_k.
        return_lse: also return lse.
        deterministic: as in flash_attention.
        batch_invariant: as in flash_attention.
        precision: as in flash_attention.
        config: the config of each call of flash_attention.

    Returns:
        o [B, S, H, V] in q's dtype, with lse [B, H, S] float32 if asked for: the rows of this device.

    Raises:
        ValueError, TypeError: arguments do not fit each other or the strategy; the message names the rule and a remedy.
        UnsupportedError: no implementation of flash_attention on the target takes the call.

    Ring attention, arXiv 2310.01889; striped attention, 2311.09431; DeepSpeed-Ulysses, 2309.14509; USP,
    2405.07719.
    """
    size = axis_size(NAME, axis_name)
    check_layout(NAME, layout)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    cuts = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    given = Operands(
        q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, **cuts, dropout=dropout_key
    )
    longest = _longest(packed, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    visible = band(static_bool(NAME, "causal", causal), window_pair(NAME, window))
    if packed:
        given, visible = unpacked(NAME, given, axis_name, size, layout, visible, longest)
    options = dict(
        softcap=softcap,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        precision=precision,
    )
    arrays, scale = _arrays(given, size, layout, dict(options, causal=causal, window=window))
    if packed and "dropout_key" in arrays:
        rule = "flash_attention draws for the tokens of each sequence; give segment ids, which are of one sequence"
        raise value_error(NAME, f"dropout is for sequences that are not packed: {rule}", **cuts)
    options |= dict(softmax_scale=scale, config=config_of_parts(NAME, config, FlashAttention.config_class))
    call = Ring(axis_name, size, layout, visible, options)
    chosen, reason = _strategy(strategy, call, arrays)
    tell(f"strategy {chosen}: {reason}")
    is_empty = not math.prod(given.q.shape) or not math.prod(given.k.shape)
    attention = no_pairs if is_empty else one_device if size == 1 else _STRATEGIES[chosen]
    o, lse = attention(call, vary_alike(arrays))
    o, lse = (o[0], lse[0]) if packed else (o, lse)
    return (o, lse) if static_bool(NAME, "return_lse", return_lse) else o


_STRATEGIES = {"ring": ring, "all_gather": all_gather, "ulysses": ulysses, "usp": usp}


def _strategy(strategy: str, call: Ring, arrays: Mapping[str, Any]) -> tuple[str, str]:
    """The requested or chosen strategy, and the reason; raises if it does not support the call."""
    q, k, v = (arrays[name] for name in "qkv")
    # The row of a device that has one query may differ from that of another.
    rows = any(name in arrays and (arrays[name].shape[2] > 1 or q.shape[1] == 1) for name in ("bias", "mask"))
    shapes = q.shape[1:], k.shape[1:], v.shape[3]
    axes = call.axis_name if isinstance(call.axis_name, tuple) else (call.axis_name,)
    within = call.size // jax.lax.axis_size(axes[0])
    options = dict(has_rows=rows, batch=q.shape[0], axes=len(axes), within=within)
    problem = Problem(call.size, call.layout, call.band, *shapes, q.dtype, **options)
    if not isinstance(strategy, str) or strategy not in ("auto", *STRATEGIES):
        raise value_error(NAME, f"strategy is {shown(strategy)}; it must be auto, {', '.join(STRATEGIES)}")
    if strategy == "auto":
        try:
            return choose(problem, _ceilings())
        except ValueError as error:
            raise value_error(NAME, str(error), q=q, k=k) from None
    if why := refusal(strategy, problem):
        raise value_error(NAME, why, q=q, k=k)
    return strategy, "it was asked for"


def _ceilings() -> Ceilings | None:
    """The measured ceilings of this device; None with several processes, whose files may differ and who must agree."""
    return None if jax.process_count() > 1 else known_ceilings(local_target().device_kind or "")


def _longest(packed: bool, **given: Any) -> int | None:
    """The bound of the lengths of packed sequences."""
    bounds = [size_or_none(NAME, name, x, least=0) for name, x in given.items() if x is not None]
    if bounds and not packed:
        raise value_error(NAME, "max_seqlen_q and max_seqlen_k are for packed sequences: give cu_seqlens_q and _k")
    return min(bounds, default=None)


def _arrays(given: Operands, size: int, layout: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """The checked arrays of a call by name, and the static scale, None if the scale is traced."""
    checked, fields = attention_call(
        NAME,
        given._replace(bias=None, mask=None),
        **options,
        max_seqlen_q=None,
        max_seqlen_k=None,
    )
    q, k = checked.q, checked.k
    for name, x in (("q", q), ("k", k)):
        require_known(NAME, f"the length of {name}", x.shape[1], **{name: x})
    check_halves(NAME, "q", q.shape[1], size, layout)
    check_halves(NAME, "k", k.shape[1], size, layout)
    arrays = {name: x for name, x in checked._asdict().items() if x is not None}
    if "dropout" in arrays:
        arrays["dropout_key"] = arrays.pop("dropout")
    # The given ids, not those renumbered for one call: numbers of one device mean nothing on another.
    arrays |= {n: array(NAME, n, getattr(given, n)) for n in ("q_segment_ids", "kv_segment_ids") if n in arrays}
    all_keys = jax.ShapeDtypeStruct((k.shape[0], size * k.shape[1], *k.shape[2:]), k.dtype)
    if given.bias is not None:
        arrays["bias"] = pairwise(NAME, "bias", given.bias, np.floating, "a float type", q, all_keys)
    if given.mask is not None:
        arrays["mask"] = pairwise(NAME, "mask", given.mask, np.bool_, "bool", q, all_keys)
    if checked.softmax_scale is None:
        return arrays, fields["softmax_scale"]
    return arrays | {"softmax_scale": checked.softmax_scale.reshape(())}, None
