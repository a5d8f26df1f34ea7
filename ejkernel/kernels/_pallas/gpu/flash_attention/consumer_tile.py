"""What the consumer warpgroups of the forward share, and what each of them has of a work tile."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array

from .feature_tiles import Tiles
from .pairs import Pairs
from .problem import BlockRanges
from .quantized import Units
from .tiles import Statistics, View


class Shared(NamedTuple):
    """Tiles in the shared memory of a thread block, and their full and empty barriers.

    The empty barriers of k and v are named barriers (plan.py). A stage of the bias is empty when that of v is: the
    weights are computed before they are multiplied by v.
    """

    q: Tiles
    k: Tiles
    v: Tiles
    q_full: Any
    k_full: Any
    v_full: Any
    q_empty: Any
    bias: Tiles | None = None
    bias_full: Any = None
    k_scales: Any = None


class ConsumerTile(NamedTuple):
    """The 64 rows of a work tile that one consumer warpgroup computes.

    number: of the warpgroup. q: the parts of its queries in shared memory. view: where these stand, and what masks
    them. head: of the queries. block_range: the blocks of keys that they see, of which the n-th is block(n); `computed`
    of them from a step on, if not all. start: the row maxima and sums of the sinks. units: the scales in e4m3. pairs:
    bias and mask. softmax_scale: if an operand.
    """

    number: Array
    q: Sequence[Any]
    view: View
    head: Array
    block_range: BlockRanges
    start: Statistics
    units: Units | None
    block: Callable[[Array], Array] = lambda n: n
    zero_hidden: Callable[[Array, Array], None] | None = None
    pairs: Pairs | None = None
    softmax_scale: Array | None = None
    computed: Callable[[Array], BlockRanges] | None = None
