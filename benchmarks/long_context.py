"""The memory of a layer whose sequence is sharded: `python -m benchmarks.long_context`, on any machine.

The gradient of one layer is compiled for CPU devices, at lengths too large to run there, and XLA reports its memory on
each device. Nothing is run. docs/long_context.py draws the record.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import lax

from ._records import RESULTS, result_file, save_record

HEADS, KV_HEADS, HEAD_DIM, DEVICES = 32, 8, 128, 8
LENGTHS = (16384, 65536, 262144)
TOKENS = P(None, "x")


def main() -> int:
    """Compiles, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    arguments = parser.parse_args()
    rows = []
    for row in measured():
        rows.append(row)
        print(
            f"{row['layer']:<32}{row['devices']:>3} devices {row['length']:>8} tokens {row['bytes'] / 2**30:>9.2f} GiB"
        )
    evidence = f"memory of the gradient of a layer over {DEVICES} devices, as XLA says it for CPU devices"
    convention = (
        f"arguments, results and temporaries of a device; batch 1, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, float32"
    )
    save_record(file := result_file("long_context", arguments.out), evidence, convention, rows=rows)
    print(f"kept in {file}")
    return 0


def measured() -> Iterator[dict[str, Any]]:
    """A row for each layer and length."""
    ring = lambda strategy: partial(lax.ring_attention, axis_name="x", causal=True, strategy=strategy)
    attention = {
        ("flash_attention", 1): partial(lax.flash_attention, causal=True),
        **{(f"ring_attention, {name}", DEVICES): ring(name) for name in ("ring", "all_gather", "ulysses")},
    }
    linear = {("gla", 1): lax.gla, ("gla, axis_name", DEVICES): partial(lax.gla, axis_name="x")}
    for layers, gates in ((attention, 0), (linear, 1)):
        for (layer, devices), f in layers.items():
            for length in LENGTHS:
                yield dict(
                    layer=layer, devices=devices, length=length, bytes=bytes_of_a_device(f, devices, length, gates)
                )


def bytes_of_a_device(f: Callable[..., Any], devices: int, length: int, gates: int) -> int:
    """The memory of the gradient of Σ f² on each device; gates have the shape of q."""
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    array = lambda heads: jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.float32)
    x = (array(HEADS), array(KV_HEADS), array(KV_HEADS), *[array(HEADS)] * gates)
    if devices > 1:
        f = jax.shard_map(f, mesh=mesh, in_specs=(TOKENS,) * len(x), out_specs=TOKENS)
    gradient = jax.grad(lambda *x: (f(*x) ** 2).sum(), tuple(range(len(x))))
    sharding = NamedSharding(mesh, TOKENS)
    compiled = jax.jit(gradient, in_shardings=sharding, out_shardings=sharding).lower(*x).compile()
    found = compiled.memory_analysis()
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


if __name__ == "__main__":
    sys.exit(main())
