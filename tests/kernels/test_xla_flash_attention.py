"""The XLA implementation of flash_attention against its own formula, in float64 and in the precision of its inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp, reference
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

B, S, T, H, G, D, E = 2, 21, 27, 4, 2, 8, 12
SMALL = KernelConfig(block_q=8, block_k=16)
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "softmax_scale")
SPEC = FlashAttentionSpec(softmax_scale=D**-0.5)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def plain(b=B, s=S, t=T, h=H, g=G, d=D, e=E):
    return Operands(normal(b, s, h, d, seed=1), normal(b, t, g, d, seed=2), normal(b, t, g, e, seed=3))


def segments(n, seed):
    """Ascending ids with some padding at the end."""
    ids = np.sort(np.random.default_rng(seed).integers(0, 3, (B, n)), axis=1)
    ids[:, -4:] = -1
    return ids.astype(np.int32)


def dropout(b, h):
    index = np.indices((b, h), np.uint32)
    words = np.broadcast_to(np.array([[[7]], [[11]]], np.uint32), (2, b, h))
    return np.concatenate([words, index]).transpose(1, 2, 0)


LENGTHS = dict(cu_seqlens_q=np.array([[0, 6, 6, 17]], np.int32), cu_seqlens_k=np.array([[0, 9, 12, 24]], np.int32))
FEATURES = {  # operands, options of the spec
    "nothing": ({}, {}),
    "causal": ({}, dict(causal=True)),
    "window": ({}, dict(window=(3, 2))),
    "window_right": ({}, dict(window=(None, 4))),
    "softcap": ({}, dict(softcap=2.0)),
    "bias": (dict(bias=normal(B, H, S, T)), {}),
    "bias_of_rows": (dict(bias=normal(1, H, S, 1)), {}),
    "bias_of_columns": (dict(bias=normal(B, 1, 1, T)), {}),
    "mask": (dict(mask=normal(1, H, S, T) > 0.3), {}),
    "mask_of_columns": (dict(mask=normal(B, 1, 1, T) > 0.3), {}),
    "segments": (dict(q_segment_ids=segments(S, 1), kv_segment_ids=segments(T, 2)), {}),
    "sinks": (dict(sinks=normal(1, H, 3)), {}),
    "scale": (dict(softmax_scale=normal(1, H)), {}),
    "scale_of_batch": (dict(softmax_scale=normal(B, 1)), {}),
    "dropout": (dict(dropout=dropout(B, H)), dict(dropout_rate=0.3)),
    "packed": (LENGTHS, {}),
}
COMBINED = {
    "causal+bias+sinks": ("causal", "bias", "sinks"),
    "causal+segments+softcap+scale": ("causal", "segments", "softcap", "scale"),
    "packed+causal+dropout+bias": ("packed", "causal", "dropout", "bias"),
    "packed+window+sinks+softcap": ("packed", "window", "sinks", "softcap"),
    "everything": ("causal", "window", "softcap", "bias", "mask", "segments", "sinks", "scale", "dropout"),
}
CASES = {name: (name,) for name in FEATURES} | COMBINED


def case(name):
    operands, options = plain(), {}
    for feature in CASES[name]:
        arrays, spec = FEATURES[feature]
        operands, options = operands._replace(**arrays), options | spec
    return operands, FlashAttentionSpec(softmax_scale=D**-0.5, **options)


def present(operands):
    return tuple(name for name in DIFFERENTIABLE if getattr(operands, name) is not None)


def only(**arrays):
    return Operands(None, None, None)._replace(**arrays)


def directions(operands, seed=100):
    """A tangent for each differentiable operand."""
    return {
        n: normal(*getattr(operands, n).shape, seed=seed).astype(getattr(operands, n).dtype) for n in present(operands)
    }


def cotangent(outputs):
    return Outputs(*(normal(*x.shape, seed=200).astype(x.dtype) for x in outputs))


def of_reference(operands, spec, moved, cotangents):
    """Outputs, tangents and gradients of the formula, by JAX."""
    f = lambda arrays: reference(*operands._replace(**arrays), spec=spec)
    arrays = {name: getattr(operands, name) for name in moved}
    outputs, tangents = jax.jvp(f, (arrays,), (moved,))
    seen = jnp.isfinite(outputs.lse)
    cotangents = Outputs(cotangents.o, jnp.where(seen, cotangents.lse, 0))  # −∞ is no number to differentiate at
    (gradients,) = jax.vjp(f, arrays)[1](cotangents)
    return outputs, tangents, gradients


def of_kernel(operands, spec, moved, cotangents, config=SMALL):
    """The same by the three lowered functions."""
    outputs = flash_attention(*operands, spec=spec, config=config)
    tangents = flash_attention_jvp(operands, outputs, only(**moved), spec=spec, config=config)
    gradients = flash_attention_bwd(operands, outputs, cotangents, wrt=tuple(moved), spec=spec, config=config)
    return outputs, tangents, dict(zip(moved, gradients, strict=True))


def distance(a, b):
    """The largest difference of each array, in units of the largest number of the second; infinities may be equal."""

    def of(x, y):
        finite = jnp.isfinite(y)
        difference = jnp.where(x == y, 0, x.astype(jnp.float64) - y)
        return jnp.abs(difference).max() / jnp.maximum(1e-30, jnp.abs(jnp.where(finite, y, 0)).max())

    return jax.tree.map(of, a, b)


# Compiled without optimisation: most of the time of a test is spent in the compiler.
jit = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


@partial(jit, static_argnames=("spec", "config"))
def compared(operands, moved, cotangents, spec, config):
    return distance(
        of_kernel(operands, spec, moved, cotangents, config), of_reference(operands, spec, moved, cotangents)
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula_in_float64(name):
    operands, spec = case(name)
    outputs = jax.eval_shape(partial(reference, spec=spec), *operands)
    errors = compared(operands, directions(operands), cotangent(outputs), spec=spec, config=SMALL)
    assert max(jax.tree.leaves(errors)) < 1e-13, errors
