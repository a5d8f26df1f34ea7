"""The backward kernels: dk and dv by blocks of keys, dq by blocks of queries, dbias by tiles of its own shape.

With the weights p = exp(s − lse) computed again, p̃ what dropout leaves of them, and

    dp = do·vᵀ ∘ p̃/p,    delta = Σ_e do·o − dlse,    ds = p ∘ (dp − delta) ∘ (1 − (s/softcap)²)

    dv = p̃ᵀ·do,    dq = scale · ds·k,    dk = scale · dsᵀ·q,    dbias = ds,    dsink = −exp(sink − lse)·delta

No two programs add to one number: every gradient is the same in every run, and heads that share a key/value head are
summed within the program of its keys. Of the sizes in a config, block_k is that of the block which a program holds
(keys for dk and dv, queries for dq) and block_q that of the blocks which stream by.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import tiles
from .problem import Problem, problem_of, seen_lse, sum_to_shape


def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple:
    """The cotangents of the operands that `wrt` names, in that order."""
    problem = problem_of(primals, spec)
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    delta = (do.astype(jnp.float32) * outputs.o.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    if cotangents.lse is not None:
        delta -= cotangents.lse
    lse = seen_lse(outputs.lse)
    saved = (do, lse, delta)

    gradients = {}
    if "k" in wrt or "v" in wrt:
        gradients |= _keys_and_values(primals, saved, wrt, problem, config)
    if "q" in wrt or "softmax_scale" in wrt:
        gradients |= _queries(primals, saved, wrt, problem, config)
    if "bias" in wrt:
        gradients["bias"] = _bias(primals, saved, problem)
    if "sinks" in wrt:
        weights = jnp.exp(primals.sinks[:, :, None, :] - lse[..., None])
        gradients["sinks"] = sum_to_shape(-(weights * delta[..., None]).sum(2), primals.sinks.shape)
    return tuple(gradients[name].astype(getattr(primals, name).dtype) for name in wrt)


def _keys_and_values(primals: Operands, saved, wrt, problem: Problem, config: KernelConfig) -> dict:
    wanted = [name for name in ("k", "v") if name in wrt]
    blocks = problem.blocks(config.block_k, of_keys=True)
    gradients = _launch.launch(
        dk_dv_kernel,
        *primals,
        *saved,
        out_type={name: jax.ShapeDtypeStruct.like(getattr(primals, name)) for name in wanted},
        grid=blocks * problem.G * problem.B,
        config=config,
        problem=problem,
        EDGES=problem.edges(config.block_q, over_keys=False),
        CHECKED=problem.checked(config.block_q, over_keys=False),
        BLOCKS=blocks,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        **{f"d{name}": None for name in ("k", "v") if name not in wrt},
    )
    return gradients


def _queries(primals: Operands, saved, wrt, problem: Problem, config: KernelConfig) -> dict:
    """dq; and of a scale that is an operand Σ_id q·(ds·k), for which the kernel leaves the scale out of dq."""
    scaled = "softmax_scale" not in wrt
    blocks = problem.blocks(config.block_k)
    dq = _launch.launch(
        dq_kernel,
        *primals,
        *saved,
        out_type=jax.ShapeDtypeStruct(primals.q.shape, primals.q.dtype if scaled else jnp.float32),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        EDGES=problem.edges(config.block_q, over_keys=True),
        CHECKED=problem.checked(config.block_q, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=config.block_k,
        BLOCK_K=config.block_q,
        SCALED=scaled,
    )
    if scaled:
        return {"q": dq}
    scale = primals.softmax_scale
    dscale = problem.scale * (primals.q.astype(jnp.float32) * dq).sum((1, 3))
    return {"q": (problem.scale * scale)[:, None, :, None] * dq, "softmax_scale": sum_to_shape(dscale, scale.shape)}


def _bias(primals: Operands, saved, problem: Problem):
    """dbias: programs lie side by side along the axes that bias varies on, and loop along those it is broadcast on."""
    sizes = (problem.B, problem.H, triton.cdiv(problem.S, BIAS_TILE.block_q), triton.cdiv(problem.K, BIAS_TILE.block_k))
    shape = primals.bias.shape
    programs = tuple(size if n > 1 else 1 for n, size in zip(shape, sizes, strict=True))
    loops = tuple(1 if n > 1 else size for n, size in zip(shape, sizes, strict=True))
    return _launch.launch(
        dbias_kernel,
        *primals,
        *saved,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=math.prod(programs),
        config=BIAS_TILE,
        problem=problem,
        PROGRAMS=programs,
        LOOPS=loops,
        BLOCK_Q=BIAS_TILE.block_q,
        BLOCK_K=BIAS_TILE.block_k,
    )


@triton.jit
def dk_dv_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    do, lse, delta,
    dk, dv,
    problem: tl.constexpr, EDGES: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, kv_head, batch = tiles.place(BLOCKS, problem.G)
    first, sequence, q_start, q_len, k_start, k_len = tiles.sequence_of(
        block, batch, cu_q, cu_k, problem, BLOCK_K, OF_KEYS=True
    )
    masks = (mask, q_segment_ids, kv_segment_ids)
    k = tiles.at(k, batch, k_start, problem.K, kv_head, problem.G, problem.D)
    v = tiles.at(v, batch, k_start, problem.K, kv_head, problem.G, problem.V)
    k_tile = tiles.load_tile(k, first, 0, k_len, problem.G * problem.D, BLOCK_K, problem.D, problem.D_PAD, True)
    v_tile = tiles.load_tile(v, first, 0, k_len, problem.G * problem.V, BLOCK_K, problem.V, problem.V_PAD, True)
    dk_tile = tl.full([BLOCK_K, problem.D_PAD], 0.0, tl.float32)
    dv_tile = tl.full([BLOCK_K, problem.V_PAD], 0.0, tl.float32)

    j = first + tl.arange(0, BLOCK_K)[:, None]
    for member in range(problem.group):
        head = kv_head * problem.group + member
        frame = (batch, head, sequence, q_start, q_len, k_start, k_len)
        q_head = tiles.at(q, batch, q_start, problem.S, head, problem.H, problem.D)
        do_head = tiles.at(do, batch, q_start, problem.S, head, problem.H, problem.V)
        lse_head = tiles.at(lse, batch, head, problem.H, q_start, problem.S, 1)
        delta_head = tiles.at(delta, batch, head, problem.H, q_start, problem.S, 1)
        scale = tiles.total_scale(softmax_scale, frame, problem)
        low, high = tiles.band(frame, problem)
        begin, end, first_full, last_full = tiles.schedule(
            first, -high, -low, q_len, problem.right is not None, problem.left is not None, BLOCK_K, BLOCK_Q
        )
        if begin < end:  # see tiles.py on loops
            for start in tl.range(begin, end, BLOCK_Q):
                i = start + tl.arange(0, BLOCK_Q)[None, :]
                q_tile = tiles.load_tile(
                    q_head, start, 0, q_len, problem.H * problem.D, BLOCK_Q, problem.D, problem.D_PAD, CHECKED
                )
                do_tile = tiles.load_tile(
                    do_head, start, 0, q_len, problem.H * problem.V, BLOCK_Q, problem.V, problem.V_PAD, CHECKED
                )
                lse_row = tiles.load_rows(lse_head, start, q_len, BLOCK_Q, CHECKED, float("inf"))[None, :]
                delta_row = tiles.load_rows(delta_head, start, q_len, BLOCK_Q, CHECKED, 0.0)[None, :]
                if problem.masked_everywhere:
                    ok = tiles.visible(i, j, masks, frame, problem)
                    q_tile = tiles.drop_unseen(q_tile, ok, 0)
                    do_tile = tiles.drop_unseen(do_tile, ok, 0)
                product = tl.dot(k_tile, q_tile.T, input_precision="ieee")
                dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")
                p, ds = tiles.weights_and_logit_cotangents(
                    product, dp, lse_row, delta_row, scale, bias, dropout, i, j, frame, problem
                )
                if problem.masked_everywhere or (EDGES and (start < first_full or start > last_full)):
                    ok = tiles.visible(i, j, masks, frame, problem)
                    p, ds = tl.where(ok, p, 0.0), tl.where(ok, ds, 0.0)
                if softmax_scale is not None:
                    ds *= scale
                if dv is not None:
                    dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision="ieee")
                if dk is not None:
                    dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")

    if dk is not None:
        if softmax_scale is None:
            dk_tile *= problem.scale
        dk = tiles.at(dk, batch, k_start, problem.K, kv_head, problem.G, problem.D)
        tiles.store_tile(dk, dk_tile, first, k_len, problem.G * problem.D, BLOCK_K, problem.D, problem.D_PAD)
    if dv is not None:
        dv = tiles.at(dv, batch, k_start, problem.K, kv_head, problem.G, problem.V)
        tiles.store_tile(dv, dv_tile, first, k_len, problem.G * problem.V, BLOCK_K, problem.V, problem.V_PAD)


@triton.jit
def dq_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    do, lse, delta,
    dq,
    problem: tl.constexpr, EDGES: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    block, head, batch = tiles.place(BLOCKS, problem.H)
    if problem.right is not None:
        block = BLOCKS - 1 - block  # the blocks that see most keys first
    first, sequence, q_start, q_len, k_start, k_len = tiles.sequence_of(
        block, batch, cu_q, cu_k, problem, BLOCK_Q, OF_KEYS=False
    )
    frame = (batch, head, sequence, q_start, q_len, k_start, k_len)
    masks = (mask, q_segment_ids, kv_segment_ids)
    kv_head = head // problem.group
    q = tiles.at(q, batch, q_start, problem.S, head, problem.H, problem.D)
    k = tiles.at(k, batch, k_start, problem.K, kv_head, problem.G, problem.D)
    v = tiles.at(v, batch, k_start, problem.K, kv_head, problem.G, problem.V)
    do = tiles.at(do, batch, q_start, problem.S, head, problem.H, problem.V)
    dq = tiles.at(dq, batch, q_start, problem.S, head, problem.H, problem.D)
    lse = tiles.at(lse, batch, head, problem.H, q_start, problem.S, 1)
    delta = tiles.at(delta, batch, head, problem.H, q_start, problem.S, 1)

    scale = tiles.total_scale(softmax_scale, frame, problem)
    low, high = tiles.band(frame, problem)
    begin, end, first_full, last_full = tiles.schedule(
        first, low, high, k_len, problem.left is not None, problem.right is not None, BLOCK_Q, BLOCK_K
    )
    seen_begin, seen_end = tiles.seen_keys(frame, problem)
    i = first + tl.arange(0, BLOCK_Q)[:, None]
    q_tile = tiles.load_tile(q, first, 0, q_len, problem.H * problem.D, BLOCK_Q, problem.D, problem.D_PAD, True)
    do_tile = tiles.load_tile(do, first, 0, q_len, problem.H * problem.V, BLOCK_Q, problem.V, problem.V_PAD, True)
    lse_rows = tiles.load_rows(lse, first, q_len, BLOCK_Q, True, float("inf"))[:, None]
    delta_rows = tiles.load_rows(delta, first, q_len, BLOCK_Q, True, 0.0)[:, None]
    dq_tile = tl.full([BLOCK_Q, problem.D_PAD], 0.0, tl.float32)
    if begin < end:  # see tiles.py on loops
        for start in tl.range(begin, end, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_tile(
                k, start, seen_begin, seen_end, problem.G * problem.D, BLOCK_K, problem.D, problem.D_PAD, CHECKED
            )
            v_tile = tiles.load_tile(
                v, start, seen_begin, seen_end, problem.G * problem.V, BLOCK_K, problem.V, problem.V_PAD, CHECKED
            )
            if problem.masked_everywhere:
                k_tile = tiles.drop_unseen(k_tile, tiles.visible(i, j, masks, frame, problem), 0)
            product = tl.dot(q_tile, k_tile.T, input_precision="ieee")
            dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
            _p, ds = tiles.weights_and_logit_cotangents(
                product, dp, lse_rows, delta_rows, scale, bias, dropout, i, j, frame, problem
            )
            if problem.masked_everywhere or (EDGES and (start < first_full or start > last_full)):
                ds = tl.where(tiles.visible(i, j, masks, frame, problem), ds, 0.0)
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")

    if SCALED:
        dq_tile *= scale
    tiles.store_tile(dq, dq_tile, first, q_len, problem.H * problem.D, BLOCK_Q, problem.D, problem.D_PAD)


# The tile of bias that a program of dbias_kernel sums, whatever it was broadcast over.
BIAS_TILE = KernelConfig(block_q=64, block_k=64, num_warps=4, num_stages=1)


@triton.jit
def dbias_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    do, lse, delta,
    dbias,
    problem: tl.constexpr, PROGRAMS: tl.constexpr, LOOPS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of dbias: the sum of ds over the batches, heads, rows and columns that it was broadcast to.

    PROGRAMS and LOOPS are along (batches, heads, blocks of rows, blocks of columns); of each pair one is 1.
    """
    tile, bias_head, bias_batch = tiles.place(PROGRAMS[2] * PROGRAMS[3], PROGRAMS[1])
    row_block, column_block = tile // PROGRAMS[3], tile % PROGRAMS[3]
    _, sequence, q_start, q_len, k_start, k_len = tiles.sequence_of(
        row_block, bias_batch, cu_q, cu_k, problem, BLOCK_Q, OF_KEYS=False
    )
    low, high = tiles.band((bias_batch, bias_head, sequence, q_start, q_len, k_start, k_len), problem)
    masks = (mask, q_segment_ids, kv_segment_ids)
    total = tl.full([BLOCK_Q, BLOCK_K], 0.0, tl.float32)
    for shared in range(LOOPS[0] * LOOPS[1]):
        batch, head = bias_batch + shared // LOOPS[1], bias_head + shared % LOOPS[1]
        kv_head = head // problem.group
        frame = (batch, head, sequence, q_start, q_len, k_start, k_len)
        scale = tiles.total_scale(softmax_scale, frame, problem)
        for row in range(LOOPS[2]):
            i0 = (row_block + row) * BLOCK_Q
            i = i0 + tl.arange(0, BLOCK_Q)[:, None]
            q_head = tiles.at(q, batch, 0, problem.S, head, problem.H, problem.D)
            do_head = tiles.at(do, batch, 0, problem.S, head, problem.H, problem.V)
            lse_head = tiles.at(lse, batch, head, problem.H, 0, problem.S, 1)
            delta_head = tiles.at(delta, batch, head, problem.H, 0, problem.S, 1)
            q_tile = tiles.load_tile(
                q_head, i0, 0, problem.S, problem.H * problem.D, BLOCK_Q, problem.D, problem.D_PAD, True
            )
            do_tile = tiles.load_tile(
                do_head, i0, 0, problem.S, problem.H * problem.V, BLOCK_Q, problem.V, problem.V_PAD, True
            )
            lse_rows = tiles.load_rows(lse_head, i0, problem.S, BLOCK_Q, True, float("inf"))[:, None]
            delta_rows = tiles.load_rows(delta_head, i0, problem.S, BLOCK_Q, True, 0.0)[:, None]
            for column in range(LOOPS[3]):
                j0 = (column_block + column) * BLOCK_K
                seen = (problem.right is None or j0 <= i0 + BLOCK_Q - 1 + high) and (
                    problem.left is None or j0 + BLOCK_K - 1 >= i0 + low
                )
                if seen:
                    j = j0 + tl.arange(0, BLOCK_K)[None, :]
                    k_head = tiles.at(k, batch, 0, problem.K, kv_head, problem.G, problem.D)
                    v_head = tiles.at(v, batch, 0, problem.K, kv_head, problem.G, problem.V)
                    k_tile = tiles.load_tile(
                        k_head, j0, 0, problem.K, problem.G * problem.D, BLOCK_K, problem.D, problem.D_PAD, True
                    )
                    v_tile = tiles.load_tile(
                        v_head, j0, 0, problem.K, problem.G * problem.V, BLOCK_K, problem.V, problem.V_PAD, True
                    )
                    product = tl.dot(q_tile, k_tile.T, input_precision="ieee")
                    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
                    _p, ds = tiles.weights_and_logit_cotangents(
                        product, dp, lse_rows, delta_rows, scale, bias, dropout, i, j, frame, problem
                    )
                    total += tl.where(tiles.visible(i, j, masks, frame, problem), ds, 0.0)

    strides: tl.constexpr = problem.bias_strides
    i = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
    j = column_block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (i < problem.S) & (j < problem.K)
    if strides.s == 0:
        total = tl.sum(total, 0, keep_dims=True)
        inside, i = j < problem.K, tl.full([1, 1], 0, tl.int32)
    if strides.t == 0:
        total = tl.sum(total, 1, keep_dims=True)
        inside, j = i < problem.S, tl.full([1, 1], 0, tl.int32)
    frame = (bias_batch, bias_head, sequence, q_start, q_len, k_start, k_len)
    tl.store(tiles.pairs_at(dbias, i, j, frame, strides), total, mask=inside)
