"""The kernels in a profile of flash_attention, and their labels: `python -m benchmarks.profile_labels`.

Runs a forward with its gradient and a tangent once each under `jax.profiler`, and writes a record with a row for each
kernel on the device: its time, its name, its HLO instruction, the label of the operation.
"""

import argparse
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Kernels that run as one CUDA graph all have the name of the graph.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp

import ejkernel

from ._records import RESULTS, result_file, save_record


def main() -> int:
    """Measures, prints and writes the record; 1 if a label is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the excerpt")
    file, rows = result_file("profile_labels", parser.parse_args().out), excerpt()
    for row in rows:
        print("{program:9}{microseconds:10.1f} us  {kernel:<32} {instruction:<24} {label}".format(**row))
    save_record(
        file,
        "labels that a profile holds",
        "microseconds of each kernel of a program, which ran once under jax.profiler",
        rows=rows,
    )
    print(f"\nwritten: {file}")
    return int(not all(any(f"op={kernel};" in row["label"] for row in rows) for kernel in KERNELS))


KERNELS = ("flash_attention", "flash_attention_bwd", "flash_attention_jvp")


def excerpt() -> list[dict]:
    """A row for each kernel that ran on the device."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = tuple(jax.random.normal(key, (1, 4096, 16, 128), jnp.bfloat16) for key in keys)
    attention = lambda q, k, v: ejkernel.lax.flash_attention(q, k, v, causal=True)
    programs = {
        "gradient": jax.jit(jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))),
        "tangent": jax.jit(lambda *x: jax.jvp(attention, x, x)),
    }
    rows = []
    for name, program in programs.items():
        jax.block_until_ready(program(*x))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(program(*x))
            rows += [{"program": name, **row_of(event)} for event in on_device(Path(folder))]
    return rows


def on_device(folder: Path) -> Iterator[dict]:
    """The events of device kernels in the trace of a profile, in order."""
    events = events_of(folder)
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:" in e["args"]["name"]}
    kernels = (e for e in events if e.get("pid") in devices and e.get("ph") == "X" and "hlo_op" in e.get("args", {}))
    start_times = set()
    for event in sorted(kernels, key=lambda event: (event["ts"], "kernel_details" not in event["args"])):
        if event["ts"] not in start_times:  # the same span is on several lines of a trace: streams, operations, modules
            start_times.add(event["ts"])
            yield event


def events_of(folder: Path) -> list[dict]:
    """All events of the trace that a profile wrote to a folder."""
    (file,) = folder.rglob("*.trace.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def row_of(event: dict) -> dict:
    """The row of one kernel in a record."""
    arguments = event["args"]
    label = arguments.get("name") or arguments.get("tf_op") or arguments.get("long_name", "")
    return dict(microseconds=event["dur"], kernel=event["name"], instruction=arguments["hlo_op"], label=label)


if __name__ == "__main__":
    raise SystemExit(main())
