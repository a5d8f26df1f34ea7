"""gla as an operation: gated linear attention, the linear recurrence that decays by key feature."""

from typing import Any, ClassVar

from jaxtyping import Array, Float

from ...primitives.gla import gla as algorithm
from ...types import CuSeqlens, RecurrentState, Scale
from .._operation import Operation, Prepared
from ._arguments import array
from ._recurrence import Recurrence, prepare


def gla_arguments(
    q: Float[Array, "batch seq_len q_heads head_dim"],
    k: Float[Array, "batch seq_len kv_heads head_dim"],
    v: Float[Array, "batch seq_len kv_heads v_head_dim"],
    gk: Float[Array, "batch seq_len q_heads head_dim"],
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
    """Gated linear attention: a recurrence over a state h [K, V] for each head, computed in chunks.

        h_t = diag(exp(gk_t)) · h_{t−1} + k_t v_tᵀ,    o_t = (softmax_scale · q_t)ᵀ h_t

    Differentiable in every float array, the state and a traced softmax_scale included, to any order. A whole sequence
    at once, and one token at a time with the state passed on, give the same results.

    Args:
        q: queries [B, S, H, K].
        k: keys [B, S, G, K]; H is a multiple of G, and query head h uses head h // (H // G).
        v: values [B, S, G, V]. q, k and v have one float dtype.
        gk: float log decay [B, S, H, K] of each row of the state; usually at most 0, but any value is correct.
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

    Gated linear attention, arXiv 2312.06635.
    """
    return prepare(
        algorithm,
        q,
        k,
        v,
        gk=array(algorithm.name, "gk", gk),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        axis_name=axis_name,
    )


class GLA(Recurrence, Operation):
    """Gated linear attention: `ejkernel.lax.gla` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(gla_arguments)
    renamed: ClassVar = {"gk": "g"}

    @classmethod
    def example(cls) -> dict[str, Any]:
        """The example of linear recurrences, with a gate for each key feature."""
        given = super().example()
        return dict(given, gk=given["q"])
