"""multi_latent_page_attention in Triton: results by the interpreter against the definition, and compilation."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._target import lowering_for  # noqa: E402
from ejkernel.kernels._triton import _launch  # noqa: E402

from . import compiler, interpreter  # noqa: E402
from .latent_pages import LENGTHS, PAGE, TOKENS, P, defined, lists, poisoned, step, tree, unnamed  # noqa: E402
from .paged import close  # noqa: E402
from .test_triton_compile import KINDS  # noqa: E402

NAME = "multi_latent_page_attention"
IMPLEMENTATION = kernel_registry.find(NAME, "triton").implementation
Config = partial(MultiLatentPageAttentionConfig, keys_per_block=16)
# Rows of one token, of some, and of a full tile; without splits, and with them.
CONFIGS = (
    Config(1),
    Config(4, num_splits=3),
    Config(2, heads_per_block=2, keys_per_block=32),
    Config(4, num_splits=2, algorithm="transposed"),
)


def run(x, config=CONFIGS[1], **options):
    """o and lse of the public arguments."""
    call = OPERATIONS[NAME].prepare_arguments(**x, **options, return_lse=True)
    return call.finish(IMPLEMENTATION(*Operands(**call.named), spec=call.spec, config=config)._asdict())


def check(x, tolerance=2e-6, config=CONFIGS[1], **options):
    for found, wanted in zip(run(x, config, **options), defined(x, **options), strict=True):
        close(found, wanted, tolerance)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)


OPTIONS = {}, dict(window=9), dict(softcap=2.0), dict(softmax_scale=-0.3), dict(num_splits=2, window=13)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drafts", (0, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 40))))
def test_options(options, drafts, interpreted):
    for config in CONFIGS:
        check(step() | (dict(draft_mask=tree(drafts)) if drafts else {}), config=config, **options)


@pytest.mark.parametrize("h", (1, 3, pytest.param(80, marks=pytest.mark.slow)))
@pytest.mark.parametrize("sinks", (pytest.param(1, marks=pytest.mark.slow), 2))
def test_heads_and_sinks(h, sinks, interpreted):
    """Sinks count once, in whatever part."""
    check(step(h) | dict(sinks=jnp.asarray(np.random.default_rng(1).standard_normal((h, sinks)), jnp.float32)))


@pytest.mark.parametrize("latent, rope", ((32, 16), (40, 24)))
def test_features(latent, rope, interpreted):
    check(step(latent=latent, rope=rope, page=24))


@pytest.mark.parametrize("pages", ("float32", "float8_e4m3fn", "int8"))
@pytest.mark.parametrize(
    "shape", (*(pytest.param(of, marks=pytest.mark.slow) for of in (None, ())), (P, PAGE, 1)), ids=str
)
def test_quantised_pages(pages, shape, interpreted):
    x = step(pages=pages)
    if shape is not None:
        x["k_scale"] = jnp.asarray(np.random.default_rng(2).uniform(0.1, 0.5, shape), jnp.float32)
    for config in CONFIGS[1::2]:
        check(x, config=config)


def test_keys_after_the_context_are_invisible(interpreted):
    for drafts in (0, 3):
        x, with_nan = poisoned(step() | (dict(draft_mask=tree(drafts)) if drafts else {}))
        jax.tree.map(np.testing.assert_array_equal, run(with_nan), run(x))


@pytest.mark.slow
def test_batch_invariant(interpreted):
    """A token has the same bits alone, with all of its sequence, and with all others."""
    x, starts = step(2), np.cumsum([0, *LENGTHS])
    found = run(x, batch_invariant=True)
    for n in (0, 1, 4):
        for begin in {starts[n], starts[n + 1] - 1}:
            own, length = slice(begin, starts[n + 1]), starts[n + 1] - begin
            alone = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
            alone |= {name: x[name][own] for name in ("q_latent", "q_rope")}
            alone |= dict(query_start_loc=jnp.array([0, length]), num_seqs=jnp.int32(1))
            for one, of_all in zip(run(x | alone, batch_invariant=True), found, strict=True):
                np.testing.assert_array_equal(one, of_all[own])


def test_a_batch_that_shares_the_pool(interpreted):
    """As vmap gives it: steps of one pool, each with its own tokens and tables."""
    first, second = (OPERATIONS[NAME].prepare_arguments(**step(seed=seed), return_lse=True) for seed in (0, 1))
    shared = ("pages",)
    both = {n: a if n in shared else jnp.concatenate([a, second.named[n]]) for n, a in first.named.items()}
    found = IMPLEMENTATION(*Operands(**both), spec=first.spec, config=CONFIGS[1])
    for n, call in enumerate((first, second)):
        alone = {name: first.named[name] if name in shared else a for name, a in call.named.items()}
        wanted = IMPLEMENTATION(*Operands(**alone), spec=first.spec, config=CONFIGS[1])
        jax.tree.map(lambda a, b, n=n: np.testing.assert_array_equal(a[n], b[0]), found, wanted)


def test_the_batch_does_not_decide_the_config():
    """Where it must not: of any number of tokens, of as many heads."""
    spec = CacheSpec(softmax_scale=0.1, batch_invariant=True)
    spaces = [IMPLEMENTATION.space(spec, decode(16, tokens), KINDS["sm_90"]) for tokens in (1, 128, 4096)]
    assert len(spaces[0]) == 1 and spaces[0] == spaces[1] == spaces[2]


# --- Lists of keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drafts", (0, pytest.param(3, marks=pytest.mark.slow)))
def test_lists_of_keys(options, drafts, interpreted):
    x = step()
    x |= dict(indices=lists(37, x)) | (dict(draft_mask=tree(drafts)) if drafts else {})
    for config in CONFIGS:
        check(x, config=config, **options)


@pytest.mark.parametrize("h", (1, 3, pytest.param(80, marks=pytest.mark.slow)))
def test_lists_of_quantised_keys_with_sinks(h, interpreted):
    x, rng = step(h, pages="int8"), np.random.default_rng(2)
    x |= dict(indices=lists(21, x), sinks=jnp.asarray(rng.standard_normal((h, 2)), jnp.float32))
    for shape in ((), (P, PAGE, 1)):
        check(x | dict(k_scale=jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32)))


@pytest.mark.parametrize("config", CONFIGS[1::2], ids=str)
def test_unlisted_keys_may_be_nan(config, interpreted):
    x, with_nan = unnamed(step(), lists(5, step()))
    jax.tree.map(np.testing.assert_array_equal, run(with_nan, config), run(x, config))


def test_an_empty_list_gives_zero_and_no_weight(interpreted):
    for config in CONFIGS:
        o, lse = run(step() | dict(indices=jnp.full((TOKENS, 3), -1)), config)
        assert (o == 0).all() and (lse == -jnp.inf).all()


def test_lists_are_batch_invariant(interpreted):
    """A token has the same bits alone, and with all others."""
    x, starts = step(2), np.cumsum([0, *LENGTHS])
    x |= dict(indices=lists(37, x))
    found = run(x, batch_invariant=True)
    for n, begin in ((0, 4), (1, 9)):
        own, length = slice(begin, starts[n + 1]), starts[n + 1] - begin
        alone = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
        alone |= {name: x[name][own] for name in ("q_latent", "q_rope", "indices")}
        alone |= dict(query_start_loc=jnp.array([0, length]), num_seqs=jnp.int32(1))
        for one, of_all in zip(run(x | alone, batch_invariant=True), found, strict=True):
            np.testing.assert_array_equal(one, of_all[own])


def test_a_batch_of_lists_that_shares_the_pool(interpreted):
    steps = [step(seed=seed) for seed in (0, 1)]
    calls = [
        OPERATIONS[NAME].prepare_arguments(**x, indices=lists(21, x, seed=seed), return_lse=True)
        for seed, x in enumerate(steps)
    ]
    both = {n: jnp.concatenate([call.named[n] for call in calls]) for n in calls[0].named}
    both["pages"] = calls[0].named["pages"]
    found = IMPLEMENTATION(*Operands(**both), spec=calls[0].spec, config=CONFIGS[1])
    for n, call in enumerate(calls):
        wanted = IMPLEMENTATION(*Operands(**call.named | dict(pages=both["pages"])), spec=call.spec, config=CONFIGS[1])
        jax.tree.map(lambda a, b, n=n: np.testing.assert_array_equal(a[n], b[0]), found, wanted)


# --- What it compiles to ----------------------------------------------------------------------------------------------


def decode(heads, tokens=128, pages="bfloat16", dtype="bfloat16", **more):
    """A decode of 128 sequences of up to 4096 keys, as in DeepSeek-V3."""
    of = jax.ShapeDtypeStruct
    shapes = dict(q_latent=(1, tokens, heads, 512), q_rope=(1, tokens, heads, 64))
    tables = dict(context_lens=(1, 128), block_tables=(1, 128, 64), query_start_loc=(1, 129), num_seqs=(1, 1))
    given = {name: of(shape, dtype) for name, shape in shapes.items()} | dict(pages=of((1, 8192, 64, 576), pages))
    return Operands(**given, **{name: of(shape, "int32") for name, shape in tables.items()}, **more)


EVERYTHING = dict(
    sinks=jax.ShapeDtypeStruct((1, 128, 1), "float32"),
    k_scale=jax.ShapeDtypeStruct((1, 8192, 64, 1), "float32"),
    draft_mask=jax.ShapeDtypeStruct((1, 512, 8), "bool"),
)
DRAFTS = dict(draft_mask=jax.ShapeDtypeStruct((1, 512, 256), "bool"))
LISTS = dict(indices=jax.ShapeDtypeStruct((1, 128, 2048), "int32"))
LISTS_OF_PREFILL = dict(indices=jax.ShapeDtypeStruct((1, 4096, 2048), "int32"))
CALLS = {
    "h16": decode(16),
    "h64": decode(64),
    "h128": decode(128),
    "h16, four tokens": decode(16, 512),
    "h128, e4m3": decode(128, pages="float8_e4m3fn"),
    "h16, int8": decode(16, pages="int8"),
    "h128, everything": decode(128, 512, **EVERYTHING),
    "h16, drafts": decode(16, 512, **DRAFTS),
    "h128, drafts": decode(128, 512, **DRAFTS),
    "h16, int8, drafts": decode(16, 512, pages="int8", **DRAFTS),
    "h128, int8, drafts": decode(128, 512, pages="int8", **DRAFTS),
    "h16, lists": decode(16, **LISTS),
    "h128, lists": decode(128, **LISTS),
    "h128, lists of a prefill": decode(128, 4096, **LISTS_OF_PREFILL),
    "h128, lists, e4m3": decode(128, pages="float8_e4m3fn", **LISTS),
    "h16, float32": decode(16, pages="float32", dtype="float32"),
}
ALWAYS = ("sm_90", "h16"), ("sm_90", "h128"), ("sm_120", "h64"), ("sm_90", "h128, lists")
ALWAYS += ("sm_90", "h128, drafts"), ("sm_90", "h128, int8, drafts")
NVIDIA = [name for name in KINDS if name.startswith("sm_")]


@pytest.mark.parametrize(
    "target, name",
    [pytest.param(t, n, marks=() if (t, n) in ALWAYS else pytest.mark.slow) for t in NVIDIA for n in CALLS],
)
def test_compiles(target, name, monkeypatch):
    """Tiles of the space, and the heuristic one, fit shared memory and spill at most 512 bytes; products overlap."""
    x, spec, kind, trouble = CALLS[name], CacheSpec(softmax_scale=0.1), KINDS[target], []
    if reason := IMPLEMENTATION.supports(spec, x, kind):
        pytest.skip(reason)
    tiles = list(dict.fromkeys(replace(config, num_splits=2) for config in IMPLEMENTATION.space(spec, x, kind)))
    for config in tiles[:1] if (target, name) in ALWAYS else tiles:
        call = partial(
            IMPLEMENTATION, *jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x), spec=spec, config=config
        )
        with lowering_for(kind):
            found = compiler.launches(monkeypatch, _launch, call)
        for launch in found:
            binary = compiler.binary(launch, compiler.TARGETS[target])
            if binary.shared > _launch.shared_memory_limit(kind) or binary.spilled > 512 or binary.serialized:
                trouble.append(f"{launch}: {binary}")
    assert not trouble, "\n".join(trouble)


@pytest.mark.parametrize("latent, rope, widest", [(32, 4, 8), (40, 8, 16), (12, 2, 4)])
def test_copies_have_a_width_that_divides_the_rows(latent, rope, widest, monkeypatch):
    """Rows of 72 bytes, 96 and 28: a wider copy would begin at a misaligned address."""
    x, spec, kind = decode(1), CacheSpec(softmax_scale=0.1), KINDS["sm_90"]
    shape = lambda of, features: jax.ShapeDtypeStruct((*of.shape[:-1], features), of.dtype)
    x = x._replace(q_latent=shape(x.q_latent, latent), q_rope=shape(x.q_rope, rope))
    x = x._replace(pages=shape(x.pages, latent + rope))
    (config, *_), given = IMPLEMENTATION.space(spec, x, kind), jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
    with lowering_for(kind):
        launch, _ = compiler.launches(monkeypatch, _launch, partial(IMPLEMENTATION, *given, spec=spec, config=config))
    assert 0 < compiler.binary(launch, compiler.TARGETS["sm_90"]).widest_copy <= widest


@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(q_latent=jax.ShapeDtypeStruct((1, 128, 16, 520), "bfloat16")), "q_latent has 520 features"),
        (dict(q_rope=jax.ShapeDtypeStruct((1, 128, 16, 136), "bfloat16")), "q_rope has 136 features"),
        (dict(q_latent=jax.ShapeDtypeStruct((1, 128, 16, 512), "float64")), "q_latent is float64"),
        (dict(block_tables=jax.ShapeDtypeStruct((1, 128, 0), "int32")), "no tokens, sequences"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_unsupported_arguments_give_a_reason(changed, reason):
    x = CALLS["h16"]._replace(**changed)
    assert reason in IMPLEMENTATION.supports(CacheSpec(), x, KINDS["sm_90"])
    assert "8.9" in IMPLEMENTATION.supports(CacheSpec(), CALLS["h128, e4m3"], KINDS["sm_80"])


@pytest.mark.parametrize("wrong", [dict(keys_per_block=48), dict(heads_per_block=12), dict(num_warps=3)], ids=str)
def test_configs_that_no_kernel_is_made_for_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"config.{name} is {value}; Triton needs"):
        run(step(), MultiLatentPageAttentionConfig(**wrong))
