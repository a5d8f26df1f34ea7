"""Attention over a cache on TPU passes the real TPU compiler, for every generation, and copies no pool.

The shapes are those of Llama-3 8B, 32 query heads and 8 key/value heads of 128 features, and of models like it; a
normal run has a few of them, each on one generation.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS

from .tpu_compiler import TARGETS, device

pytest.importorskip("libtpu")

array = jax.ShapeDtypeStruct
OPERATION = ("page_attention", "ragged_page_attention", "ragged_page_attention_v3", "ragged_decode_attention")
SEQUENCES, CONTEXT, PREFILL = 32, 2048, 512
QUICK = {
    ("v5e", "page_attention", 16, SEQUENCES),
    ("v5p", "ragged_page_attention", 64, SEQUENCES),
    ("v6e", "ragged_page_attention_v3", 128, SEQUENCES),
    ("tpu7x", "ragged_page_attention", 16, PREFILL),
}


def arguments(operation, page, tokens, h=32, g=8, d=128, dtype="bfloat16", pages=None, **more):
    """Of an operation, for sequences of up to 2048 keys."""
    columns, ints, stored = CONTEXT // page, lambda *shape: array(shape, jnp.int32), jnp.dtype(pages or dtype)
    x = dict(q=array((tokens, h, d), jnp.dtype(dtype)))
    if operation == "ragged_decode_attention":
        cache = array((SEQUENCES, CONTEXT, g, d), stored)
        return x | dict(k=cache, v=cache, sequence_start=ints(SEQUENCES), sequence_end=ints(SEQUENCES)) | more
    pool = SEQUENCES * columns, page
    x |= dict(context_lens=ints(SEQUENCES), block_tables=ints(SEQUENCES, columns))
    if operation == "page_attention":
        return x | dict.fromkeys(("k_pages", "v_pages"), array((*pool, g, d), stored)) | more
    x |= dict(query_start_loc=ints(SEQUENCES + 1), num_seqs=ints(1), kv_pages=array((*pool, 2 * g, d), stored))
    if operation == "ragged_page_attention_v3":
        x |= dict.fromkeys(("k", "v"), array((tokens, g, d), jnp.dtype(dtype)))
    return x | more


def configs(generation, operation, x, **options):
    """The space of a call."""
    spec = []

    def prepared(arrays):
        call = OPERATIONS[operation].prepare_arguments(**arrays, **options)
        spec.append(call.spec)
        return OPERATIONS[operation].algorithm.operands(**call.named)

    operands = jax.eval_shape(prepared, x)
    implementation = kernel_registry.find(operation, "pallas", "tpu").implementation
    assert implementation.supports(spec[0], operands, TARGETS[generation]) is None
    return implementation.space(spec[0], operands, TARGETS[generation])


def program(generation, operation, x, config, **options):
    """What the compiler makes of a call, as text."""
    on_core = jax.sharding.SingleDeviceSharding(device(generation))
    x = {name: array(a.shape, a.dtype, sharding=on_core) for name, a in x.items()}
    donated = ("kv_pages",) if operation == "ragged_page_attention_v3" else ()
    call = lambda **x: OPERATIONS[operation].call(**x, **options, config=config)
    traced = jax.jit(call, donate_argnames=donated).trace(**x)
    return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def copies(text, x):
    """Instructions that move a whole cache."""
    largest = max(a.size for a in x.values())
    made = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|fusion|transpose|reshape|convert|copy-start)\(", text)
    return [(shape, how) for shape, how in made if math.prod(map(int, shape.split(","))) >= largest]


@pytest.mark.parametrize(
    "generation, operation, page, tokens",
    [
        pytest.param(*of, marks=() if of in QUICK else pytest.mark.slow)
        for generation in TARGETS
        for operation in OPERATION
        for page in (16, 64, 128)
        for tokens in ((SEQUENCES, PREFILL) if operation.startswith("ragged_page") else (SEQUENCES,))
        for of in [(generation, operation, page, tokens)]
        if operation != "ragged_decode_attention" or page == 128
    ],
)
def test_llama(request, generation, operation, page, tokens):
    """Every config of the space (in a normal run the likeliest); the pool stays where it is, or is written in place."""
    x = arguments(operation, page, tokens)
    space = configs(generation, operation, x)
    assert len(space) > 1
    quick = request.node.get_closest_marker("slow") is None
    for config in space[:1] if quick else space:
        text = program(generation, operation, x, config)
        assert "tpu_custom_call" in text
        assert not copies(text, x)
        if operation == "ragged_page_attention_v3":
            assert re.search(r"input_output_alias=\{ \{1\}: \(\d+, \{\}", text)


@pytest.mark.slow
@pytest.mark.parametrize("generation", TARGETS)
@pytest.mark.parametrize("operation", OPERATION)
@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(d=64), {}),
        (dict(d=80), {}),
        (dict(d=256, g=2), {}),
        (dict(h=4, g=1), {}),
        (dict(h=6, g=3), {}),
        (dict(h=24, g=12), {}),
        (dict(d=192), {}),
        (dict(h=32, g=32), {}),
        (dict(dtype="float32"), {}),
        (dict(dtype="float16"), {}),
        (dict(dtype="float16", pages="int8", k_scale=array((), jnp.float32)), {}),
        (dict(pages="int8", k_scale=array((), jnp.float32), v_scale=array((8,), jnp.float32)), {}),
        (dict(pages="float8_e4m3fn"), {}),
        (dict(h=24, sinks=array((24, 2), jnp.float32)), dict(window=1000, softcap=30.0)),
    ],
    ids=str,
)
def test_sizes_and_options(generation, operation, sizes, options):
    """By the config of the heuristic, a decode and a prefill."""
    if "pages" in sizes and not operation.endswith("page_attention"):
        pytest.skip("its cache has the dtype of the queries")
    for tokens in (SEQUENCES, PREFILL) if operation.startswith("ragged_page") else (SEQUENCES,):
        x = arguments(operation, 16, tokens, **sizes)
        config = configs(generation, operation, x, **options)[0]
        assert "tpu_custom_call" in program(generation, operation, x, config, **options)


SCALED = {("v5e", "page_attention", 16, 8), ("v6e", "ragged_page_attention", 128, 1)}


@pytest.mark.parametrize(
    "generation, operation, page, g",
    [
        pytest.param(*of, marks=() if of in SCALED else pytest.mark.slow)
        for generation in TARGETS
        for operation in ("page_attention", "ragged_page_attention")
        for page in (8, 16, 64, 128, 256)
        for g in (1, 2, 3, 8)
        for of in [(generation, operation, page, g)]
    ],
)
@pytest.mark.parametrize("pages", ("int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)))
def test_scales_of_slots(generation, operation, page, g, pages):
    """Beside pages of 8 bits, which stay where they are, however few heads they have."""
    scale = array((SEQUENCES * CONTEXT // page, page, g), jnp.float32)
    for tokens in (SEQUENCES, PREFILL) if operation.startswith("ragged_page") else (SEQUENCES,):
        x = arguments(operation, page, tokens, h=4 * g, g=g, pages=pages, k_scale=scale, v_scale=scale)
        text = program(generation, operation, x, configs(generation, operation, x)[0])
        assert "tpu_custom_call" in text
        assert not copies(text, x)


@pytest.mark.slow
@pytest.mark.parametrize("generation", TARGETS)
@pytest.mark.parametrize("tokens", (SEQUENCES, PREFILL))
def test_drafts(generation, tokens):
    x = arguments("ragged_page_attention", 16, tokens, draft_mask=array((tokens, 8), jnp.bool_))
    config = configs(generation, "ragged_page_attention", x)[0]
    assert "tpu_custom_call" in program(generation, "ragged_page_attention", x, config)
