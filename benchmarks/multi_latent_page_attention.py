"""Latent attention over pages beside FlashMLA: `python benchmarks/multi_latent_page_attention.py --shapes b128-4k-h16`.

What is timed is a chain of calls, so that the host counts for little: one jitted function here, in which each call has
the last one's output for its queries, a CUDA graph for FlashMLA. Pages lie in random order. Every contender is judged
against the formula in float64 before; the table gives the time of a chain and TB/s of latents and rotary parts. A head
makes 1.9 floating point operations of a byte: with 128 heads a TB/s is 242 TFLOP/s.

FlashMLA is that of vLLM's wheel, if the folder FA3_FOLDER holds _flashmla_C.abi3.so.
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
CONVENTION = f"a chain of {CHAIN} calls; bytes: latents and rotary parts of all contexts, read once by each"
_OURS, _RIVAL = 3.0, 10.0
_JUDGED = 2  # sequences
OPERATION = "multi_latent_page_attention"


@dataclass(frozen=True)
class Step:
    """A step: sequences of one context, of which each has some tokens, heads, features, and slots of a page."""

    sequences: int
    context: int
    heads: int
    tokens: int = 1
    latent: int = 512
    rope: int = 64
    page: int = 64

    def __str__(self) -> str:
        sizes = f"h{self.heads} d{self.latent}+{self.rope} page {self.page}"
        return f"b{self.sequences} s{self.context} q{self.tokens} {sizes}"


SHAPES = {
    "b128-4k-h16": Step(128, 4096, 16),
    "b128-4k-h64": Step(128, 4096, 64),
    "b128-4k-h128": Step(128, 4096, 128),
    "b32-16k-h16": Step(32, 16384, 16),
    "b32-16k-h128": Step(32, 16384, 128),
    "b1-32k-h16": Step(1, 32768, 16),
    "b1-32k-h128": Step(1, 32768, 128),
    "b128-4k-h16-q4": Step(128, 4096, 16, tokens=4),
    "b64-4k-h128-q2": Step(64, 4096, 128, tokens=2),
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
        [*contenders, Contender("FlashMLA", lambda: _flash_mla(step, arrays))],
        lambda results: judge()(results),
        bounds=(_OURS, _RIVAL),
        work=CHAIN * step.sequences * step.context * (step.latent + step.rope) * 2,
        yardstick=yardstick(None),
        repeats=arguments.repeats,
    )


def _arrays(step: Step) -> dict[str, jax.Array]:
    """Those of a call."""
    columns, tokens = step.context // step.page, step.sequences * step.tokens
    pages = step.sequences * columns
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    return dict(
        q_latent=normal(keys[0], tokens, step.heads, step.latent),
        q_rope=normal(keys[1], tokens, step.heads, step.rope),
        pages=normal(keys[2], pages, step.page, step.latent + step.rope),
        context_lens=jnp.full((step.sequences,), step.context, jnp.int32),
        block_tables=jax.random.permutation(keys[3], pages).astype(jnp.int32).reshape(-1, columns),
        query_start_loc=jnp.arange(step.sequences + 1, dtype=jnp.int32) * step.tokens,
        num_seqs=jnp.full((1,), step.sequences, jnp.int32),
    )


def _gate(step: Step, arrays: dict[str, jax.Array]):
    """Judges the first of a chain's outputs of the first sequences."""
    judged = min(_JUDGED, step.sequences)
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)[: judged * step.tokens]
    q = np.asarray(q, np.float64).reshape(judged, step.tokens, step.heads, -1)
    pages = np.asarray(arrays["pages"][arrays["block_tables"][:judged]], np.float64)
    keys = pages.reshape(judged, step.context, step.latent + step.rope)
    hidden = np.arange(step.context) > step.context - step.tokens + np.arange(step.tokens)[:, None]

    def formula(dtype):
        s = np.einsum("bthd,bkd->bhtk", q, keys) * (step.latent + step.rope) ** -0.5
        p = np.exp(np.where(hidden, -np.inf, s - s.max(-1, keepdims=True)))
        p = (p / p.sum(-1, keepdims=True)).astype(dtype).astype(np.float64)
        return [np.einsum("bhtk,bkd->bthd", p, keys[..., : step.latent]).astype(dtype).astype(np.float64)]

    shape = judged, step.tokens, step.heads, step.latent
    return gate(lambda results: [results[0].reshape(-1, *shape[1:])[:judged]], formula, arrays["q_latent"].dtype)


def _ours(arrays: dict[str, jax.Array], platform: str) -> Prepared:
    config = None if platform == "auto" else dict(platform=platform)

    def chain(q, arrays):
        outputs = [q]
        for _ in range(CHAIN):
            outputs.append(ejkernel.lax.multi_latent_page_attention(outputs[-1], **arrays, config=config))
        return outputs[1], outputs[-1]

    q, others = arrays["q_latent"], {name: x for name, x in arrays.items() if name != "q_latent"}
    compiled = jax.jit(chain)
    first = jax.block_until_ready(compiled(q, others))
    explained = str(ejkernel.explain(OPERATION, **arrays)).splitlines()[0]
    return Prepared(first, queued(compiled, q, others), explained)


def _flash_mla(step: Step, arrays: dict[str, jax.Array]) -> Prepared:
    torch = torch_on_gpu()
    library = Path(os.environ.get("FA3_FOLDER", "."), "_flashmla_C.abi3.so")
    if not library.exists():
        raise Unavailable("FA3_FOLDER names no folder with _flashmla_C.abi3.so")
    torch.ops.load_library(str(library))
    decode = torch.ops._flashmla_C.dense_decode_fwd
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)
    q = q.reshape(step.sequences, step.tokens, step.heads, -1)
    q, pages, used, table = map(
        torch.from_dlpack, (q, arrays["pages"][:, :, None], arrays["context_lens"], arrays["block_tables"])
    )
    options = step.latent, used, table, (step.latent + step.rope) ** -0.5, step.tokens > 1
    _, _, plan, splits = decode(q, pages, *options, None, None, None)
    attend = lambda: decode(q, pages, *options, plan, splits, None)[0]
    first = attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            last = attend()

    def batch(calls: int) -> None:
        for _ in range(calls):
            graph.replay()
        torch.cuda.synchronize()

    return Prepared((first, last), batch)


if __name__ == "__main__":
    sys.exit(run(OPERATION, __doc__, SHAPES, case, CONVENTION, "TB/s"))
