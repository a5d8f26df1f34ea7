"""A process that makes one call, its first: `first_call` starts it with the call and the start time in JSON.

It prints the seconds of each part as JSON.
"""

import json
import sys
import time
from itertools import pairwise

import jax
import jax.numpy as jnp

from ejkernel import lax
from ejkernel.ops.execution.executor import default_executor


def main(asked: dict) -> dict[str, float]:
    """Makes the call: the gradient of flash_attention with respect to q, k and v."""
    jax.devices()
    start = time.time() - asked["began"]
    searches = []
    selector = default_executor().selector
    search = selector.measure

    def timed(*args, **kwargs):
        began = time.perf_counter()
        try:
            return search(*args, **kwargs)
        finally:
            searches.append(time.perf_counter() - began)

    selector.measure = timed
    x = arrays(**asked["sizes"])
    ids = jnp.arange(x[0].shape[1])[None] * asked["segments"] // x[0].shape[1] + jnp.zeros(
        (x[0].shape[0], 1), jnp.int32
    )
    segments = dict(q_segment_ids=ids, kv_segment_ids=ids) if asked["segments"] else {}
    options = asked["options"] | ({"window": tuple(asked["options"]["window"])} if "window" in asked["options"] else {})
    loss = lambda *x, **segments: lax.flash_attention(*x, **segments, **options).astype(jnp.float32).sum()
    jax.block_until_ready((x, segments))
    times = [time.perf_counter()]

    def told(result):
        times.append(time.perf_counter())
        return result

    traced = told(jax.jit(jax.grad(loss, (0, 1, 2))).trace(*x, **segments))
    lowered = told(traced.lower())
    program = told(lowered.compile())
    told(jax.block_until_ready(program(*x, **segments)))
    trace, lower, compile_, run = (b - a for a, b in pairwise(times))
    parts = dict(trace=trace - sum(searches), lower=lower, compile=compile_, run=run)
    return dict(start=start, tuning=sum(searches), searches=len(searches), **parts)


def arrays(batch: int, length: int, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> list[jax.Array]:
    """q, k and v."""
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (batch, length, *shape), jnp.float32).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
