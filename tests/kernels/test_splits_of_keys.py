"""Tangents and backwards of splits of the keys, given o and lse of all keys: their sums are those of the whole call.

Ring attention is made of them. Some queries see nothing in one of the splits, some in none; sinks are in one.
"""

import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla import flash_attention as xla
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import derivatives, differentiable, like

SPEC = FlashAttentionSpec(softcap=3.0, softmax_scale=0.25)
CUT, QUERIES, KEYS, HEADS = 24, 40, 56, 2
IDS = dict(
    q_segment_ids=jnp.repeat(jnp.array([[0, 1, 2, -1, 1]]), 8, 1),
    kv_segment_ids=jnp.repeat(jnp.array([[0, 1, 1, 1, 2, -1, 2]]), 8, 1),
)
PLAIN = dict(q=(1, QUERIES, HEADS, 16), k=(1, KEYS, 1, 16), v=(1, KEYS, 1, 24))
CALLS = {
    "segments, scale": dict(IDS, softmax_scale=(1, HEADS)),
    "sinks, bias": dict(sinks=(1, HEADS, 2), bias=(1, HEADS, QUERIES, KEYS)),
}


def operands(name, dtype) -> Operands:
    arrays = {n: jax.ShapeDtypeStruct(x, dtype) for n, x in (PLAIN | CALLS[name]).items() if isinstance(x, tuple)}
    return Operands(**like(arrays, 0) | {n: x for n, x in CALLS[name].items() if not isinstance(x, tuple)})


def split(x: Operands) -> list[Operands]:
    """The first keys, and the others with the sinks; of operands or of their tangents."""
    cut = lambda name, axis, part: (
        None if getattr(x, name) is None else getattr(x, name)[(slice(None),) * axis + (part,)]
    )
    of = lambda part, sinks: x._replace(
        **{name: cut(name, 1, part) for name in ("k", "v", "kv_segment_ids")}, bias=cut("bias", 3, part), sinks=sinks
    )
    return [of(slice(0, CUT), None), of(slice(CUT, None), x.sinks)]


def joined(parts: list[dict]) -> dict:
    """The gradients of the whole from those of the splits."""
    axes = dict(k=1, v=1, bias=3)
    join = lambda name, xs: jnp.concatenate(xs, axes[name]) if name in axes else sum(xs)
    return {name: join(name, [part[name] for part in parts if name in part]) for name in parts[1]}


def of_splits(module, x, outputs, cotangents, tangents, config):
    """Gradients by name, and the tangents of o and lse, by the kernels of a module."""
    spec, gradients, moved = replace(SPEC, split=True), [], []
    for part, tangent in zip(split(x), split(Operands(**dict.fromkeys(x._fields) | tangents)), strict=True):
        wrt = differentiable(part)
        of_part = module.flash_attention_bwd(part, outputs, cotangents, wrt=wrt, spec=spec, config=config)
        gradients.append(dict(zip(wrt, of_part, strict=True)))
        moved.append(module.flash_attention_jvp(part, outputs, tangent, spec=spec, config=config))
    return joined(gradients), jax.tree.map(lambda *parts: sum(parts), *moved)


def check(module, name, config=KernelConfig(block_q=16, block_k=16), run=lambda f: f, dtype=jnp.float32, bound=2e-5):
    x = operands(name, dtype)
    cotangents = like(Outputs(jnp.zeros((*x.q.shape[:3], 24), dtype), jnp.zeros((1, HEADS, QUERIES), jnp.float32)), 2)
    tangents = {n: like(getattr(x, n), 1) for n in differentiable(x)}
    outputs, gradients, moved = derivatives(x, SPEC, cotangents, tangents, jnp.float64)
    given = Outputs(jnp.asarray(outputs.o, dtype), jnp.asarray(outputs.lse, jnp.float32))
    found = run(lambda *arrays: of_splits(module, *arrays, config))(x, given, cotangents, tangents)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((gradients, moved)), strict=True):
        error = np.abs(np.asarray(a, np.float64) - b).max() / max(1, np.abs(b).max())
        assert error < bound, error


@pytest.mark.parametrize("name", CALLS)
def test_in_xla(name):
    check(xla, name, run=jax.jit)


@pytest.mark.parametrize("name", CALLS)
def test_the_derivative_of_a_backward_in_xla(name, x64):
    """It goes through o and lse, which are functions of the operands."""
    x = operands(name, jnp.float64)
    moving = {n: getattr(x, n) for n in differentiable(x)}
    along = {n: like(a, 1) for n, a in moving.items()}
    config = KernelConfig(block_q=16, block_k=16)
    outputs = lambda arrays: xla.reference(*x._replace(**arrays), spec=SPEC)
    cotangents = like(jax.eval_shape(outputs, moving), 2)

    def backward(arrays):
        given = x._replace(**arrays)
        return of_splits(xla, given, outputs(arrays), cotangents, along, config)[0]

    found = jax.jit(lambda *a: jax.jvp(backward, *a)[1])((moving,), (along,))
    wanted = jax.jit(lambda *a: jax.jvp(lambda arrays: jax.vjp(outputs, arrays)[1](cotangents)[0], *a)[1])(
        (moving,), (along,)
    )
    for n in wanted:
        assert np.abs(found[n] - wanted[n]).max() < 1e-11 * max(1, np.abs(wanted[n]).max()), n


# The interpreters take half a minute a call.
one_of_them = pytest.mark.parametrize("name", ["segments, scale", pytest.param("sinks, bias", marks=pytest.mark.slow)])


@one_of_them
def test_in_triton(name, monkeypatch):
    pytest.importorskip("triton")
    from ejkernel.kernels._triton import _launch

    from . import interpreter

    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    check(importlib.import_module("ejkernel.kernels._triton.flash_attention"), name)


@one_of_them
def test_on_tpu(name):
    from .tpu_interpreter import interpreted

    kernels = importlib.import_module("ejkernel.kernels._pallas.tpu.flash_attention")
    check(kernels, name, KernelConfig(block_q=128, block_k=128), interpreted)
