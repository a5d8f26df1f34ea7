"""The backward kernels of flash_attention, from the recomputed weights p = exp(s − lse) of each tile:

    ds = p·(v·doᵀ − delta)·slope with delta = Σ do·o − dlse

    dv = Σ p·do;   dk = scale·Σ ds·q;   dq = scale·Σ ds·k;   dbias = ds

dk and dv also sum over the heads of a group. The kernel in key_gradients.py has a stationary block of keys and loops
over queries, the one below has a stationary block of queries. If gradients of both are asked for, and dq of a group of
heads fits into vector memory, the former accumulates dq too: the logits are computed once instead of twice, which takes
five products per tile instead of seven.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .bias_gradient import bias_gradient
from .key_gradients import gradients_by_keys
from .launch import launch, vmem
from .problem import (
    LANES,
    Problem,
    Tile,
    arrange,
    fully_masked_queries,
    lse_in_units,
    merge_heads,
    per_query,
    plan,
    round_up,
    sink_of,
    split_heads,
)
from .rows import exact_rows
from .schedule import MaskInfo, Schedule, blocks_at, mask_info_of, schedule_of, step_at
from .tiles import (
    chunks_of,
    contract,
    for_tile_mask,
    gradient_products,
    gradients_of,
    mask_of,
    pipeline,
    scale_of,
    zero_masked_keys,
)

# The most bytes of dq that are kept in vector memory beside the tiles.
DQ_BYTES = 36 * 2**20


def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    problem = plan(primals, spec, config)
    masked = None
    if problem.hidden or primals.bias is not None:  # a bias of −∞ may mask pairs
        masked = fully_masked_queries(primals, outputs.lse, problem)
    split = config.algorithm == "split"
    return backward(primals, outputs, cotangents, wrt, problem, mask_info_of(primals, problem), masked, split)


def backward(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    wrt: tuple[str, ...],
    problem: Problem,
    mask_info: MaskInfo,
    masked: jax.Array | None,
    split: bool,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands named in `wrt`, from the tiles that the mask info does not exclude.

    Queries that are `masked` [b,h?,s] may hold NaN; None if there are none. With `split`, dq has its own kernel even if
    it would fit beside dk and dv.
    """
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    if masked is not None:
        masked = masked.swapaxes(1, 2)[:, :, :, None]
        primals, do = primals._replace(q=jnp.where(masked, 0, primals.q)), jnp.where(masked, 0, do)
    lse, delta, correction = lse_in_units(outputs.lse, problem), _mean(do, outputs.o), None
    tile = arrange(primals, problem)._replace(
        do=merge_heads(do, problem.padded_queries),
        lse=per_query(lse, problem, constant_values=jnp.inf),
        delta=per_query(delta, problem),
    )
    if problem.natural and not problem.spec.split:
        sink = sink_of(primals.sinks, problem)
        correction, delta = exact_rows(tile._replace(sink=sink), problem, schedule_of(mask_info, by="queries"))
        tile = tile._replace(correction=per_query(correction, problem))
    if cotangents.lse is not None:
        delta -= jnp.where(outputs.lse == -jnp.inf, 0, cotangents.lse)
    tile = tile._replace(delta=per_query(delta, problem))
    wants_keys, wants_queries = ({"k", "v"} & set(wrt), {"q", "softmax_scale"} & set(wrt))
    together = wants_keys and wants_queries and not split and dq_bytes(primals, problem) <= DQ_BYTES
    gradients, dq = {}, None
    if wants_keys:
        by_keys = schedule_of(mask_info, by="keys", group=problem.group)
        gradients, dq = gradients_by_keys(tile, problem, by_keys, primals, wrt, with_dq=together)
    if wants_queries and not together:
        dq = _by_queries(tile, problem, schedule_of(mask_info, by="queries"))
    if wants_queries:
        gradients |= _scaled(split_heads(dq, primals.q.shape), problem, primals)
    if "bias" in wrt:
        gradients["bias"] = bias_gradient(tile, problem, mask_info, primals.bias)
    if "sinks" in wrt:
        # dsink = −Σ exp(sink − lse)·delta: the ds of a sink, whose dp is 0 as it has no value.
        sinks = primals.sinks[:, :, :, None] * problem.unit
        weights = problem.exp_of_lse(sinks - lse[:, :, None], corrected=correction is not None)
        delta = delta if correction is None else delta * correction
        gradients["sinks"] = sum_to(-(weights * delta[:, :, None]).sum(-1), primals.sinks)
    return tuple(gradients[name] for name in wrt)


def _scaled(dq: jax.Array, problem: Problem, primals: Operands) -> dict[str, jax.Array]:
    """The gradients of q, scale·Σ ds·k, and of the scale, Σ q·Σ ds·k, from Σ ds·k."""
    static, scale = problem.spec.softmax_scale, primals.softmax_scale
    if scale is None:
        return {"q": (dq * static).astype(primals.q.dtype)}
    dscale = static * jnp.einsum("bshd,bshd->bh", primals.q.astype(jnp.float32), dq, precision="highest")
    dq = dq * (static * scale[:, None, :, None])
    return {"q": dq.astype(primals.q.dtype), "softmax_scale": sum_to(dscale, scale)}


def _mean(do: jax.Array, o: jax.Array) -> jax.Array:
    """Σ_e do·o, [b,h,s] float32."""
    return jnp.einsum("bshe,bshe->bhs", do, o, precision="highest", preferred_element_type=jnp.float32)


def sum_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sums over the axes along which `like` was broadcast."""
    axes = tuple(a for a in range(x.ndim) if like.shape[a] < x.shape[a])
    return x.sum(axes, keepdims=True).astype(like.dtype)


def dq_bytes(primals: Operands, problem: Problem) -> int:
    """Bytes of dq for the heads of a group in float32, without a second buffer: its copies are rare and short."""
    return 4 * problem.group * problem.padded_queries * round_up(primals.q.shape[3], LANES)


# ---- dq, dscale ------------------------------------------------------------------------------------------------------


def _by_queries(tile: Tile, problem: Problem, schedule: Schedule) -> jax.Array:
    features = tile.q.shape[2] // problem.heads
    out = launch(
        functools.partial(_queries_kernel, problem=problem, schedule=schedule),
        "flash_attention_backward_queries",
        problem,
        schedule,
        (tile,),
        Tile(q=jax.ShapeDtypeStruct(tile.q.shape, jnp.float32)),
        where=lambda b, h, step, table: (b, h, *blocks_at(schedule, table, b, h, step)),
        grid=(problem.batch, problem.heads, schedule.steps),
        scratch=vmem((features, problem.block_q)),
        matmuls=(2, 1),
    )
    return out.q


def _queries_kernel(table, tile: Tile, out: Tile, total, *, problem: Problem, schedule: Schedule):
    b, h = pl.program_id(0), pl.program_id(1)
    step = step_at(schedule, table, b, h, pl.program_id(2))
    scale = scale_of(tile, problem, b, h)

    @pl.when(step.is_first)
    def _():
        total[...] = jnp.zeros_like(total)

    def accumulate(tile_mask):
        def use(rows, products):
            visible = mask_of(tile_mask, tile, step.minor, rows)
            _, ds = gradients_of(tile, problem, rows, products, scale, visible)
            k = zero_masked_keys(tile.k[rows], problem, visible)
            total[...] += contract(k, ds.astype(k.dtype), (0, 0))

        pipeline(chunks_of(tile_mask, problem), problem.ahead, functools.partial(gradient_products, tile), use)

    for_tile_mask(step, schedule, accumulate)

    @pl.when(step.is_last)
    def _():
        out.q[...] = total[...].T
