"""The computations of one tile: `block_k` keys by `block_q` queries, **keys in sublanes and queries in lanes**.

With sᵀ = k·qᵀ the statistics of a query (maximum, denominator, lse, delta) are lane vectors: they are reduced over
sublanes by plain vector arithmetic and broadcast back at no cost. The other orientation would need a shuffle across
lanes for every row.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from .problem import Problem, Tile
from .schedule import Schedule, Step, TileMask

# The value of a masked logit: its exponential is 0 beside that of any real one, and unlike −inf it can be subtracted.
MASKED = -0.7 * float(np.finfo(np.float32).max)


def contract(x, y, axes: tuple[int, int]) -> jax.Array:
    """The matrix product over one axis of each, summed in float32; float32 operands are multiplied in full."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def column(ref, rows: slice) -> jax.Array:
    """[1,n] in lanes → [rows,1] in sublanes; an axis of size 1 stays."""
    return (ref[:, rows] if ref.shape[1] > 1 else ref[...]).T


def scalar(ref, b, h) -> jax.Array:
    """The element of batch b and head h of [b?,h?]."""
    return ref[b if ref.shape[0] > 1 else 0, h if ref.shape[1] > 1 else 0]


def scale_of(tile: Tile, problem: Problem, b, h):
    """The factor of q·kᵀ: the static scale, times the operand if there is one."""
    static = problem.spec.softmax_scale
    return static if tile.scale is None else static * scalar(tile.scale, b, h)


def pipeline(chunks: Sequence[slice], ahead: int, products: Callable, use: Callable) -> None:
    """Runs `use(chunk, products(chunk))` for the chunks of a tile, as a software pipeline.

    The products of a chunk are issued `ahead` chunks before their use. The compiler interleaves neighbouring code, and
    so lets the matrix unit compute the next logits while the vector unit takes the exponentials of these.
    """
    ready = [products(chunk) for chunk in chunks[:ahead]]
    for chunk, following in itertools.zip_longest(chunks, chunks[ahead:]):
        if following is not None:
            ready.append(products(following))
        use(chunk, ready.pop(0))


def for_tile_mask(step: Step, schedule: Schedule, compute: Callable[[TileMask], None]) -> None:
    """Runs `compute(tile_mask)` for the tile mask of the step, unless the tile is fully masked."""
    for number in schedule.numbers:
        tile_mask = schedule.tile_masks[number]
        if tile_mask.last > tile_mask.first:
            pl.when(len(schedule.numbers) == 1 or step.mask_number == number)(functools.partial(compute, tile_mask))


def chunks_of(tile_mask: TileMask, problem: Problem) -> list[slice]:
    """The chunks of keys of a tile that are computed, as slices."""
    return [slice(n * problem.chunk, (n + 1) * problem.chunk) for n in range(tile_mask.first, tile_mask.last)]


def mask_of(tile_mask: TileMask, tile: Tile, j, rows: slice) -> jax.Array | None:
    """`visible` for a chunk, or None if the tile mask needs no mask."""
    return visible(tile, j, rows) if tile_mask.needs_mask else None


def visible(tile: Tile, j, rows: slice) -> jax.Array:
    """Which queries see which keys of a chunk, bool [rows, block_q], by interval, mask and segments."""
    (block_k, _), (block_q, _) = tile.k.shape, tile.q.shape
    shape = (rows.stop - rows.start, block_q)
    key = j * block_k + rows.start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    conditions = [
        key >= tile.first[...] if tile.first is not None else None,
        key <= tile.last[...] if tile.last is not None else None,
        of_rows(tile.mask, rows).astype(jnp.int32) != 0 if tile.mask is not None else None,
        column(tile.key_mask, rows) != 0 if tile.key_mask is not None else None,
        column(tile.k_segments, rows) == tile.q_segments[...] if tile.q_segments is not None else None,
    ]
    conditions = [condition for condition in conditions if condition is not None]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, conditions), shape)


def of_rows(ref, rows: slice) -> jax.Array:
    return ref[rows] if ref.shape[0] > 1 else ref[...]


def zero_masked_keys(keys: jax.Array, problem: Problem, visible) -> jax.Array:
    """k or v of a chunk, with zeros for keys that no query of the tile sees if such keys may hold NaN."""
    if visible is None or not problem.hidden:
        return keys
    is_visible = jnp.max(visible.astype(jnp.float32), axis=1, keepdims=True) > 0
    return jnp.where(is_visible, keys.astype(jnp.float32), 0).astype(keys.dtype)


def logits_of(tile: Tile, problem: Problem, rows: slice, qk: jax.Array, scale, visible):
    """The logits in units of the problem, from q·kᵀ, and their derivative by the uncapped ones (None for 1):

    x = scale·q·kᵀ + bias;  without softcap: x;  with: softcap·tanh(x / softcap), slope 1 − tanh²
    """
    softcap = problem.spec.softcap
    unit = problem.unit if softcap is None else 1 / softcap
    x = qk * (scale * unit)
    if tile.bias is not None:
        x = x + of_rows(tile.bias, rows).astype(jnp.float32) * unit
    if tile.key_bias is not None:
        x = x + column(tile.key_bias, rows).astype(jnp.float32) * unit
    slope = None
    if softcap is not None:
        t = tanh(x, softcap)
        x, slope = t * (softcap * problem.unit), 1 - t * t
    return (x if visible is None else jnp.where(visible, x, MASKED)), slope


def tanh(x: jax.Array, softcap: float) -> jax.Array:
    """tanh; with a large softcap, beside which most logits are small, by its series where x is small."""
    if softcap <= 100:
        return jnp.tanh(x)
    z = x * x
    series = x + x * z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835))))
    return jnp.where(z < 0.0625, series, jnp.tanh(x))


def gradients_of(tile: Tile, problem: Problem, rows: slice, products, scale, visible) -> tuple[jax.Array, jax.Array]:
    """The weights p and the gradient ds of the uncapped logits from `gradient_products`:

    p = exp(s − lse);  ds = p·(v·doᵀ − delta)·slope with delta = Σ do·o − dlse
    """
    qk, dp = products
    x, slope = logits_of(tile, problem, rows, qk, scale, visible)
    p = problem.exp_of_lse(x - tile.lse[...], corrected=tile.correction is not None)
    if tile.correction is not None:
        p = p * tile.correction[...]
    ds = p * (dp - tile.delta[...])
    if slope is not None:
        ds = ds * slope
    return p, jnp.where(visible, ds, 0) if visible is not None and problem.hidden else ds


def gradient_products(tile: Tile, rows: slice) -> tuple[jax.Array, jax.Array]:
    """The products k·qᵀ and v·doᵀ of a tile, with which the backward begins."""
    return contract(tile.k[rows], tile.q[...], (1, 1)), contract(tile.v[rows], tile.do[...], (1, 1))
