"""multi_latent_page_attention on TPU: results in the interpreter that simulates the chip, and the real TPU compiler.

Results are compared with the definition in float64, with NaN in unread entries. The compiled shapes are those of
DeepSeek-V3: 128 query heads, or the part of them on a device, over latents of 512 + 64 features.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FAMILIES
from jax.experimental.layout import Format, Layout

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

from .latent_pages import CONTEXTS, LENGTHS, J, P, defined, poisoned, step, tree
from .paged import DTYPES, hidden_slots, wide
from .test_tpu_paged_compile import configs, copies
from .tpu_compiler import TARGETS, device
from .tpu_interpreter import interpreted
from .tpu_paged import TARGET, check, prepared, without

NAME = "multi_latent_page_attention"
IMPLEMENTATION = kernel_registry.find(NAME, "pallas", "tpu").implementation
slow = pytest.mark.slow


def config_of(tokens, pages):
    return MultiLatentPageAttentionConfig(tokens, pages)


def with_sinks(x):
    heads = x["q_latent"].shape[1]
    return x | dict(sinks=jnp.asarray(np.random.default_rng(1).standard_normal((heads, 2)), jnp.float32))


@pytest.mark.parametrize(
    "sizes, config, options",
    [
        pytest.param(dict(dtype="bfloat16", sinks=True), (8, 2), dict(window=9), id="bf16"),
        pytest.param(dict(drafts=3), (8, 2), dict(window=9), marks=slow, id="drafts"),
        pytest.param(dict(drafts=130, dtype="bfloat16"), (1, 2), {}, marks=slow, id="many drafts"),
        pytest.param(dict(), (1, 1), dict(softcap=2.0, batch_invariant=True), marks=slow, id="alone"),
        pytest.param(dict(h=3), (16, 5), dict(softmax_scale=-0.3), marks=slow, id="one block"),
        pytest.param(dict(h=1), (8, 2), dict(window=20), marks=slow, id="one head"),
        pytest.param(dict(latent=128, rope=64, h=16), (4, 2), {}, marks=slow, id="whole lanes"),
        pytest.param(dict(latent=40, rope=24, page=24), (8, 2), {}, marks=slow, id="features"),
    ],
)
def test_numbers(sizes, config, options):
    sizes = dict(sizes)
    drafts, sinks = sizes.pop("drafts", 0), sizes.pop("sinks", False)
    x = step(**{**sizes, "pages": sizes.get("dtype", "float32")})
    if drafts:
        x["draft_mask"] = tree(drafts)
    x, with_nan = poisoned(with_sinks(x) if sinks else x)
    wanted = defined(x, **{name: option for name, option in options.items() if name != "batch_invariant"})
    check(NAME, with_nan, config_of(*config), wanted, x, return_lse=True, **options)


@pytest.mark.parametrize(
    "pages, dtype",
    [("float8_e4m3fn", "bfloat16"), ("int8", "float16"), pytest.param("int8", "float32", marks=slow)],
)
@pytest.mark.parametrize("scale", [pytest.param(None, marks=slow), ()], ids=str)
def test_quantised_pages(pages, dtype, scale):
    x = step(pages=pages, dtype=dtype)
    if scale is not None:
        x["k_scale"] = jnp.asarray(np.random.default_rng(2).uniform(0.1, 0.5, scale), jnp.float32)
    check(NAME, x, config_of(8, 2), defined(x), return_lse=True)


@pytest.mark.parametrize("pages, dtype", [("int8", "bfloat16"), pytest.param("float8_e4m3fn", "float32", marks=slow)])
@pytest.mark.parametrize("tokens", (8, pytest.param(1, marks=slow)))
def test_scales_of_slots(pages, dtype, tokens):
    """With NaN, in scales too, in all slots that no token sees."""
    x, rng, shape = step(pages=pages, dtype=dtype), np.random.default_rng(2), (len(CONTEXTS), J)
    x |= dict(block_tables=jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape))
    x |= dict(pages=x["pages"][rng.integers(0, P, np.prod(shape))])
    x |= dict(k_scale=jnp.asarray(rng.uniform(0.1, 0.5, (*x["pages"].shape[:2], 1)), jnp.float32))
    poisoned = x | without(hidden_slots(x), x)
    check(NAME, poisoned, config_of(tokens, 2), defined(x), x, return_lse=True)


@slow
def test_a_batch_that_shares_the_pool():
    """As `vmap` gives it: steps of one pool, or each of its own, with their tokens and tables."""
    first, second = (OPERATIONS[NAME].prepare_arguments(**step(seed=seed), return_lse=True) for seed in (0, 1))
    for shared in ({"pages"}, set()):
        both = {n: a if n in shared else jnp.concatenate([a, second.named[n]]) for n, a in first.named.items()}
        operands = OPERATIONS[NAME].algorithm.operands
        run = interpreted(lambda *x: IMPLEMENTATION(*x, spec=first.spec, config=config_of(8, 2)))
        found = run(*operands(**both))
        formula = kernel_registry.find(NAME, "xla").implementation(*operands(**both), spec=first.spec)
        for a, b in zip(found, formula, strict=True):
            np.testing.assert_allclose(wide(a), wide(b), rtol=2e-5, atol=2e-5)


@slow
@pytest.mark.parametrize("name", ("normal", "large", "one_hot", "long_uniform"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_families(name, dtype):
    """The four families of inputs, against the formula in float64, by the config of the heuristic."""
    case = next(case for case in FAMILIES if case.operation == NAME and case.name == name)
    x, formula = case.arrays(dtype=jnp.dtype(dtype)), kernel_registry.find(NAME, "xla").implementation
    operands, spec = prepared(NAME, x, **case.options)
    with jax.enable_x64(True):
        wider = {n: jnp.asarray(np.asarray(a, np.float64)) if a.dtype == dtype else a for n, a in x.items()}
        wanted = [np.asarray(a) for a in formula(*prepared(NAME, wider, **case.options)[0], spec=spec)]
    check(NAME, x, IMPLEMENTATION.heuristic(spec, operands, TARGET), wanted, **case.options)


@slow
def test_batch_invariant():
    """A token has the same bits alone, with all of its sequence, and with all others."""
    x, starts = step(2), np.cumsum([0, *LENGTHS])

    def run(x):
        operands, spec = prepared(NAME, x, return_lse=True, batch_invariant=True)
        config = IMPLEMENTATION.heuristic(spec, operands, TARGET)
        assert config.queries_per_block == 1
        return interpreted(lambda *a: IMPLEMENTATION(*a, spec=spec, config=config))(*operands)

    found = run(x)
    for n in (0, 4):
        own = slice(starts[n], starts[n + 1])
        alone = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
        alone |= {name: x[name][own] for name in ("q_latent", "q_rope")}
        alone |= dict(query_start_loc=jnp.array([0, LENGTHS[n]]), num_seqs=jnp.array([1]))
        for one, of_all in zip(run(x | alone), found, strict=True):
            np.testing.assert_array_equal(one, of_all[:, own])


@pytest.mark.parametrize(
    "change, options, reason",
    [
        (dict(q_latent="float16", q_rope="float16", pages="float16"), {}, "float16"),
        (dict(), dict(num_splits=3), "num_splits is 3"),
    ],
    ids=("dtype", "splits"),
)
def test_what_is_refused(change, options, reason):
    """With the reason, so that XLA takes the call."""
    x = step()
    changed = {name: x[name].astype(to) if isinstance(to, str) else jnp.ones(to) for name, to in change.items()}
    operands, spec = prepared(NAME, x | changed, **options)
    assert reason in IMPLEMENTATION.supports(spec, operands, TARGET)


# --- What it compiles to ----------------------------------------------------------------------------------------------

array = jax.ShapeDtypeStruct
SEQUENCES, CONTEXT, PREFILL = 32, 4096, 512
CALLS = {
    "h128": dict(h=128),
    "h16": dict(h=16),
    "h128, prefill": dict(h=128, tokens=PREFILL),
    "h16, prefill": dict(h=16, tokens=PREFILL, page=16),
    "e4m3": dict(h=128, pages="float8_e4m3fn", k_scale=array((), jnp.float32)),
    "int8, prefill": dict(h=64, pages="int8", tokens=PREFILL),
    "e4m3, scales of slots": dict(
        h=16, pages="float8_e4m3fn", k_scale=array((SEQUENCES * CONTEXT // 64, 64, 1), jnp.float32)
    ),
    "int8, prefill, scales of slots": dict(
        h=64, pages="int8", page=16, tokens=PREFILL, k_scale=array((SEQUENCES * CONTEXT // 16, 16, 1), jnp.float32)
    ),
    "float32": dict(h=16, dtype="float32", page=8),
    "everything": dict(
        h=64, tokens=PREFILL, page=128, draft_mask=array((PREFILL, 8), jnp.bool_), sinks=array((64, 2), jnp.float32),
        options=dict(window=1000, softcap=30.0),
    ),
    "few features": dict(h=3, latent=24, rope=8),
}  # fmt: skip
QUICK = {("v5e", "e4m3"), ("v5p", "h16"), ("v6e", "h128"), ("tpu7x", "h16, prefill")}


def arguments(h=16, latent=512, rope=64, page=64, tokens=SEQUENCES, dtype="bfloat16", pages=None, options=None, **more):
    """Arguments of the operation for sequences of up to 4096 keys, and its options."""
    columns, ints, stored = CONTEXT // page, lambda *shape: array(shape, jnp.int32), pages or dtype
    x = dict(q_latent=array((tokens, h, latent), dtype), q_rope=array((tokens, h, rope), dtype))
    x |= dict(pages=array((SEQUENCES * columns, page, latent + rope), DTYPES.get(stored, stored)))
    x |= dict(context_lens=ints(SEQUENCES), block_tables=ints(SEQUENCES, columns))
    return x | dict(query_start_loc=ints(SEQUENCES + 1), num_seqs=ints(1)) | more, options or {}


def program(generation, x, config, **options):
    """The compiled text of a call with a row-major pool.

    By default XLA would put pages along the lanes, as they fill whole tiles, and copy them to rows in each call.
    """
    on_core = jax.sharding.SingleDeviceSharding(device(generation))
    given = {name: array(a.shape, a.dtype, sharding=on_core) for name, a in x.items()}
    given["pages"] = array(x["pages"].shape, x["pages"].dtype, sharding=Format(Layout((0, 1, 2)), on_core))
    call = lambda **x: OPERATIONS[NAME].call(**x, **options, config=config)
    return jax.jit(call).trace(**given).lower(lowering_platforms=("tpu",)).compile().as_text()


@pytest.mark.parametrize(
    "generation, name",
    [
        pytest.param(generation, name, marks=() if (generation, name) in QUICK else slow)
        for generation in TARGETS
        for name in CALLS
    ],
)
def test_compiles(request, generation, name):
    """Every config of the space (in a normal run the likeliest); the pool stays where it is."""
    pytest.importorskip("libtpu")
    x, options = arguments(**CALLS[name])
    space = configs(generation, NAME, x, **options)
    for config in space if request.node.get_closest_marker("slow") else space[:1]:
        text = program(generation, x, config, **options)
        assert "tpu_custom_call" in text
        assert not copies(text, x)
