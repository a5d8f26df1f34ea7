"""What the kernel of attention over a cache is given, what it is written for, and what it keeps between blocks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ejkernel.primitives._pages import CacheSpec

from .cache import Cache


class Inputs(NamedTuple):
    """The arrays of a call; None where absent.

    Attributes:
        q: query tiles [tiles, g, m, d], sorted as by `tiles.tiles_of`.
        caches: one of latents, or of keys and values in turn, or one of each, [pieces, s, rows, features]; one row has
            no axis.
        sinks: [b?, g, m, 128] float32: the logsumexp of each row's.
        drafts: [tiles, m, w] bfloat16: 1 where a row sees the new token w of its sequence, else 0.
        k_scale, v_scale: factors of keys and values [b?, g?] float32.
        table: block tables, row after row; None where the pieces of a sequence lie side by side.
    """

    q: Any
    caches: tuple[Any, ...]
    sinks: Any = None
    drafts: Any = None
    k_scale: Any = None
    v_scale: Any = None
    table: Any = None


class Outputs(NamedTuple):
    """Of each tile o [g, m, e] and lse [g, m]."""

    o: Any
    lse: Any


class State(NamedTuple):
    """m and l [g, m, 128], the same number in all lanes, a [g, m, e], float32.

    Where tiles are large, keys and values of a block too, [g, parts, keys, width].
    """

    maximum: Any
    total: Any
    weighted: Any
    keys: Any = None
    values: Any = None


@dataclass(frozen=True)
class Problem:
    """What a kernel is written for.

    Attributes:
        spec: what is computed.
        caches: that of keys and that of values, or of both, or of latents.
        group: query heads of a key/value head.
        tokens: of a tile.
        columns: pages of a row of the block tables, or pieces of a sequence where there are none.
        pages: of a pool.
        pieces: of a page.
        pool: pieces of a pool, where each batch element has its own; 0 where all have one.
        latent: how many of the first features of a key are its value; 0 where values are stored.
    """

    spec: CacheSpec
    caches: tuple[Cache, ...]
    group: int
    tokens: int
    columns: int
    pages: int = 0
    pieces: int = 1
    pool: int = 0
    latent: int = 0

    @property
    def keys(self) -> int:
        """Of a block."""
        return self.caches[0].slots

    @property
    def rows_of_head(self) -> int:
        """Of a slot of the cache of keys: with one of both each head has two."""
        return 2 if len(self.caches) == 1 and not self.latent else 1

    @property
    def values(self) -> int:
        """Features of values."""
        return self.latent or self.caches[-1].features

    @property
    def value_parts(self) -> list[slice]:
        """The features of values, as they are loaded."""
        return [slice(0, self.latent)] if self.latent else self.caches[-1].parts
