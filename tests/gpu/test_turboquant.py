"""Attention over pages quantised by TurboQuant in Triton on a GPU, beside the definition in float64.

Entries and signs are made by instructions of PTX, which only a GPU runs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _turboquant
from ejkernel.kernels._triton._turboquant import prefill
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives._pages import CacheSpec
from tests.kernels.paged import close
from tests.kernels.quantised_pages import POOLS, defined, step, with_strangers

pytestmark = pytest.mark.gpu
V2 = OPERATIONS["ragged_page_attention_v2_turboquant"]
# A prefill of several tiles, decodes of short and long contexts, a sequence without tokens, one with more than keys.
MIXED = dict(contexts=(200, 700, 1, 333, 3, 8), lengths=(90, 1, 1, 0, 5, 4), tokens=105, page=16)
DECODES = dict(contexts=(1, 64, 700, 65, 128), lengths=(1, 1, 1, 1, 1), count=5, tokens=5, page=64)
DTYPES = ("bfloat16", "float16", "float32")
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
# Products of 16 bits are of float16, whatever the dtype.
LSE = {"bfloat16": 5e-4, "float16": 5e-4, "float32": 1e-5}


def check(x, config=None, **options):
    f = jax.jit(
        lambda x: ejkernel.lax.ragged_page_attention_v2_turboquant(**x, **options, return_lse=True, config=config)
    )
    given = with_strangers(x)
    assert "triton_kernel_call" in f.lower(given).as_text()
    (o, lse), wanted, dtype = f(given), defined(x, **options), x["q"].dtype.name
    close(o, wanted[0], TOLERANCE[dtype])
    close(lse, wanted[1], LSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", ((8, 8, 128, 128), (8, 2, 64, 64), (8, 1, 128, 32), (12, 1, 96, 104), (4, 1, 256, 256)), ids=str
)
@pytest.mark.parametrize("lengths", (MIXED, DECODES), ids=("mixed", "decodes"))
def test_shapes(lengths, shape, dtype):
    h, g, d, rows = shape
    check(step(h=h, g=g, d=d, rows=rows, bits=4, dtype=dtype, **lengths)[0])


@pytest.mark.parametrize("bits", (2, 3, 5))
@pytest.mark.parametrize("norms", ("float32", "float16"))
def test_bits_and_norms(norms, bits):
    """Codebooks of 2, 4 and 16 entries for keys, 4, 8 and 16 for values; and indices past their ends."""
    x, _ = step(h=8, g=2, d=128, rows=128, bits=min(bits, 4), dtype="bfloat16", norms=norms, **MIXED)
    if bits == 5:
        x["key_codebook"] = x["value_codebook"]
    check(x)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_options(dtype):
    check(
        step(h=8, g=2, d=128, rows=128, bits=4, dtype=dtype, sinks=(8, 2), **MIXED)[0],
        window=100,
        softcap=3.0,
        softmax_scale=0.3,
    )


@pytest.mark.parametrize(
    "heads, groups, d", ((8, 2, 128), (16, 1, 128), (32, 1, 128), (40, 1, 128), (4, 1, 256), (16, 1, 256))
)
def test_every_config(heads, groups, d):
    x, _ = step(h=heads, g=groups, d=d, rows=d, bits=4, dtype="bfloat16", **MIXED)
    call = V2.prepare_arguments(**x)
    found = _turboquant.space(CacheSpec(), V2.algorithm.operands(**call.named), gpu_target())
    found = {(c.keys_per_block, c.num_warps, c.num_stages): c for c in found}
    for config in found.values():
        check(x, config)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("window", (None, 150))
def test_prefills_that_do_not_fit_together(window, dtype, monkeypatch):
    """Their keys are dequantised in turn, in a loop of the program; with vmap for two steps at once."""
    monkeypatch.setattr(prefill, "LEAST_CAPACITY", 0)
    lengths = dict(lengths=(90, 1, 200, 0, 40, 64), contexts=(500, 700, 200, 333, 40, 1000), tokens=400, page=32)
    x, _ = step(h=8, g=2, d=128, rows=128, bits=4, dtype=dtype, **lengths)
    check(x, window=window)
    f = jax.jit(jax.vmap(partial(ejkernel.lax.ragged_page_attention_v2_turboquant, window=window, return_lse=True)))
    given = (
        x,
        x | dict(context_lens=x["context_lens"][::-1], query_start_loc=jnp.array([0, 50, 51, 51, 60, 260, 399])),
    )
    found = f(**jax.tree.map(lambda *a: jnp.stack(a), *given))
    for n, one in enumerate(given):
        for a, wanted, tolerance in zip(found, defined(one, window=window), (TOLERANCE, LSE), strict=True):
            close(a[n], wanted, tolerance[dtype])


def test_a_scan_over_a_donated_cache():
    """Three steps of decoding, each of which sees the keys that those before it wrote."""
    x, new = step(h=8, g=2, d=128, rows=128, bits=4, dtype="bfloat16", **DECODES)
    names = ("q", *new, *POOLS, "context_lens", "block_tables", "query_start_loc", "num_seqs")
    rest = {name: a for name, a in x.items() if name not in names}

    def steps(pools, q, k, v):
        def one(pools, n):
            given = dict(zip(POOLS, pools, strict=True)) | {name: x[name] for name in names[-3:]} | rest
            o, lse, *pools = ejkernel.lax.ragged_page_attention_v3_turboquant(
                q=q * (n + 1), k=k + n, v=v - n, context_lens=x["context_lens"] - 2 + n, **given, return_lse=True
            )
            return tuple(pools), (o, lse)

        return jax.lax.scan(one, pools, jnp.arange(3, dtype=q.dtype).astype(jnp.int32))

    pools, results = tuple(x[name] for name in POOLS), []
    for n in range(3):
        one = x | dict(zip(POOLS, pools, strict=True)) | dict(context_lens=x["context_lens"] - 2 + n)
        o, lse, *pools = jax.jit(ejkernel.lax.ragged_page_attention_v3_turboquant, static_argnames="return_lse")(
            **one | dict(q=x["q"] * (n + 1), k=new["k"] + n, v=new["v"] - n), return_lse=True
        )
        wanted = defined(one | dict(q=x["q"] * (n + 1)) | dict(zip(POOLS, pools, strict=True)))
        close(o, wanted[0], 1e-2)
        close(lse, wanted[1], 5e-4)
        results.append((o, lse))
    found, (o, lse) = jax.jit(steps, donate_argnums=0)(tuple(map(jnp.array, (x[n] for n in POOLS))), x["q"], **new)
    for a, b in zip(found, pools, strict=True):
        np.testing.assert_array_equal(a, b)
    for n, (one, of_lse) in enumerate(results):
        close(o[n], one, 1e-2)
        close(lse[n], of_lse, 5e-4)


def test_vmap_and_the_same_bits():
    calls = [step(h=8, g=2, d=128, rows=128, bits=4, dtype="bfloat16", seed=seed, **DECODES)[0] for seed in range(2)]
    together = jax.tree.map(lambda *a: jnp.stack(a), *calls)
    f = jax.jit(jax.vmap(lambda x: ejkernel.lax.ragged_page_attention_v2_turboquant(**x, return_lse=True)))
    found = f(together)
    for n, x in enumerate(calls):
        for one, wanted, tolerance in zip(found, defined(x), (1e-2, 5e-4), strict=True):
            close(one[n], wanted, tolerance)
    jax.tree.map(np.testing.assert_array_equal, f(together), found)
