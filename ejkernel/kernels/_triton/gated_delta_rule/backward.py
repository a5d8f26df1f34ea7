"""The backward: states forwards in time, their cotangents backwards, then the gradients of all chunks in parallel.

With dh' the cotangent of the state after a chunk, the transposes of the equations of `forward` are

    dx = A'ᵀ do + K' dh',    dv = β dx,    dh = total dh' + Qᵀ (q_since do) − Kᵀ (k_since β dx)

What is left is in `gradients`.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import tiles
from ejkernel.kernels._triton._recurrence.problem import Places, Problem, places_of, zero_elsewhere
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig

from . import chunks
from .chunks import Chunks
from .forward import block_of_program, states_and_deltas
from .gradients import gradients_of_chunks


def gated_delta_rule_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: GatedDeltaRuleSpec,
    config: RecurrenceConfig,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands named in `wrt`, in that order."""
    x, do = primals, cotangents.o
    p = chunks.problem(x, spec, config)
    places = places_of(x, p)
    do = jnp.zeros((p.B, p.S, p.H, p.V), x.v.dtype) if do is None else do
    others = bool(set(wrt) - {"v", "initial_state"})
    of = chunks.chunks_of(x, spec, places, p, config, for_gradients=others)
    forwards = states_and_deltas(x, of, places, p, config) if others else {}
    back = cotangents_of_states(x, do, cotangents.final_state, of, forwards.get("deltas"), places, p, config)
    found = dict(v=back["dv"], initial_state=back["dinitial_state"])
    if others:
        found |= gradients_of_chunks(x, do, of, forwards, back, places, p, spec)
    of_tokens = lambda a: a if a.ndim == 5 else zero_elsewhere(a, places)
    return tuple(of_tokens(found[name]).astype(getattr(x, name).dtype) for name in wrt)


def cotangents_of_states(
    x: Operands,
    do: jax.Array,
    dfinal_state: jax.Array | None,
    of: Chunks,
    deltas: jax.Array | None,
    places: Places,
    p: Problem,
    config: RecurrenceConfig,
) -> dict[str, jax.Array]:
    """dinitial_state [b,n,h,d,e] and dv [b,s,h,e]; in the dtype of products dstates [b,chunks,h,d,e], the cotangents of
    chunk states, and dx [b,s,h,e]; with deltas also the sums of dx ∘ delta over blocks of columns [blocks,b,s,h].
    """
    columns, array = min(config.block_v, p.V_PAD), jax.ShapeDtypeStruct
    blocks = triton.cdiv(p.V, columns)
    types = dict(
        dinitial_state=array((p.B, p.sequences, p.H, p.D, p.V), jnp.float32),
        dstates=array((p.B, p.chunks, p.H, p.D, p.V), chunks.kept_dtype(p)),
        dv=array((p.B, p.S, p.H, p.V), x.v.dtype),
        dx=array((p.B, p.S, p.H, p.V), chunks.kept_dtype(p)),
        dx_delta=array((blocks, p.B, p.S, p.H), jnp.float32),
    )
    if deltas is None:
        del types["dx_delta"]
    return _launch.launch(
        cotangents_kernel,
        *(x.q, x.k, x.beta, do, of.k_since, of.q_since, of.total, of.x_to_o, of.x_to_state, deltas, dfinal_state),
        *places[:3],
        out_type=types,
        grid=p.B * p.sequences * p.H * blocks,
        config=config,
        p=p,
        COLUMNS=columns,
        **({"dx_delta": None} if deltas is None else {}),
    )


@triton.jit
def cotangents_kernel(
    q, k, beta, do, k_since, q_since, total, x_to_o, x_to_state, deltas, dfinal_state, first, length, chunk,
    dinitial_state, dstates, dv, dx, dx_delta,
    p: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, head, batch, number, token, tokens, first_chunk = block_of_program(first, length, chunk, COLUMNS, p)
    dstate = tiles.first_state(dfinal_state, number, 0, p.D_PAD, column, COLUMNS, p)
    count = (tokens + p.C - 1) // p.C
    for i in tl.range(0, count):
        c = count - 1 - i
        at, left = token + c * p.C, tokens - c * p.C
        of_chunk = (batch * p.chunks + first_chunk + c) * p.H + head
        do_tile = tiles.load_tile(do, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(p.dtype)
        out_tile = tiles.load_tile(x_to_state, batch, at, left, head, p.H, 0, p.D, p.D_PAD, p)
        rounded = dstate.to(p.dtype)
        kept, exists = tiles.state_pointers(dstates, of_chunk, 0, p.D_PAD, column, COLUMNS, p)
        tl.store(kept, rounded, mask=exists)
        weights = tl.trans(tl.load(chunks.pair_pointers(x_to_o, of_chunk, p)))
        dx_tile = tl.dot(weights, do_tile, tiles.product(out_tile, rounded, p), input_precision=p.precision)
        tiles.store_tile(dx, dx_tile, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        if deltas is not None:
            delta = tiles.load_tile(deltas, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(tl.float32)
            of_block = dx_delta + tl.cast(column // COLUMNS, tl.int64) * (p.B * p.S * p.H)
            chunks.store_rows(of_block, tl.sum(dx_tile * delta, 1), batch, at, left, head, p)
        dv_tile = dx_tile * chunks.load_rows(beta, batch, at, left, head, p)[:, None]
        tiles.store_tile(dv, dv_tile, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        q_tile, k_tile = chunks.queries_and_keys(q, k, batch, at, left, head, p)
        do_tile = do_tile.to(tl.float32) * chunks.load_rows(q_since, batch, at, left, head, p)[:, None]
        dstate = chunks.add_product(dstate * tl.load(total + of_chunk), tl.trans(q_tile), do_tile, p)
        dv_tile *= -chunks.load_rows(k_since, batch, at, left, head, p)[:, None]
        dstate = chunks.add_product(dstate, tl.trans(k_tile), dv_tile, p)
    address, exists = tiles.state_pointers(dinitial_state, number, 0, p.D_PAD, column, COLUMNS, p)
    tl.store(address, dstate, mask=exists)
