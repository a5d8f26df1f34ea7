"""Several thread blocks for a tile of keys in a backward, where there are few tiles, or heads that share keys are many.

The steps of a tile of keys are the blocks of queries of all the heads that share them. With few keys and few key/value
heads, as in multi-query attention of one sequence, a thread block for each tile would leave most of the device idle,
and under a causal mask all would wait for the tile of the first keys, which has twice the steps of the mean. So the
steps of a tile are split over several thread blocks, each of which stores the dk and dv of its own steps in float32,
and XLA sums them, in an order that does not depend on when a thread block runs.

On an H200 splits took 0.06 to 0.54 of the time of none, at 8 to 128 tiles.

Under a causal mask tiles have different numbers of steps, and those that run at once come to different heads of their
group. Where these read and add to more memory than the L2 cache has, splits of a few heads take 0.74 to 0.92 of the
time of one thread block for all heads.
"""

# In steps, the time in which the float32 dk and dv of a thread block for each multiprocessor are written and read, and
# that of the launch of their sum.
OVERHEAD, LAUNCH = 8, 2
# Splits of a tile, at most.
MOST = 64
# Of a Hopper GPU. With up to twice as many bytes at once, splits take longer for their sums than they save.
L2_BYTES = 50e6


def splits_of(tiles: int, steps: int, processors: int, causal: bool) -> int:
    """The splits of each tile with which a launch takes the least time by a model.

    Args:
        tiles: of all heads and batches.
        steps: of a tile that all queries see.
        processors: thread blocks that run at once.
        causal: whether tiles have from none to all of these steps, in which case the launch evens them out.
    """
    if tiles >= (2 if causal else 1) * processors:
        return 1

    def time(splits: int) -> float:
        longest, waves = 1 / splits, -(-tiles * splits // processors) / splits
        computing = max(longest, tiles / (2 * processors)) if causal else waves
        return steps * computing + (OVERHEAD * tiles * splits / processors + LAUNCH) * (splits > 1)

    return min(range(1, min(steps, MOST) + 1), key=time, default=1)


def splits_for_cache(group: int, kv_heads: int, tiles: int, bytes_of_head: int, most: float, processors: int) -> int:
    """The least splits of a causal tile, of equally many heads each, with which what is in use at once fits in L2.

    Args:
        group: query heads that share keys.
        kv_heads: key/value heads, of all batches.
        tiles: of one key/value head.
        bytes_of_head: of q, do and dq of a query head.
        most: splits whose dk and dv may be kept.
        processors: thread blocks that run at once.
    """
    in_use = bytes_of_head * group * min(kv_heads, max(1.0, processors / max(1, tiles)))
    if in_use <= 2 * L2_BYTES:
        return 1
    allowed = [n for n in range(1, group + 1) if group % n == 0 and n <= max(1, most)]
    return next((n for n in allowed if in_use <= n * L2_BYTES), allowed[-1])
