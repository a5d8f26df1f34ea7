"""state_space_v2 as an operation: from public arguments to operands and spec of the primitive, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...primitives.state_space_v2 import Operands, StateSpaceSpec
from ...primitives.state_space_v2 import state_space_v2 as algorithm
from ...types import CuSeqlens
from .._operation import Operation, Prepared
from ._state_space import StateSpace, prepare

NAME = algorithm.name


def state_space_v2_arguments(
    x: Float[Array, "batch seq_len heads head_dim"],
    A: Float[Array, " heads"],
    B: Float[Array, "batch seq_len groups state"],
    C: Float[Array, "batch seq_len groups state"],
    D: Float[Array, " heads"] | None,
    dt: Float[Array, "batch seq_len heads"],
    initial_state: Float[Array, "batch heads head_dim state"]
    | Float[Array, "sequences heads head_dim state"]
    | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    return_state: bool = False,
) -> Prepared[
    Float[Array, "batch seq_len heads head_dim"]
    | tuple[
        Float[Array, "batch seq_len heads head_dim"],
        Float[Array, "batch heads head_dim state"] | Float[Array, "sequences heads head_dim state"],
    ]
]:
    """The state space of Mamba-2: a recurrence over a state h [P, N] of each head with one decay, computed in chunks.

        h_t = exp(dt_t · A) · h_{t−1} + dt_t · x_t B_tᵀ,    y_t = h_t C_t + D · x_t

    Differentiable in every float array, the state included, to any order. A whole sequence at once, and one token at a
    time with the state passed on, give the same results. The convolution before, the softplus of dt, and a gate and a
    norm after are left to the caller.

    Args:
        x: [B, S, H, P], of a float dtype, which is that of the result.
        A: [H], the decay rates; usually negative, but any value is correct. All arrays are floats.
        B: [B, S, G, N], by which a token is written; H is a multiple of G, and head h uses group h // (H // G).
        C: [B, S, G, N], by which the state is read.
        D: [H], the factor of x in y beside the state; None for none.
        dt: [B, S, H], the step of each token, after its softplus.
        initial_state: [B, H, P, N], or [sequences, H, P, N] with cu_seqlens; 0 if not given. Kept in float32.
        cu_seqlens: [sequences + 1] integers, ascending, may be traced: B is 1 and sequence n is the tokens from entry n
            to entry n + 1.
        return_state: also return the final state.

    Returns:
        y [B, S, H, P] in x's dtype, 0 for tokens past the last sequence, whose contents do not matter; with the final
        state, of the initial state's shape, in float32 if asked for. An empty sequence leaves its state as it was.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Transformers are SSMs (Mamba-2), arXiv 2405.21060.
    """
    arrays = dict(x=x, A=A, B=B, C=C, D=D, dt=dt)
    return prepare(algorithm, Operands, arrays, initial_state, cu_seqlens, return_state)


class StateSpaceV2(StateSpace, Operation):
    """The state space of Mamba-2: `ejkernel.lax.state_space_v2` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(state_space_v2_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with 16 heads of 32 features, and one group with 64 state features, that returns the final state."""
        array = jax.ShapeDtypeStruct
        x, BC = array((1, 128, 16, 32), jnp.bfloat16), array((1, 128, 1, 64), jnp.bfloat16)
        A, D, dt = (array(shape, jnp.float32) for shape in ((16,), (16,), (1, 128, 16)))
        return dict(x=x, A=A, B=BC, C=BC, D=D, dt=dt, return_state=True)

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: StateSpaceSpec) -> float:
        """2·P·N for each token, head and product: a token's x Bᵀ, and the state times C.

        A backward or tangent recomputes the states; each of x, B and C in which it differentiates adds a product, and x
        or B adds one more, for the tangent or cotangent of the state.
        """
        del spec
        (batch, length, heads, features), state = named["x"].shape, named["B"].shape[-1]
        moving = [f"{name}_dot" in named or f"{name}_bar" in results for name in ("C", "x", "B")]
        products = 2 if "o" in results else 1 + sum(moving) + any(moving[1:])
        return 2.0 * batch * length * heads * features * state * products
