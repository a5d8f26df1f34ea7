"""Draws long-context.svg and prints the predictions of long-context.md: `python docs/long_context.py`.

Memory is XLA's analysis of compiled programs, from a record of `python -m benchmarks.long_context`. Times are a model,
not measured: operations and bytes over the ceilings of an H200 (`ejkernel.callib`).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/long-context.svg"
MEMORY = ROOT / "benchmarks/results/long_context-cpu-20261124-142025.json"
SPEED = ROOT / "benchmarks/results/flash_attention-nvidia-h200-20261122-130738.json"

HEADS, KV_HEADS, HEAD_DIM, BATCH, BYTES = 32, 8, 128, 2, 2
# Two H200 over NVLink exchanged 64 MiB at 237 GB/s and 512 MiB at 342 GB/s: a latency, and a rate.
START = 99e-6
LINK = 365e9


class Rates(NamedTuple):
    """Of an H200: its ceilings for matrix products and copies, and the throughput of flash_attention."""

    matmul: float
    copy: float
    forward: float
    backward: float


def rates() -> Rates:
    """From the record of flash_attention with the layer of Llama-3 8B: 2 × 8192 tokens, causal."""
    record = json.loads(SPEED.read_text())
    rows = [
        row for row in record["rows"] if row["case"].startswith("llama3-8b:") and row["contender"] == "ejkernel auto"
    ]
    forward, both = (next(row for row in rows if row["mode"] == mode) for mode in ("fwd", "fwd_bwd"))
    operations = forward["rate"] * forward["milliseconds"]
    backward = 2.5 * operations / (both["milliseconds"] - forward["milliseconds"])
    return Rates(record["ceilings"]["matmul"]["bfloat16"], record["ceilings"]["copy"], forward["rate"], backward)


# --- The model --------------------------------------------------------------------------------------------------------


def sent(size: float) -> float:
    """Seconds to send that many bytes from each device to another."""
    return START + size / LINK


class Ring(NamedTuple):
    """Seconds of a causal zigzag ring: computing and sending of a hop, all hops, and flash_attention divided by n."""

    computed: float
    sent: float
    total: float
    ideal: float


def ring(length: int, devices: int, products: float, arrays: int, merged: float) -> Ring:
    """Each hop has the same work, half of the pairs of its queries and keys; all but the first are sent.

    A hop takes the longer of computing and sending, as keys are sent during the previous hop.

    Args:
        length: of the whole sequence; there are BATCH sequences.
        devices: the size of the ring.
        products: seconds per operation of the forward.
        arrays: how many arrays of the size of k a hop sends, one after the other.
        merged: average bytes moved for each number of o in a hop besides these products.
    """
    here = length // devices
    operations = 4 * BATCH * HEADS * HEAD_DIM * here * here / 2
    merge = BATCH * here * HEADS * HEAD_DIM * merged / rates().copy
    computed = operations * products + merge
    hop = arrays * sent(BATCH * here * KV_HEADS * HEAD_DIM * BYTES)
    return Ring(computed, hop, computed + (devices - 1) * max(computed, hop), devices * operations * products)


def forward(length: int, devices: int) -> Ring:
    """k and v are sent, and o merged: float32 between hops, read first and written last in its own dtype."""
    bytes_of_merges = 2 + 2 + 2 + (devices - 2) * (2 + 4 + 4)
    return ring(length, devices, 1 / rates().forward, arrays=2, merged=bytes_of_merges / devices)


def backward(length: int, devices: int) -> Ring:
    """Five products; k and v are sent, dk and dv sent back; each hop reads o and do for δ, and dq is accumulated."""
    return ring(length, devices, 2.5 / rates().backward, arrays=4, merged=2 + 2 + 2 + 2 + 2)


def gathered(length: int, devices: int) -> tuple[float, float]:
    """Seconds of all_gather, forward and with the backward; no communication is hidden and nothing recomputed.

    k and v are gathered, in the backward again, where dk and dv are reduced and scattered over the devices.
    """
    exchange = 2 * sent((devices - 1) * BATCH * length // devices * KV_HEADS * HEAD_DIM * BYTES)
    ideal, of_backward = forward(length, devices).ideal, backward(length, devices).ideal
    return exchange + ideal, 3 * exchange + ideal + of_backward


def attention_seconds(length: int, devices: int) -> float:
    """The forward of one sequence at the ceiling of matrix products, in a ring if there are several devices."""
    of_all = 4 * HEADS * HEAD_DIM * length * length / 2 / rates().matmul
    if devices == 1:
        return of_all
    hop = 2 * sent(length / devices * KV_HEADS * HEAD_DIM * BYTES)
    computed = of_all / devices / devices
    return computed + (devices - 1) * max(computed, hop)


def gla_seconds(length: int, devices: int) -> float:
    """The forward of one sequence at the ceiling of copies: q, gk and o with all heads, k and v with theirs.

    Over several devices k, v and gk are read twice, and a float32 state goes from each device to all.
    """
    tokens, copy = length / devices * HEAD_DIM * BYTES, rates().copy
    once = tokens * (3 * HEADS + 2 * KV_HEADS) / copy
    if devices == 1:
        return once
    return once + tokens * (HEADS + 2 * KV_HEADS) / copy + sent((devices - 1) * HEADS * HEAD_DIM * HEAD_DIM * 4)


# --- The table of predictions -----------------------------------------------------------------------------------------


def table() -> str:
    """Predictions for ring_attention, as in long-context.md; in brackets the share of the ideal."""
    names = (
        "tokens",
        "devices",
        "hop, ms",
        "sends, ms",
        "ring, ms",
        "with backward",
        "all_gather, ms",
        "with backward",
    )
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for length in (16384, 65536):
        for devices in (2, 4, 8):
            f, b = forward(length, devices), backward(length, devices)
            both = f.ideal + b.ideal
            of = lambda seconds, ideal: f"{seconds * 1e3:.1f} ({ideal / seconds:.0%})"
            gather, gather_both = gathered(length, devices)
            times = (of(f.total, f.ideal), of(f.total + b.total, both), of(gather, f.ideal), of(gather_both, both))
            cells = (
                f"{BATCH} × {length // 1024}k",
                f"{devices}",
                f"{f.computed * 1e3:.2f}",
                f"{f.sent * 1e3:.2f}",
                *times,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# --- The picture ------------------------------------------------------------------------------------------------------

COLORS = {"attention": ("#e45756", "#f0a5a4"), "gla": ("#4c78a8", "#a6bcd4")}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 380, 300, 52, 40, 44


class Line(NamedTuple):
    """Values over lengths, for one device (light) or eight."""

    name: str
    of: str
    devices: int
    values: Mapping[int, float]
    dashes: str = ""


def page() -> str:
    """The text of long-context.svg: memory by XLA's analysis, and time by the model, over the length."""
    memory = _panel(0, "memory of the gradient, GiB a device (compiled)", _memory(), [1, 10, 100])
    lengths = [2**n for n in range(13, 21)]
    of = lambda f, devices: {length: f(length, devices) * 1e3 for length in lengths}
    lines = [
        Line("flash_attention", "attention", 1, of(attention_seconds, 1)),
        Line("ring_attention, 8", "attention", 8, of(attention_seconds, 8)),
        Line("gla", "gla", 1, of(gla_seconds, 1)),
        Line("gla, 8", "gla", 8, of(gla_seconds, 8)),
    ]
    time = _panel(WIDTH, "time of the forward, ms (a model, not measured)", lines, [0.1, 1, 10, 100, 1000])
    box, font = f'viewBox="0 0 {2 * WIDTH} {HEIGHT}"', 'font-family="monospace" font-size="11"'
    background = f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>\n{background}\n{memory}{time}</svg>\n'


def _memory() -> list[Line]:
    names = {
        "flash_attention": ("flash_attention", "attention", ""),
        "ring_attention, ring": ("ring, 8", "attention", ""),
        "ring_attention, all_gather": ("all_gather, 8", "attention", "5 3"),
        "ring_attention, ulysses": ("ulysses, 8", "attention", "2 3"),
        "gla": ("gla", "gla", ""),
        "gla, axis_name": ("gla, 8", "gla", ""),
    }
    rows = json.loads(MEMORY.read_text())["rows"]
    lines = []
    for layer, (name, of, dashes) in names.items():
        found = [row for row in rows if row["layer"] == layer]
        values = {row["length"]: row["bytes"] / 2**30 for row in found}
        lines.append(Line(name, of, found[0]["devices"], values, dashes))
    return lines


def _panel(left: int, title: str, lines: Sequence[Line], marks: Sequence[float]) -> str:
    """Lines on logarithmic axes, labelled at their ends."""
    lengths = sorted({length for line in lines for length in line.values})
    values = [value for line in lines for value in line.values.values()]
    x = _axis(lengths, left + LEFT, left + WIDTH - 118)
    y = _axis([*values, *marks], HEIGHT - BOTTOM, TOP)
    parts = [f'<text x="{left + 8}" y="18">{title}</text>']
    for mark in marks:
        at = f'y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#dddddd"'
        parts.append(f'<line x1="{x(lengths[0]):.1f}" x2="{x(lengths[-1]):.1f}" {at}/>')
        parts.append(f'<text x="{left + LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for length in lengths[:: 1 if len(lengths) < 5 else 2]:
        name = f"{length // 1024}k"
        parts.append(f'<text x="{x(length):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{x(lengths[0]):.1f}" y="{HEIGHT - 8}">tokens of the whole sequence</text>')
    ends = _apart({line.name: y(line.values[lengths[-1]]) for line in lines})
    for line in lines:
        color = COLORS[line.of][line.devices == 1]
        points = " ".join(f"{x(length):.1f},{y(value):.1f}" for length, value in line.values.items())
        dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        at = f'x="{x(lengths[-1]) + 6:.1f}" y="{ends[line.name] + 4:.1f}"'
        parts.append(f'<text {at} fill="{COLORS[line.of][0]}">{line.name}</text>')
    return "\n".join(parts) + "\n"


def _axis(values: Sequence[float], first: float, last: float) -> Callable[[float], float]:
    low, high = math.log(min(values)), math.log(max(values))
    return lambda value: first + (math.log(value) - low) / (high - low) * (last - first)


def _apart(places: Mapping[str, float], least: float = 12) -> dict[str, float]:
    """Positions of labels that do not overlap."""
    found: dict[str, float] = {}
    for name in sorted(places, key=places.__getitem__):
        found[name] = max(places[name], max(found.values(), default=-math.inf) + least)
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
    print(table())
