"""The backward kernels, with p = exp(s − lse) and δ = Σ_e do·o − dlse of each row:

    ds = p (do·v − δ)       dq = scale Σ_j ds k_j       dk_j = scale Σ_i ds q_i       dv_j = Σ_i p do_i

dq is computed in the tiles of the forward. dk and dv are computed by a program for each work item: up to 512 of the
queries that list one block, gathered some at a time with the heads of their group. Then the items of a block are summed
in order, so that gradients repeat bit for bit.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._native_sparse import Lists, lists_of, tokens_in_slots
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import tiles
from .configs import power_of_two, queries_of
from .forward import attended
from .problem import Items, Problem, items_of, problem_of
from .unions import unions_of


def native_sparse_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: NativeSparseAttentionSpec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands named in `wrt`, in that order."""
    problem = problem_of(primals, spec, config.block_q)
    lists, do = lists_of(primals, problem.size), cotangents.o
    delta = jnp.zeros_like(outputs.lse)
    if do is not None:
        # Where a single key has all weight of a row, δ equals do·v, and what rounds o to float16 is all that is left.
        in_float16 = primals.q.dtype == jnp.float16
        o = attended(primals, spec, config, jnp.float32).o if in_float16 else outputs.o
        delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    if cotangents.lse is not None:
        delta = delta - cotangents.lse
    # Fully masked rows get weights of 0, whatever their logits are.
    lse = jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse)
    rows = (do, lse, delta)
    found = {}
    if "q" in wrt:
        found["q"] = _of_queries(primals, rows, lists, problem, config)
    if not {"k", "v"}.isdisjoint(wrt):
        found["k"], found["v"] = _of_keys(primals, rows, lists, problem, config)
    return tuple(found[name] for name in wrt)


def _of_queries(x: Operands, rows: tuple, lists: Lists, problem: Problem, config: KernelConfig) -> jax.Array:
    queries = queries_of(config.block_q, problem.heads)
    count = triton.cdiv(problem.S, queries)
    return _launch.launch(
        queries_kernel,
        *x[:3],
        *rows,
        lists.limit,
        *unions_of(lists, queries, problem.size)[:4],
        out_type=jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),
        grid=count * problem.G * problem.B,
        config=config,
        problem=problem,
        TILES=count,
        ROWS=queries * problem.PADDED,
        BLOCK_K=config.block_k,
    )


def _of_keys(x: Operands, rows: tuple, lists: Lists, problem: Problem, config: KernelConfig):
    items, queries = items_of(lists, problem), queries_of(config.block_d, problem.heads)
    count, of_batch = items.slot.shape[2], problem.B * problem.G
    parts = [jax.ShapeDtypeStruct((of_batch, count, problem.size, n), jnp.float32) for n in (problem.D, problem.V)]
    dk, dv = _launch.launch(
        keys_kernel,
        *x[:3],
        *rows,
        lists.limit,
        lists.first,
        *items[:4],
        out_type=tuple(parts),
        grid=count * of_batch * triton.cdiv(problem.size, config.block_k),
        config=config,
        problem=problem,
        ITEMS=count,
        LISTED=items.query.shape[2],
        ROWS=queries * problem.PADDED,
        BLOCK_K=config.block_k,
    )
    return tuple(of_tokens(summed(part, items, problem, config), x, problem) for part in (dk, dv))


def summed(parts: jax.Array, items: Items, problem: Problem, config: KernelConfig) -> jax.Array:
    """[b·g, slots, size, features]: the sum of the parts [b·g, items, size, features] over the items of each slot."""
    of_batch, count, size, features = parts.shape
    return _launch.launch(
        sums_kernel,
        parts,
        items.first,
        out_type=jax.ShapeDtypeStruct((of_batch, problem.slots, size, features), parts.dtype),
        grid=of_batch * problem.slots * triton.cdiv(size, config.block_k),
        config=replace(config, num_warps=8 if config.block_k * features > 2**14 else 4),
        problem=problem,
        ITEMS=count,
        FEATURES=features,
        WIDTH=power_of_two(features),
        BLOCK_K=config.block_k,
    )


def of_tokens(x: jax.Array, of: Operands, problem: Problem) -> jax.Array:
    """Gradients of slots as [b,t,g,features] of tokens, in the dtype of `of`; 0 for tokens of no slot."""
    x = x.reshape(problem.B, problem.G, problem.slots * problem.size, x.shape[3]).astype(of.k.dtype)
    if of.cu_seqlens is None:
        return jnp.moveaxis(x[:, :, : problem.K], 1, 2)
    at = tokens_in_slots(of, problem.size)
    return jax.vmap(lambda x, at: x.at[:, at].get(mode="fill", fill_value=0))(x, at).swapaxes(1, 2)


@triton.jit
def queries_kernel(
    q, k, v, do, lse, delta, limit, count, begin, end, members,
    dq,
    problem: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    batch, tile, group = tiles.tile_of_program(problem, TILES)
    query = tile * (ROWS // problem.PADDED) + tl.arange(0, ROWS) // problem.PADDED
    row, row_of_head, inside = tiles.rows_of(batch, query, group, problem, ROWS)
    q_tile = tiles.load_rows(q, row, inside, problem.D, problem.WIDTH)
    do_tile = tiles.load_rows(do, row, inside, problem.V, problem.V_WIDTH)
    limits = tl.load(limit + batch * problem.S + query, mask=inside, other=0)
    of_row = tl.load(lse + row_of_head, mask=inside, other=float("inf"))[:, None] * tiles.LOG2E
    deltas = tl.load(delta + row_of_head, mask=inside, other=0.0)
    at = (batch * TILES + tile) * problem.G + group
    WIDTH: tl.constexpr = problem.WIDTH
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    parts: tl.constexpr = (problem.size + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(0, tl.load(count + at) * parts):
        place = at * problem.entries + step // parts
        stop = tl.load(end + place)
        token = tl.load(begin + place) + step % parts * BLOCK_K + tl.arange(0, BLOCK_K)
        k_tile = tiles.load_keys(k, batch, token, stop, group, problem, problem.D, problem.WIDTH)
        visible = tiles.visible_rows(tl.load(members + place), token, stop, limits, problem, ROWS)
        p = tiles.weights(tiles.product(q_tile, k_tile), of_row, visible, problem)
        ds = tl.zeros_like(p) - deltas[:, None]
        if do is not None:
            ds += tiles.product(
                do_tile, tiles.load_keys(v, batch, token, stop, group, problem, problem.V, problem.V_WIDTH)
            )
        ds = tl.where(visible, p * ds, 0.0)
        acc = tiles.added(ds, k_tile, acc)
    tiles.store_rows(dq, acc * problem.scale, row, inside, problem.D, problem.WIDTH)


@triton.jit
def keys_kernel(
    q, k, v, do, lse, delta, limit, first, listed, slot, begin, end,
    dk, dv,
    problem: tl.constexpr, ITEMS: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    item, offset = part_of_program(problem, BLOCK_K)
    of_group = item // ITEMS
    batch, group = of_group // problem.G, of_group % problem.G
    start, stop, at = tl.load(begin + item), tl.load(end + item), tl.load(slot + item)
    if start < stop:
        queries: tl.constexpr = ROWS // problem.PADDED
        begins = tl.load(first + batch * problem.slots + at)
        token = begins + offset
        last = tl.load(listed + of_group * LISTED + stop - 1)  # the listed queries ascend, and so do their limits
        until = tl.minimum(begins + problem.size, tl.load(limit + batch * problem.S + last))
        k_tile = tiles.load_keys(k, batch, token, until, group, problem, problem.D, problem.WIDTH)
        v_tile = tiles.load_keys(v, batch, token, until, group, problem, problem.V, problem.V_WIDTH)
        WIDTH: tl.constexpr = problem.WIDTH
        dk_tile = tl.zeros([BLOCK_K, WIDTH], tl.float32)
        V_WIDTH: tl.constexpr = problem.V_WIDTH
        dv_tile = tl.zeros([BLOCK_K, V_WIDTH], tl.float32)
        for place in tl.range(start, stop, queries):
            which = place + tl.arange(0, ROWS) // problem.PADDED
            query = tl.load(listed + of_group * LISTED + which, mask=which < stop, other=problem.S)
            row, row_of_head, inside = tiles.rows_of(batch, query, group, problem, ROWS)
            q_tile = tiles.load_rows(q, row, inside, problem.D, problem.WIDTH)
            limits = tl.load(limit + batch * problem.S + query, mask=inside, other=0)
            of_row = tl.load(lse + row_of_head, mask=inside, other=float("inf"))[:, None] * tiles.LOG2E
            deltas = tl.load(delta + row_of_head, mask=inside, other=0.0)
            visible = token[None, :] < tl.minimum(limits, until)[:, None]
            p = tiles.weights(tiles.product(q_tile, k_tile), of_row, visible, problem)
            ds = tl.zeros_like(p) - deltas[:, None]
            if do is not None:
                do_tile = tiles.load_rows(do, row, inside, problem.V, problem.V_WIDTH)
                ds += tiles.product(do_tile, v_tile)
                dv_tile = tiles.added(tl.trans(p), do_tile, dv_tile)
            ds = tl.where(visible, p * ds, 0.0)
            dk_tile = tiles.added(tl.trans(ds), q_tile, dk_tile)
        inside = offset < problem.size
        row = item * problem.size + offset
        tiles.store_rows(dk, dk_tile * problem.scale, row, inside, problem.D, problem.WIDTH)
        tiles.store_rows(dv, dv_tile, row, inside, problem.V, problem.V_WIDTH)


@triton.jit
def part_of_program(problem: tl.constexpr, BLOCK_K: tl.constexpr):
    """The work item or slot of a program, and the keys of its block that it computes."""
    parts: tl.constexpr = (problem.size + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0).to(tl.int64)
    return program // parts, (program % parts).to(tl.int32) * BLOCK_K + tl.arange(0, BLOCK_K)


@triton.jit
def sums_kernel(
    parts, first,
    total,
    problem: tl.constexpr, ITEMS: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program, offset = part_of_program(problem, BLOCK_K)
    of_group, slot = program // problem.slots, program % problem.slots
    at = of_group * (problem.slots + 1) + slot
    inside = offset < problem.size
    acc = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    for item in tl.range(tl.load(first + at), tl.load(first + at + 1)):
        acc += tiles.load_rows(parts, (of_group * ITEMS + item) * problem.size + offset, inside, FEATURES, WIDTH)
    tiles.store_rows(total, acc, program * problem.size + offset, inside, FEATURES, WIDTH)
