"""Attention over pages quantised by TurboQuant on TPU: results, in the interpreter that simulates the chip.

They are compared with the definition in float64, with NaN in unread norms and any numbers in unused table entries.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.quantization.turboquant.codebook import solve_lloyd_max
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from . import quantised_pages
from .paged import RAGGED_LENGTHS
from .quantised_pages import MATRICES, POOLS, defined, with_strangers
from .tpu_paged import TARGET, check, prepared, slow

N, J = 6, 3
CONTEXTS = (170, 300, 1, 257, 3, 200)  # the fifth sequence has more tokens than keys


def step(e=64, **sizes):
    """A prefill, a decode, a sequence without tokens, one with more tokens in the step than in all; and new keys."""
    sizes = dict(h=4, d=64, page=128, dtype="bfloat16", bits=4) | sizes
    return quantised_pages.step(rows=e, contexts=CONTEXTS, columns=J, **sizes)


@pytest.mark.parametrize(
    "sizes, config, options",
    [
        pytest.param(dict(), (8, 2), {}, id="bf16"),
        pytest.param(dict(dtype="float32", sinks=(4, 3)), (8, 2), dict(window=150, softcap=2.0), id="float32"),
        pytest.param(dict(h=2, d=128, e=128), (1, 1), dict(softmax_scale=-0.3), marks=slow, id="alone"),
        pytest.param(dict(h=8, g=1, sinks=(8,)), (4, 3), dict(window=9), marks=slow, id="eight of one head"),
        pytest.param(dict(h=2, page=256), (16, 1), dict(window=20, softcap=2.0), marks=slow, id="two pieces"),
        pytest.param(dict(h=3, g=3, norms="float32", bits=3), (32, 2), {}, marks=slow, id="three heads, three bits"),
        pytest.param(dict(dtype="float16", e=32, bits=2), (8, 2), {}, marks=slow, id="float16, few signs"),
        pytest.param(dict(e=256, d=192), (8, 1), {}, marks=slow, id="192 features, many signs"),
        pytest.param(dict(g=1, h=2, d=128, dtype="float32", bits=5), (1, 3), {}, marks=slow, id="five bits"),
    ],
)
def test_ragged_page_attention_v2_turboquant(sizes, config, options):
    if sizes.get("bits") == 5:
        x, _ = step(**sizes | dict(bits=4))
        x |= {name: jnp.asarray(solve_lloyd_max(4, 128).centroids, jnp.float32) for name in MATRICES[2:]}
    else:
        x, _ = step(**sizes)
    config = RaggedPageAttentionConfig(*config)
    poisoned, wanted = with_strangers(x, options.get("window")), defined(x, **options)
    check("ragged_page_attention_v2_turboquant", poisoned, config, wanted, x, return_lse=True, **options)


# --- What is written --------------------------------------------------------------------------------------------------


def writing(lengths=RAGGED_LENGTHS, contexts=CONTEXTS, h=4, g=2, count=N, **sizes):
    x, new = step(h=h, g=g, **sizes)
    starts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    return x | new | dict(context_lens=jnp.asarray(contexts), query_start_loc=starts, num_seqs=jnp.array([count]))


@pytest.mark.parametrize(
    "sizes, config, options",
    [
        pytest.param(dict(lengths=(9, 1, 1, 0, 5, 4), contexts=(130, 257, 1, 40, 3, 385)), (8, 2), {}, id="bf16"),
        pytest.param(dict(lengths=(1,) * 6, dtype="float32", norms="float32"), (1, 3), {}, marks=slow, id="decode"),
        pytest.param(
            dict(lengths=(0, 0, 0, 30, 0, 0), page=256, g=1, contexts=(9, 9, 9, 270, 9, 9)),
            (8, 1),
            dict(window=99),
            marks=slow,
            id="prefill",
        ),
        pytest.param(dict(count=0), (8, 1), {}, marks=slow, id="no sequence"),
    ],
)
def test_ragged_page_attention_v3_turboquant(sizes, config, options):
    """The pools, byte for byte, and the results of the second version with them."""
    name, x = "ragged_page_attention_v3_turboquant", writing(**sizes)
    x["block_tables"] = x["block_tables"].at[3, 0].set(-1)  # a page outside of the pool, and tokens beyond the table
    operands, spec = prepared(name, x, **options)
    known = kernel_registry.find(name, "xla").implementation(*operands, spec=spec)[2:]
    pools = {of: pool[0] for of, pool in zip(POOLS, known, strict=True)}
    exact = defined({n: a for n, a in x.items() if n not in ("k", "v")} | pools, **options)
    found = check(name, x, RaggedPageAttentionConfig(*config), exact, return_lse=True, **options)
    numbers = lambda a: np.asarray(a).reshape(-1).view(np.uint8)
    for a, pool in zip(found[2:], known, strict=True):
        np.testing.assert_array_equal(numbers(a), numbers(pool))
    if sizes.get("count", N):
        assert any((numbers(a) != numbers(x[of])).any() for a, of in zip(found[2:], POOLS, strict=True))


def test_two_sequences_may_write_to_one_page():
    """Each token is in its slot, as if they had been written one after the other."""
    name, x = "ragged_page_attention_v3_turboquant", writing(lengths=(1,) * 6, contexts=(4, 9, 130, 131, 20, 256))
    x["block_tables"] = x["block_tables"].at[:, 0].set(7).at[:, 1].set(3)
    operands, spec = prepared(name, x)
    known = kernel_registry.find(name, "xla").implementation(*operands, spec=spec)[2:]
    pools = {of: pool[0] for of, pool in zip(POOLS, known, strict=True)}
    exact = defined({n: a for n, a in x.items() if n not in ("k", "v")} | pools)
    found = check(name, x, RaggedPageAttentionConfig(1, 2), exact, return_lse=True)
    for a, pool in zip(found[2:], known, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(pool))


# --- What is left to XLA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, said",
    [
        (
            dict(page=64),
            "pages of 64 slots; the kernel takes multiples of 128, as XLA would rewrite the pool for others",
        ),
        (dict(page=16), "pages of 16 slots"),
        (dict(d=96), "96 features; the kernel takes multiples of 64 below 256"),
        (dict(d=256), "256 features"),
        (dict(e=96), "96 rows of qjl_projection; the kernel takes 32, 64, 128, 256, 512 and 768"),
        (dict(norms="float16"), "key_norms_pages are float16; the kernel takes bfloat16 and float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("version", ("v2", "v3"))
def test_left_to_xla(sizes, said, version):
    x = step(**sizes)[0] if version == "v2" else writing(**sizes)
    operands, spec = prepared(f"ragged_page_attention_{version}_turboquant", x)
    found = kernel_registry.find(f"ragged_page_attention_{version}_turboquant", "pallas", "tpu").implementation
    assert found.supports(spec, operands, TARGET).startswith(said)
