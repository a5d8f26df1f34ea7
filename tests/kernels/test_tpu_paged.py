"""Attention over a cache on TPU: numbers, in the interpreter that simulates the chip, finds races and poisons memory.

Against the definition in float64. What nobody may see holds NaN, and tables any numbers where they say nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAMILIES

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import Target
from ejkernel.types.page_attention import PageAttentionConfig
from ejkernel.types.ragged_decode_attention import RaggedDecodeAttentionConfig
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from . import paged as mixed
from .paged import DTYPES, attended, decode_defined, decode_step, wide
from .tpu_interpreter import interpreted

slow = pytest.mark.slow
TARGET = Target("tpu", "TPU v6 lite")
STRANGE = np.array([-1, 2**31 - 1, -(2**31), 7, 10**6])
PAGE = 8


def prepared(operation, x, **options):
    call = OPERATIONS[operation].prepare_arguments(**x, **options)
    return OPERATIONS[operation].algorithm.operands(**call.named), call.spec


def check(operation, x, config, wanted, plain=None, **options):
    """Results with an error of twice that of the formula in the same dtype, which is given `plain` without NaN."""
    operands, spec = prepared(operation, x, **options)
    implementation = kernel_registry.find(operation, "pallas", "tpu").implementation
    assert implementation.supports(spec, operands, TARGET) is None
    found = interpreted(lambda *a: implementation(*a, spec=spec, config=config))(*operands)
    formula = kernel_registry.find(operation, "xla").implementation
    known = formula(*prepared(operation, plain or x, **options)[0], spec=spec)
    for a, b, exact in zip(found, known, wanted, strict=False):
        a, b, exact = wide(a).reshape(np.shape(exact)), wide(b).reshape(np.shape(exact)), wide(exact)
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(a[~finite], exact[~finite])
        error, usual = (np.abs(y[finite] - exact[finite]).max(initial=0) for y in (a, b))
        assert error <= 2 * usual + 4e-7 * max(1, np.abs(exact[finite]).max(initial=0)), (error, usual)
    return found


# --- One token of each sequence ---------------------------------------------------------------------------------------


def decoding(dtype="float32", pages="same", sinks=(), scales=None, **sizes):
    x = decode_step(dtype=dtype, pages=dtype if pages == "same" else pages, **sizes)
    rng, heads = np.random.default_rng(1), x["q"].shape[1]
    if sinks:
        x["sinks"] = jnp.asarray(rng.standard_normal((heads, *sinks[1:])), jnp.float32)
    if scales is not None:
        x |= {name: jnp.asarray(rng.uniform(0.1, 0.5, scales), jnp.float32) for name in ("k_scale", "v_scale")}
    return x


def poisoned(x):
    """With NaN in the slots after each context, in pages of each sequence's own, and any page after its last."""
    (n, j), page = x["block_tables"].shape, x["k_pages"].shape[1]
    contexts = np.asarray(x["context_lens"])[:, None]
    own = jnp.arange(n * j, dtype=jnp.int32).reshape(n, j)
    used = (np.arange(j * page) < contexts).reshape(n * j, page, 1, 1)
    taken = {
        name: jnp.asarray(x[name])[x["block_tables"].reshape(-1) % len(x[name])] for name in ("k_pages", "v_pages")
    }
    plain = x | taken | dict(block_tables=own)
    is_float = jnp.issubdtype(x["k_pages"].dtype, jnp.floating)
    rubbish = {name: jnp.where(used, a, jnp.nan if is_float else 99) for name, a in taken.items()}
    held = np.arange(j) < -(-contexts // page)
    return plain, plain | rubbish | dict(block_tables=jnp.where(held, own, STRANGE[:j]))


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
    ],
)
def test_page_attention(sizes, keys, options):
    plain, x = poisoned(decoding(**sizes))
    wanted = decode_defined(plain, **options)
    config = PageAttentionConfig(keys)
    check("page_attention", x, config, wanted, plain, return_lse=True, **options)


@slow
def test_every_number_of_8_bits():
    """Those that float8_e4m3fn has, of which NaN is one, and of int8."""
    for pages, count in (("float8_e4m3fn", 256), ("int8", 256)):
        numbers = jnp.arange(count, dtype=jnp.uint8).view(DTYPES[pages])
        x = dict(
            q=jnp.zeros((count // 8, 4, 8)),
            k_pages=jnp.zeros((count // 8, PAGE, 4, 8), DTYPES[pages]),
            v_pages=jnp.broadcast_to(numbers.reshape(count // 8, 1, 1, 8), (count // 8, PAGE, 4, 8)),
            context_lens=jnp.ones(count // 8, jnp.int32),
            block_tables=jnp.arange(count // 8, dtype=jnp.int32)[:, None],
        )
        operands, spec = prepared("page_attention", x)
        implementation = kernel_registry.find("page_attention", "pallas", "tpu").implementation
        found = interpreted(lambda *a, f=implementation, s=spec: f(*a, spec=s, config=PageAttentionConfig(8)))(
            *operands
        )
        np.testing.assert_array_equal(found.o[0, :, 0].reshape(-1), numbers.astype(jnp.float32))


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


# --- Steps of many tokens ---------------------------------------------------------------------------------------------


def step(h=6, g=2, d=16, dtype="float32", pages="same", sinks=False, scales=None, drafts=0):
    """A prefill, a decode, a sequence without tokens, one that is longer in the step than as a whole, and rubbish."""
    x, rng = mixed.ragged_step(h, g, d, dtype, dtype if pages == "same" else pages), np.random.default_rng(1)
    n, j = x["block_tables"].shape
    pool = x["kv_pages"][jnp.asarray(rng.integers(0, len(x["kv_pages"]), n * j))]
    x |= dict(kv_pages=pool, block_tables=jnp.asarray(rng.permutation(n * j).reshape(n, j), jnp.int32))
    if sinks:
        x["sinks"] = jnp.asarray(rng.standard_normal((h, 3)), jnp.float32)
    if scales is not None:
        x |= {name: jnp.asarray(rng.uniform(0.1, 0.5, scales), jnp.float32) for name in ("k_scale", "v_scale")}
    if drafts:
        x["draft_mask"] = jnp.asarray(rng.random((mixed.TOKENS, drafts)) < 0.5)
    return x


def rubbish(x):
    """NaN in slots that nobody sees and in queries of no sequence; any numbers in tables that say nothing."""
    (n, j), there = x["block_tables"].shape, np.arange(len(mixed.RAGGED_CONTEXTS)) < mixed.COUNT
    contexts = np.where(there, mixed.RAGGED_CONTEXTS, 0)[:, None]
    used = np.zeros((n * j, PAGE), bool)
    used[np.asarray(x["block_tables"]).reshape(-1)] = (np.arange(j * PAGE) < contexts).reshape(n * j, PAGE)
    is_float = jnp.issubdtype(x["kv_pages"].dtype, jnp.floating)
    tokens = np.arange(mixed.TOKENS) < sum(mixed.RAGGED_LENGTHS[: mixed.COUNT])
    return x | dict(
        q=jnp.where(tokens[:, None, None], x["q"], jnp.nan),
        kv_pages=jnp.where(used[..., None, None], x["kv_pages"], jnp.nan if is_float else 99),
        context_lens=jnp.where(there, x["context_lens"], -7),
        block_tables=jnp.where(np.arange(j) < -(-contexts // PAGE), x["block_tables"], STRANGE[:j]),
        query_start_loc=jnp.where(np.arange(n + 1) <= mixed.COUNT, x["query_start_loc"], -3),
    )


@pytest.mark.parametrize(
    "sizes, config, options",
    [
        pytest.param(dict(h=4, dtype="bfloat16", sinks=True), (8, 2), dict(window=9), id="bf16"),
        pytest.param(dict(drafts=3), (8, 2), dict(window=9), marks=slow, id="drafts"),
        pytest.param(dict(h=4, drafts=130, dtype="bfloat16"), (1, 2), {}, marks=slow, id="many drafts"),
        pytest.param(dict(), (1, 1), dict(softcap=2.0, batch_invariant=True), marks=slow, id="alone"),
        pytest.param(dict(), (16, 5), dict(softmax_scale=-0.3), marks=slow, id="one block"),
        pytest.param(dict(h=12, g=4, d=8), (32, 1), dict(window=20), marks=slow, id="large tiles"),
        pytest.param(dict(h=3, g=1, d=256, dtype="bfloat16"), (8, 2), {}, marks=slow, id="two parts"),
        pytest.param(dict(h=4, dtype="bfloat16", pages="int8", scales=(2,)), (8, 2), {}, marks=slow, id="int8"),
        pytest.param(dict(h=4, pages="float8_e4m3fn", scales=()), (8, 2), dict(window=9), marks=slow, id="e4m3"),
    ],
)
def test_ragged_page_attention(sizes, config, options):
    x = step(**sizes)
    wanted = mixed.ragged_defined(x, **{name: option for name, option in options.items() if name != "batch_invariant"})
    config = RaggedPageAttentionConfig(*config)
    check("ragged_page_attention", rubbish(x), config, wanted, x, return_lse=True, **options)


@slow
@pytest.mark.parametrize("count", range(7))
def test_any_number_of_sequences(count):
    """None too, and tables that say nothing of those that are not there."""
    x = step() | dict(num_seqs=jnp.array([count]))
    wanted = mixed.ragged_defined(x)
    check("ragged_page_attention", x, RaggedPageAttentionConfig(8, 3), wanted, return_lse=True)


def writing(h=6, g=2, d=16, dtype="float32", lengths=(17, 1, 0, 5, 5, 2)):
    """A step that fills pages, and writes beyond a table and into a page that is not there."""
    x, rng = step(h, g, d, dtype), np.random.default_rng(2)
    x |= {name: jnp.asarray(rng.standard_normal((mixed.TOKENS, g, d)), dtype) for name in ("k", "v")}
    x["block_tables"] = x["block_tables"].at[4, 0].set(-1)
    contexts = jnp.array([24, 40, 1, 33, 6, mixed.J * PAGE + 1])
    return x | dict(
        context_lens=contexts, query_start_loc=jnp.asarray(np.cumsum((0, *lengths)), jnp.int32), num_seqs=jnp.array([6])
    )


@pytest.mark.parametrize(
    "sizes, config, options",
    [
        pytest.param(dict(h=4, dtype="bfloat16"), (8, 2), dict(window=9), id="bf16"),
        pytest.param(dict(), (1, 3), dict(softcap=2.0), marks=slow, id="float32"),
        pytest.param(dict(g=1, h=4, lengths=(1, 1, 1, 1, 1, 1)), (8, 1), {}, marks=slow, id="decode"),
        pytest.param(dict(lengths=(0, 0, 0, 30, 0, 0)), (8, 1), {}, marks=slow, id="prefill"),
    ],
)
def test_ragged_page_attention_v3(sizes, config, options):
    """The pool, every byte of it, and what the second version gives for that pool."""
    x = writing(**sizes)
    formula = kernel_registry.find("ragged_page_attention_v3", "xla").implementation
    operands, spec = prepared("ragged_page_attention_v3", x, **options)
    pool = formula(*operands, spec=spec).new_pages[0].reshape(x["kv_pages"].shape)
    exact = mixed.ragged_defined({n: a for n, a in x.items() if n not in ("k", "v")} | dict(kv_pages=pool), **options)
    config = RaggedPageAttentionConfig(*config)
    found = check("ragged_page_attention_v3", x, config, exact, return_lse=True, **options)
    bits = lambda a: np.asarray(a).reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(bits(found.new_pages), bits(pool))
    assert (bits(found.new_pages) != bits(x["kv_pages"])).any()


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
    """A sequence has the same bits alone and with others, and as a chunk of a prefill or one by one."""
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
        ("page_attention", dict(q="float16", k_pages="float16", v_pages="float16"), "float16"),
        ("page_attention", dict(k_scale=(20, 8, 2)), "scales of single slots"),
        ("page_attention", dict(num_splits=3), "num_splits is 3"),
        ("ragged_page_attention", dict(num_splits=3), "num_splits is 3"),
    ],
)
def test_what_is_refused(operation, change, reason):
    """With the reason, so that XLA takes the call."""
    x = decode_step(h=4) if operation == "page_attention" else mixed.ragged_step()
    options = {name: option for name, option in change.items() if isinstance(option, int)}
    for name, to in change.items():
        if isinstance(to, str):
            x[name] = x[name].astype(to)
        elif isinstance(to, tuple):
            x[name] = jnp.ones(to)
    operands, spec = prepared(operation, x, **options)
    assert reason in kernel_registry.find(operation, "pallas", "tpu").implementation.supports(spec, operands, TARGET)
