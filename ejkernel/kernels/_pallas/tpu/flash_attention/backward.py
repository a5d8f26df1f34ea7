"""The backward kernels: with p = exp(s − lse) and ds = p·(v·doᵀ − delta)·slope, tile by tile,

    dv = Σ p·do;   dk = scale·Σ ds·q;   dq = scale·Σ ds·k;   dbias = ds

where delta = Σ do·o − dlse, and dk and dv sum over the heads of a group as well. `_by_keys` holds a block of keys and walks over its queries, `_by_queries` the other way
round. When both are wanted and dq of a group of heads fits into memory beside them, `_by_keys` collects it too, and the
logits are computed once instead of twice: five products a tile instead of seven.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .launch import launch, vmem
from .problem import LOG2_E, Problem, Tile, arrange, merge_heads, per_query, plan, split_heads
from .schedule import Schedule, blocks_at, step_at, visibility, walk
from .tiles import contract, for_kind, gradients_of, load_keys, scale_of


def backward(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    problem = plan(primals, spec, config)
    lse, delta = statistics(outputs, cotangents)
    do = jnp.zeros_like(outputs.o) if cotangents.o is None else cotangents.o
    tile = arrange(primals, problem)._replace(
        do=merge_heads(do, problem.padded_queries),
        lse=per_query(lse, problem, constant_values=jnp.inf),
        delta=per_query(delta, problem),
    )
    seen = visibility(primals, problem)
    gradients = {}
    if {"k", "v"} & set(wrt):
        gradients |= _by_keys(tile, problem, walk(*seen, by="keys"), primals, wrt)
    if {"q", "softmax_scale"} & set(wrt):
        gradients |= _by_queries(tile, problem, walk(*seen, by="queries"), primals, wrt)
    if "bias" in wrt:
        gradients["bias"] = _bias(tile, problem, seen, primals.bias)
    if "sinks" in wrt:
        # d/dsink of −delta-weighted softmax: the sink's weight exp(sink − lse) has no value, only a share of the row.
        weights = jnp.exp2(primals.sinks[:, :, :, None] * LOG2_E - lse[:, :, None])
        gradients["sinks"] = sum_to(-(weights * delta[:, :, None]).sum(-1), primals.sinks)
    return tuple(gradients[name] for name in wrt)


def statistics(outputs: Outputs, cotangents: Outputs) -> tuple[jax.Array, jax.Array]:
    """lse in base two, +inf where nothing is seen, and delta = Σ do·o − dlse; [b,h,s]."""
    lse = jnp.where(outputs.lse == -jnp.inf, jnp.inf, outputs.lse * LOG2_E)
    delta = jnp.zeros_like(lse)
    if cotangents.o is not None:
        delta = jnp.einsum("bshe,bshe->bhs", cotangents.o, outputs.o, preferred_element_type=jnp.float32)
    return lse, delta if cotangents.lse is None else delta - cotangents.lse


def sum_to(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sums over the axes along which `like` was broadcast."""
    axes = tuple(a for a in range(x.ndim) if like.shape[a] < x.shape[a])
    return x.sum(axes, keepdims=True).astype(like.dtype)


# ---- dk, dv ----------------------------------------------------------------------------------------------------------


def _by_keys(tile: Tile, problem: Problem, schedule: Schedule, primals: Operands, wrt) -> dict[str, jax.Array]:
    group, block = problem.group, problem.block_k

    def where(b, g, step, member, table):
        j, i = blocks_at(table, b, step)
        return b, g * group + member, i, j

    wanted = {"k": tile.k if "k" in wrt else None, "v": tile.v if "v" in wrt else None}
    scratch = {name: None if x is None else vmem((block, x.shape[2] // problem.kv_heads)) for name, x in wanted.items()}
    out = launch(
        functools.partial(_keys_kernel, problem=problem, schedule=schedule),
        "flash_attention_backward_keys",
        problem,
        schedule,
        (tile,),
        Tile(**jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)),
        where=where,
        grid=(problem.batch, problem.kv_heads, schedule.steps, group),
        scratch=Tile(**scratch),
        matmuls=(2, 2),
    )
    return {n: split_heads(getattr(out, n), getattr(primals, n).shape) for n, x in wanted.items() if x is not None}


def _keys_kernel(table, tile: Tile, out: Tile, sums: Tile, *, problem: Problem, schedule: Schedule):
    b, g, member = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    step = step_at(table, b, pl.program_id(2))
    scale = scale_of(tile, problem, b, g * problem.group + member)

    @pl.when(step.opens & (member == 0))
    def _():
        for x in jax.tree.leaves(sums):
            x[...] = jnp.zeros_like(x)

    def gather(visible):
        k, v = load_keys(tile, problem, visible)
        p, ds = gradients_of(tile, problem, k, v, scale, visible)
        q, do = tile.q[...], tile.do[...]
        if sums.v is not None:
            sums.v[...] += contract(p.astype(do.dtype), do, (1, 0))
        if sums.k is not None:
            sums.k[...] += scale * contract(ds.astype(q.dtype), q, (1, 0))

    for_kind(step.kind, schedule.kinds, tile, step.major, gather)

    @pl.when(step.closes & (member == problem.group - 1))
    def _():
        for x, total in zip(jax.tree.leaves(out), jax.tree.leaves(sums), strict=True):
            x[...] = total[...].astype(x.dtype)


# ---- dq, dscale ------------------------------------------------------------------------------------------------------


def _by_queries(tile: Tile, problem: Problem, schedule: Schedule, primals: Operands, wrt) -> dict[str, jax.Array]:
    # A gradient of the scale is Σ q·dq / scale, from dq before it is scaled and rounded.
    unscaled = "softmax_scale" in wrt
    features = tile.q.shape[2] // problem.heads
    out = launch(
        functools.partial(_queries_kernel, problem=problem, schedule=schedule, unscaled=unscaled),
        "flash_attention_backward_queries",
        problem,
        schedule,
        (tile,),
        Tile(q=jax.ShapeDtypeStruct(tile.q.shape, jnp.float32 if unscaled else tile.q.dtype)),
        where=lambda b, h, step, table: (b, h, *blocks_at(table, b, step)),
        grid=(problem.batch, problem.heads, schedule.steps),
        scratch=vmem((features, problem.block_q)),
        matmuls=(2, 1),
    )
    dq = split_heads(out.q, primals.q.shape)
    if not unscaled:
        return {"q": dq}
    static, scale = problem.spec.softmax_scale, primals.softmax_scale
    dscale = static * jnp.einsum("bshd,bshd->bh", primals.q.astype(jnp.float32), dq)
    dq = (dq * (static * scale[:, None, :, None])).astype(primals.q.dtype)
    return {"q": dq, "softmax_scale": sum_to(dscale, scale)}


def _queries_kernel(table, tile: Tile, out: Tile, total, *, problem: Problem, schedule: Schedule, unscaled: bool):
    b, h = pl.program_id(0), pl.program_id(1)
    step = step_at(table, b, pl.program_id(2))
    scale = scale_of(tile, problem, b, h)

    @pl.when(step.opens)
    def _():
        total[...] = jnp.zeros_like(total)

    def gather(visible):
        k, v = load_keys(tile, problem, visible)
        _, ds = gradients_of(tile, problem, k, v, scale, visible)
        total[...] += contract(k, ds.astype(k.dtype), (0, 0))

    for_kind(step.kind, schedule.kinds, tile, step.minor, gather)

    @pl.when(step.closes)
    def _():
        out.q[...] = (total[...] if unscaled else scale * total[...]).T.astype(out.q.dtype)


# ---- dbias -----------------------------------------------------------------------------------------------------------


def _bias(tile: Tile, problem: Problem, seen, bias: jax.Array) -> jax.Array:
    """ds, summed inside the kernel over the axes along which the bias was broadcast: these are walked last."""
    batch, heads = (n if n > 1 else 1 for n in bias.shape[:2])
    summed_heads = problem.heads // heads
    one_row, one_column = bias.shape[2] < problem.queries, bias.shape[3] < problem.keys
    schedule = walk(*seen, by="keys" if one_row else "queries", every=True)

    def where(b, h, step, member, table):
        b, h = b + jax.lax.div(member, summed_heads), h + jax.lax.rem(member, summed_heads)
        blocks = blocks_at(table, b, step)
        return b, h, *(blocks[::-1] if one_row else blocks)

    array = tile.key_bias if tile.bias is None else tile.bias
    out = jax.ShapeDtypeStruct(array.shape, bias.dtype)
    out = launch(
        functools.partial(_bias_kernel, problem=problem, schedule=schedule, where=where, sums=(one_column, one_row)),
        "flash_attention_backward_bias",
        problem,
        schedule,
        (tile,),
        Tile(key_bias=out) if tile.bias is None else Tile(bias=out),
        where=where,
        grid=(batch, heads, schedule.steps, problem.batch // batch * summed_heads),
        scratch=vmem((problem.block_k, problem.block_q)),
        matmuls=(1, 1),
    )
    if tile.bias is None:
        return out.key_bias[:, :, :, : bias.shape[3]]
    return out.bias.swapaxes(2, 3)[:, :, : bias.shape[2], : bias.shape[3]]


def _bias_kernel(table, tile: Tile, out: Tile, total, *, problem: Problem, schedule: Schedule, where, sums):
    one_column, one_row = sums
    position = tuple(pl.program_id(axis) for axis in range(4))
    b, h, _, j = where(*position, table)
    step, member, members = step_at(table, b, position[2]), position[3], pl.num_programs(3)
    opens, closes = step.opens | (not one_row and not one_column), step.closes | (not one_row and not one_column)
    if one_row and one_column:
        opens, closes = position[2] == 0, position[2] == pl.num_programs(2) - 1

    @pl.when(opens & (member == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    def gather(visible):
        k, v = load_keys(tile, problem, visible)
        total[...] += gradients_of(tile, problem, k, v, scale_of(tile, problem, b, h), visible)[1]

    for_kind(step.kind, schedule.kinds, tile, j, gather)

    @pl.when(closes & (member == members - 1))
    def _():
        ds = total[...]
        if one_column:
            ds = ds.sum(0, keepdims=True)
        if one_row:
            ds = ds.sum(1, keepdims=True)
        if out.key_bias is not None:
            out.key_bias[...] = ds.T.astype(out.key_bias.dtype)
        else:
            out.bias[...] = ds.astype(out.bias.dtype)
