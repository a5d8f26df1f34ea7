"""Which kernels a profile of flash_attention shows, and under which labels: `python benchmarks/profile_labels.py`.

Runs a forward with its gradient and a tangent once each under `jax.profiler`, and writes what ran on the device, one
line for each kernel (its time, its name, its HLO instruction, the label of the operation), as a text file under
benchmarks/results/.
"""

import argparse
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Kernels that run as one graph of CUDA all go by the name of the graph.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp
from _harness import RESULTS, result_file

import ejkernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the excerpt")
    file = result_file("profile_labels", parser.parse_args().out).with_suffix(".txt")
    lines = [f"{jax.devices()[0].device_kind}, jax {jax.__version__}", *excerpt()]
    print(*lines, sep="\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    print(f"\nwritten: {file}")
    return int(not all(any(f"op={kernel};" in line for line in lines) for kernel in KERNELS))


KERNELS = ("flash_attention", "flash_attention_bwd", "flash_attention_jvp")


def excerpt() -> list[str]:
    """A heading for each program, and a line for each kernel of it that ran on the device."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = tuple(jax.random.normal(key, (1, 4096, 16, 128), jnp.bfloat16) for key in keys)
    attention = lambda q, k, v: ejkernel.lax.flash_attention(q, k, v, causal=True)
    programs = {
        "gradient": jax.jit(jax.grad(lambda *x: attention(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))),
        "tangent": jax.jit(lambda *x: jax.jvp(attention, x, x)),
    }
    lines = []
    for name, program in programs.items():
        jax.block_until_ready(program(*x))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(program(*x))
            lines += ["", name, *(line(event) for event in on_device(Path(folder)))]
    return lines


def on_device(folder: Path) -> Iterator[dict]:
    """The events of device kernels in the trace of a profile, in order."""
    (file,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:" in e["args"]["name"]}
    kernels = (e for e in events if e.get("pid") in devices and e.get("ph") == "X" and "hlo_op" in e.get("args", {}))
    seen = set()
    for event in sorted(kernels, key=lambda event: (event["ts"], "kernel_details" not in event["args"])):
        if event["ts"] not in seen:  # the same span stands on several lines of a trace: streams, operations, modules
            seen.add(event["ts"])
            yield event


def line(event: dict) -> str:
    arguments = event["args"]
    label = arguments.get("name") or arguments.get("tf_op") or arguments.get("long_name", "")
    return f"{event['dur']:10.1f} us  {event['name']:<32} {arguments['hlo_op']:<24} {label}"


if __name__ == "__main__":
    raise SystemExit(main())
