"""state_space_v1 as an operation: from public arguments to operands and spec of the primitive, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...primitives.state_space_v1 import Operands, StateSpaceSpec
from ...primitives.state_space_v1 import state_space_v1 as algorithm
from ...types import CuSeqlens
from .._operation import Operation, Prepared
from ._state_space import StateSpace, prepare

NAME = algorithm.name


def state_space_v1_arguments(
    x: Float[Array, "batch seq_len channels"],
    A: Float[Array, "channels state"],
    B: Float[Array, "batch seq_len state"],
    C: Float[Array, "batch seq_len state"],
    D: Float[Array, " channels"] | None,
    dt: Float[Array, "batch seq_len channels"],
    initial_state: Float[Array, "batch channels state"] | Float[Array, "sequences channels state"] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    *,
    return_state: bool = False,
) -> Prepared[
    Float[Array, "batch seq_len channels"]
    | tuple[
        Float[Array, "batch seq_len channels"],
        Float[Array, "batch channels state"] | Float[Array, "sequences channels state"],
    ]
]:
    """The selective state space of Mamba: a recurrence over a state h [N] of each channel, computed in chunks.

        h_t = exp(dt_t · A) ∘ h_{t−1} + dt_t · x_t · B_t,    y_t = C_t · h_t + D · x_t

    Differentiable in every float array, the state included, to any order. A whole sequence at once, and one token at a
    time with the state passed on, give the same results. The convolution before, the softplus of dt and a gate after
    are left to the caller.

    Args:
        x: [B, S, channels], of a float dtype, which is that of the result.
        A: [channels, N], the decay rates; usually negative, but any value is correct. All arrays are floats.
        B: [B, S, N], by which a token is written into the state of each channel.
        C: [B, S, N], by which the state of each channel is read.
        D: [channels], the factor of x in y beside the state; None for none.
        dt: [B, S, channels], the step of each token, after its softplus.
        initial_state: [B, channels, N], or [sequences, channels, N] with cu_seqlens; 0 if not given. Kept in float32.
        cu_seqlens: [sequences + 1] integers, ascending, may be traced: B is 1 and sequence n is the tokens from entry n
            to entry n + 1.
        return_state: also return the final state.

    Returns:
        y [B, S, channels] in x's dtype, 0 for tokens past the last sequence, whose contents do not matter; with the
        final state, of the initial state's shape, in float32 if asked for. An empty sequence leaves its state as it
        was.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Mamba, arXiv 2312.00752.
    """
    arrays = dict(x=x, A=A, B=B, C=C, D=D, dt=dt)
    return prepare(algorithm, Operands, arrays, initial_state, cu_seqlens, return_state)


class StateSpaceV1(StateSpace, Operation):
    """The state space of Mamba: `ejkernel.lax.state_space_v1` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(state_space_v1_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with 128 channels, each with a state of 16 numbers, that returns the final state."""
        array = jax.ShapeDtypeStruct
        x, BC = array((1, 128, 128), jnp.bfloat16), array((1, 128, 16), jnp.bfloat16)
        A, D, dt = (array(shape, jnp.float32) for shape in ((128, 16), (128,), x.shape))
        return dict(x=x, A=A, B=BC, C=BC, D=D, dt=dt, return_state=True)

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: StateSpaceSpec) -> float | None:
        """None: there are no matrix products."""
        del named, results, spec
        return None
