"""Attention over pages quantised by TurboQuant on TPU passes the real TPU compiler, which copies no pool of bytes."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("libtpu")

from ejkernel.modules._operation import OPERATIONS

from .quantised_pages import MATRICES, POOLS
from .test_tpu_paged_compile import CONTEXT, PREFILL, SEQUENCES, array, configs, copies
from .tpu_compiler import TARGETS, device

V2, V3 = (f"ragged_page_attention_{version}_turboquant" for version in ("v2", "v3"))
QUICK = {("v5e", V3, SEQUENCES), ("tpu7x", V2, SEQUENCES)}


def arguments(
    operation, tokens, h=32, g=8, d=128, e=128, page=128, dtype="bfloat16", norms="bfloat16", entries=(8, 16)
):
    """Of an operation, for sequences of up to 2048 keys."""
    columns, ints = CONTEXT // page, lambda *shape: array(shape, jnp.int32)
    pool = SEQUENCES * columns, page, g
    widths = (d // 2,), (e // 8,), (2,), (d // 2,), ()
    kinds = "uint8", "uint8", norms, "uint8", norms
    x = dict(q=array((tokens, h, d), jnp.dtype(dtype)), context_lens=ints(SEQUENCES), num_seqs=ints(1))
    x |= dict(block_tables=ints(SEQUENCES, columns), query_start_loc=ints(SEQUENCES + 1))
    x |= {name: array((*pool, *last), jnp.dtype(of)) for name, last, of in zip(POOLS, widths, kinds, strict=True)}
    matrices = (d, d), (e, d), *((n,) for n in entries)
    x |= {name: array(of, jnp.float32) for name, of in zip(MATRICES, matrices, strict=True)}
    return x | (dict.fromkeys(("k", "v"), array((tokens, g, d), jnp.dtype(dtype))) if operation == V3 else {})


def compiled(generation, operation, x, config, **options):
    """The program of a call that gives its pools to the operation, if that writes them."""
    on_core = jax.sharding.SingleDeviceSharding(device(generation))
    x = {name: array(a.shape, a.dtype, sharding=on_core) for name, a in x.items()}
    call = lambda **x: OPERATIONS[operation].call(**x, **options, config=config)
    traced = jax.jit(call, donate_argnames=POOLS if operation == V3 else ()).trace(**x)
    return traced.lower(lowering_platforms=("tpu",)).compile()


def check(generation, operation, x, **options):
    """Compiles the likeliest config: pools stay where they are, and are written in place."""
    found = compiled(generation, operation, x, configs(generation, operation, x, **options)[0], **options)
    text = found.as_text()
    kernels = text.count('custom_call_target="tpu_custom_call"')
    assert kernels >= (2 if operation == V3 else 1)
    assert not copies(text, {name: x[name] for name in POOLS})
    if operation == V3:
        assert found.memory_analysis().alias_size_in_bytes >= sum(
            x[name].size * x[name].dtype.itemsize for name in POOLS
        )


@pytest.mark.parametrize(
    "generation, operation, tokens",
    [
        pytest.param(*of, marks=() if of in QUICK else pytest.mark.slow)
        for generation in TARGETS
        for operation in (V2, V3)
        for tokens in (SEQUENCES, PREFILL)
        for of in [(generation, operation, tokens)]
    ],
)
def test_llama(generation, operation, tokens):
    """32 query heads and 8 key/value heads of 128 features, as in Llama-3 8B."""
    check(generation, operation, arguments(operation, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("generation", TARGETS)
@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(d=64, e=64), {}),
        (dict(d=192, e=256, h=6, g=3), {}),
        (dict(h=8, g=1, e=32), dict(window=1000, softcap=30.0)),
        (dict(h=4, g=2, page=512, e=768), {}),
        (dict(dtype="float32", norms="float32", entries=(16, 3)), {}),
        (dict(dtype="float16"), {}),
        (dict(h=32, g=32), {}),
    ],
    ids=str,
)
def test_sizes_and_options(generation, sizes, options):
    for tokens in (SEQUENCES, PREFILL):
        check(generation, V3, arguments(V3, tokens, **sizes), **options)
