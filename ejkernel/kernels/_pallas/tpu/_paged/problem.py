"""The inputs, outputs, constants and running state of the kernel of attention over a cache."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ejkernel.primitives._pages import CacheSpec

from .cache import Cache
from .scales import SlotScales


class Inputs(NamedTuple):
    """The arrays of a call; None where absent.

    Attributes:
        q: query tiles [tiles, g, m, d], in the order of `tiles.tiles_of`.
        caches: one of latents, one of alternating keys and values, or one of each, as `Cache.stored` gives them.
        sinks: [b?, g, m, 128] float32: the logsumexp of the sinks of each row, the same in all lanes.
        drafts: [tiles, m, w] bfloat16: 1 where a row sees the new token w of its sequence, else 0.
        k_scale, v_scale: factors of keys and values [b?, g?] float32, if they are the same for all slots.
        scales: factors of slots, for each of the problem's `scales`, [pieces, g, s] float32.
        table: block tables, row after row; None if the pieces of a sequence are contiguous.
    """

    q: Any
    caches: tuple[Any, ...]
    sinks: Any = None
    drafts: Any = None
    k_scale: Any = None
    v_scale: Any = None
    scales: tuple[Any, ...] = ()
    table: Any = None


class Outputs(NamedTuple):
    """o [g, m, e] and lse [g, m] of each tile."""

    o: Any
    lse: Any


class State(NamedTuple):
    """The online softmax in float32: m and l [g, m, 128], the same in all lanes, and a [g, m, e].

    For large tiles also the keys and values of a block, sorted by heads: [g, parts, keys, width]. And the scales of the
    slots of a block, for each of the problem's `scales`: [g, 1, keys].
    """

    maximum: Any
    total: Any
    weighted: Any
    scales: tuple[Any, ...] = ()
    keys: Any = None
    values: Any = None


@dataclass(frozen=True)
class Problem:
    """The constants of a kernel.

    Attributes:
        spec: what is computed.
        caches: the layout of each cache: keys and values, both in one, or latents.
        group: query heads of a key/value head.
        tokens: tokens of a tile.
        columns: pages of a row of the block tables, or, without these, pieces of a sequence.
        pages: pages of a pool.
        pieces: pieces of a page.
        scales: the layout of the scales that differ between slots.
        latent: the number of first features of a key that are its value; 0 if values are stored.
    """

    spec: CacheSpec
    caches: tuple[Cache, ...]
    group: int
    tokens: int
    columns: int
    pages: int = 0
    pieces: int = 1
    scales: tuple[SlotScales, ...] = ()
    latent: int = 0

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.caches[0].slots

    @property
    def copied(self) -> tuple[Cache | SlotScales, ...]:
        """The layouts of all that is copied for a block."""
        return *self.caches, *self.scales

    @property
    def rows_of_head(self) -> int:
        """Rows of a slot for each head in the cache of keys: two if that also holds the values."""
        return 2 if len(self.caches) == 1 and not self.latent else 1

    @property
    def values(self) -> int:
        """The number of features of a value."""
        return self.latent or self.caches[-1].features

    @property
    def value_parts(self) -> list[slice]:
        """The parts in which the features of values are loaded."""
        return [slice(0, self.latent)] if self.latent else self.caches[-1].parts
