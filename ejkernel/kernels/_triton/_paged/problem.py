"""The compile-time constants of a launch of the kernels over a cache: shapes, strides and options."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Strides:
    """Rows of features from one to the next along the axes of an array [batch?, page?, slot?, group?]; 0 for one."""

    batch: int
    page: int
    slot: int
    group: int


def strides_of(shape: tuple[int, ...], rows: int = 1) -> Strides:
    """Of a dense array [batch, page, slot, group], each of whose entries is so many rows."""
    found, step = [], rows
    for size in reversed(shape):
        found.append(0 if size == 1 else step)
        step *= size
    return Strides(*reversed(found))


@dataclass(frozen=True)
class Problem:
    """The shapes of a call, and what is computed.

    Attributes:
        N, T: sequences and tokens of a batch index.
        H, G, D, V: query and key/value heads, features of keys and of values.
        pages, page: how many pages a batch index has, and slots of each; a dense cache has a page for each sequence.
        columns: pages of a sequence in its table; 0 where it has no table, and its page is that of its number.
        length: tokens of every sequence; None where query_start_loc says.
        causal: whether a token sees no key behind its own.
        left: how many keys before its own a token sees; None for all.
        scale, softcap: the factor of q·k, and the bound of the logits or None.
        k, v: where the keys and values stand, in rows of D and V features.
        v_offset: how many elements the values stand behind the keys, where both are one array.
        k_scale, v_scale: where their factors stand; None without.
        sinks, sinks_batch: how many sinks a head has, and the stride of a batch index in them.
        draft_words: words of 32 bits that hold which drafts a token sees; 0 without any.
        sinks_of_empty: whether the softmax of a token that is in no context has the sinks; it is −∞ otherwise.
        ptx: whether instructions of PTX may be used.
        only_drafts: whether o and lse have all keys but the drafts, or some of these, whose softmax is continued.
    """

    N: int
    T: int
    H: int
    G: int
    D: int
    V: int
    pages: int
    page: int
    columns: int
    length: int | None
    causal: bool
    left: int | None
    scale: float
    softcap: float | None
    k: Strides
    v: Strides
    v_offset: int
    k_scale: Strides | None
    v_scale: Strides | None
    sinks: int
    sinks_batch: int
    draft_words: int
    sinks_of_empty: bool
    ptx: bool
    only_drafts: bool = False


@dataclass(frozen=True)
class Schedule:
    """Which rows of tokens a launch computes, and how their keys are divided.

    A row is up to `tokens` tokens of one sequence, whose query heads of a group are packed into one tile.

    Attributes:
        rows: of a batch index: one for each sequence, and as many more as its tokens can need if they are packed.
        tokens: of a row at most.
        packed: whether a sequence may have several rows, which follow the first ones of all.
        padding: whether rows that no sequence needs write what tokens of no sequence have; they have to be packed.
        least, most: only sequences of least ≤ tokens ≤ most in the step are computed.
        splits: parts that the keys of a row are cut into.
        keys_per_split: keys of a part, where it may depend on nothing else; 0 shares them out evenly.
        items: work items of a batch index, if a plan says what is computed in the place of rows and splits; else 0.
        plan_batch: the stride of a batch index in the plan, in items.
    """

    rows: int
    tokens: int
    packed: bool
    padding: bool
    least: int
    most: int
    splits: int
    keys_per_split: int
    items: int = 0
    plan_batch: int = 0
