"""The overlap of communication and computation in a ring: `python -m benchmarks.profile_overlap`, on two GPUs or more.

Runs ring_attention in zigzag under `jax.profiler`, forward and with the backward, and writes a row for each device: the
time of its collectives, and how much of it overlaps other kernels.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from ejkernel import lax

from ._records import RESULTS, result_file, save_record
from .profile_labels import events_of  # its import disables graphs of CUDA
from .sequence_shards import HEAD_DIM, HEADS, KV_HEADS, TOKENS, XLA_FLAGS, arrays, with_backward

Interval = tuple[float, float]
# Queued, as in training: the first finds idle GPUs, on which a send is over before the host has launched a kernel.
CALLS = 4
LINE = "{mode:<9}{device:<40} exchanges {exchanges:>3} in {exchange_us:>9.1f} us, {overlapped:>4.0%} beside kernels"


def main() -> int:
    """Measures, prints and writes the record; 1 if there is no GPU, or if one sent without computing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=16384, help="of the whole sequence")
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    of = parser.parse_args()
    rows = list(measured(of.batch, of.length, of.strategy))
    for row in rows:
        print(LINE.format(**row))
    evidence = f"ring_attention ({of.strategy}) sends its keys and values while it computes"
    convention = (
        f"{CALLS} queued calls under jax.profiler; batch {of.batch}, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, bfloat16, "
        "causal; overlapped: the share of the time of exchanges in which other kernels ran on the device"
    )
    save_record(
        file := result_file("profile_overlap", of.out),
        evidence,
        convention,
        length=of.length,
        xla_flags=XLA_FLAGS,
        rows=rows,
    )
    print(f"kept in {file}")
    return int(not rows or not all(row["exchanges"] and row["overlapped"] > 0 for row in rows))


def measured(batch: int, length: int, strategy: str) -> Iterator[dict[str, Any]]:
    """A row for each mode and device."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))
    order = lax.ring_order(length, mesh.size, "zigzag")[0]
    x = [jax.device_put(np.asarray(a)[:, order], NamedSharding(mesh, TOKENS)) for a in arrays(batch, length, 0)]
    ring = partial(lax.ring_attention, axis_name="x", causal=True, strategy=strategy)
    ring = jax.shard_map(ring, mesh=mesh, in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    for mode, f in (("fwd", ring), ("fwd_bwd", with_backward(ring))):
        program = jax.jit(f)
        jax.block_until_ready(program(*x))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([program(*x) for _ in range(CALLS)])
            for device, (exchanges, others) in intervals(Path(folder)).items():
                took = sum(end - begin for begin, end in exchanges)
                beside = sum(shared(exchange, others) for exchange in exchanges)
                row = dict(mode=mode, device=device, exchanges=len(exchanges), exchange_us=took)
                yield row | dict(overlapped=beside / took if took else 0.0, kernels=len(others))


def intervals(folder: Path) -> dict[str, tuple[list[Interval], list[Interval]]]:
    """For each device, the intervals of its collectives, by NCCL or by copies, and those of its other kernels."""
    events = events_of(folder)
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    found: dict[str, tuple[list[Interval], list[Interval]]] = defaultdict(lambda: ([], []))
    for event in events:
        device = names.get(event.get("pid"), "")
        if event.get("ph") != "X" or "/device:" not in device:
            continue
        # The details of an event on a stream name it; the same span is also on the lines of operations and modules.
        is_copy, is_kernel = event["name"] == "MemcpyP2P", "kernel_details" in event.get("args", {})
        if is_copy or is_kernel:
            sends = is_copy or "nccl" in event["name"].lower()
            found[device][0 if sends else 1].append((event["ts"], event["ts"] + event["dur"]))
    return dict(sorted(found.items()))


def shared(interval: Interval, others: list[Interval]) -> float:
    """The length of the part of an interval that is in the union of others."""
    begin, end = interval
    total, covered = 0.0, begin
    for low, high in sorted(others):
        low, high = max(low, covered), min(high, end)
        if low < high:
            total, covered = total + high - low, high
    return total


if __name__ == "__main__":
    raise SystemExit(main())
