"""The axes of operands and results, written as short words: `b s h d`, with `?` for an axis that may also have size 1.

A table from names to axes is all that the generic rules need: by it shapes are checked, result shapes computed, mapped
axes folded, and partition specs read and written.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import value_error


class Axis(NamedTuple):
    """One axis: its letter, and whether size 1 stands for "the same along this axis"."""

    letter: str
    optional: bool


Axes = tuple[Axis, ...]
Table = Mapping[str, Axes]


def axes(words: str) -> Axes:
    """`axes("b? h n")`."""
    return tuple(Axis(word.rstrip("?"), word.endswith("?")) for word in words.split())


def position(of: Axes, letter: str) -> int | None:
    """The position of `letter` in `of`, or None."""
    return next((i for i, axis in enumerate(of) if axis.letter == letter), None)


def fixed_size(axis: Axis) -> int | None:
    """The size of an axis that is written as a number."""
    return int(axis.letter) if axis.letter.isdigit() else None


def sizes(operation: str, table: Table, arrays: Mapping[str, Any]) -> dict[str, int]:
    """The size of every letter; raises if two operands disagree or a rank is wrong."""
    found: dict[str, tuple[int, str]] = {}
    for name, x in arrays.items():
        if len(x.shape) != len(table[name]):
            wanted = " ".join(axis.letter for axis in table[name])
            raise value_error(
                operation, f"{name} has {len(x.shape)} axes; it must have {len(table[name])}: {wanted}", **{name: x}
            )
        for axis, size in zip(table[name], x.shape, strict=True):
            if axis.optional and size == 1:
                continue
            number = fixed_size(axis)
            known, owner = found.setdefault(axis.letter, (size, name)) if number is None else (number, "the operation")
            if known != size:
                raise value_error(
                    operation,
                    f"axis {axis.letter} of {name} is {size} but {owner} has {known}; they must be equal",
                    **{n: arrays[n] for n in (owner, name) if n in arrays},
                )
    return {letter: size for letter, (size, _) in found.items()}


def shape(of: Axes, size_of: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a result; a letter that only broadcast operands have is 1."""
    return tuple(fixed_size(axis) or size_of.get(axis.letter, 1) for axis in of)


def is_broadcast(axis: Axis, size: int) -> bool:
    """Whether an array is broadcast along this axis."""
    return axis.optional and size == 1
