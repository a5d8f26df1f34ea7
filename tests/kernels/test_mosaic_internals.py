"""Internals of JAX that the Hopper kernels use: if JAX has moved them, calls go to Triton."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.kernels._pallas.gpu import _internals, _supports
from ejkernel.types import Target

FILES = [(file, what) for file, used in _internals._USED.items() for what in used]
HOPPER = Target("cuda", "NVIDIA H200")


@pytest.mark.core
def test_the_installed_jax_has_the_names_in_use():
    assert _internals.moved() is None


@pytest.mark.parametrize(("name", "what"), FILES, ids=lambda x: x)
def test_every_moved_name_is_noticed(name, what, tmp_path):
    for file in _internals._USED:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(jax.__file__).parent / file, tmp_path / file)
    assert _internals.moved(tmp_path) is None
    _internals.moved.cache_clear()
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text.replace(what, "another_name"))
    assert f"no {what!r} in {name}" in _internals.moved(tmp_path)


def test_then_triton_takes_the_call(monkeypatch):
    """A refusal with its reason, instead of an error while the kernel is traced."""
    monkeypatch.setattr(_supports, "moved", lambda: "jax 9 has no Layout")
    x = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16)
    found = ejkernel.explain("flash_attention", x, x, x, causal=True, target=HOPPER)
    assert "triton/gpu with" in str(found) and "jax 9 has no Layout" in str(found)
