"""Mamba-2's state space in Triton: forward, tangent and backward by the kernels of the linear recurrence.

The forward and the backward read x, and multiply it by dt where it is used. So no array dt · x is made, and x enters
products of matrices as it is. The tangent is that of the recurrence with values dt · x.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels import _state_space_v2 as state_spaces
from ejkernel.kernels._state_space_v2 import SPEC
from ejkernel.kernels._triton._recurrence import forward
from ejkernel.kernels._triton._recurrence.gradients import recurrence_bwd
from ejkernel.kernels._triton._recurrence.problem import StateSpace
from ejkernel.kernels._triton._recurrence.tangent import recurrence_jvp
from ejkernel.primitives._recurrence import Operands as Recurrence
from ejkernel.primitives.state_space_v2 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import gradients, outputs


def state_space_v2(*operands: Array | None, spec: StateSpaceSpec, config: RecurrenceConfig) -> Outputs:
    """y and the final state."""
    x = Operands(*operands)
    if config.algorithm == "chunks" and state_spaces.dtype_of_products(x) == jnp.bfloat16:
        return Outputs(*outputs.recurrence(_recurrence(x), _space(x), config))
    return Outputs(*forward.recurrence(*_recurrence(x), spec=SPEC, config=config, space=_space(x)))


def state_space_v2_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: StateSpaceSpec, config: RecurrenceConfig
) -> Outputs:
    """The tangents of both."""
    push = lambda x, dot: recurrence_jvp(x, None, dot, spec=SPEC, config=config)
    return state_spaces.tangent(push, primals, tangents)


def state_space_v2_bwd(
    primals: Operands, outputs: Outputs, cotangents: Outputs, *, wrt: tuple[str, ...], spec: StateSpaceSpec,
    config: RecurrenceConfig,
) -> tuple[Array, ...]:  # fmt: skip
    """The cotangents of the operands named in wrt."""
    x, bar = state_spaces.of_sequences_alone(primals, cotangents)
    if state_spaces.dtype_of_products(x) == jnp.bfloat16 and wrt != ("D",):
        pull = lambda names: gradients.cotangents(_recurrence(x), _space(x), bar.o, bar.final_state, names, config)
    else:
        of_recurrence = lambda x, bar, wrt: recurrence_bwd(x, None, bar, wrt=wrt, spec=SPEC, config=config)
        pull = partial(state_spaces.cotangents_by, of_recurrence, x, bar)
    return state_spaces.backward(pull, x, bar.o, wrt)


def _recurrence(x: Operands) -> Recurrence:
    dtype, of_heads = state_spaces.dtype_of_products(x), x.A.astype(jnp.float32)[:, None]
    q, k = x.C.astype(dtype), x.B.astype(dtype)
    g = x.dt.astype(jnp.float32) * of_heads
    return Recurrence(q, k, x.x, g, initial_state=x.initial_state, spans=x.spans)


def _space(x: Operands) -> StateSpace:
    batch, heads = x.x.shape[0], x.x.shape[2]
    return StateSpace(x.dt, None if x.D is None else jnp.broadcast_to(x.D, (batch, heads)))
