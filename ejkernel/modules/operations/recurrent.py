"""recurrent as an operation: the linear recurrence with any of its decays."""

from typing import Any

import jax
from jaxtyping import Array, Float

from ...primitives.recurrent import recurrent as algorithm
from ...types import CuSeqlens, RecurrentState, Scale
from .._operation import Operation, Prepared
from ._recurrence import Recurrence, prepare


def recurrent_arguments(
    q: Float[Array, "batch seq_len q_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len kv_heads v_head_dim"],
    g: Float[Array, "batch seq_len q_heads"] | None = None,
    gk: Float[Array, "batch seq_len q_heads head_dim"] | None = None,
    gv: Float[Array, "batch seq_len q_heads v_head_dim"] | None = None,
    g_gamma: Float[Array, " q_heads"] | None = None,
    initial_state: RecurrentState | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    softmax_scale: Scale | None = None,
    reverse: bool = False,
    return_state: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> Prepared[
    Float[Array, "batch seq_len q_heads v_head_dim"]
    | tuple[Float[Array, "batch seq_len q_heads v_head_dim"], RecurrentState]
]:
    """Linear attention with decays: a recurrence over a state h [K, V] for each head, computed in chunks.

        h_t = diag(exp(gk_t)) · h_{t−1} · diag(exp(gv_t)) · exp(g_t + g_gamma) + k_t v_tᵀ
        o_t = (softmax_scale · q_t)ᵀ h_t

    Differentiable in every float array, the state and a traced softmax_scale included, to any order. A whole sequence
    at once, and one token at a time with the state passed on, give the same results.

    Args:
        q: queries [B, S, H, K].
        k: keys [B, S, G, K]; H is a multiple of G, and query head h uses head h // (H // G).
        v: values [B, S, G, V]. q, k and v have one float dtype.
        g: float log decay [B, S, H] of the whole state; usually at most 0, but any value is correct.
        gk: float log decay [B, S, H, K] of each row of the state.
        gv: float log decay [B, S, H, V] of each column of the state.
        g_gamma: float log decay [H] of the whole state, the same at each token.
        initial_state: [B, H, K, V], or [N, H, K, V] with cu_seqlens; 0 if not given. Kept in float32.
        cu_seqlens: [N + 1] integers, ascending, may be traced: B is 1 and sequence n is the tokens from entry n to
            entry n + 1.
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

    Linear attention, arXiv 2006.16236; gated, 2312.06635.
    """
    return prepare(
        algorithm,
        q,
        k,
        v,
        g=g,
        gk=gk,
        gv=gv,
        g_gamma=g_gamma,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        axis_name=axis_name,
    )


class Recurrent(Recurrence, Operation):
    """The linear recurrence with any of its decays: `ejkernel.lax.recurrent` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(recurrent_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """The example of linear recurrences, with a gate for each head."""
        given = super().example()
        return dict(given, g=jax.ShapeDtypeStruct(given["q"].shape[:3], given["q"].dtype))
