"""Attention over a cache on TPU: results, in the interpreter that simulates the chip, finds races and poisons memory.

They are compared with the definition in float64, with NaN in unread entries and any numbers in unused table entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAMILIES

from ejkernel.kernels._registry import kernel_registry
from ejkernel.types.page_attention import PageAttentionConfig
from ejkernel.types.ragged_decode_attention import RaggedDecodeAttentionConfig
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from . import paged as mixed
from .paged import attended, decode_defined, decode_step, wide
from .tpu_interpreter import interpreted
from .tpu_paged import STRANGE, TARGET, check, prepared, scales_of, slow, step, without, writing

# --- One token of each sequence ---------------------------------------------------------------------------------------


def decoding(dtype="float32", pages="same", sinks=(), scales=None, **sizes):
    x = decode_step(dtype=dtype, pages=dtype if pages == "same" else pages, **sizes)
    rng, heads = np.random.default_rng(1), x["q"].shape[1]
    if sinks:
        x["sinks"] = jnp.asarray(rng.standard_normal((heads, *sinks[1:])), jnp.float32)
    return x | scales_of(x["k_pages"].shape[:3], scales, rng)


def poisoned(x):
    """With NaN in the slots after each context, in pages of each sequence's own, and any page after its last."""
    (n, j), page = x["block_tables"].shape, x["k_pages"].shape[1]
    contexts = np.asarray(x["context_lens"])[:, None]
    own = jnp.arange(n * j, dtype=jnp.int32).reshape(n, j)
    used = (np.arange(j * page) < contexts).reshape(n * j, page)
    taken = {
        name: jnp.asarray(a)[x["block_tables"].reshape(-1) % len(a)]
        for name, a in x.items()
        if name.endswith(("pages", "_scale")) and a.ndim > 2
    }
    plain = x | taken | dict(block_tables=own)
    held = np.arange(j) < -(-contexts // page)
    return plain, plain | without(~used, plain) | dict(block_tables=jnp.where(held, own, STRANGE[:j]))


@pytest.mark.parametrize(
    "sizes, keys, options",
    [
        pytest.param(dict(h=8, g=4, d=16, e=24, dtype="bfloat16", sinks=(8, 2)), 16, dict(window=9), id="bf16"),
        pytest.param(
            dict(h=4, g=4, d=16, e=16, dtype="bfloat16", pages="int8", scales=(4,)), 16, {}, marks=slow, id="int8"
        ),
        pytest.param(dict(h=3, g=1, d=256, e=16), 24, dict(softcap=2.0), marks=slow, id="two parts"),
        pytest.param(dict(h=4, g=1, d=16, e=16, dtype="bfloat16"), 8, dict(window=20), marks=slow, id="one head"),
        pytest.param(dict(h=6, g=2, d=16, e=24, page=16), 1000, dict(softmax_scale=-0.3), marks=slow, id="one block"),
        pytest.param(dict(h=24, g=24, d=16, e=16), 16, dict(window=9), marks=slow, id="many heads"),
        pytest.param(
            dict(h=8, g=8, dtype="bfloat16", pages="float8_e4m3fn", scales=()),
            16,
            dict(window=9),
            marks=slow,
            id="e4m3",
        ),
        pytest.param(dict(h=4, g=4, pages="float8_e4m3fn"), 16, {}, marks=slow, id="float32 of e4m3"),
        pytest.param(dict(h=4, g=2, page=136), 136, dict(window=100), marks=slow, id="parts of pages"),
        pytest.param(
            dict(h=4, g=2, d=16, e=24, dtype="bfloat16", pages="int8", scales="slots"),
            16,
            dict(window=9),
            id="int8, scales of slots",
        ),
        pytest.param(
            dict(h=8, g=4, d=16, e=24, pages="float8_e4m3fn", scales="slots", sinks=(8, 2)),
            16,
            dict(softcap=2.0),
            marks=slow,
            id="e4m3, scales of slots",
        ),
        pytest.param(
            dict(h=4, g=2, page=136, dtype="bfloat16", pages="int8", scales="slots"),
            136,
            dict(window=100),
            marks=slow,
            id="parts of pages, scales of slots",
        ),
        pytest.param(
            dict(h=16, g=1, d=16, e=16, page=256, dtype="bfloat16", pages="int8", scales="slots"),
            256,
            dict(window=300),
            marks=slow,
            id="one head of 8 bits, large pages",
        ),
        pytest.param(dict(h=3, g=1, pages="float8_e4m3fn", scales=()), 8, {}, marks=slow, id="one head of e4m3"),
        pytest.param(
            dict(h=32, g=16, d=8, e=8, dtype="bfloat16", pages="int8", scales="slots"),
            16,
            {},
            marks=slow,
            id="16 heads",
        ),
        pytest.param(dict(h=6, g=3, dtype="bfloat16", sinks=(6,)), 16, {}, marks=slow, id="three heads"),
        pytest.param(dict(h=4, g=2, d=192, e=136, dtype="bfloat16"), 16, {}, marks=slow, id="192 features"),
        pytest.param(dict(h=4, g=2, scales="slots"), 16, {}, marks=slow, id="float32, scales of slots"),
        pytest.param(dict(h=4, g=4, d=16, e=16, dtype="float16", sinks=(4,)), 16, dict(window=9), id="float16"),
        pytest.param(dict(h=4, g=2, dtype="float16", scales="slots"), 16, {}, marks=slow, id="two heads of float16"),
        pytest.param(
            dict(h=4, g=2, dtype="float16", pages="int8", scales="slots"), 16, {}, marks=slow, id="f16 of int8"
        ),
    ],
)
def test_page_attention(sizes, keys, options):
    plain, x = poisoned(decoding(**sizes))
    wanted = decode_defined(plain, **options)
    config = PageAttentionConfig(keys)
    check("page_attention", x, config, wanted, plain, return_lse=True, **options)


def dense(h=6, g=2, d=16, e=24, length=40, dtype="float32"):
    rng, n = np.random.default_rng(0), 6
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    starts, ends = jnp.array([0, 3, -1, 30, 20, 9]), jnp.array([17, 40, 60, 31, 20, 5])
    x = dict(q=array(n, h, d), k=array(n, length, g, d), v=array(n, length, g, e))
    return x | dict(sequence_start=starts, sequence_end=ends, sinks=jnp.asarray(rng.standard_normal(h), jnp.float32))


@pytest.mark.parametrize(
    "sizes, options",
    [
        pytest.param(dict(), dict(window=9), id="window"),
        pytest.param(dict(h=4, dtype="bfloat16"), dict(softcap=2.0), marks=slow, id="bf16"),
        pytest.param(dict(h=4, g=1, d=8, dtype="bfloat16", length=48), {}, marks=slow, id="one head"),
    ],
)
def test_ragged_decode_attention(sizes, options):
    x, (window, softcap) = dense(**sizes), (options.get("window"), options.get("softcap"))
    wanted, length = [], x["k"].shape[1]
    visible = np.zeros((len(x["q"]), length), bool)
    for n, (start, end) in enumerate(zip(x["sequence_start"], x["sequence_end"], strict=True)):
        end = min(int(end), length)
        j = np.arange(length)
        visible[n] = (j >= int(start)) & (j < end) & (j >= end - (window or length))
        k, v = wide(x["k"][n]), wide(x["v"][n])
        wanted.append(attended(np.asarray(x["q"][n]), k, v, visible[n], x["sinks"], softcap))
    poison = {name: jnp.where(visible[..., None, None], x[name], jnp.nan) for name in ("k", "v")}
    config = RaggedDecodeAttentionConfig(1, 16)
    o, lse = map(np.stack, zip(*wanted, strict=True))
    check("ragged_decode_attention", x | poison, config, (o, lse), x, return_lse=True, **options)


# --- What holds for all -----------------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("operation", ["page_attention", "ragged_page_attention_v3"])
def test_under_vmap(operation):
    """The primitive's own batch axis: each element has its tables, and a pool or the pool of all."""
    if operation == "page_attention":
        x, config = decoding(h=4, dtype="bfloat16"), PageAttentionConfig(16)
        moving = ("q", "context_lens", "block_tables")
    else:
        x, config = writing(h=4, dtype="bfloat16", lengths=(9, 1, 0, 2, 3, 1)), RaggedPageAttentionConfig(8, 2)
        moving = ("q", "k", "v", "kv_pages")
    other = x | {name: x[name][::-1] for name in moving}
    (first, spec), (second, _) = prepared(operation, x), prepared(operation, other)
    axes = {"kv_pages"} if operation.endswith("v3") else set()
    shared = {"k_pages", "v_pages"} - axes
    both = type(first)(*(
        None if a is None else a if name in shared else jnp.concatenate([a, b])
        for name, a, b in zip(first._fields, first, second, strict=True)
    ))  # fmt: skip
    implementation = kernel_registry.find(operation, "pallas", "tpu").implementation
    formula = kernel_registry.find(operation, "xla").implementation
    found = interpreted(lambda *a: implementation(*a, spec=spec, config=config))(*both)
    for a, b in zip(found, formula(*both, spec=spec), strict=True):
        np.testing.assert_allclose(wide(a), wide(b), rtol=2e-2, atol=2e-2)


@slow
@pytest.mark.parametrize("own", ("k_scale", "k_pages v_scale", "k_pages v_pages k_scale v_scale"))
def test_scales_of_slots_under_vmap(own):
    """Each element has a pool or scales of its own, or those of all."""
    x, config = decoding(h=4, dtype="bfloat16", pages="int8", scales="slots"), PageAttentionConfig(16)
    own = {*own.split(), "q", "context_lens", "block_tables"}
    (first, spec), (second, _) = (
        prepared("page_attention", y, return_lse=True) for y in (x, x | {name: x[name][::-1] for name in own})
    )
    both = type(first)(*(
        None if a is None else jnp.concatenate([a, b]) if name in own else a
        for name, a, b in zip(first._fields, first, second, strict=True)
    ))  # fmt: skip
    implementation = kernel_registry.find("page_attention", "pallas", "tpu").implementation
    formula = kernel_registry.find("page_attention", "xla").implementation
    found = interpreted(lambda *a: implementation(*a, spec=spec, config=config))(*both)
    for a, b in zip(found, formula(*both, spec=spec), strict=True):
        np.testing.assert_allclose(wide(a), wide(b), rtol=2e-2, atol=2e-2)


@slow
@pytest.mark.parametrize("name", ("k_scale", "v_scale"))
def test_one_scale_of_slots_and_one_of_heads(name):
    plain = decoding(h=4, g=2, dtype="bfloat16", pages="int8", scales="slots")
    plain[name] = jnp.array([0.3, 0.2])
    plain, x = poisoned(plain)
    check("page_attention", x, PageAttentionConfig(16), decode_defined(plain), plain, return_lse=True)


@slow
@pytest.mark.parametrize(
    "operation",
    ("page_attention", "ragged_decode_attention", "ragged_page_attention"),
)
@pytest.mark.parametrize("name", ("normal", "large", "one_hot", "long_uniform"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_families(operation, name, dtype):
    """The four families of inputs, against the formula in float64."""
    case = next(case for case in FAMILIES if case.operation == operation and case.name == name)
    if operation == "ragged_decode_attention":
        case = case.resized(dict(t=case.sizes["t"] // 8 * 8))
    x, exact = case.arrays(dtype=jnp.dtype(dtype)), kernel_registry.find(operation, "xla").implementation
    with jax.enable_x64(True):
        wider = {n: jnp.asarray(np.asarray(a, np.float64)) if a.dtype == dtype else a for n, a in x.items()}
        wanted = exact(*prepared(operation, wider, **case.options)[0], spec=prepared(operation, x, **case.options)[1])
        wanted = [np.asarray(a) for a in wanted]
    config = kernel_registry.find(operation, "pallas", "tpu").implementation.heuristic(
        *reversed(prepared(operation, x, **case.options)), TARGET
    )
    check(operation, x, config, wanted, **case.options)


@slow
def test_batch_invariant():
    """A sequence has the same bits alone and with others, and as a chunk of a prefill or token by token."""
    x = step(dtype="bfloat16", h=4)
    implementation = kernel_registry.find("ragged_page_attention", "pallas", "tpu").implementation

    def run(x):
        operands, spec = prepared("ragged_page_attention", x, return_lse=True, batch_invariant=True)
        config = implementation.heuristic(spec, operands, TARGET)
        assert config.queries_per_block == 1
        return interpreted(lambda *a: implementation(*a, spec=spec, config=config))(*operands)

    found, starts = run(x), np.cumsum([0, *mixed.RAGGED_LENGTHS])
    for n in (0, 4):
        own = slice(starts[n], starts[n + 1])
        tables = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
        start = dict(query_start_loc=jnp.array([0, mixed.RAGGED_LENGTHS[n]]), num_seqs=jnp.array([1]))
        alone = run(x | tables | start | dict(q=x["q"][own]))
        for one, of_all in zip(alone, found, strict=True):
            np.testing.assert_array_equal(one, of_all[:, own])


@pytest.mark.parametrize(
    "operation, change, reason",
    [
        ("page_attention", dict(q="float16", k_pages="float16", v_pages="float16"), "1 rows of 16 float16"),
        ("page_attention", dict(num_splits=3), "num_splits is 3"),
        ("ragged_page_attention", dict(num_splits=3), "num_splits is 3"),
    ],
)
def test_what_is_refused(operation, change, reason):
    """With the reason, so that XLA takes the call."""
    x = decode_step(h=4, g=1) if operation == "page_attention" else mixed.ragged_step()
    options = {name: option for name, option in change.items() if isinstance(option, int)}
    for name, to in change.items():
        if isinstance(to, str):
            x[name] = x[name].astype(to)
        elif isinstance(to, tuple):
            x[name] = jnp.ones(to)
    operands, spec = prepared(operation, x, **options)
    assert reason in kernel_registry.find(operation, "pallas", "tpu").implementation.supports(spec, operands, TARGET)
