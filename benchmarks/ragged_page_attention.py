"""Steps of prefill over pages beside their rivals: `python benchmarks/ragged_page_attention.py --modes fwd`.

What is timed is a chain of calls, each with the last one's output for its queries, so that the host counts for little:
one jitted function here, a CUDA graph for FlashAttention-3. Pages lie in random order. Every contender is judged
against the formula in float64 before; the table gives the time of a chain and TF/s of the keys that are seen.

FlashAttention-3 is that of vLLM's wheel, if the folder FA3_FOLDER holds _vllm_fa3_C.abi3.so; its keys and values are
two arrays.
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

CHAIN = 4
CONVENTION = f"a chain of {CHAIN} calls; operations: 4 · heads · features · Σ keys that each token sees"
_OURS, _RIVAL = 3.0, 10.0
_JUDGED = 16  # tokens, the last of the first sequence


@dataclass(frozen=True)
class Step:
    """Sequences with so many keys in the cache and new tokens, heads, features, and slots of a page."""

    sequences: int
    cached: int
    new: int
    heads: int
    kv_heads: int
    features: int = 128
    page: int = 64

    def __str__(self) -> str:
        heads = f"h{self.heads}/{self.kv_heads} d{self.features}"
        return f"b{self.sequences} {self.cached}+{self.new} {heads} page {self.page}"

    @property
    def context(self) -> int:
        return self.cached + self.new

    @property
    def operations(self) -> int:
        seen = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.sequences * self.heads * self.features * seen


SHAPES = {
    "b8-4k-512": Step(8, 4096, 512, 32, 8),
    "b8-4k-512-page16": Step(8, 4096, 512, 32, 8, page=16),
    "b8-4k-512-page128": Step(8, 4096, 512, 32, 8, page=128),
    "b1-0-8k": Step(1, 0, 8192, 32, 8),
    "b4-16k-2k": Step(4, 16384, 2048, 32, 8),
    "b32-2k-128": Step(32, 2048, 128, 32, 8),
    "b64-1k-64": Step(64, 1024, 64, 32, 8),
    "b1-32k-256": Step(1, 32768, 256, 32, 8),
    "b8-4k-512-d64": Step(8, 4096, 512, 32, 8, 64),
    "b8-4k-512-d256": Step(8, 4096, 512, 16, 4, 256),
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
        work=CHAIN * step.operations,
        yardstick=yardstick(None),
        repeats=arguments.repeats,
    )


def _arrays(step: Step) -> dict[str, jax.Array]:
    """Those of a call."""
    columns = -(-step.context // step.page)
    pages = step.sequences * columns
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    return dict(
        q=normal(keys[0], step.sequences * step.new, step.heads, step.features),
        kv_pages=normal(keys[1], pages, step.page, 2 * step.kv_heads, step.features),
        context_lens=jnp.full((step.sequences,), step.context, jnp.int32),
        block_tables=jax.random.permutation(keys[2], pages).astype(jnp.int32).reshape(-1, columns),
        query_start_loc=jnp.arange(step.sequences + 1, dtype=jnp.int32) * step.new,
        num_seqs=jnp.asarray([step.sequences], jnp.int32),
    )


def _gate(step: Step, arrays: dict[str, jax.Array]):
    """Judges the first of a chain's outputs for the last tokens of the first sequence."""
    tokens = slice(max(0, step.new - _JUDGED), step.new)
    q = np.asarray(arrays["q"][tokens], np.float64).reshape(
        -1, step.kv_heads, step.heads // step.kv_heads, step.features
    )
    kv = np.asarray(arrays["kv_pages"][arrays["block_tables"][0]], np.float64)
    k, v = (kv[:, :, n::2].reshape(-1, step.kv_heads, step.features) for n in range(2))
    position = step.context - len(q) + np.arange(len(q))
    hidden = np.where(np.arange(len(k)) <= position[:, None], 0, -np.inf)[:, None, None]

    def formula(dtype):
        s = np.einsum("tgrd,kgd->tgrk", q, k) * step.features**-0.5 + hidden
        p = np.exp(s - s.max(-1, keepdims=True))
        p = (p / p.sum(-1, keepdims=True)).astype(dtype).astype(np.float64)
        return [np.einsum("tgrk,kgd->tgrd", p, v).astype(dtype).astype(np.float64)]

    return gate(lambda results: [results[0][tokens].reshape(q.shape)], formula, arrays["q"].dtype)


def _ours(arrays: dict[str, jax.Array], platform: str) -> Prepared:
    config = None if platform == "auto" else dict(platform=platform)

    def chain(q, arrays):
        outputs = [q]
        for _ in range(CHAIN):
            outputs.append(ejkernel.lax.ragged_page_attention(outputs[-1], **arrays, config=config))
        return outputs[1], outputs[-1]

    q, others = arrays["q"], {name: x for name, x in arrays.items() if name != "q"}
    compiled = jax.jit(chain)
    explained = str(ejkernel.explain("ragged_page_attention", **arrays)).splitlines()[0]
    return Prepared(jax.block_until_ready(compiled(q, others)), queued(compiled, q, others), explained)


def _flash_attention_3(step: Step, arrays: dict[str, jax.Array]) -> Prepared:
    torch = torch_on_gpu()
    library = Path(os.environ.get("FA3_FOLDER", "."), "_vllm_fa3_C.abi3.so")
    if not library.exists():
        raise Unavailable("FA3_FOLDER names no folder with _vllm_fa3_C.abi3.so")
    torch.ops.load_library(str(library))
    fa3 = torch.ops._vllm_fa3_C
    q, used, table, ends = (
        torch.from_dlpack(arrays[name]) for name in ("q", "context_lens", "block_tables", "query_start_loc")
    )
    k, v = (torch.from_dlpack(arrays["kv_pages"][:, :, n::2] + 0) for n in range(2))
    shape = (step.sequences, step.new, step.context, step.heads, step.kv_heads, step.features, step.features)
    plan = fa3.get_scheduler_metadata(
        *shape, torch.bfloat16, used, ends, None, None, None, None, step.page, 0, True, -1, -1, False, 0, None, 0
    )
    attend = lambda q: fa3.fwd(
        q, k, v, None, None, None, None, ends, None, None, None, used, step.new, step.context, table, None, None, None,
        None, None, None, None, None, step.features**-0.5, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None,
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
    sys.exit(run("ragged_page_attention", __doc__, SHAPES, case, CONVENTION, "TF/s"))
