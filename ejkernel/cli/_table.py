"""Tables with aligned columns."""

from collections.abc import Mapping, Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints the header and the rows."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def print_rows(title: str, rows: Mapping[str, str]) -> None:
    """Prints the title, and below it a row for each name."""
    width = max(map(len, rows), default=0)
    print(f"{title}\n" + "".join(f"  {name:<{width}}  {value}\n" for name, value in rows.items()))
