"""The small programs of benchmarks run, keep records that become tables, and check numbers before timing."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    _program,
    _records,
    _results_tables,
    attention_bias,
    differential_attention,
    fused_norm,
    packed_attention,
)
from ejkernel import callib

LAYER = fused_norm.Sizes(hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The record that a program with these arguments writes, and its table."""
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    monkeypatch.setattr(_records, "RESULTS", tmp_path)

    def run(main, arguments, **more):
        assert main([*arguments.split(), "--repeats", "1", "--out", str(tmp_path)], **more) == 0
        (file,) = tmp_path.iterdir()
        return json.loads(file.read_text())["rows"], _results_tables._of_record(_records.Record(file.name))

    return run


@pytest.mark.slow
def test_fusing_the_norm(kept, capsys):
    rows, table = kept(fused_norm.main, "--sizes 1x16 3x1", layer=LAYER)
    cases = [(1, 16, "fwd"), (1, 16, "fwd_bwd"), (3, 1, "fwd")]
    assert [(r["batch"], r["tokens"], r["mode"]) for r in rows] == [case for case in cases for _ in range(5)]
    for row, *_, without, layer in zip(*[iter(rows)] * 5, strict=True):
        assert row["program"] == "norm + qkv" and "gain" not in row
        assert layer["gain"] == 1 - without["milliseconds"] / layer["milliseconds"]
    assert capsys.readouterr().out.count("the bar of 5%") == len(cases)
    assert "| ms | mode | norm + qkv | qkv | norm | layer without norms | layer | gain |" in table
    assert "| 1 × 16 | forward + backward | " in table and table.count("at most") == len(cases)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_layer_is_that_of_llama(normalised):
    """For a single token, which attends only to itself: its attention output is its value."""
    x, weights, *norms = jax.tree.map(
        lambda x: x.astype(jnp.float32), fused_norm.programs(LAYER, 3, 1)["layer" if normalised else NO_NORMS][1]
    )
    found = fused_norm.layer_of(LAYER, 3, 1)(x, weights, *norms)
    x, weights, *norms = jax.tree.map(np.asarray, (x, weights, *norms))
    norm = lambda x, n: norms[0][n] * x / np.sqrt((x**2).mean(-1, keepdims=True)) if normalised else x
    v = (norm(x, 0) @ weights["qkv"]).reshape(3, -1, 8)[:, 6:]
    x = x + np.repeat(v, 2, 1).reshape(3, -1) @ weights["o"]
    gate, up = np.split(norm(x, 1) @ weights["gate_up"], 2, -1)
    np.testing.assert_allclose(found, x + (gate / (1 + np.exp(-gate)) * up) @ weights["down"], rtol=1e-4, atol=1e-4)


NO_NORMS = "layer without norms"


def test_differential_attention_beside_two_attentions(kept, monkeypatch):
    monkeypatch.setattr(differential_attention, "HEADS", {"few": (4, 2, 8, 16)})
    rows, table = kept(differential_attention.main, "--sizes 2x16")
    assert [(row["mode"], row["program"]) for row in rows] == [
        (mode, program)
        for mode in ("fwd", "fwd_bwd")
        for program in (
            "differential_attention",
            "two attentions",
            "two and their difference",
            "differential_attention, RMSNorm",
            "two attentions, RMSNorm",
        )
    ]
    ours, two, _, normed, two_normed = rows[:5]
    assert ours["of_two"] == ours["milliseconds"] / two["milliseconds"] and ours["difference"] <= 0.02
    assert normed["of_two"] == normed["milliseconds"] / two_normed["milliseconds"]
    assert "| few, 2 × 16 | forward + backward | " in table
    assert "| differential_attention of two attentions |" in table


def test_different_results_are_not_timed(monkeypatch):
    monkeypatch.setattr(differential_attention.lax, "differential_attention", lambda *x, causal: x[0] * 0)
    programs = differential_attention.programs(4, 2, 8, 8, 1, 16)
    ours, two, written, normed, _ = differential_attention.measured(_program.compiled({("fwd",): programs})["fwd",], 1)
    assert np.isnan(ours["milliseconds"]) and np.isnan(normed["milliseconds"]) and ours["difference"] > 0.02
    assert two["milliseconds"] > 0 and written["milliseconds"] > 0


def test_a_program_that_fails_has_no_time(capsys):
    def fails():
        raise RuntimeError("out of memory")

    found = _program.milliseconds({"right": (lambda: None, ()), "broken": (fails, ())}, 1)
    assert found["right"] > 0 and np.isnan(found["broken"])
    assert capsys.readouterr().out == "broken failed: out of memory\n"


# --- Bias and mask

SMALL = {"t5-large": (2, 16), "alibi": (2, 16), "mask": (2, 16), "shared-mask": (2, 16)}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(attention_bias, "HEADS", SMALL)


def test_bias_and_mask_beside_cudnn(kept, small, monkeypatch, capsys):
    monkeypatch.setitem(callib.ceilings._SIZES, "cpu", (2**16, 64))
    rows, table = kept(attention_bias.main, "--cases t5-large mask --tokens 32 --platforms auto")
    status = {(r["case"].split(":")[0], r["mode"], r["contender"]): r["status"] for r in rows}
    assert len(rows) == len(status) == 2 * 2 * 4
    for name in ("t5-large", "mask"):
        for mode in ("fwd", "fwd_bwd"):
            assert status[name, mode, "ejkernel auto"] == "timed"
            assert status[name, mode, "jax.nn cudnn"] == status[name, mode, "torch cudnn"] == "unavailable"
    assert capsys.readouterr().out.count("no time of both") == 4
    assert "| t5-large: b2 s32 h2 d16 full | " in table


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("name", SMALL)
def test_the_check_of_bias_and_mask_rejects_wrong_results(small, name, mode):
    """Our results pass; with one of them a tenth too large, or without bias or mask, the check fails."""
    shape, given = attention_bias.made_of(name, 2, 32)
    case = attention_bias.case(shape, mode, given, ["auto"])
    results, judge = case.contenders[0].prepare().results, case.judge()
    assert judge(results) <= (2.0 if mode == "fwd" else 3.0)
    assert len(results) == (1 if mode == "fwd" else 1 + len(given.operands))
    for n, x in enumerate(results):
        assert judge([*results[:n], x * 1.1, *results[n + 1 :]]) > 10
    bare = attention_bias._ours(shape, None)(*given.operands[:3])
    assert judge([bare, *results[1:]]) > 10


def test_the_ratio_to_cudnn_is_that_of_the_best():
    row = lambda name, time: attention_bias.Row("t5", "fwd", name, name.startswith("ejkernel"), milliseconds=time)
    rows = [row("ejkernel auto", 2.0), row("jax.nn cudnn", 4.0), row("torch cudnn", 3.0), row("torch efficient", 1.0)]
    assert list(attention_bias.beside_cudnn(rows)) == ["t5, fwd: 1.500 × cuDNN"]


# --- Packed sequences

PACKED = {
    "causal": packed_attention.Packed("causal", 4, 2, 16, (5, 1, 26)),
    "full": packed_attention.Packed("full", 2, 2, 16, packed_attention.drawn(4, 32), causal=False),
}


def test_packed_sequences_beside_their_rivals(kept, monkeypatch):
    monkeypatch.setitem(callib.ceilings._SIZES, "cpu", (2**16, 64))
    monkeypatch.setattr(packed_attention, "CASES", PACKED)
    rows, _ = kept(packed_attention.main, "--cases causal full")
    status = {(r["case"].split(":")[0], r["mode"], r["contender"]): r["status"] for r in rows}
    assert len(rows) == len(status) == 2 * 2 * 4
    for name in PACKED:
        for mode in ("fwd", "fwd_bwd"):
            assert status[name, mode, "ejkernel auto"] == status[name, mode, "ejkernel segment ids"] == "timed"
            assert status[name, mode, "FlashAttention-3"] == status[name, mode, "torch varlen"] == "unavailable"


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("name", PACKED)
def test_the_check_of_packed_sequences_rejects_wrong_results(name, mode):
    shape = PACKED[name]
    case = packed_attention.case(shape, mode)
    (results, by_ids), judge = (c.prepare().results for c in case.contenders[:2]), case.judge()
    assert judge(results) <= 3 and judge(by_ids) <= 3
    one = replace(shape, lengths=(sum(shape.lengths),))
    assert judge(packed_attention.case(one, mode).contenders[0].prepare().results) > 10
    for n, x in enumerate(results):
        assert judge([*results[:n], x * 1.1, *results[n + 1 :]]) > 10


def test_lengths_are_drawn_to_a_sum():
    assert sum(packed_attention.drawn(16, 16384)) == 16384 and min(packed_attention.drawn(128, 200)) >= 1
    assert packed_attention.CASES["llama3-8b-8x2048"].work("fwd") == 4 * 32 * 128 * 8 * 2048 * 2049 // 2
