"""The choice of blocks of keys in native sparse attention, by the weights of their means."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def chosen_blocks(
    q: Array, means: Array, before: Array, stop: Array, *, count: int, block_size: int, softmax_scale: float
) -> Array:
    """The blocks of each query [c, g, count]: its own, the first, and of those between the ones of the highest scores.

        p_ihx = exp(scale · q_ih·c_x) / Σ_x' exp(scale · q_ih·c_x')        score_ix = Σ_h p_ihx

    over the blocks x that end at or before query i, and over the heads h of a group. Of equal scores the earlier block
    is first; lists that are not full end with −1.

    Args:
        q: queries [c, g, r, d].
        means: the mean keys [blocks, g, d], of any float dtype; those of no query's blocks may be NaN.
        before: [c] int32, the place in `means` of the first block of each query's sequence.
        stop: [c] int32, the number of keys that each query sees, of which its own is the last; 0 if it sees none.
        count: blocks of a list.
        block_size: keys of a block.
        softmax_scale: the scale of q·c.
    """
    dtype = np.promote_types(*(np.promote_types(a.dtype, np.float32) for a in (q, means)))  # of the scores
    of_products = means.dtype if means.dtype == q.dtype else dtype  # products of 16 bits are exact in float32
    slot = jnp.arange(means.shape[0], dtype=jnp.int32)[None]
    x = slot - before[:, None]  # [c, blocks]: the blocks as numbers in the sequence of each query
    ended = (x >= 0) & (x < (stop // block_size)[:, None])
    q, means = q.astype(of_products), means.astype(of_products)
    logits = jnp.einsum("cgrd,xgd->cgrx", q, means, precision="highest", preferred_element_type=dtype)
    # NaN of a block that a query does not see is in no other logit.
    logits = jnp.where(ended[:, None, None], softmax_scale * logits, -jnp.inf)
    top = jnp.maximum(logits.max(-1, keepdims=True, initial=-jnp.inf), jnp.finfo(dtype).min)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    score = (weights / jnp.where(total == 0, 1, total)).sum(2)
    own = ((stop - 1) // block_size)[:, None]
    score = jnp.where((ended & (x > 0) & (x < own))[:, None], score, -jnp.inf)
    score = jnp.pad(score, ((0, 0), (0, 0), (0, count)), constant_values=-jnp.inf)
    best, at = lax.top_k(score, count)
    others = jnp.where(best >= 0, at - before[:, None, None], -1)
    own = jnp.broadcast_to(jnp.where(stop > 0, own[:, 0], -1)[:, None, None], (*score.shape[:2], 1))
    return jnp.concatenate([own, jnp.where(own > 0, 0, -1), others], axis=-1)[..., :count]
