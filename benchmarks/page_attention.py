"""Decoding over pages beside its rivals: `python benchmarks/page_attention.py --shapes b32-4k`.

What is timed is a chain of calls, each with the last one's output for its queries, so that the host counts for little:
one jitted function here, a CUDA graph for FlashAttention-3. Pages lie in random order. Every contender is judged
against the formula in float64 before; the table gives the time of a chain and TB/s of keys and values.

FlashAttention-3 is that of vLLM's wheel, if the folder FA3_FOLDER holds _vllm_fa3_C.abi3.so.
"""

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from _packed import gate, run, torch_on_gpu  # isort: skip (sets what JAX reads)

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, Prepared, Unavailable, measure, queued, yardstick

import ejkernel

CHAIN = 8
CONVENTION = f"a chain of {CHAIN} calls; bytes: keys and values of all contexts, read once by each"
_OURS, _RIVAL = 3.0, 10.0
_JUDGED = 2  # sequences


@dataclass(frozen=True)
class Step:
    """A step of decoding: sequences of one context, heads, features, and slots of a page."""

    sequences: int
    context: int
    heads: int
    kv_heads: int
    features: int = 128
    page: int = 16

    def __str__(self) -> str:
        heads = f"h{self.heads}/{self.kv_heads} d{self.features}"
        return f"b{self.sequences} s{self.context} {heads} page {self.page}"


SHAPES = {
    "b128-8k": Step(128, 8192, 32, 8),
    "b32-4k": Step(32, 4096, 32, 8),
    "b16-8k": Step(16, 8192, 32, 8),
    "b8-32k": Step(8, 32768, 32, 8),
    "b64-2k": Step(64, 2048, 64, 8),
    "b4-32k": Step(4, 32768, 64, 8),
    "b1-1k": Step(1, 1024, 32, 4),
    "b1-32k": Step(1, 32768, 32, 4),
    "b1-128k": Step(1, 131072, 32, 4),
}


def case(step: Step, mode: str, arguments) -> list:
    """The rows of one shape; there is a forward alone."""
    if mode != "fwd":
        return []
    arrays = _arrays(step)
    judge = cache(lambda: _gate(step, arrays))
    contenders = [
        Contender(f"ejkernel {platform}", lambda platform=platform: _ours(arrays, platform), ours=True)
        for platform in arguments.platforms
    ]
    return measure(
        str(step),
        mode,
        [*contenders, Contender("FlashAttention-3", lambda: _flash_attention_3(step, arrays))],
        lambda results: judge()(results),
        bounds=(_OURS, _RIVAL),
        work=CHAIN * 2 * step.sequences * step.context * step.kv_heads * step.features * 2,
        yardstick=yardstick(None),
        repeats=arguments.repeats,
    )


def _arrays(step: Step) -> dict[str, jax.Array]:
    """Those of a call."""
    columns = step.context // step.page
    pages = step.sequences * columns
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    pool = (pages, step.page, step.kv_heads, step.features)
    return dict(
        q=normal(keys[0], step.sequences, step.heads, step.features),
        k_pages=normal(keys[1], *pool),
        v_pages=normal(keys[2], *pool),
        context_lens=jnp.full((step.sequences,), step.context, jnp.int32),
        block_tables=jax.random.permutation(keys[3], pages).astype(jnp.int32).reshape(-1, columns),
    )


def _gate(step: Step, arrays: dict[str, jax.Array]):
    """Judges the first of a chain's outputs of the first sequences."""
    numbers = {n: np.asarray(arrays[n][:_JUDGED], np.float64) for n in ("q",)}
    tables = arrays["block_tables"][:_JUDGED]
    k, v = (
        np.asarray(arrays[n][tables], np.float64).reshape(len(tables), -1, step.kv_heads, step.features)
        for n in ("k_pages", "v_pages")
    )
    rows = numbers["q"].reshape(len(tables), step.kv_heads, -1, step.features)

    def formula(dtype):
        p = np.einsum("bgrd,btgd->bgrt", rows, k) * step.features**-0.5
        p = np.exp(p - p.max(-1, keepdims=True))
        p = (p / p.sum(-1, keepdims=True)).astype(dtype).astype(np.float64)
        return [np.einsum("bgrt,btgd->bgrd", p, v).astype(dtype).astype(np.float64)]

    return gate(lambda results: [results[0][:_JUDGED].reshape(rows.shape)], formula, arrays["q"].dtype)


def _ours(arrays: dict[str, jax.Array], platform: str) -> Prepared:
    config = None if platform == "auto" else dict(platform=platform)

    def chain(q, arrays):
        outputs = [q]
        for _ in range(CHAIN):
            outputs.append(ejkernel.lax.page_attention(outputs[-1], **arrays, config=config))
        return outputs[1], outputs[-1]

    q, others = arrays["q"], {name: x for name, x in arrays.items() if name != "q"}
    compiled = jax.jit(chain)
    explained = str(ejkernel.explain("page_attention", **arrays)).splitlines()[0]
    return Prepared(jax.block_until_ready(compiled(q, others)), queued(compiled, q, others), explained)


def _flash_attention_3(step: Step, arrays: dict[str, jax.Array]) -> Prepared:
    torch = torch_on_gpu()
    library = Path(os.environ.get("FA3_FOLDER", "."), "_vllm_fa3_C.abi3.so")
    if not library.exists():
        raise Unavailable("FA3_FOLDER names no folder with _vllm_fa3_C.abi3.so")
    torch.ops.load_library(str(library))
    fa3 = torch.ops._vllm_fa3_C
    q, k, v, used, table = (torch.from_dlpack(arrays[name]) for name in arrays)
    ends = torch.arange(step.sequences + 1, dtype=torch.int32, device="cuda")
    shape = (step.sequences, 1, step.context, step.heads, step.kv_heads, step.features, step.features)
    plan = fa3.get_scheduler_metadata(
        *shape, torch.bfloat16, used, ends, None, None, None, None, step.page, 0, True, -1, -1, False, 0, None, 0
    )
    attend = lambda q: fa3.fwd(
        q, k, v, None, None, None, None, ends, None, None, None, used, 1, step.context, table, None, None, None, None,
        None, None, None, None, step.features**-0.5, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip
    first = attend(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = q
        for _ in range(CHAIN):
            last = attend(last)

    def batch(calls: int) -> None:
        for _ in range(calls):
            graph.replay()
        torch.cuda.synchronize()

    return Prepared((first, last), batch)


if __name__ == "__main__":
    sys.exit(run("page_attention", __doc__, SHAPES, case, CONVENTION, "TB/s"))
