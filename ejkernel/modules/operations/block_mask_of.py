"""block_mask_of, composed of JAX operations, without a primitive of its own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from ...errors import a_type, type_error, value_error
from .._composed import composed
from ._arguments import block_pair, static_int

NAME = "block_mask_of"


@composed
def block_mask_of(
    fn: Callable[[Array, Array], Bool[Array, "..."]], S: int, K: int, block_size: tuple[int, int] = (128, 128)
) -> Bool[Array, "... q_blocks kv_blocks"]:
    """The block mask of a mask function: a block is kept if any query in it sees any of its keys.

        block_mask[m, n] = any fn(i, j) of i < S with i // block_q = m and j < K with j // block_k = n

    fn is evaluated for one block of queries and one block of keys at a time, so that no array has the size S × K.
    Within the blocks that are kept, the options of `blocksparse_attention` (causal, window, mask, segment ids) alone
    decide which pairs are visible.

    Args:
        fn: (i, j) → whether query i sees key j, from indices of queries i, int32 [block_q, 1], and of keys j, int32
            [1, block_k], to a bool that broadcasts to [block_q, block_k], with leading axes for batch elements and
            heads if these differ. It may use arrays, also traced ones. It is also evaluated at indices past the ends,
            where its values are ignored.
        S: the number of queries.
        K: the number of keys.
        block_size: the numbers of queries and of keys in a block.

    Returns:
        bool [⌈S / block_q⌉, ⌈K / block_k⌉], preceded by the leading axes of fn.

    Raises:
        ValueError, TypeError: lengths or block sizes are out of range, or the result of fn has a wrong shape or dtype.

    FlexAttention, arXiv 2412.05496.
    """
    block_q, block_k = block_pair(NAME, block_size)
    if not callable(fn):
        raise type_error(NAME, f"fn is {a_type(fn)}; it must be a function of (i, j)")
    S, K = static_int(NAME, "S", S), static_int(NAME, "K", K)
    block_q, block_k = min(block_q, max(1, S)), min(block_k, max(1, K))
    rows, columns = -(-S // block_q), -(-K // block_k)
    leading = _leading(fn, block_q, block_k)

    def is_kept(number):
        row, column = number // columns * block_q, number % columns * block_k
        i, j = row + jnp.arange(block_q, dtype=jnp.int32), column + jnp.arange(block_k, dtype=jnp.int32)
        i, j = i[:, None], j[None]
        inside = (i < S) & (j < K)
        visible = jnp.broadcast_to(fn(i, j), (*leading, block_q, block_k))
        return (visible & inside.reshape((1,) * len(leading) + inside.shape)).any((-2, -1))

    if rows * columns == 0:
        return jnp.zeros((*leading, rows, columns), bool)
    kept = lax.map(is_kept, jnp.arange(rows * columns, dtype=jnp.int32))
    return jnp.moveaxis(kept.reshape(rows, columns, *leading), (0, 1), (-2, -1))


def _leading(fn: Callable, block_q: int, block_k: int) -> tuple[int, ...]:
    """The leading axes of fn's result, before those of queries and keys."""
    of = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((block_q, 1), (1, block_k))))
    if getattr(of, "dtype", None) != np.bool_:
        raise type_error(NAME, f"fn gives {of}; it must give an array of bool")
    if any(n not in (1, wanted) for n, wanted in zip(of.shape[::-1], (block_k, block_q), strict=False)):
        rule = f"it must broadcast to [{block_q}, {block_k}], queries and keys, with any axes before these"
        raise value_error(NAME, f"fn gives an array of shape {list(of.shape)}; {rule}")
    return of.shape[:-2]
