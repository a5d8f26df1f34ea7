"""The order in which thread blocks add to dq where the sum has to be deterministic.

A semaphore for every block of queries of a head counts the tiles of keys that have added to its dq. A tile waits until
the count is its rank among the tiles that add there, adds, and increments the count when the addition is complete; so
the bits of dq do not depend on when a thread block runs. Ranks are chosen so that there is no deadlock and hardly any
waiting: the tile before in rank comes to a block of queries earlier than this one.

* With a band a tile of keys begins with the last queries that see it, which with a window are later for later keys. So
  the first tile is the first to add, and its thread block is launched first: under a causal mask it has most to do.
* Without one all tiles see all queries. Tile j of a group of W begins with block s_j = ⌊j·M / W⌋ of M and comes to the
  first again after the last; block m is added to by the tiles from the last with s_j ≤ m downwards, then by those from
  the last of the group down to it. They wait for one another in a circle, so the W tiles have to run at once: a group
  has fewer tiles than a device has multiprocessors. It adds after the groups before it, which are launched earlier.
* With a mask by arrays (mask_info.py) the first tile is the first, too, and the ranks are in a table.

This relies on thread blocks being launched in the order of their index, as stream-K and FlashAttention-3 do.
"""

import jax.numpy as jnp
from jax import Array

from .mask_info import MaskInfo

# Tiles that wait for one another in a circle, at most: a program may run on a smaller device than it was lowered for,
# of which the smallest, an H20, has 78 multiprocessors.
MOST_IN_GROUP = 64


def table_of_ranks(mask_info: MaskInfo, blocks: int) -> Array:
    """Ranks [b, tiles, blocks] int32: the number of earlier tiles of keys that add to a block of queries."""
    block = jnp.arange(blocks, dtype=jnp.int32)
    begin, end = (mask_info.block_ranges[:, 0, :, n, None] for n in range(2))
    adds = ((begin <= block) & (block < end)).astype(jnp.int32)
    return jnp.cumsum(adds, axis=1) - adds
