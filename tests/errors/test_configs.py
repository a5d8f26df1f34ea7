"""Configs are checked on entry: a user's wrong config raises, a stored one is skipped with a warning."""

import json
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, each, with_primitives
from shown import Config, Shown, executor, ones
from shown import key_of as key_of_shown

import ejkernel
from ejkernel.errors import a_type
from ejkernel.kernels._dispatch import candidates
from ejkernel.kernels._registry import config_refusal, kernel_registry
from ejkernel.modules import FlashAttention
from ejkernel.modules._operation import OPERATIONS
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    autotune,
    default_key_builder_with_sharding,
    load_table,
    overlay_cache,
    vmap_with_config,
)
from ejkernel.types import KernelConfig, Target, checked_config

# (fields, error, message)
WRONG = {
    "negative": (dict(block_q=-4), ValueError, "config.block_q is -4; it must be a positive int"),
    "zero": (dict(block_k=0), ValueError, "config.block_k is 0; it must be a positive int"),
    "text": (dict(block_q="abc"), TypeError, "config.block_q is 'abc'; it must be a positive int"),
    "float": (dict(block_d=64.0), TypeError, "config.block_d is 64.0; it must be a positive int"),
    "bool": (dict(num_stages=True), TypeError, "config.num_stages is True; it must be a positive int"),
    "none": (dict(num_warps=None), TypeError, "config.num_warps is None; it must be a positive int"),
    "list": (dict(block_q=[64]), TypeError, "config.block_q is [64]; it must be a positive int"),
    "huge": (dict(block_q=2**40), ValueError, "config.block_q is 1099511627776; it must be a positive int of 32 bits"),
    "beyond words": (dict(block_q=10**5000), ValueError, "config.block_q is an int that cannot be shown"),
    "platform": (dict(platform="tritn"), ValueError, "platform 'tritn' is unknown; known are auto, triton, pallas"),
    "backend": (dict(backend="npu"), ValueError, "backend 'npu' is unknown; known are gpu, tpu, cpu, any"),
    "algorithm": (dict(algorithm="fast"), ValueError, "config.algorithm is 'fast'; it must be one of None"),
    "algorithm's type": (dict(algorithm=3), TypeError, "config.algorithm is 3; it must be a str or None"),
    "priority": (dict(priority="high"), TypeError, "config.priority is 'high'; it must be an int"),
}
WRONG_ANYWHERE = {name.replace(" ", "_"): of for name, of in WRONG.items()}
WRONG |= {
    "Triton's blocks": (dict(platform="triton", block_q=48), ValueError, "config.block_q is 48; Triton needs a power"),
    "Triton's warps": (dict(platform="triton", num_warps=3), ValueError, "config.num_warps is 3; Triton needs a power"),
    "Mosaic's blocks": (
        dict(platform="pallas", backend="gpu", block_q=96),
        ValueError,
        "config.block_q is 96; the Mosaic",
    ),
}
NO_CONFIGS = {
    "a mapping": {"block_q": 64},
    "a number": 3,
    "a word": "fast",
    "an array": np.ones(2),
    "a class": KernelConfig,
}
DEVICE = "cpu|cpu"
wrong = pytest.mark.parametrize("fields, error, says", list(WRONG.values()), ids=[n.replace(" ", "_") for n in WRONG])


@pytest.fixture
def q():
    return jax.random.normal(jax.random.key(0), (1, 24, 2, 16))


def key_of(q):
    return default_key_builder_with_sharding(FlashAttention(), (q, q, q), {})


def own_executor(**how):
    return Executor(ConfigSelectorChain(cache=ConfigCache(), autotune=False, **how))


# --- What a user gives


@wrong
def test_a_wrong_config_that_a_user_gives_is_refused(q, fields, error, says):
    config, kernel, cache, run = KernelConfig(**fields), FlashAttention(), ConfigCache(), own_executor()
    cache.put(key_of(q), config)
    inv, _ = kernel.prepare((q, q, q), {})
    for call in (
        lambda: ejkernel.lax.flash_attention(q, q, q, config=config),
        lambda: ejkernel.lax.flash_attention(q, q, q, config=fields),
        lambda: ejkernel.modules.flash_attention(q, q, q, cfg=config),
        lambda: run(kernel, q, q, q, cfg=config),
        lambda: run.selector.choose(inv.kernel, inv, override=config),
        lambda: inv.kernel.bind(inv.args, inv.kwargs, config),
        lambda: vmap_with_config(kernel)(q[None], q[None], q[None], cfg=config),
        lambda: autotune(kernel, q, q, q, configs=[KernelConfig(), config]),
        lambda: Executor(ConfigSelectorChain(cache=cache))(kernel, q, q, q),
        lambda: in_overlay(cache, lambda: ejkernel.lax.flash_attention(q, q, q)),
    ):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value).startswith(f"flash_attention: {says}"), raised.value


def in_overlay(cache, call):
    with overlay_cache(cache):
        return call()


@pytest.mark.parametrize("fields, error, says", list(WRONG_ANYWHERE.values()), ids=WRONG_ANYWHERE)
def test_of_an_implementation_from_the_registry_too(q, fields, error, says):
    with pytest.raises(error, match=r"flash_attention \(xla\): ") as raised:
        kernel_registry.find("flash_attention", "xla").implementation(q, q, q, config=KernelConfig(**fields))
    assert says in str(raised.value)


@pytest.mark.parametrize("bad", NO_CONFIGS.values(), ids=NO_CONFIGS)
def test_the_executor_rejects_invalid_configs(q, bad):
    with pytest.raises(TypeError, match=f"flash_attention: config is {a_type(bad)}; it must be a KernelConfig"):
        own_executor()(FlashAttention(), q, q, q, cfg=bad)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (KernelConfig(), "config is a KernelConfig; it must be a RaggedPageAttentionConfig"),
        (dict(block_q=8), "config has no field block_q; the fields are ['backend', 'keys_per_block', 'num_splits', "),
        (dict(pages_per_block=0), "config.pages_per_block is 0; it must be a positive int"),
    ],
    ids=["another class", "another field", "a size"],
)
def test_an_operation_takes_configs_of_its_own_class(config, says):
    arrays = OPERATIONS["ragged_page_attention_v3"].example()
    call = lambda arrays: ejkernel.lax.ragged_page_attention_v3(**arrays, config=config)
    with pytest.raises((TypeError, ValueError), match=re.escape(f"ragged_page_attention_v3: {says}")):
        jax.eval_shape(call, arrays)


def test_a_users_kernel_may_check_its_own():
    class Picky(Shown):
        def checked_config(self, cfg):
            if cfg.block < 1:
                raise ValueError(f"{self.name}: block is {cfg.block}; it must be at least 1")
            return cfg

    kernel, cache = Picky("picky"), ConfigCache()
    with pytest.raises(ValueError, match="picky: block is 0"):
        executor(autotune=False)(kernel, ones(), cfg=Config(0))
    cache.put(key_of_shown(kernel, ones()), Config(0))
    with pytest.raises(ValueError, match="picky: block is 0"):
        executor(cache, autotune=False)(kernel, ones())


@pytest.mark.parametrize("bad", [{}, [], None, "table.json", PersistentCache("/tmp")], ids=lambda x: type(x).__name__)
def test_an_overlay_is_a_cache_in_memory(bad):
    with pytest.raises(TypeError, match=f"overlay_cache: cache is {a_type(bad)}; it must be a ConfigCache"):
        overlay_cache(bad).__enter__()


def test_numpy_integers_and_fields_of_none(q):
    config = KernelConfig(block_q=np.int64(8), block_k=np.uint8(16), platform=None, backend=None)
    checked = KERNELS["flash_attention"].checked_config(config)
    assert checked == KernelConfig(block_q=8, block_k=16) and type(checked.block_q) is int
    expected = ejkernel.lax.flash_attention(q, q, q)
    np.testing.assert_allclose(ejkernel.lax.flash_attention(q, q, q, config=config), expected, rtol=1e-5, atol=1e-6)


def test_an_equal_config_that_was_right_does_not_make_one_right(q):
    """1 == 1.0 == True, and programs are cached by options."""
    ejkernel.lax.flash_attention(q, q, q, window=(1, 0), config=KernelConfig(block_q=1))
    for options in (dict(window=(1.0, 0)), dict(window=(1, 0), config=KernelConfig(block_q=1.0))):
        with pytest.raises(TypeError, match="flash_attention: "):
            ejkernel.lax.flash_attention(q, q, q, **options)


# --- What is stored


@wrong
def test_a_wrong_config_that_is_stored_is_passed_over(q, tmp_path, fields, error, says):
    """In a cache file, and in a table."""
    expected = ejkernel.lax.flash_attention(q, q, q)
    cache, table = PersistentCache(tmp_path / "cache"), PersistentCache(tmp_path / "table")
    write(cache, key_of(q), fields)
    write(table, key_of(q), fields)
    events = []
    run = own_executor(persistent=cache, tables=[table], on_event=lambda event, *_: events.append(event))
    with pytest.warns(UserWarning) as warned:
        found = run(FlashAttention(), q, q, q)
    np.testing.assert_array_equal(found, expected)
    assert events == ["heuristics"]
    assert any(str(cache.path_of(DEVICE)) in str(w.message) for w in warned)


def test_the_next_level_answers(q, tmp_path):
    cache, table = PersistentCache(tmp_path / "cache"), PersistentCache(tmp_path / "table")
    cache.put(key_of(q), KernelConfig(block_q=-4), DEVICE)
    table.put(key_of(q), KernelConfig(block_q=8), DEVICE)
    events = []
    run = own_executor(persistent=cache, tables=[table], on_event=lambda event, *_: events.append(event))
    with pytest.warns(UserWarning, match=r"flash_attention: config.block_q is -4; it must be .*, is ignored"):
        run(FlashAttention(), q, q, q)
    assert events == ["table_hit"]


def test_a_gradient_asks_for_the_configs_of_its_backward_alike(q, monkeypatch):
    """A wrong stored config of the backward is also skipped."""
    loss = lambda q: ejkernel.lax.flash_attention(q, q, q).sum()
    expected = jax.grad(loss)(q)
    from ejkernel.ops import default_executor

    monkeypatch.setattr(PersistentCache, "get", lambda *_: KernelConfig(block_q=-4, platform="xla", backend="cpu"))
    default_executor.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"flash_attention_bwd: config.block_q is -4"):
            found = jax.grad(lambda q: loss(q))(q)
    finally:
        default_executor.cache_clear()
    np.testing.assert_array_equal(found, expected)


def test_a_table_that_is_loaded_leaves_wrong_configs_out(q, tmp_path):
    cache = PersistentCache(tmp_path)
    cache.put(key_of(q), KernelConfig(block_q=-4), DEVICE)
    cache.put("other", KernelConfig(block_q=8), DEVICE)
    with pytest.warns(UserWarning, match=r"an entry is left out: flash_attention: config.block_q is -4"):
        table = load_table(cache.path_of(DEVICE))
    assert len(table) == 1 and table.get("other") == KernelConfig(block_q=8)


def test_a_config_of_a_class_that_is_not_frozen_is_not_lost_in_silence(tmp_path):
    @dataclass
    class Loose:
        block: int = 1

    with pytest.warns(UserWarning, match="has to be a frozen dataclass to be stored, and Loose is not frozen"):
        PersistentCache(tmp_path).put("key", Loose())


def write(cache, key, fields):
    """Writes an entry as in a damaged file: `fields` may be any JSON."""
    cache.put(key, KernelConfig(), DEVICE)
    with open(path := cache.path_of(DEVICE)) as file:
        content = json.load(file)
    content["configs"][key]["config"] |= {
        n: 10**40 if isinstance(x, int) and x > 10**40 else x for n, x in fields.items()
    }
    with open(path, "w") as file:
        json.dump(content, file)


# --- What the library proposes


@each(with_primitives(CASES))
def test_what_implementations_propose_is_right(case):
    """Every config of every space, on every platform, is valid."""
    pytest.importorskip("triton")
    found = {}

    def look(arrays):
        call = OPERATIONS[case.operation].prepare_arguments(**arrays, **case.options)
        found.update(
            spec=call.spec, operands=case.algorithm.operands(**{n: jax.typeof(x) for n, x in call.named.items()})
        )

    jax.eval_shape(look, case.arrays(dtype=jnp.bfloat16))
    for primitive in case.algorithm.primitives:
        for target in (Target("cpu"), Target("cuda", "NVIDIA H200"), Target("tpu", "TPU v6 lite")):
            for entry, reason in candidates(primitive.name, found["spec"], found["operands"], target):
                if reason is None:
                    configs = entry.implementation.space(found["spec"], found["operands"], target)
                    assert [config_refusal(entry.implementation, config) for config in configs] == [None] * len(configs)
                    assert [
                        checked_config("", config, OPERATIONS[case.operation].config_class) for config in configs
                    ] == configs
