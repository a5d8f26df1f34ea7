"""The XLA implementation of flash_attention on a CPU: `python -m benchmarks.xla_cpu`, on an idle machine.

The time saved by skipping blocks outside of causal and window bounds, the memory of the gradient, and forward and
gradient beside `jax.nn.dot_product_attention`, with the contenders of a row interleaved. Prints a table, writes a
record, and exits with 1 if a bar is not met.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["EJKERNEL_CACHE_DIR"] = tempfile.mkdtemp()

import jax

from ejkernel.lax import flash_attention

from ._bars import Row, conclude
from ._harness import interleaved, queued
from ._records import RESULTS

HEADS, HEAD_DIM, MIB = 8, 64, 2**20


def main() -> int:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="rounds of each contender")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    arguments = parser.parse_args()
    rows = [*bounds(arguments.repeats), memory(), *beside_jax(arguments.repeats)]
    convention = f"least of {arguments.repeats} rounds; float32, {HEADS} heads of {HEAD_DIM} unless said"
    return conclude("xla_cpu", rows, convention, arguments.out)


def arrays(length: int, heads: int = HEADS) -> list[jax.Array]:
    """q, k, v and a cotangent."""
    return list(jax.random.normal(jax.random.key(0), (4, 1, length, heads, HEAD_DIM)))


def milliseconds(functions: dict[str, Callable[..., Any]], given: list[jax.Array], repeats: int) -> dict[str, float]:
    """The least time of a call of each function over rounds, which excludes other load of the machine."""
    times = interleaved({name: queued(jax.jit(f), *given) for name, f in functions.items()}, repeats)
    return {name: min(seconds) * 1e3 for name, seconds in times.items()}


def bounds(repeats: int) -> list[Row]:
    """The forward at 4096 tokens, beside the forward without causality or window."""
    options = {"full": {}, "causal": {"causal": True}, "window 256": {"causal": True, "window": 256}}
    forward = lambda of: lambda q, k, v: flash_attention(q, k, v, **of)
    times = milliseconds({name: forward(of) for name, of in options.items()}, arrays(4096)[:3], repeats)
    bars = {"causal": 0.7, "window 256": 0.3}
    return [
        Row(f"forward 4096, {name} beside full", times[name], times["full"], bar, "ms") for name, bar in bars.items()
    ]


def memory() -> Row:
    """The temporary memory of the gradient at 8192 tokens with 4 heads."""
    program = jax.jit(lambda *x: pullback(causal(flash_attention))(*x)[1])
    compiled = program.lower(*arrays(8192, heads=4)).compile()
    return Row("gradient 8192, 4 heads, memory", compiled.memory_analysis().temp_size_in_bytes / MIB, None, 100, "MiB")


def beside_jax(repeats: int) -> list[Row]:
    """Forward and gradient at lengths from 128 to 4096."""
    rows = []
    for length in (128, 256, 512, 1024, 2048, 4096):
        for name, of in (("full", lambda f: f), ("causal", causal)):
            contenders = {"ours": pullback(of(flash_attention)), "rival": pullback(of(jax.nn.dot_product_attention))}
            times = milliseconds(contenders, arrays(length), repeats)
            bar = 1.0 if length >= 1024 else 1.2
            rows.append(Row(f"forward + gradient {length}, {name}", times["ours"], times["rival"], bar, "ms"))
    return rows


def causal(attention: Callable[..., Any]) -> Callable[..., Any]:
    """The attention with its causal option."""
    option = "is_causal" if attention is jax.nn.dot_product_attention else "causal"
    return lambda q, k, v: attention(q, k, v, **{option: True})


def pullback(attention: Callable[..., Any]) -> Callable[..., Any]:
    """(q, k, v, cotangent) -> o and the gradients of q, k and v."""

    def run(q, k, v, cotangent):
        o, pull = jax.vjp(attention, q, k, v)
        return o, pull(cotangent)

    return run


if __name__ == "__main__":
    sys.exit(main())
