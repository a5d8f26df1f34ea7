"""Labels are found in lowered programs and in XLA's optimised HLO, and lead back to configs."""

import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
import shown
from shown import HEURISTIC, Config, Shown, executor, ones

from ejkernel.ops import extract_labels_from_hlo_text, find_labels_in_lowered, label, labelled, labels_to_configs


def lowered_gradient():
    loss = lambda a: jnp.tanh(executor()(Shown(), jnp.sin(a))).sum()
    return jax.jit(jax.grad(loss)).lower(ones())


def labels_of(lowered):
    """Of the lowered module, and of the optimised HLO."""
    return find_labels_in_lowered(lowered), extract_labels_from_hlo_text(lowered.compile().as_text())


def test_every_primitive_of_a_kernel_is_labelled():
    class Square(Shown):
        def run(self, a, *, cfg):
            return jnp.sin(a) * a

    run = lambda a: executor()(Square("square"), a)
    for function, operation in (
        (run, "square"),
        (jax.grad(run), "square_bwd"),
        (lambda x: jax.jvp(run, (x,), (x,))[1], "square_jvp"),
    ):
        for labels in labels_of(jax.jit(function).lower(1.0 * jnp.ones(()))):
            assert f"ejkernel[op={operation};impl=run]" in labels


@pytest.mark.parametrize("platform, implementation", [("cpu", "xla"), ("cuda", "triton"), ("tpu", "pallas")])
def test_the_implementation_is_the_one_that_is_lowered(platform, implementation):
    class Everywhere(Shown):
        def run_triton(self, a, *, cfg):
            return a * 2

        run_pallas = run_xla = run_triton

    traced = jax.jit(lambda a: executor()(Everywhere(), a)).trace(ones())
    assert find_labels_in_lowered(traced.lower(lowering_platforms=(platform,))) == [
        f"ejkernel[op=shown;impl={implementation}]"
    ]


def test_without_a_stamp_there_is_no_config():
    for labels in labels_of(lowered_gradient()):
        assert labels and labels_to_configs(labels) == {}


@pytest.mark.parametrize("stamp", ["hash", "json"])
def test_a_stamp_survives_vmap_and_a_loop(monkeypatch, stamp):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", stamp)
    run = lambda a: executor()(Shown(), a)
    loop = lambda a: jax.lax.scan(lambda c, x: (jnp.cos(jax.vmap(run)(c)), None), a, None, length=3)[0]
    for labels in labels_of(jax.jit(loop).lower(ones())):
        assert list(labels_to_configs(labels).values()) == [HEURISTIC]


@pytest.mark.parametrize("stamp", ["hash", "json"])
def test_another_process_reads_a_label(monkeypatch, stamp):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", stamp)
    (text,) = find_labels_in_lowered(jax.jit(lambda a: executor()(Shown(), a)).lower(ones()))
    script = f"import shown, ejkernel.ops; print(ejkernel.ops.labels_to_configs([{text!r}]))"
    here = os.path.dirname(shown.__file__)
    read = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=True)
    assert read.stdout.strip() == str({text: HEURISTIC})


def test_any_text_survives_in_a_config(monkeypatch):
    @dataclass(frozen=True)
    class Odd:
        text: str = "a@b ;]=%/\"'\\ é {x}"

    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "json")

    def step(a):
        with labelled("operation@v1", "triton;hopper", Odd()):
            return jnp.sin(a) * 2

    for labels in labels_of(jax.jit(step).lower(ones())):
        assert list(labels_to_configs(labels).values()) == [Odd()]


def test_label_decorates_and_is_transparent():
    @label("my attention")
    def attention(q, *, scale=1.0):
        """Doc."""
        return jnp.tanh(q) * scale

    assert attention.__doc__ == "Doc." and attention(jnp.zeros(2), scale=2.0).shape == (2,)
    for labels in labels_of(jax.jit(jax.grad(lambda q: attention(q).sum())).lower(ones())):
        assert "ejkernel[op=my%20attention]" in labels
    assert extract_labels_from_hlo_text(f"x {label('matmul@v1', '0123')} y") == ["ejkernel[op=matmul%40v1;call=0123]"]


def test_labels_that_say_nothing_of_a_config_are_left_out():
    texts = [label("op@v1", "0123"), "ejkernel[op=x;impl=y;config=0123456789abcdef]", "ejkernel[]", "not a label"]
    assert labels_to_configs(texts) == {}


def test_an_unknown_stamp_is_named(monkeypatch):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "hashed")
    with (
        pytest.raises(ValueError, match="'hashed'; it has to be one of none, hash, json"),
        labelled("op", "xla", Config()),
    ):
        pass
