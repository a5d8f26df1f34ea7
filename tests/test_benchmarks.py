"""Benchmarks count operations and bytes correctly, and time nothing with wrong numbers."""

import ast
import importlib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _attention, _attention_rivals, _contenders, _driver, _referee, flash_attention
from benchmarks import _harness as harness
from ejkernel.cli.tune import calls_of_shape
from ejkernel.modules._operation import OPERATIONS, types_of_call
from ejkernel.types import ATTENTION_SHAPES, AttentionShape
from ejkernel.types.shapes import TFLOPS, measured_operations, shape_named, shapes_of
from tests.benchmarked import breaks

SMALL = AttentionShape("small", 4, 2, 16, 24, 2, 48, 48, window=(20, 0), softcap=5.0, sinks=1)
NAMED = [(operation, shape) for operation in measured_operations() for shape in shapes_of(operation).values()]


def test_imports_between_programs_resolve():
    """Including modules that nothing imports, where a renamed import would only show when they run."""
    for path in sorted(Path(_driver.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                module = importlib.import_module(f"benchmarks.{node.module}")
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{path.name}: {node.module} has no {missing}"


# --- The registry of calls


def test_every_call_is_found_by_its_name():
    assert len(NAMED) == len({shape.name for _, shape in NAMED})
    for operation, shape in NAMED:
        assert shape_named(shape.name) == (operation, shape) and str(shape).startswith(f"{shape.name}: ")
    with pytest.raises(ValueError, match="no call is named gpt-9"):
        shape_named("gpt-9")


@pytest.mark.parametrize("operation", measured_operations())
def test_every_call_is_one_that_the_operation_takes(operation):
    """Its arguments are those of the lax API, and its values have the declared types."""
    for shape in shapes_of(operation).values():
        types_of_call(operation, **shape.arguments("bfloat16"))
    smallest = min(
        shapes_of(operation).values(), key=lambda shape: shape.work("step" if "step" in shape.modes else "fwd")
    )
    types = smallest.arguments("bfloat16")
    for name, values in smallest.indices().items():
        assert (values.shape, values.dtype) == (types[name].shape, types[name].dtype)


@pytest.mark.parametrize("operation", measured_operations())
def test_every_operation_has_its_benchmark_with_the_rivals_of_the_registry(operation, monkeypatch):
    module, shape = importlib.import_module(f"benchmarks.{operation}"), SMALL_CALLS[operation]
    for mode in shape.modes:
        case = module.case(shape, mode, jnp.dtype("float32"), ["auto", "xla"])
        names = [contender.name for contender in case.contenders]
        assert names == ["ejkernel auto", "ejkernel xla", *shape.rivals]


def test_flops_are_those_of_the_operation():
    """Those that the tuner uses, where they are known; causality halves a square here, and keeps the diagonal there."""
    counted = set()
    for operation, shape in NAMED:
        if shape.unit("fwd") == TFLOPS and "fwd" in shape.modes:
            named, spec = types_of_call(operation, **shape.arguments("bfloat16"))
            flops = OPERATIONS[operation].flops(named, OPERATIONS[operation].algorithm.forward.results, spec)
            if flops is not None:
                assert shape.work("fwd") == pytest.approx(flops, rel=0.01), shape
                counted.add(operation)
    recurrences = {"gated_delta_rule", "gla", "lightning_attention", "recurrent", "state_space_v2"}
    assert counted == {"flash_attention", "flash_mla", *recurrences}


@pytest.mark.parametrize("operation", ("flash_attention", "flash_mla", "gated_delta_rule", "gla", "state_space_v2"))
def test_flops_of_derivatives_are_those_of_the_operation(operation):
    shape = next(iter(shapes_of(operation).values()))
    flops = {inv.kernel.name: inv.kernel.cost(inv)[0] for inv in calls_of_shape(operation, shape, "bfloat16")}
    forward, backward, tangent = (flops[operation + suffix] for suffix in ("", "_bwd", "_jvp"))
    assert shape.work("fwd_bwd") == pytest.approx(forward + backward, rel=0.01)
    assert tangent == pytest.approx(backward, rel=0.01)


def test_the_convention():
    shape = ATTENTION_SHAPES["llama3-8b"].at(2, 1024)
    assert shape.work("fwd") == 4 * 2 * 32 * 1024 * 1024 * 128 / 2
    assert replace(shape, causal=False).work("fwd") == 4 * 2 * 32 * 1024 * 1024 * 128
    assert [shape.work(mode) / shape.work("fwd") for mode in ("bwd", "fwd_bwd", "jvp")] == [2.5, 3.5, 2.5]


def test_values_of_another_size_count_as_they_are():
    shape = ATTENTION_SHAPES["deepseek-v3"].at(1, 512)
    assert shape.work("fwd") == 2 * 128 * 512 * 512 * (192 + 128) / 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (3, 0), (5, 2), (None, 1), (0, 0), (4, None)])
@pytest.mark.parametrize("lengths", [(16, 16), (5, 16), (16, 5)])
def test_pairs_are_those_of_the_mask(causal, window, lengths):
    seq_q, seq_k = lengths
    shape = replace(SMALL, seq_q=seq_q, seq_k=seq_k, causal=causal, window=window)
    position, column = np.arange(seq_q)[:, None] + seq_k - seq_q, np.arange(seq_k)
    left, right = window
    visible = (column <= position) | (not causal)
    visible = visible & (left is None or column >= position - left) & (right is None or column <= position + right)
    assert shape.pairs == visible.sum()
    if window != (None, None) or seq_q != seq_k:
        assert shape.work("fwd") == 2 * 4 * visible.sum() * 2 * (16 + 24)


# --- Every operation at a size for a CPU


def small(operation, name, **sizes):
    return replace(shapes_of(operation)[name], **sizes)


SMALL_CALLS = {
    "blocksparse_attention": small("blocksparse_attention", "4k-25%", length=64, block=16, heads=2, head_dim=16),
    "flash_attention": SMALL,
    "flash_mla": small(
        "flash_mla", "deepseek-v3-mla", heads=4, seq_q=48, seq_k=48, latent=32, nope=16, rope=8, value_dim=24
    ),
    "gated_delta_rule": small(
        "gated_delta_rule", "qwen3-next-80b-linear", batch=2, seq=48, heads=4, qk_heads=2, key_dim=16, value_dim=16
    ),
    "gla": small("gla", "gla-h16-d128", batch=1, seq=64, heads=2, key_dim=16, value_dim=16),
    "grouped_matmul": small("grouped_matmul", "qwen3-30b-up", rows=256, features=64, columns=96, groups=4),
    "lightning_attention": small(
        "lightning_attention", "lightning-h16-d128", batch=1, seq=64, heads=2, key_dim=16, value_dim=16
    ),
    "mean_pooling": small("mean_pooling", "chunks-64", tokens=256, features=128, sequences=4),
    "multi_latent_page_attention": small(
        "multi_latent_page_attention", "b64-4k-h128-q2", sequences=3, context=64, heads=4, latent=32, rope=16, page=16
    ),
    "native_sparse_attention": small(
        "native_sparse_attention", "8k", length=128, heads=16, kv_heads=1, head_dim=16, blocks=3, size=16
    ),
    "page_attention": small("page_attention", "b8-32k", sequences=3, context=64, heads=4, kv_heads=2, head_dim=16),
    "quantized_matmul": small("quantized_matmul", "llama3-70b-up-16", rows=3, features=64, columns=128),
    "ragged_page_attention": small(
        "ragged_page_attention",
        "b4-4k-512-b60-decode",
        sequences=2,
        cached=32,
        new=24,
        heads=4,
        kv_heads=2,
        head_dim=16,
        page=16,
        decodes=2,
    ),
    "recurrent": small("recurrent", "retention-h16-d128", batch=1, seq=64, heads=2, key_dim=16, value_dim=16),
    "state_space_v2": small(
        "state_space_v2", "mamba-codestral-7b", batch=2, seq=48, heads=4, head_dim=16, groups=2, state=16
    ),
}
STEP = small("gla", "gla-h16-d128", batch=2, seq=1, heads=2, key_dim=16, value_dim=16)
LISTS = small(
    "multi_latent_page_attention",
    "top2k-1k-of-32k-h128",
    context=64,
    heads=4,
    tokens=12,
    latent=32,
    rope=16,
    page=16,
    top_k=60,
)
FEW = replace(SMALL_CALLS["flash_mla"], seq_q=3)
CALLS = [(operation, shape, mode) for operation, shape in SMALL_CALLS.items() for mode in shape.modes]


@pytest.mark.parametrize(
    ("operation", "shape", "mode"),
    [
        # The backward alone is most of the forward with the backward.
        pytest.param(*call, id=f"{call[0]}-{call[2]}", marks=[pytest.mark.slow] * (call[2] == "bwd"))
        for call in [
            *CALLS,
            ("gla", STEP, "step"),
            ("multi_latent_page_attention", LISTS, "fwd"),
            ("flash_mla", FEW, "fwd"),
        ]
    ],
)
def test_our_results_pass_the_check_and_wrong_ones_do_not(operation, shape, mode):
    """Our results pass and name their configs; with one of them a tenth too large, or NaN, the check fails."""
    case = importlib.import_module(f"benchmarks.{operation}").case(shape, mode, jnp.dtype("bfloat16"), ["auto"])
    prepared, judge = case.contenders[0].prepare(), case.judge()
    assert judge(prepared.results) <= (case.largest_error or _driver.LARGEST_ERROR[mode])
    assert operation in prepared.detail
    judged = 1 if case.chained > 1 else len(prepared.results)
    for n in range(judged):
        replaced = lambda x, n=n: [*prepared.results[:n], x, *prepared.results[n + 1 :]]
        assert judge(replaced(prepared.results[n] * 1.1)) > 10
        assert not judge(replaced(prepared.results[n] * jnp.nan)) <= 10


def test_a_step_has_the_state_of_the_step_before():
    """The results that are judged are those of the first, and what was given remains."""
    x, state, states = jnp.ones(3), jnp.zeros(3), []
    batch = harness.carrying(lambda state, x: states.append(state) or (x, state + x), state, x)
    batch(2)
    batch(1)
    np.testing.assert_array_equal(jnp.stack(states)[:, 0], [0, 1, 2])
    step = _contenders.of_jax(
        "step", lambda: lambda x, h: (x, h + x), "step", _contenders.Inputs((x, state), carried=True)
    )
    prepared = step.prepare()
    prepared.batch(3)
    np.testing.assert_array_equal(prepared.results[1], x)
    np.testing.assert_array_equal(state, jnp.zeros(3))


@pytest.mark.slow
def test_a_rival_of_jax_is_judged_as_ours_is():
    of_mla = (("flash_mla", mode) for mode in SMALL_CALLS["flash_mla"].modes)
    calls = ("grouped_matmul", "fwd_bwd"), ("mean_pooling", "bwd"), ("blocksparse_attention", "fwd"), *of_mla
    for operation, mode in calls:
        module = importlib.import_module(f"benchmarks.{operation}")
        case = module.case(SMALL_CALLS[operation], mode, jnp.dtype("float32"), [])
        assert case.judge()(case.contenders[0].prepare().results) <= 10


# --- The check of numbers


def test_the_formula_is_judged_in_the_dtype_of_the_inputs():
    given = _attention.inputs(SMALL, jnp.dtype("bfloat16"))
    judge = flash_attention.check(SMALL, "fwd_bwd", given)
    ours, formula, *_ = _attention_rivals.contenders(SMALL, "fwd_bwd", given, ["auto"])
    assert judge(ours.prepare().results) <= 3 and judge(formula.prepare().results) <= 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_rounds_its_results_alone_has_the_unit_of_errors(dtype):
    """In float32 that is the error of the sums of the formula, beside which rounding the exact ones is little."""
    x = np.random.default_rng(0).standard_normal(4096)
    formula = lambda dtype: [jnp.asarray(x, dtype).cumsum()]
    judge = _referee.check_by_rounding(list, formula, dtype)
    assert judge([formula("float32")[0].astype(dtype)]) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("mode", SMALL.modes)
def test_concurrent_preparation_runs_no_contender(mode, monkeypatch):
    """When contenders ran concurrently, processes crashed."""
    given = _attention.inputs(SMALL, jnp.dtype("float32"))
    ours, *_ = _attention_rivals.contenders(SMALL, mode, given, ["auto"])
    monkeypatch.setattr(jax, "block_until_ready", breaks)
    monkeypatch.setattr(jax.stages.Compiled, "__call__", breaks)
    harness.warmed([ours.warm])
    ours.warm()  # prints a failure, which `warmed` leaves to the preparation
    with pytest.raises(RuntimeError):
        ours.prepare()
