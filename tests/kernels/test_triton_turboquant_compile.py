"""The kernel over pages quantised by TurboQuant, compiled without GPUs: all configs fit, and few registers spill.

The bound of shared memory counts no entries of codebooks but those for warpgroups: they are made in registers.
"""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import gpu_target, lowering_for
from ejkernel.kernels._triton import _launch, _turboquant
from ejkernel.kernels._triton._paged import TileConfig
from ejkernel.kernels._triton.ragged_page_attention_v2_turboquant import ragged_page_attention_v2_turboquant
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v2_turboquant import Operands
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from . import compiler
from .test_triton_compile import KINDS

MOST_SPILLED = 512
# Tokens, query heads and heads of the cache, features, rows of the projection, entries of the codebook of keys.
SHAPES = {
    "decode": (32, 32, 8, 128, 128, 8),
    "16 entries": (32, 32, 8, 128, 128, 16),
    "64 features": (32, 8, 8, 64, 64, 8),
    "96 features": (32, 32, 8, 96, 96, 8),
    "256 features": (32, 16, 4, 256, 256, 8),
    "16 heads of a group": (32, 128, 8, 128, 128, 8),
    "64 heads of a group": (32, 64, 1, 128, 128, 8),
    "32 heads of 256": (32, 32, 1, 256, 256, 8),
    "drafts": (128, 32, 8, 128, 128, 8),
    "prefill": (2048, 32, 8, 128, 128, 8),
    "prefill of 256": (2048, 16, 4, 256, 256, 8),
}
QUICK = ("decode", "prefill", "256 features")


def operands(tokens, heads, groups, d, rows, entries, dtype, page=64, sequences=32, columns=64):
    of = lambda dtype: lambda *shape: jax.ShapeDtypeStruct((1, *shape), dtype)
    ints, bytes, norms, single = map(of, (jnp.int32, jnp.uint8, jnp.bfloat16, jnp.float32))
    slots = 512, page, groups
    return Operands(
        of(dtype)(tokens, heads, d), bytes(*slots, d // 2), bytes(*slots, rows // 8), norms(*slots, 2),
        bytes(*slots, d // 2), norms(*slots), ints(sequences), ints(sequences, columns), ints(sequences + 1), ints(1),
        single(d, d), single(rows, d), single(entries), single(16),
    )  # fmt: skip


def launches(monkeypatch, x, spec=CacheSpec(softmax_scale=0.1)):
    """Those of a call with each tile of a decode, of which the tile of a prefill is the same."""
    found = {}
    for tiles in _turboquant._fitting(x, _turboquant._decodes(x), gpu_target()):
        config = RaggedPageAttentionConfig(
            keys_per_block=tiles.keys, num_splits=2, num_warps=tiles.warps, num_stages=tiles.stages
        )
        call = lambda config=config: jax.eval_shape(
            lambda x: ragged_page_attention_v2_turboquant(*x, spec=spec, config=config), x
        )
        found |= {launch: None for launch in compiler.launches(monkeypatch, _launch, call)}
    return list(found)


def named(name, found):
    return [launch for launch in found if launch.kernel.__name__ == name]


def check(target, x, monkeypatch, spec=CacheSpec(softmax_scale=0.1)):
    with lowering_for(KINDS[target]):
        assert _turboquant.supports(CacheSpec(), x, gpu_target()) is None or target == "gfx942"
        found = launches(monkeypatch, x, spec)
        for launch in named("turboquant_kernel", found):
            constants = dict(launch.constants)
            tiles = TileConfig(constants["ROWS"], constants["BLOCK_K"], launch.num_warps, launch.num_stages)
            binary = compiler.binary(launch, compiler.TARGETS[target])
            print(target, tiles, binary.shared, binary.registers, binary.spilled)
            assert binary.shared <= _turboquant.shared_memory(x, tiles, _launch.has_ptx()), tiles
            assert (binary.spilled or 0) <= MOST_SPILLED, tiles
        for launch in named("dequantise_kernel", found):
            binary = compiler.binary(launch, compiler.TARGETS[target])
            print(target, binary.shared, binary.registers, binary.spilled)
            assert binary.shared <= _launch.shared_memory_limit(gpu_target())
            assert (binary.spilled or 0) <= MOST_SPILLED


@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
@pytest.mark.parametrize("shape", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in SHAPES])
@pytest.mark.parametrize(
    "target", ("sm_90", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_80", "sm_100", "sm_120", "gfx942")))
)
def test_every_config(target, shape, dtype, monkeypatch):
    x = operands(*SHAPES[shape], dtype)
    with lowering_for(KINDS[target]):
        wrong = _turboquant.supports(CacheSpec(), x, gpu_target())
    if target != "gfx942" and wrong and ("share" in wrong or "shared memory" in wrong):
        assert dtype == "float32"
        return
    check(target, x, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100", "sm_120"))
@pytest.mark.parametrize("page", (16, 64))
def test_options(page, target, monkeypatch):
    """Window and softcap; and tiles of several pages, whose numbers are loaded key by key."""
    spec = CacheSpec(window=100, softcap=5.0, softmax_scale=0.1)
    check(target, operands(*SHAPES["decode"], "bfloat16", page=page), monkeypatch, spec)
