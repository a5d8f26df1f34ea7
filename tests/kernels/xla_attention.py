"""Shared by the tests of flash_attention in XLA: operands with every feature, and the formula beside the kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp, reference
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

B, S, T, H, G, D, E = 2, 21, 27, 4, 2, 8, 12
SMALL = KernelConfig(block_q=8, block_k=16)
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "softmax_scale")
SPEC = FlashAttentionSpec(softmax_scale=D**-0.5)


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
    """Of every second query from the third on, and of every third key from the fifth on, of a whole."""
    of_all = lambda *words: np.broadcast_to(np.array(words, np.uint32)[:, None, None], (len(words), b, h))
    return np.concatenate([of_all(7, 11), np.indices((b, h), np.uint32), of_all(2, 2, 4, 3)]).transpose(1, 2, 0)


LENGTHS = dict(cu_seqlens_q=np.array([[0, 6, 6, 17]], np.int32), cu_seqlens_k=np.array([[0, 9, 12, 24]], np.int32))
FEATURES = {  # operands, options of the spec
    "nothing": ({}, {}),
    "causal": ({}, dict(causal=True)),
    "window": ({}, dict(window=(3, 2))),
    "softcap": ({}, dict(softcap=2.0)),
    "bias": (dict(bias=normal(B, H, S, T)), {}),
    "mask": (dict(mask=normal(1, H, S, T) > 0.3), {}),
    "segments": (dict(q_segment_ids=segments(S, 1), kv_segment_ids=segments(T, 2)), {}),
    "sinks": (dict(sinks=normal(1, H, 3)), {}),
    "scale": (dict(softmax_scale=normal(1, H)), {}),
    "dropout": (dict(dropout=dropout(B, H)), dict(dropout_rate=0.3)),
    "packed": (LENGTHS, {}),
}
BROADCAST = {
    "bias_of_rows": (dict(bias=normal(1, H, S, 1)), {}),
    "bias_of_columns": (dict(bias=normal(B, 1, 1, T)), {}),
    "mask_of_columns": (dict(mask=normal(B, 1, 1, T) > 0.3), {}),
    "scale_of_batch": (dict(softmax_scale=normal(B, 1)), {}),
    "window_to_the_right": ({}, dict(window=(None, 4))),
}
COMBINED = {
    "causal+softcap+bias+sinks+scale": ("causal", "softcap", "bias", "sinks", "scale"),
    "window+mask+bias+scale": ("window_to_the_right", "mask_of_columns", "bias_of_rows", "scale_of_batch"),
    "packed+causal+dropout+bias": ("packed", "causal", "dropout", "bias_of_columns"),
    "packed+window+sinks+softcap": ("packed", "window", "sinks", "softcap"),
    "everything": ("causal", "window", "softcap", "bias", "mask", "segments", "sinks", "scale", "dropout"),
}


def case(*names):
    """Operands and spec with all these features."""
    operands, options = plain(), {}
    for feature in (feature for name in names for feature in COMBINED.get(name, (name,))):
        arrays, spec = (FEATURES | BROADCAST)[feature]
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


def cotangent(operands, spec):
    """A cotangent for o and lse."""
    outputs = jax.eval_shape(partial(reference, spec=spec), *operands)
    return Outputs(*(jnp.asarray(normal(*x.shape, seed=200), x.dtype) for x in outputs))


def of_reference(operands, spec, moved, cotangents):
    """Outputs, tangents and gradients of the formula, by JAX."""
    f = lambda arrays: reference(*operands._replace(**arrays), spec=spec)
    arrays = {name: getattr(operands, name) for name in moved}
    outputs, tangents = jax.jvp(f, (arrays,), (moved,))
    is_visible = jnp.isfinite(outputs.lse)
    cotangents = Outputs(cotangents.o, jnp.where(is_visible, cotangents.lse, 0))  # −∞ cannot be differentiated at
    (gradients,) = jax.vjp(f, arrays)[1](cotangents)
    return outputs, tangents, gradients


def of_kernel(operands, spec, moved, cotangents, config=SMALL):
    """The same results by the three lowered functions."""
    outputs = flash_attention(*operands, spec=spec, config=config)
    tangents = flash_attention_jvp(operands, outputs, only(**moved), spec=spec, config=config)
    gradients = flash_attention_bwd(operands, outputs, cotangents, wrt=tuple(moved), spec=spec, config=config)
    return outputs, tangents, dict(zip(moved, gradients, strict=True))


def distance(a, b):
    """The largest difference of each array relative to its largest number; equal infinities are equal."""

    def of(x, y):
        difference = jnp.where(x == y, 0, x - y)
        return jnp.abs(difference).max() / jnp.maximum(1e-30, jnp.abs(jnp.where(jnp.isfinite(y), y, 0)).max())

    return jax.tree.map(of, a, b)
