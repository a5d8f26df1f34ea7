"""The kernel of attention over quantised pages: for each work item, an online softmax over its blocks of keys.

With the rotated query, a logit is a sum of two products, each with factors of its columns:

    s_j = ‖k_j‖ · ⟨Π·q, c_j⟩ + ‖k_j‖·‖r_j‖ · ⟨√(π/2e)·S·Π·q, s_j⟩,   Π·o = Σ (p_j · ‖v_j‖) · c_j

Bytes are made to matrices of bfloat16 with a slot in each lane. Queries and weights are split into parts of bfloat16,
each of which has its own rows.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._paged import LANES
from .._paged.kernel import BUFFERS, over_blocks
from .._paged.problem import Outputs, Problem, State
from .._paged.softmax import in_parts, visible_to_rows, weights_of, write
from .._paged.work import count_of, item_at
from ..flash_attention.launch import VMEM_BYTES
from ..flash_attention.tiles import contract
from . import PARTS
from .codes import codes, signs


class Inputs(NamedTuple):
    """The arrays of a call; None where absent.

    Attributes:
        q: the rotated queries [tiles, g, 3·m, ·] bfloat16, part below part: 3·d features for codes, and e for signs.
        pools: indices, signs and norms of keys, indices and norms of values, as `pool.stored` gives them.
        tables: of the codebooks of keys and of values, [b?, ·, ·, 8, 128] int32, as `codes.table_of` gives them.
        sinks: [b?, g, m, 128] float32: the logsumexp of the sinks of each row, the same in all lanes.
        v_scale: None.
    """

    q: tuple[Any, Any]
    pools: tuple[Any, ...]
    tables: tuple[Any, Any]
    sinks: Any = None
    v_scale: None = None


def attend(items: jax.Array, table: jax.Array, x: Inputs, features: int, problem: Problem, name: str) -> Outputs:
    """The sums Π·o [tiles, g, m, ·] of the parts of `features` features and lse [tiles, g, m].

    They are undefined for tokens that belong to no work item.
    """
    (tiles, heads, rows, _), (_, words, *_) = x.q[0].shape, x.tables[1].shape
    rows, features = rows // PARTS, (1 + words) * features
    of_tile = lambda i, items, *_: (item_at(items, i).tile, 0, 0, 0)
    of_lse = lambda i, items, *_: (item_at(items, i).tile, 0, 0)
    batch_of = lambda i, items, a: item_at(items, i).batch if a.shape[0] > 1 else 0
    of_batch = lambda a: pl.BlockSpec(
        (None, *a.shape[1:]), lambda i, items, *_: (batch_of(i, items, a), *[0] * (a.ndim - 1))
    )
    vmem = partial(pltpu.VMEM, dtype=jnp.float32)
    specs = Inputs(
        tuple(pl.BlockSpec((None, *q.shape[1:]), of_tile) for q in x.q),
        tuple(pl.BlockSpec(memory_space=pl.ANY) for _ in x.pools),
        tuple(map(of_batch, x.tables)),
        None if x.sinks is None else of_batch(x.sinks),
    )
    out = Outputs(pl.BlockSpec((None, heads, rows, features), of_tile), pl.BlockSpec((None, heads, rows), of_lse))
    state = State(*(vmem((heads, rows, n)) for n in (LANES, LANES, features)), (vmem((heads, 1, problem.keys)),))
    copied = (
        tuple(pool.buffers(BUFFERS) for pool in problem.copied),
        tuple(pltpu.SemaphoreType.DMA((BUFFERS,)) for _ in problem.copied),
    )
    return pl.pallas_call(
        partial(_kernel, problem=problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count_of(items),),
            in_specs=[specs],
            out_specs=[out],
            scratch_shapes=[state, *copied],
        ),
        out_shape=[
            Outputs(
                jax.ShapeDtypeStruct((tiles, heads, rows, features), jnp.float32),
                jax.ShapeDtypeStruct((tiles, heads, rows), jnp.float32),
            )
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        name=name,
    )(items, table, x)[0]


def _kernel(items, table, x: Inputs, out: Outputs, state: State, buffers, semaphores, *, problem: Problem):
    copying = x.pools, buffers, semaphores, table, problem
    over_blocks(items, copying, state, lambda *block: _accumulate(x, buffers, state, *block, problem))
    item = item_at(items, pl.program_id(0))

    @pl.when(item.begin < item.end)
    def _():
        write(x, out, state, item, problem)


def _accumulate(x: Inputs, buffers, state: State, item, block, slot, problem: Problem):
    """Updates the online softmax of all heads with a block of keys."""
    heads, rows, _ = state.maximum.shape
    begin = (lax.div(item.first, problem.keys) + block) * problem.keys
    visible = visible_to_rows(None, item, begin, rows, problem)
    (norms,), pieces = state.scales, range(problem.caches[0].pieces)
    of_values = jnp.concatenate([buffers[-1][slot, n].astype(jnp.float32) for n in pieces], axis=1)
    for g in range(heads):
        norms[g] = of_values[g : g + 1]

    def of_head(g, carry):
        blocks = [[buffer[slot, n, g] for n in pieces] for buffer in buffers[:-1]]
        _accumulate_head(x, state, g, blocks, norms[g], visible, problem)
        return carry

    lax.fori_loop(0, heads, of_head, 0)


def _accumulate_head(x: Inputs, state: State, g, blocks: list, value_norms, visible, problem: Problem):
    """Updates the online softmax of head g with the pieces of each pool; norms may be NaN where no row sees a slot."""
    rows = state.maximum.shape[1]
    key_indices, key_signs, key_norms, value_indices = blocks
    of_keys, of_values = (table[...] for table in x.tables)
    of_codes, of_signs = (q[g] for q in x.q)
    s = []
    for packed, bits, of_key in zip(key_indices, key_signs, key_norms, strict=True):
        of_key = of_key.astype(jnp.float32)
        along = _summed(contract(of_codes, codes(packed, of_keys), (1, 0)), rows)
        residual = _summed(contract(of_signs, signs(bits), (1, 0)), rows)
        s.append(of_key[:1] * (along + of_key[1:] * residual))
    weights, rescale = weights_of(jnp.concatenate(s, axis=1), visible, state, g, problem)
    weights = jnp.where(visible, weights * value_norms, 0)
    weights = jnp.concatenate(in_parts(weights, 1 + len(of_values))).astype(jnp.bfloat16)
    products = [
        contract(weights[:, n * LANES : (n + 1) * LANES], codes(packed, of_values), (1, 1))
        for n, packed in enumerate(value_indices)
    ]
    state.weighted[g] = state.weighted[g] * rescale + _summed(sum(products[1:], products[0]), rows)


def _summed(product: jax.Array, rows: int) -> jax.Array:
    """The sum [rows,·] of the products of the parts, which are below one another."""
    return sum((product[n : n + rows] for n in range(rows, product.shape[0], rows)), product[:rows])
