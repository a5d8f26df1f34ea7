"""Draws timeline.svg, the kernels of one gradient, from a recorded trace: `python docs/timeline.py`."""

import json
import re
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/profile_labels-nvidia-h200-20261121-194515.json"
PAGE = ROOT / "docs/timeline.svg"
COLORS = {"flash_attention": "#4c78a8", "flash_attention_bwd": "#e45756", "": "#9d9d9d"}
WIDTH, ROW, MARGIN = 720, 24, 8


def page() -> str:
    """The text of timeline.svg: one row for each kernel, by start time, drawn one after the other."""
    rows = [row for row in json.loads(RECORD.read_text())["rows"] if row["program"] == "gradient"]
    labelled = lambda row: re.search(r"ejkernel\[op=(\w+);", row["label"])
    kernels = [(row["kernel"], found[1] if (found := labelled(row)) else "") for row in rows]
    times = [row["microseconds"] for row in rows]
    scale = (WIDTH - 2 * MARGIN) / sum(times)
    rows = zip(kernels, times, (end - time for end, time in zip(accumulate(times), times, strict=True)), strict=True)
    drawn = "".join(
        _row(i, name, op, MARGIN + scale * start, scale * time, time)
        for i, ((name, op), time, start) in enumerate(rows)
    )
    height = len(kernels) * ROW + 2 * MARGIN
    box, font = f'viewBox="0 0 {WIDTH} {height}"', 'font-family="monospace" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{drawn}</svg>\n'
    )


def _row(number: int, name: str, operation: str, x: float, width: float, time: float) -> str:
    """A bar with its name beside it, on the side with space."""
    y, right = MARGIN + number * ROW, x + width < WIDTH / 2
    at, anchor = (x + width + 6, "start") if right else (x - 6, "end")
    if width > WIDTH / 2:
        at, anchor = x + width / 2, "middle"
    bar = f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{ROW - 6}" fill="{COLORS[operation]}"/>'
    text = f'<text x="{at:.1f}" y="{y + 13}" text-anchor="{anchor}">{name} {time:g} us</text>'
    return f"{bar}\n{text}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
