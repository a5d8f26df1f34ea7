"""`ejkernel explain`: its exit status, its rows, and the autotuning policy."""

import functools

import jax
import numpy as np
import pytest

import ejkernel
from ejkernel.__main__ import main
from ejkernel.kernels._dispatch import table
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.ops import ConfigCache, default_executor
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import KernelConfig

EXPLAIN = "explain flash_attention --q 1,64,4,64"


def explained(capsys, arguments):
    status = main(arguments.split())
    return status, capsys.readouterr().out.splitlines()


def test_explain_exits_with_1_where_nothing_can_run(capsys):
    status, (what, *rows) = explained(capsys, f"{EXPLAIN} --target cpu --platform triton")
    assert status == 1 and what == "flash_attention on cpu: nothing can run"
    assert not any("takes this call" in row or "→" in row for row in rows)


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm", "tpu"])
def test_explain_has_a_row_for_each_implementation_and_marks_the_one_that_runs(capsys, target):
    status, (what, *rows) = explained(capsys, f"{EXPLAIN} --target {target}")
    entries = kernel_registry.list_implementations("flash_attention")
    assert status == 0 and len(rows) == len(entries)
    for entry, row in zip(entries, rows, strict=True):
        mark, priority, name, reason = row[:1], *row[1:].split(maxsplit=2)
        assert (priority, name) == (str(entry.priority), f"{entry.platform}/{entry.backend}") and reason
        assert mark in " →"
    (runs,) = (row for row in rows if row.startswith("→"))
    assert "takes this call" in runs and runs.split()[2].partition("/")[0] in what


@pytest.mark.parametrize(
    "options",
    [dict(causal=np.True_, window=np.int64(3)), dict(softcap=np.float32(3), softmax_scale=np.float64(0.5))],
    ids=str,
)
def test_options_may_be_numbers_of_numpy(options):
    """As they may in the call."""
    q = jax.ShapeDtypeStruct((1, 8, 2, 16), np.float32)
    assert ejkernel.explain("flash_attention", q, q, q, **options).runs
    assert jax.eval_shape(functools.partial(ejkernel.lax.flash_attention, **options), q, q, q).shape == q.shape
    x = dict(q1=q, k1=q, q2=q, k2=q, v=q, lambda_=0.3)
    assert ejkernel.explain("differential_attention", **x, **options).runs


@pytest.mark.parametrize("wrong", [dict(target="gpu"), dict(target="no"), dict(platform="no")], ids=str)
def test_a_target_or_platform_that_does_not_exist(wrong):
    q = jax.ShapeDtypeStruct((1, 8, 2, 16), np.float32)
    with pytest.raises(ValueError, match=r"flash_attention: (target is|platform) '(gpu|no)'"):
        ejkernel.explain("flash_attention", q, q, q, **wrong)


def test_a_reason_of_many_lines_is_one_row():
    entry = kernel_registry.list_implementations("flash_attention")[0]
    assert table([(entry, "cannot be imported (no\n  such module)")]).endswith("  cannot be imported (no such module)")


def test_explain_knows_the_policy_that_a_miss_is_an_error(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "error")
    chain = default_executor().selector
    monkeypatch.setattr(chain, "cache", ConfigCache())
    status, (what, *rows) = explained(capsys, EXPLAIN)
    assert status == 1 and "the call raises ConfigMissError" in what and not any("→" in row for row in rows)
    x = jax.ShapeDtypeStruct((1, 64, 4, 64), "bfloat16")
    with pytest.raises(ejkernel.ConfigMissError):
        jax.eval_shape(ejkernel.lax.flash_attention, x, x, x)
    inv = KERNELS["flash_attention"].invocation(dict(q=x, k=x, v=x), FlashAttentionSpec(softmax_scale=0.125))
    chain.cache.put(inv.kernel.key_builder(inv), KernelConfig(block_q=32, platform="xla", backend="cpu"))
    status, (what, *rows) = explained(capsys, EXPLAIN)
    assert status == 0 and what.endswith("from the cache in memory") and rows[-1].startswith("→")


def test_explain_knows_that_the_first_call_measures(capsys, monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "autotune")
    configs = [KernelConfig(block_q=size, platform="xla", backend="cpu") for size in (16, 32)]
    monkeypatch.setattr(KERNELS["flash_attention"], "config_space", lambda inv: configs)
    status, (what, *_) = explained(capsys, EXPLAIN)
    assert status == 0 and what.endswith("by heuristics, until the first call measures 3 configs")
    x = jax.ShapeDtypeStruct((1, 64, 4, 64), "bfloat16")
    inv = KERNELS["flash_attention"].invocation(dict(q=x, k=x, v=x), FlashAttentionSpec(softmax_scale=0.125))
    key = inv.kernel.key_builder(inv).replace("source ", "source of before ")
    default_executor().selector.persistent.put(key, configs[1])
    status, (what, *_) = explained(capsys, EXPLAIN)
    assert "measures 3 configs, first KernelConfig(block_q=32" in what and "with another source" in what
    assert explained(capsys, f"{EXPLAIN} --target cuda")[1][0].endswith("by heuristics")
