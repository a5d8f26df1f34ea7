"""The recurrence token by token, for decoding: each program keeps a block of columns of the state in registers.

h_t = diag(exp(gk_t)) · h_{t−1} · diag(exp(gv_t)) · exp(g_t + g_gamma) + k_t v_tᵀ,    o_t = (scale · q_t)ᵀ h_t

A state space has dt_t · v_t in the place of v_t, and skip · v_t in o_t. A state is read once and written once, in its
place: a step takes as long as its memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from .problem import StateSpace, gamma_of_batch, problem_of

LONGEST = 8
"""The most tokens for which this kernel is used: with more, chunks are faster."""


def recurrence(*operands, spec=RecurrenceSpec(), config=RecurrenceConfig(), space=StateSpace()) -> Outputs:
    """o and the final state of a dense call of at most LONGEST tokens."""
    x = Operands(*operands)
    x = gamma_of_batch(x, x.q.shape[0])
    p = problem_of(x, spec, 16, of_space=space.dt is not None)
    block = min(config.block_v, p.V_PAD)
    start = jnp.zeros((p.B, 1, p.H, *p.state), jnp.float32) if x.initial_state is None else x.initial_state
    found = launch_in_place(
        step_kernel, x.q, x.k, x.v, x.g, x.gk, x.gv, x.g_gamma, *space,
        placed=dict(states=start),
        new=dict(o=jax.ShapeDtypeStruct((p.B, p.S, p.H, p.V), x.v.dtype)),
        grid=p.B * p.H * triton.cdiv(p.V, block),
        config=config,
        p=p, BLOCK=block,
    )  # fmt: skip
    return Outputs(found["o"], found["states"])


@triton.jit
def step_kernel(
    q, k, v, g, gk, gv, g_gamma, dt, skip,
    states, o,
    p: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (p.V + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    head, batch = pid // blocks % p.H, pid // (blocks * p.H)
    d, e = tl.arange(0, p.D_PAD), pid % blocks * BLOCK + tl.arange(0, BLOCK)
    in_d, in_e = d < p.D, e < p.V
    exists = in_d[:, None] & in_e[None, :]
    of_state = tl.cast(batch * p.H + head, tl.int64) * (p.D * p.V)
    of_state += d[:, None] + e[None, :] * p.D if p.of_space else d[:, None] * p.V + e[None, :]
    state = tl.load(states + of_state, mask=exists, other=0.0)
    for i in range(p.S):
        token = tl.cast(batch, tl.int64) * p.S + (p.S - 1 - i if p.reverse else i)
        row, q_row = token * p.H + head, token * p.HQ + head // p.per_query
        k_row, v_row = token * p.HK + head // p.per_key, token * p.HV + head // p.per_value
        if g_gamma is not None:
            state *= tl.exp(tl.load(g_gamma + batch * p.H + head))
        if g is not None:
            state *= tl.exp(tl.load(g + row).to(tl.float32))
        if gk is not None:
            state *= tl.exp(tl.load(gk + row * p.D + d, mask=in_d, other=0.0).to(tl.float32))[:, None]
        if gv is not None:
            state *= tl.exp(tl.load(gv + row * p.V + e, mask=in_e, other=0.0).to(tl.float32))[None, :]
        k_token = tl.load(k + k_row * p.D + d, mask=in_d, other=0.0).to(tl.float32)
        v_token = tl.load(v + v_row * p.V + e, mask=in_e, other=0.0).to(tl.float32)
        added = v_token if dt is None else v_token * tl.load(dt + row).to(tl.float32)
        state += k_token[:, None] * added[None, :]
        q_token = tl.load(q + q_row * p.D + d, mask=in_d, other=0.0).to(tl.float32) * p.scale
        o_token = tl.sum(q_token[:, None] * state, 0)
        if skip is not None:
            o_token += tl.load(skip + batch * p.H + head).to(tl.float32) * v_token
        tl.store(o + row * p.V + e, o_token.to(o.dtype.element_ty), mask=in_e)
    tl.store(states + of_state, state, mask=exists)
