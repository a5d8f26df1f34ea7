"""How a head dim is laid out in shared memory, where TMA writes rows of 32, 64 or 128 bytes.

A head dim that is a multiple of 16 is one part: rows of the widest swizzle that divides it. One below 64 is a row of
the next width. TMA loads zeros beyond the features of an array, and stores nothing there; but of several rows side by
side none may be cut. So a head dim above 64 that is only a multiple of 8 has parts, each one row: 64 wide, and the last
as wide as it has to be, for it is the one that is cut. 72 is 64 and 16.

Each part has the swizzle of its width, which a product wants to be that of its other operand, and at most as many
numbers as there are rows that it sums over. So where k is multiplied by ds all of its parts are even: 72 is 64 and 64.
"""

import itertools

# Numbers of 16 bits in a row.
ROW_WIDTHS = (16, 32, 64)
LEAST, MOST = 16, 256


def parts_of(
    features: int, widest: int = ROW_WIDTHS[-1], even: bool = False, by_row: bool = False
) -> tuple[slice, ...]:
    """The columns of each part of a tile, whose rows are at most `widest` numbers; all of one width if `even`, and with
    `by_row` one part for each row.
    """
    if features % 16 == 0 and not by_row:
        return (slice(0, features),)
    widths = [min(_width(features - start), widest) for start in range(0, features, widest)]
    ends = list(itertools.accumulate([widths[0]] * len(widths) if even else widths))
    return tuple(slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False))


def tile_width(features: int, widest: int = ROW_WIDTHS[-1], even: bool = False) -> int:
    """Columns of a tile that holds so many features."""
    return parts_of(features, widest, even)[-1].stop


def cut_row(features: int) -> int:
    """The row width for a head dim that is not a multiple of 16, whose last row TMA cuts off."""
    return parts_of(features)[0].stop


def row_width(columns: int, widest: int = ROW_WIDTHS[-1]) -> int:
    """The width of the rows in which a part of `columns` columns is stored, side by side."""
    return next(width for width in reversed(ROW_WIDTHS) if columns % width == 0 and width <= widest)


def _width(features: int) -> int:
    return next((width for width in ROW_WIDTHS if features <= width), ROW_WIDTHS[-1])


def refuses(features: int) -> str | None:
    """Why a head dim has no tiles, or None."""
    if LEAST <= features <= MOST and features % 8 == 0:
        return None
    return f"a head dim of {features}; the kernels take multiples of 8 from {LEAST} to {MOST}"
