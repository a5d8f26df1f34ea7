"""The cost of a call on the host, beside `jax.nn.dot_product_attention`: `python -m benchmarks.host_cost`.

On the CPU, with arrays so small that computing them does not count: the dispatch of an eager and of a jitted call, a
cache hit of the Executor, and tracing and lowering of the forward and of the gradient. A time is the least over rounds
in which ours and the rival are interleaved, which excludes other load of the machine. Tracing and lowering start with
empty caches of JAX, and are measured in CPU time. Prints a table, writes a record, and exits with 1 if a bar is missed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["EJKERNEL_CACHE_DIR"] = tempfile.mkdtemp()

import jax
import jax.numpy as jnp

from ejkernel.lax import flash_attention
from ejkernel.modules import FlashAttention
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor

from ._bars import Row, conclude
from ._records import RESULTS

SHAPE = (1, 16, 2, 16)


def main() -> int:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each contender, ten times as many of calls")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    arguments = parser.parse_args()
    rows = [*calls(arguments.rounds), cache_hit(arguments.rounds), *tracing_and_lowering(arguments.rounds)]
    convention = f"of a call, least of {arguments.rounds} rounds, interleaved; float32 {list(SHAPE)}"
    return conclude("host_cost", rows, convention, arguments.out)


def least(contenders: list[Callable[[], Any]], rounds: int, calls: int, *, cold: bool = False) -> list[float]:
    """Microseconds of a call of each contender; with `cold` in CPU time, after the caches of JAX are emptied."""
    clock = time.process_time if cold else time.perf_counter
    times = [float("inf")] * len(contenders)
    for _ in range(rounds + 1):  # one more than asked for, since the first also warms up
        for i, contender in enumerate(contenders):
            if cold:
                jax.clear_caches()
            start = clock()
            for _ in range(calls):
                result = contender()
            jax.block_until_ready(result)
            times[i] = min(times[i], (clock() - start) / calls * 1e6)
    return times


def arrays() -> list[jax.Array]:
    """q, k and v."""
    return [jax.random.normal(jax.random.key(i), SHAPE) for i in range(3)]


def calls(rounds: int) -> list[Row]:
    """Eager and jitted calls, each beside a jitted call of the rival."""
    x = arrays()
    rival, jitted = jax.jit(jax.nn.dot_product_attention), jax.jit(lambda q, k, v: flash_attention(q, k, v))
    eager, ours, theirs = least([lambda: flash_attention(*x), lambda: jitted(*x), lambda: rival(*x)], 10 * rounds, 20)
    return [Row("eager call, rival jitted", eager, theirs, 6.0, "µs"), Row("jitted call", ours, theirs, None, "µs")]


def cache_hit(rounds: int) -> Row:
    """The Executor's choice if the config is in memory."""
    run = Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False))
    inv, _ = FlashAttention().prepare(arrays(), {})
    run.selector.cache.put(inv.kernel.key_builder(inv), inv.kernel.heuristic_cfg(inv))
    (hit,) = least([lambda: run.choose(inv.kernel, inv)], 10 * rounds, 20)
    return Row("cache hit of the Executor", hit, None, 20.0, "µs")


def tracing_and_lowering(rounds: int) -> list[Row]:
    """Rows for the forward and the gradient with respect to q, k and v; each function is new to JAX.

    Our primitive is one equation while it is traced, and its decomposition is traced when it is lowered, while the
    rival's is traced at once; hence a row for the sum of both.
    """
    types = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * 3

    def forward(attention):
        return lambda q, k, v: attention(q, k, v)

    def gradient(attention):
        return jax.grad(lambda q, k, v: attention(q, k, v).sum(), argnums=(0, 1, 2))

    def trace(make, attention):
        return lambda: jax.make_jaxpr(make(attention))(*types) and None

    def lower(make, attention):
        traced = jax.jit(make(attention)).trace(*types)
        return lambda: traced.lower(lowering_platforms=("cpu",)) and None

    def whole(make, attention):
        return lambda: jax.jit(make(attention)).trace(*types).lower(lowering_platforms=("cpu",)) and None

    both = (flash_attention, jax.nn.dot_product_attention)
    return [
        Row(f"{what} of the {make.__name__}", *least([how(make, f) for f in both], rounds, 1, cold=True), bar, "µs")
        for what, how, bar in (("tracing", trace, 1.0), ("lowering", lower, 2.0), ("both", whole, None))
        for make in (forward, gradient)
    ]


if __name__ == "__main__":
    sys.exit(main())
