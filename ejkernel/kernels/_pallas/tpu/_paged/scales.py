"""The scale of each slot and head of quantised pages, which is copied beside the keys and values of a block.

In a block of logits q·kᵀ of one head a slot is a column. So the scales of keys are factors of the logits' columns,
those of values of the weights' columns, and the products themselves are of what the pages hold:

    s_j = scale_j · (q·k_j),   o = Σ (p_j · scale_j) · v_j
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from . import has_slots


def of_heads(scale: Any) -> Any:
    """A scale [b?,1,1,g?] as [b?,g?]; None if there is none, or one for each slot."""
    return None if scale is None or has_slots(scale) else scale[:, 0, 0]


@dataclass(frozen=True)
class SlotScales:
    """The sizes of the scales of a cache, and of a block of them in vector memory.

    Attributes:
        of: whose factors they are: "keys", "values", or both.
        piece: slots of one copy, the same as of the cache.
        pieces: pieces of a block.
        heads: heads of a slot.
        pool: pieces of a pool if each batch element has its own; 0 if they share one.
    """

    of: tuple[str, ...]
    piece: int
    pieces: int
    heads: int
    pool: int = 0

    def stored(self, scale: jax.Array, pages: int, slots: int) -> jax.Array:
        """Scales [b?,p?,s?,g?] as [pieces, g, s] float32, for `pages` pages of `slots` slots."""
        scale = jnp.broadcast_to(scale, (scale.shape[0], pages, slots, self.heads)).astype(jnp.float32)
        cut = scale.reshape(scale.shape[0] * pages, slots // self.piece, self.piece, self.heads)
        return cut.swapaxes(2, 3).reshape(-1, self.heads, self.piece)

    def buffers(self, count: int) -> Any:
        """Vector memory for `count` blocks."""
        return pltpu.VMEM((count, self.pieces, self.heads, self.piece), jnp.float32)

    def copies(self, stored: Any, buffer: Any, semaphore: Any, slot: Any, piece: Any, place: Any) -> Iterator[Any]:
        """The copy of a piece to its place in the block of a buffer."""
        yield pltpu.make_async_copy(stored.at[piece], buffer.at[slot, place], semaphore.at[slot])

    def columns(self, buffer: Any, slot: Any) -> jax.Array:
        """The scales of a block, [heads, keys]; those of slots that were not copied are anything."""
        return jnp.concatenate([buffer[slot, n] for n in range(self.pieces)], axis=1)


def slot_scales(scales: tuple[Any, Any], **sizes: int) -> list[tuple[SlotScales, Any]]:
    """Which of the scales of keys and of values [b?,p?,s?,g?] differ between slots, each with its layout.

    Where both are the same array, as for latents, it is copied once. `pool` is the number of pieces of a pool.
    """
    k, v = scales
    named = [(("keys", "values"), k)] if k is v else [(("keys",), k), (("values",), v)]
    pool = sizes.pop("pool")
    return [
        (SlotScales(of, **sizes, pool=pool if scale.shape[0] > 1 else 0), scale)
        for of, scale in named
        if has_slots(scale)
    ]
