"""lightning_attention as an operation: the linear recurrence with one constant decay for each head of a layer."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ...errors import shown, type_error, value_error
from ...primitives.lightning_attention import lightning_attention as algorithm
from ...types import CuSeqlens, RecurrentState, Scale
from .._operation import Operation, Prepared
from ._arguments import array, require_known
from ._recurrence import Recurrence, prepare

NAME = algorithm.name


def lightning_attention_arguments(
    q: Float[Array, "batch seq_len q_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len kv_heads v_head_dim"],
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    g_gamma: Float[Array, " q_heads"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: Scale | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> Prepared[
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
]:
    """Lightning attention: a recurrence over a state h [K, V] for each head, computed in chunks.

        h_t = exp(g_gamma) · h_{t−1} + k_t v_tᵀ,    o_t = (softmax_scale · q_t)ᵀ h_t
        g_gamma = −(8/H) · (1 − layer_idx/num_layers) · (0, 1, …, H − 1)

    Differentiable in every float array, the state and a traced softmax_scale included, to any order. A whole sequence
    at once, and one token at a time with the state passed on, give the same results.

    Args:
        q: queries [B, S, H, K].
        k: keys [B, S, G, K]; H is a multiple of G, and query head h uses head h // (H // G).
        v: values [B, S, G, V]. q, k and v have one float dtype.
        initial_state: [B, H, K, V], or [N, H, K, V] with cu_seqlens; 0 if not given. Kept in float32.
        cu_seqlens: [N + 1] integers, ascending, may be traced: B is 1 and sequence n is the tokens from entry n to
            entry n + 1.
        g_gamma: [H], log decays to use instead of the formula above, which holds for all heads of a layer: under
            `jax.shard_map` over heads each device must be given the log decays of its own heads.
        layer_idx: the index of the layer, from 0; states decay more slowly in later layers.
        num_layers: the number of layers.
        softmax_scale: K**-0.5 by default; a number, or a traced scalar.
        reverse: time runs backwards, from the last token of each sequence to its first.
        return_state: also return the final state.
        axis_name: inside `jax.shard_map`, the mesh axis, or axes, over which the tokens are sharded in order. Arrays
            over tokens have this device's tokens; cu_seqlens and states are those of the whole, equal on all devices.

    Returns:
        o [B, S, H, V] in q's dtype, 0 for tokens past the last sequence, whose contents do not matter; with the final
        state, of the initial state's shape, in float32 if asked for. An empty sequence leaves its state as it was.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Lightning Attention-2, arXiv 2401.04658; the decays are those of TransNormerLLM, 2307.14995.
    """
    q = array(NAME, "q", q)
    has_heads = len(q.shape) == 4 and q.shape[2] != 0
    slopes = _g_gamma(q, layer_idx, num_layers) if has_heads else None
    return prepare(
        algorithm,
        q,
        k,
        v,
        g_gamma=slopes if g_gamma is None else g_gamma,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        axis_name=axis_name,
    )


def _g_gamma(q: Array, layer_idx: int, num_layers: int) -> Array:
    """The log decay of each head of q, in float64 if q is float64, as the state is."""
    for name, x in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if isinstance(x, bool) or not isinstance(x, int | np.integer):
            raise type_error(NAME, f"{name} must be a static int, not {type(x).__name__}")
    if not 0 <= layer_idx < num_layers:
        raise value_error(
            NAME, f"layer_idx is {shown(layer_idx)}; it must be at least 0 and below num_layers, {shown(num_layers)}"
        )
    heads = q.shape[2]
    require_known(NAME, "the number of heads, by which they decay,", heads)
    decays = -8 / heads * (1 - layer_idx / num_layers) * np.arange(heads)
    return jnp.asarray(decays, jnp.result_type(float) if q.dtype == np.float64 else jnp.float32)


class LightningAttention(Recurrence, Operation):
    """Linear attention with one decay for each head: `ejkernel.lax.lightning_attention` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(lightning_attention_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """The example of linear recurrences, with the decays of the first of two layers."""
        given = super().example()
        return dict(given, layer_idx=0, num_layers=2)

    @classmethod
    def place(
        cls, arrays: Mapping[str, Any], given: Mapping[str, Any], specs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Each shard gets the decays that its heads have in the whole call."""
        if "g_gamma" in arrays:
            return dict(arrays), dict(specs)
        heads = (*specs["q"], None, None, None)[2]
        g_gamma = _g_gamma(arrays["q"], given["layer_idx"], given["num_layers"])
        return dict(arrays, g_gamma=g_gamma), dict(specs, g_gamma=PartitionSpec(heads))
