"""The commands: their output, their files, and one clear line for wrong arguments."""

import csv
import sys
from functools import partial

import jax
import numpy as np
import pytest

import ejkernel
from ejkernel.__main__ import main
from ejkernel.cli import _devices, _versions, demo, info
from ejkernel.cli._formulas import plain_attention, plain_gla, plain_grouped_matmul
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.ops import ConfigCache, PersistentCache, default_executor, overlay_cache
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import KernelConfig


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    """The one-line error for wrong arguments."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    out, err = capsys.readouterr()
    assert raised.value.code == 2 and out == "" and err.count("\n") == 1
    return err


# --- info


def test_info_shows_versions_devices_and_implementations(capsys):
    out = printed(capsys, "info")
    assert f"jax         {jax.__version__}" in out
    assert f"{jax.device_count()} × cpu" in out
    entry = kernel_registry.list_implementations("flash_attention")[0]
    assert f"{entry.platform}/{entry.backend} ({entry.priority})" in out


def test_info_says_why_a_platform_is_missing(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert _devices.available("cuda") == "none: JAX_PLATFORMS=cpu leaves it out"
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(_devices, "version", lambda package: None)
    assert _devices.available("rocm") == "none: jax-rocm7-plugin or jax-rocm60-plugin is not installed"


def test_info_counts_the_tuned_configs_that_fit(capsys, monkeypatch, tmp_path):
    table, kernel = PersistentCache(tmp_path), KERNELS["flash_attention"]
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), "float32")
    key = kernel.key_builder(kernel.invocation(dict(q=x, k=x, v=x), FlashAttentionSpec()))
    for stored in (key, key.replace("source ", "source of another time ")):
        table.put(stored, KernelConfig(), "gpu|NVIDIA H200")
    monkeypatch.setattr(info, "SHIPPED", table)
    assert "gpu_NVIDIA_H200  2 configs, 1 of what is installed here" in printed(capsys, "info")


def test_a_package_that_is_not_installed_has_no_version():
    assert _versions.version("no-such-package") is None


# --- explain


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm", "tpu"])
def test_explain_shows_every_implementation(capsys, target):
    out = printed(capsys, *f"explain flash_attention --q 2,4096,32,128 --kv-heads 8 --causal --target {target}".split())
    assert out.startswith(f"flash_attention on {target}: ")
    for entry in kernel_registry.list_implementations("flash_attention"):
        assert f"{entry.platform}/{entry.backend}" in out


def test_explain_names_the_variants_that_a_config_may_ask_for(capsys):
    pytest.importorskip("triton")
    call = "explain", "recurrent", "--q", "1,4096,16,128", "--dtype", "bf16"
    out = printed(capsys, *call, "--target", "cuda", "--device-kind", "NVIDIA H200")
    triton = kernel_registry.find("recurrent", "triton").implementation
    also = "".join(f"; also with algorithm={name!r} in the config" for name in triton.variants)
    assert f"triton/gpu    takes this call{also}\n" in out and "'fused_chunks'" in also


def test_explain_says_where_a_config_comes_from(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), "float32")
    inv = KERNELS["flash_attention"].invocation(dict(q=x, k=x, v=x), FlashAttentionSpec(softmax_scale=0.25))
    config, chain = KernelConfig(block_q=32, platform="xla", backend="cpu"), default_executor().selector
    monkeypatch.setattr(chain, "cache", ConfigCache())
    told = lambda: str(ejkernel.explain("flash_attention", x, x, x)).partition("\n")[0]
    assert told().endswith(", by heuristics")
    chain.persistent.put(inv.kernel.key_builder(inv), config)
    assert told() == f"flash_attention on {inv.target}: xla/cpu with {config}, measured on this machine"
    chain.cache.put(inv.kernel.key_builder(inv), config)
    assert told().endswith(f"{config}, from the cache in memory")
    overlay = ConfigCache()
    overlay.put(inv.kernel.key_builder(inv), config)
    with overlay_cache(overlay):
        assert told().endswith(f"{config}, from an overlay")


EVERY_OPTION = """
    --q 2,64,8,32 --kv-heads 2 --kv-length 128 --value-dim 16 --dtype f16 --bias 1,8,64,128 --sinks 1 --segment-ids
    --array mask=bool[64,128] --causal --window 31,none --softcap 30 --dropout 0.1 --option deterministic=True
"""


def test_explain_hands_on_every_option(capsys, monkeypatch):
    given = {}
    monkeypatch.setattr(
        "ejkernel.cli.explain.explain",
        lambda operation, **keywords: given.update(keywords) or ejkernel.explain(operation, **keywords),
    )
    printed(
        capsys, "explain", "flash_attention", *EVERY_OPTION.split(), "--target", "cuda", "--device-kind", "NVIDIA H200"
    )
    types = {name: f"{x.dtype}{list(x.shape)}" for name, x in given.items() if hasattr(x, "shape")}
    assert types == {
        "q": "float16[2, 64, 8, 32]",
        "k": "float16[2, 128, 2, 32]",
        "v": "float16[2, 128, 2, 16]",
        "bias": "float32[1, 8, 64, 128]",
        "mask": "bool[64, 128]",
        "sinks": "float32[8, 1]",
        "q_segment_ids": "int32[2, 64]",
        "kv_segment_ids": "int32[2, 128]",
        "dropout_key": "key<fry>[]",
    }
    options = {name: given[name] for name in ("causal", "window", "softcap", "dropout_rate", "deterministic")}
    assert options == dict(causal=True, window=(31, None), softcap=30.0, dropout_rate=0.1, deterministic=True)
    assert str(given["target"]) == "cuda (NVIDIA H200)"


def test_explain_takes_every_option(capsys):
    assert "xla/any" in printed(capsys, "explain", "flash_attention", *EVERY_OPTION.split())


@pytest.mark.parametrize(
    "call",
    (
        "recurrent --q 2,64,4,64 --kv-heads 2 --array g=f32[2,64,4]",
        "gla --q 2,64,4,64 --array gk=f32[2,64,4,64]",
        "lightning_attention --q 2,64,4,64 --option layer_idx=0 --option num_layers=2",
        "grouped_matmul --array lhs=bf16[64,32] --array rhs=int8[4,32,16] --array group_sizes=i32[4]",
        "mean_pooling --array x=bf16[2,64,32]",
    ),
    ids=lambda call: call.partition(" ")[0],
)
def test_explain_takes_every_operation(capsys, call):
    assert "xla/any       takes this call" in printed(capsys, "explain", *call.split())


# --- Wrong arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: command"),
        ("nonsense", "invalid choice: 'nonsense'"),
        ("explain no_such_operation --q 1,64,4,64", "no such operation: no_such_operation"),
        ("explain flash_attention --q 1,64,4", "--q has 3 sizes; it must have 4"),
        ("explain flash_attention --q 1,0,4,64", "'1,0,4,64' is not a list of positive sizes"),
        ("explain flash_attention --q 1,64,4,64 --kv-heads 3", "k has 3 heads but q has 4"),
        ("explain flash_attention --q 1,64,4,64 --kv-heads 0", "'0' is not a positive number"),
        ("explain flash_attention --q 1,64,4,64 --dtype float3", "'float3' is not a dtype"),
        ("explain flash_attention --q 1,64,4,64 --window 0", "window is 0"),
        ("explain flash_attention --q 1,64,4,64 --window a", "'a' is neither a number of keys nor a pair"),
        ("explain flash_attention --q 1,64,4,64 --softcap 0", "softcap is 0.0"),
        ("explain flash_attention --q 1,64,4,64 --array mask", "'mask' is not of the form"),
        ("explain flash_attention --q 1,64,4,64 --option causal=perhaps", "'causal=perhaps' is not of the form"),
        ("explain mean_pooling --kv-heads 3 --array x=f32[1,2,3]", "--kv-heads needs --q"),
        ("explain flash_attention --q 1,64,4,64 --device-kind H200", "--device-kind needs --target"),
        ("demo --steps 0", "--steps is 0; it must be at least 1"),
        ("demo --context-parallel 3", "--context-parallel is 3; it must be at least 1 and divide 64, half"),
        ("demo --context-parallel 16", "16 devices are asked for; there are 8 of cpu"),
        ("demo --context-parallel 2 --mixer gla", "--context-parallel is for attention, not for --mixer gla"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(capsys, arguments, message):
    assert message in refused(capsys, *arguments.split())


# --- demo


def trained(capsys, out, monkeypatch, *arguments):
    """The output of the demo; 12 steps show whether the losses are smooth enough for two trainings to stay together."""
    monkeypatch.setattr(demo, "_SAMPLED", 8)
    told = printed(capsys, "demo", *arguments, "--steps", "12", "--out", str(out))
    assert "of a step, in the first 12 " in told and "of means over" not in told
    assert "the kernels and the formula train alike" in told
    return told


@pytest.mark.slow
def test_demo_trains_shows_and_saves(capsys, tmp_path, monkeypatch):
    out = trained(capsys, tmp_path / "new", monkeypatch)
    assert "4 × flash_attention, 4 × flash_attention_bwd" in out
    assert "config=KernelConfig(" in out and "ejkernel[op=flash_attention;" in out
    with open(tmp_path / "new" / "loss.csv") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "ejkernel", "reference"] and [int(row[0]) for row in rows] == list(range(1, 13))
    assert len((tmp_path / "new" / "sample.txt").read_text()) == 128 + 8


@pytest.mark.slow
def test_demo_with_gated_linear_attention(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_show_text", lambda *given: True)  # the test with experts saves files
    assert "training step: 4 × gla, 4 × gla_bwd\n" in trained(capsys, tmp_path, monkeypatch, "--mixer", "gla")


@pytest.mark.slow
def test_demo_with_experts(capsys, tmp_path, monkeypatch):
    out = trained(capsys, tmp_path, monkeypatch, "--moe")
    assert "4 × flash_attention, 4 × flash_attention_bwd, 12 × grouped_matmul, 12 × grouped_matmul_bwd" in out


@pytest.mark.slow
def test_demo_with_sequences_over_two_devices(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_show_text", lambda *given: True)
    out = printed(capsys, "demo", "--context-parallel", "2", "--steps", "3", "--out", str(tmp_path))
    assert "64 characters of each on one" in out
    assert "2 devices and one device train alike" in out


@pytest.mark.slow
def test_demo_with_gated_linear_attention_and_experts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_SAMPLED", 8)
    monkeypatch.setattr(demo, "Model", partial(demo.Model, windows=(None, None)))  # as many layers
    out = printed(capsys, "demo", "--mixer", "gla", "--moe", "--steps", "3", "--out", str(tmp_path))
    assert "the kernels and the formula train alike" in out
    assert "2 × gla, 2 × gla_bwd, 6 × grouped_matmul, 6 × grouped_matmul_bwd" in out
    assert "ejkernel[op=gla;" in out and "ejkernel[op=grouped_matmul;" in out
    assert "8 of 8 characters, generated from recurrent states, agree with a forward over the whole text" in out


def test_without_matplotlib_the_demo_says_so_and_leaves_the_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    demo._save_losses({"ejkernel": np.ones(2), "reference": np.ones(2)}, demo._TOLERANCE["float32"], "", tmp_path)
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["loss.csv"]


def test_an_error_names_a_directory_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "File exists" in refused(capsys, "demo", "--out", str(tmp_path / "file"))


def test_demo_fails_if_the_curves_differ(capsys):
    def agree(steps, by, dtype="float32"):
        """Whether the losses agree if those steps of a falling curve are higher by so much."""
        curves = {name: np.linspace(4, 2, 200) for name in ("ejkernel", "reference")}
        curves["ejkernel"][steps] += by
        return demo._compare(curves, demo._TOLERANCE[dtype])

    assert agree(19, 4e-3, "bfloat16") and agree(20, 0.1, "bfloat16") and not agree(19, 6e-3, "bfloat16")
    assert agree(20, 5e-6) and agree(slice(50, 200), 0.01) and agree(50, 0.9) and agree(120, -0.9)
    assert "means over 50 steps, later   1.8e-02, tolerance 0.02\n" in capsys.readouterr().out
    assert not agree(20, 1e-4) and not agree(49, 1e-4)  # a step that is compared by itself
    assert not agree(slice(50, 200), 0.03) and not agree(slice(150, 200), -0.03) and not agree(120, 1.1)
    assert not agree(0, np.nan) and not agree(120, np.nan) and not agree(199, np.nan) and not agree(199, np.inf)
    assert "train alike" not in capsys.readouterr().out


def test_the_formula_of_the_demo_is_that_of_the_operation():
    from ejkernel import lax

    q, k, v = (jax.random.normal(jax.random.key(i), (2, 40, heads, 16)) for i, heads in enumerate((4, 2, 2)))
    for window in (None, 7):
        options = dict(causal=True, window=window, softcap=5.0)
        np.testing.assert_allclose(
            plain_attention(q, k, v, **options), lax.flash_attention(q, k, v, **options), atol=2e-6
        )


def test_the_formula_of_gated_linear_attention_is_that_of_the_operation():
    from ejkernel import lax

    q, k, v, gk = (jax.random.normal(jax.random.key(i), (2, 40, heads, 16)) for i, heads in enumerate((4, 2, 2, 4)))
    given = (q, k, v, -jax.numpy.abs(gk), jax.random.normal(jax.random.key(4), (2, 4, 16, 16)))
    for ours, plain in zip(lax.gla(*given, return_state=True), plain_gla(*given, return_state=True), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_the_formula_of_experts_is_that_of_the_operation():
    from ejkernel import lax

    lhs, rhs = jax.random.normal(jax.random.key(0), (9, 8)), jax.random.normal(jax.random.key(1), (4, 8, 6))
    given = (lhs, rhs, jax.numpy.array([3, 0, 5, 1]))
    plain = plain_grouped_matmul(*given, preferred_element_type=lhs.dtype)
    np.testing.assert_allclose(lax.grouped_matmul(*given), plain, atol=1e-5)
