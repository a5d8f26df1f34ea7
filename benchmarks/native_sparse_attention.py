"""Native sparse attention beside flash-linear-attention: `python benchmarks/native_sparse_attention.py --shapes 16k`.

`16k` and its like are the selected branch with given lists: own block, first block and random ones in between, others
for each query or, in `16k-near`, the same for 16 queries in a row. They are judged against float64, gradients of full
size too. `16k-whole` is the compressed and the selected branch with the choice of the blocks; not everybody chooses the
same, so that a result has but to be finite.

`--configs` measures the selected branch with every config of the heuristics, too.
"""

import sys
from dataclasses import dataclass
from functools import cache, partial

from _packed import gate, imported, of_jax, of_torch, run, torch_on_gpu  # isort: skip (sets what JAX reads)

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, measure, yardstick

import ejkernel
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._xla import native_sparse_attention as in_jax
from ejkernel.ops.utils.devices import local_target
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands

CONVENTION = "flops: 4·B·H·S·blocks·size·D forward, 2.5 times as many backward; causal masks are not deducted"
FLOPS = {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5}
_OURS, _RIVAL = 3.0, 10.0


@dataclass(frozen=True)
class Selected:
    """A call; `together` queries in a row have the same random blocks."""

    length: int
    heads: int = 64
    kv_heads: int = 4
    features: int = 128
    blocks: int = 16
    size: int = 64
    together: int = 1
    whole: bool = False

    def __str__(self) -> str:
        lists = "whole" if self.whole else f"{self.blocks} of {self.size}, lists for {self.together}"
        return f"b1 s{self.length} h{self.heads}/{self.kv_heads} d{self.features} {lists}"


SHAPES = {
    "8k": Selected(8192),
    "16k": Selected(16384),
    "16k-near": Selected(16384, together=16),
    "64k": Selected(65536),
    "16k-whole": Selected(16384, whole=True),
}


def case(shape: Selected, mode: str, arguments) -> list:
    """The rows of one shape and mode."""
    x, lists, gates, do = _arrays(shape)
    judge = cache(lambda: _finite if shape.whole else _gate(shape, x, lists, do, mode))
    return measure(
        str(shape),
        mode,
        [*_ours(shape, mode, x, lists, gates, do, arguments.platforms), Contender("fla", partial(_fla, shape, mode))],
        lambda results: judge()(results),
        bounds=(_OURS, _RIVAL),
        work=FLOPS[mode] * 4 * shape.length * shape.heads * shape.blocks * shape.size * shape.features,
        yardstick=yardstick("bfloat16"),
        repeats=arguments.repeats,
    )


@cache
def _arrays(shape: Selected):
    """q, k and v; the lists; two gates; the cotangent."""
    keys = jax.random.split(jax.random.key(0), 6)
    normal = lambda key, heads: jax.random.normal(key, (1, shape.length, heads, shape.features), jnp.bfloat16)
    x = normal(keys[0], shape.heads), normal(keys[1], shape.kv_heads), normal(keys[2], shape.kv_heads)
    gates = jax.nn.sigmoid(jax.random.normal(keys[4], (2, 1, shape.length, shape.heads), jnp.bfloat16))
    return x, jnp.asarray(_lists(shape)), gates, normal(keys[5], shape.heads)


def _lists(shape: Selected) -> np.ndarray:
    """[1, S, G, blocks]: the own block, the first, and others in between, each once; −1 where there are none."""
    rng, groups = np.random.default_rng(0), shape.kv_heads
    runs, total = -(-shape.length // shape.together), -(-shape.length // shape.size)
    rank = np.repeat(rng.random((runs, groups, total), np.float32), shape.together, 0)[: shape.length]
    own, block = np.arange(shape.length)[:, None, None] // shape.size, np.arange(total)
    rank = np.where(block == own, 3, np.where(block == 0, 2, rank))
    rank = np.where(block > own, -1, rank)
    best = np.argpartition(-rank, min(shape.blocks, total) - 1, axis=-1)[..., : shape.blocks]
    return np.where(np.take_along_axis(rank, best, -1) < 0, -1, best).astype(np.int32)[None]


def _finite(results) -> float:
    return 0.0 if all(bool(abs(x).sum() < np.inf) for x in results) else float("nan")


def _gate(shape: Selected, x, lists, do, mode: str):
    """Judges o and the gradients by the implementation in plain JAX."""
    spec = NativeSparseAttentionSpec(shape.size, shape.features**-0.5)

    def formula(dtype):
        operands = Operands(*(a.astype(dtype) for a in x), lists)
        config = in_jax.heuristic(spec, operands, local_target())
        of = lambda kind: kernel_registry.find(f"native_sparse_attention{kind}", "xla").implementation
        forward = jax.jit(lambda x: of("")(*x, spec=spec, config=config))
        backward = lambda x, out, do: of("_bwd")(
            x, out, out._replace(o=do, lse=None), wrt=("q", "k", "v"), spec=spec, config=config
        )
        out = forward(operands)
        found = [] if mode == "bwd" else [out.o]
        found += [] if mode == "fwd" else jax.jit(backward)(operands, out, do.astype(dtype))
        return [np.asarray(a).astype(np.float64) for a in found]

    return gate(list, formula, x[0].dtype)


def _ours(shape: Selected, mode: str, x, lists, gates, do, platforms):
    """The operation on each platform, and in it with each config."""

    def contender(platform, config=None):
        def function(q, k, v):
            if shape.whole:
                given = dict(g_cmp=gates[0], g_slc=gates[1], block_counts=shape.blocks)
            else:
                given = dict(block_indices=lists, cfg=config)
            platform_ = None if platform == "auto" else platform
            return ejkernel.modules.native_sparse_attention(q, k, v, **given, block_size=shape.size, platform=platform_)

        return of_jax(function, x, do, mode, "native_sparse_attention")

    yield from (Contender(f"ejkernel {p}", partial(contender, p), ours=True) for p in platforms)
    if "--configs" in EXTRA and not shape.whole:
        kernel = ejkernel.modules.NativeSparseAttention()
        given = dict(q=x[0], k=x[1], v=x[2], block_indices=lists, block_size=shape.size)
        space = kernel.config_space(ejkernel.ops.Invocation(kernel=kernel, args=(), kwargs=given))
        for config in (config for config in space if config.platform == "triton"):
            name = f"q{config.block_q} k{config.block_k} w{config.num_warps} s{config.num_stages}"
            yield Contender(f"ejkernel {name}", partial(contender, "triton", config), ours=True)


def _fla(shape: Selected, mode: str):
    torch = torch_on_gpu()
    attend = imported("fla.ops.nsa.parallel").parallel_nsa
    x, lists, gates, do = _arrays(shape)
    lists, gates = (torch.from_dlpack(a) for a in (lists, gates))
    lists = torch.where(lists < 0, shape.length, lists).long()  # its kernels take a block behind the query for none
    options = dict(block_counts=shape.blocks, block_size=shape.size)
    ones = torch.ones_like(gates[0])
    if shape.whole:
        function = lambda q, k, v: attend(q, k, v, g_cmp=gates[0], g_slc=gates[1], **options)
    else:
        function = lambda q, k, v: attend(q, k, v, g_slc=ones, block_indices=lists, **options)
    return of_torch(function, x, do, mode)


EXTRA = [argument for argument in sys.argv if argument == "--configs"]

if __name__ == "__main__":
    sys.argv = [argument for argument in sys.argv if argument not in EXTRA]
    sys.exit(run("native_sparse_attention", __doc__, SHAPES, case, CONVENTION, "TFLOP/s"))
