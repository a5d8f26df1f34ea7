"""The constants of a call, and the layout of its arrays in the kernels.

q [b,s,h,d] is read as [b,s,h·d], the layout in which a projection writes it, one head at a time by its lanes. Nothing
is transposed, and nothing is copied if d is a multiple of 128 lanes and s one of the block. Values per query (lse,
delta, segment ids …) are lane vectors [b,h,1,s]; arrays over pairs have keys before queries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import KernelConfig

from .. import round_up

LANES = 128

# For weights exp(s − lse) that are divided by the sum of their row: the largest exponent, above which sums may
# overflow, and the smallest sum, below which all weights underflow.
LARGEST_EXPONENT, SMALLEST_SUM = 30.0, 2.0**-100
LOG2_E = float(np.log2(np.e))


class Tile(NamedTuple):
    """The arrays that a kernel reads, or their block specs, or within a kernel the refs of one tile; None if absent.

    `?` marks an axis that may have size 1; s and t are padded to whole blocks. Tangents are passed as a second Tile.
    """

    q: Any = None  # [b, s, h·d]
    k: Any = None  # [b, t, g·d]
    v: Any = None  # [b, t, g·e]
    do: Any = None  # [b, s, h·e]
    lse: Any = None  # [b, h, 1, s], in units; +inf for a fully masked query, so that exp(logit − lse) = 0
    delta: Any = None  # [b, h, 1, s]
    correction: Any = None  # [b, h, 1, s], a factor of the weights (see rows.py)
    bias: Any = None  # [b?, h?, t?, s]
    key_bias: Any = None  # [b?, h?, 1, t?]: the same for all queries
    mask: Any = None  # [b?, h?, t?, s] int8
    key_mask: Any = None  # [b?, h?, 1, t?] int32
    first: Any = None  # [b?, 1, 1, s] int32: the first key that a query may see
    last: Any = None  # [b?, 1, 1, s] int32: the last one
    q_segments: Any = None  # [b, 1, 1, s] int32
    k_segments: Any = None  # [b, 1, 1, t] int32
    scale: Any = None  # [b?, h?] float32 scalars
    sink: Any = None  # [b?, h] float32 scalars, in units: the logsumexp of the sinks


@dataclass(frozen=True)
class Problem:
    """The spec and sizes of a call, and the sizes of its blocks.

    A tile is computed by chunks of keys, in a software pipeline that issues products `ahead` chunks before their use.
    """

    spec: FlashAttentionSpec
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    # Features of a value, rounded up to whole sublanes of any dtype.
    values: int
    block_q: int
    block_k: int
    chunk: int
    ahead: int
    # Some keys or queries may be fully masked, or a bias masked, and hold NaN: they must not be multiplied by a weight
    # of 0, as 0·NaN = NaN.
    hidden: bool
    # In float32 logits are exponents of e; in 16 bits they are exponents of 2, which the hardware computes directly, at
    # the cost of one more rounding of each logit, where differences of logits are small.
    natural: bool

    @property
    def unit(self) -> float:
        """The factor from logits to exponents of `exp`."""
        return 1.0 if self.natural else LOG2_E

    @property
    def exp(self) -> Callable[[jax.Array], jax.Array]:
        return jnp.exp if self.natural else jnp.exp2

    def exp_of_lse(self, exponents: jax.Array, corrected: bool) -> jax.Array:
        """`exp` of logits − lse, with exponents limited to 0, or to LARGEST_EXPONENT for `corrected` weights.

        Only rounding makes an exponent positive: near 10⁹ float32 resolves logits in steps of 64. Weights that are
        corrected by their sum keep their ratios, up to an exponent that leaves sums finite.
        """
        return self.exp(jnp.minimum(exponents, LARGEST_EXPONENT if corrected else 0.0))

    @property
    def log(self) -> Callable[[jax.Array], jax.Array]:
        return jnp.log if self.natural else jnp.log2

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def q_blocks(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def k_blocks(self) -> int:
        return -(-self.keys // self.block_k)

    @property
    def padded_queries(self) -> int:
        return self.q_blocks * self.block_q

    @property
    def padded_keys(self) -> int:
        return self.k_blocks * self.block_k


def plan(operands: Operands, spec: FlashAttentionSpec, config: KernelConfig, chunk: int = 2 * LANES) -> Problem:
    """The `Problem` of a call, with chunks of `chunk` keys or a divisor of that; a matrix unit contracts up to 256."""
    batch, queries, heads, _ = operands.q.shape
    _, keys, kv_heads, _ = operands.k.shape
    block_k = balanced(keys, config.block_k)
    visibility = visibility_of(operands, spec)
    arbitrary = any(x is not None for x in (operands.bias, operands.mask, operands.q_segment_ids))
    return Problem(
        spec=spec,
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        values=round_up(operands.v.shape[3], 32),
        block_q=balanced(queries, config.block_q),
        block_k=block_k,
        chunk=math.gcd(block_k, chunk),
        ahead=config.num_stages - 1,
        hidden=arbitrary or visibility.masks_queries or visibility.masks_keys,
        natural=operands.q.dtype == jnp.float32,
    )


def balanced(size: int, limit: int) -> int:
    """The smallest block that covers `size` in as few blocks as `limit` does: 768 for 2176 and a limit of 1024."""
    return round_up(-(-size // -(-size // limit)), LANES)


def pad_axis(x, axis: int, size: int, **mode):
    """x padded to `size` along an axis, with zeros or by a mode of np.pad."""
    if x.shape[axis] == size:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, [(0, size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)], **mode)


def merge_heads(x: jax.Array, rows: int) -> jax.Array:
    """[b,s,h,d] → [b,rows,h·d'], padded with zeros to `rows` and to whole lanes."""
    x = pad_axis(pad_axis(x, 1, rows), 3, round_up(x.shape[3], LANES))
    return x.reshape(*x.shape[:2], -1)


def split_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[b,rows,h·d'] → [b,s,h,d], the inverse of `merge_heads`."""
    b, s, h, d = shape
    return x.reshape(b, x.shape[1], h, -1)[:, :s, :, :d]


def per_query(x: jax.Array, problem: Problem, **mode) -> jax.Array:
    """Brings numbers of queries into one row of lanes, [b,h,s] → [b,h,1,s]."""
    return pad_axis(x, 2, problem.padded_queries, **mode)[:, :, None]


def keys_first(x: jax.Array | None, problem: Problem) -> tuple[jax.Array | None, jax.Array | None]:
    """[b?,h?,s?,t?] → ([b?,h?,t?,s], None), or (None, [b?,h?,1,t?]) for an array that is the same for all queries."""
    if x is None:
        return None, None
    if x.shape[3] > 1:
        x = pad_axis(x, 3, problem.padded_keys)
    if x.shape[2] == 1 < problem.queries:
        return None, x
    return pad_axis(x, 2, problem.padded_queries).swapaxes(2, 3), None


def arrange(operands: Operands, problem: Problem) -> Tile:
    """The operands as the kernels read them."""
    mask = None if operands.mask is None else operands.mask.astype(jnp.int8)
    mask, key_mask = keys_first(mask, problem)
    first, last = interval_of_queries(operands, problem)
    row = lambda x: None if x is None else per_query(x[:, None], problem, mode="edge")
    segments = lambda ids, padding, block: None if ids is None else padded_segments(ids, padding, block)[:, None, None]
    return arrange_differentiable(operands, problem)._replace(
        mask=mask,
        key_mask=None if key_mask is None else key_mask.astype(jnp.int32),
        first=row(first),
        last=row(last),
        q_segments=segments(operands.q_segment_ids, -1, problem.block_q),
        k_segments=segments(operands.kv_segment_ids, -2, problem.block_k),
    )


def arrange_differentiable(operands: Operands, problem: Problem) -> Tile:
    """The differentiable operands, or tangents, as the kernels read them, except sinks, which differ by kernel."""
    heads = lambda x, rows: None if x is None else merge_heads(x, rows)
    bias, key_bias = keys_first(operands.bias, problem)
    return Tile(
        q=heads(operands.q, problem.padded_queries),
        k=heads(operands.k, problem.padded_keys),
        v=heads(operands.v, problem.padded_keys),
        bias=bias,
        key_bias=key_bias,
        scale=operands.softmax_scale,
    )


def sink_of(sinks: jax.Array | None, problem: Problem) -> jax.Array | None:
    """Sinks [b?,h,n] → [b?,h], their logsumexp in units: together they are one term of the denominator."""
    return None if sinks is None else jax.nn.logsumexp(sinks, axis=-1) * problem.unit


def lse_in_units(lse: jax.Array, problem: Problem) -> jax.Array:
    """lse [b,h,s] in units, with +inf instead of −inf for fully masked queries."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * problem.unit)


def interval_of_queries(operands: Operands, problem: Problem) -> tuple[Any, Any]:
    """The first and the last key that each query may see, [b?,s] int32; None for an unbounded side."""
    visibility = visibility_of(operands, problem.spec)
    first, stop = visibility.intervals()
    is_packed = visibility.cu_seqlens is not None
    is_ended = is_packed or visibility.right is not None or problem.padded_keys > problem.keys
    return first if is_packed or visibility.left is not None else None, stop - 1 if is_ended else None


def fully_masked_queries(operands: Operands, lse: jax.Array, problem: Problem) -> jax.Array:
    """[b,h?,s]: the queries that see no key."""
    return lse == -jnp.inf if operands.sinks is None else visibility_of(operands, problem.spec).fully_masked()


def padded_segments(segments, padding: int, block: int):
    """Segment ids padded to whole blocks with `padding`, which differs for queries and keys and so never matches."""
    whole = -(-segments.shape[1] // block) * block
    return pad_axis(jnp.where(segments < 0, padding, segments), 1, whole, constant_values=padding)
