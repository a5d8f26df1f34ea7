"""ring_order: the permutation that lays a sequence out over the devices of a ring."""

from typing import Literal

import numpy as np
from jaxtyping import Integer

from ...errors import shown, type_error, value_error
from .._composed import composed
from ._ring_layout import LAYOUTS, runs

NAME = "ring_order"


@composed
def ring_order(
    length: int, size: int, layout: Literal["zigzag", "striped", "contiguous"] = "zigzag"
) -> tuple[Integer[np.ndarray, " length"], Integer[np.ndarray, " length"]]:
    """The permutation by which the tokens of a sequence are sharded for `ring_attention`, and its inverse.

        order, inverse = ring_order(length, size, "zigzag")
        x[:, order]       to be sharded into `size` equal shards
        y[:, inverse]     a result for each token, in the order of the sequence again

    All arrays with an entry for each token must be permuted alike: embeddings, positions, labels, ids.

    Args:
        length: the tokens of the whole sequence, a multiple of size; in zigzag of 2·size, unless size is 1.
        size: the devices of the axis over which the sequence is sharded.
        layout: "contiguous" (device d has tokens d·S to (d + 1)·S), "striped" (tokens d, d + size, …) or "zigzag"
            (chunks d and 2·size − 1 − d of 2·size).

    Returns:
        The permutation and its inverse, NumPy arrays [length] of int32.

    Raises:
        ValueError, TypeError: the numbers do not fit; the message names them and the rule.

    Striped attention, arXiv 2311.09431.
    """
    for name, x in (("length", length), ("size", size)):
        if isinstance(x, bool) or not isinstance(x, int | np.integer):
            raise type_error(NAME, f"{name} must be an int, not {type(x).__name__}")
        if x < (name == "size"):
            raise value_error(NAME, f"{name} is {shown(x)}; it must be at least {int(name == 'size')}")
    check_layout(NAME, layout)
    if length % size:
        raise value_error(NAME, f"length {length} is no multiple of {size}, the number of devices")
    check_halves(NAME, "a shard", length // size, size, layout)
    places = [
        first + step * np.arange(count)
        for device in range(size)
        for _, count, first, step in runs(length // size, size, layout, device)
    ]
    order = np.concatenate(places).astype(np.int32)
    return order, np.argsort(order).astype(np.int32)


def check_layout(operation: str, layout: str) -> None:
    """Raises unless the layout is one of `LAYOUTS`."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise value_error(operation, f"layout is {shown(layout)}; it must be one of {', '.join(LAYOUTS)}")


def check_halves(operation: str, what: str, length: int, size: int, layout: str) -> None:
    """Raises in zigzag unless a shard divides into two chunks of equal length."""
    if layout == "zigzag" and size > 1 and length % 2:
        rule = "zigzag needs an even number, two chunks for each device; pad, or use striped or contiguous"
        raise value_error(operation, f"{what} has {length} tokens; {rule}")
