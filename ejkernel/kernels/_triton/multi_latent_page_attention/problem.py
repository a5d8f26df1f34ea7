"""The shapes of a call of absorbed latent attention over pages, and what is computed, as a compile-time constant."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Strides:
    """Elements from one to the next along the axes of an array [batch?, page?, slot?]; 0 where there is one."""

    batch: int
    page: int
    slot: int


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, and what is computed, as a compile-time constant.

    Attributes:
        T, H, R, D: tokens of a step, heads, and features of a latent and of its rotary part.
        rows: of a step.
        sequences: of a step, of which each has a table; with lists, the tokens.
        pages, page: how many pages the pool has, and slots of each.
        columns: pages of a sequence in its table, or places in a list.
        lists: whether tables are lists of slots.
        splits: parts that the keys of a row are cut into.
        draft_words: words of 32 bits that hold what a token sees of the drafts.
        scale: the factor of the logits.
        softcap: their bound, or None.
        slots: where a slot stands, in rows of R + D features.
        sinks, k_scale: where the sink of a head and the factor of a slot stand, if there are any.
    """

    T: int
    H: int
    R: int
    D: int
    rows: int
    sequences: int
    pages: int
    page: int
    columns: int
    lists: bool
    splits: int
    draft_words: int
    scale: float
    softcap: float | None
    slots: Strides
    sinks: int
    k_scale: Strides | None


def strides_of(shape: tuple[int, ...]) -> Strides:
    """Of a dense array [batch, page, slot]."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(0 if size == 1 else step)
        step *= size
    return Strides(*reversed(found))
