"""The absorbed forward of flash_mla: its results, when it is chosen, and that nothing has the keys of all heads."""

import itertools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels import _absorbed_mla as absorbed
from ejkernel.kernels import _flash_mla as expanded
from ejkernel.kernels._xla import flash_attention as flash
from ejkernel.kernels._xla import flash_mla
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import KernelConfig

from .latents import deepseek

R, DN, DR, V = 32, 16, 8, 24
NAMES = ("q", "kv_latent", "k_rope", "w_kc", "w_vc")
CONFIG = KernelConfig(block_q=16, block_k=128)


def arrays(queries, keys, heads=3, batch=2, dtype=np.float64):
    """Arguments whose projections keep the size of a latent."""
    shapes = (batch, queries, heads, DN + DR), (batch, keys, R), (batch, keys, DR), (R, heads, DN), (R, heads, V)
    rng = np.random.default_rng([queries, keys, heads])
    x = {name: rng.standard_normal(shape) for name, shape in zip(NAMES, shapes, strict=True)}
    return {n: jnp.asarray(a * (R**-0.5 if n.startswith("w") else 1), dtype) for n, a in x.items()}


def prepared(x, **options):
    call = OPERATIONS["flash_mla"].prepare_arguments(**x, **options, return_lse=True)
    return Operands(**call.named), call.spec


def by(form, x, **options):
    """o and lse by one of the forms, in XLA."""
    x, spec = prepared(x, **options)
    return form.forward(flash.flash_attention, x, spec, CONFIG)


def norm(a, b):
    """That of a − b over finite values; the others must be equal."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    finite = np.isfinite(b)
    np.testing.assert_array_equal(a[~finite], b[~finite])
    return np.linalg.norm(a[finite] - b[finite])


SIZES = list(itertools.product((1, 2, 8, 33), (1, 17, 300, 1024), (1, 16)))
DTYPES = jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16


def in_one_dtype():
    """Every size in every dtype, a normal run in one of them, another for the next size."""
    for n, (sizes, dtype) in enumerate(itertools.product(SIZES, DTYPES)):
        marks = () if n % 4 == n // 4 % 4 else pytest.mark.slow
        yield pytest.param(*sizes, dtype, marks=marks, id="-".join(map(str, (*sizes, dtype.__name__))))


@pytest.mark.parametrize("queries, keys, heads, dtype", list(in_one_dtype()))
def test_equals_the_formula(queries, keys, heads, dtype, x64):
    """In float64 up to rounding, otherwise with at most twice the error of the formula in the dtype."""
    x = arrays(queries, keys, heads, 2 if heads > 1 else 32, dtype)
    operands, spec = prepared(x, causal=True)
    formula = jax.jit(partial(flash_mla.reference, spec=spec))
    plain, wanted = formula(*operands), formula(*jax.tree.map(lambda a: a.astype(jnp.float64), operands))
    call = jax.jit(partial(ejkernel.lax.flash_mla, causal=True, return_lse=True))(**x)
    for found in (jax.jit(partial(by, absorbed, causal=True))(x), call):
        for a, b, c in zip(found, plain, wanted, strict=True):
            assert a.dtype == b.dtype
            rounded = norm(jnp.asarray(c, a.dtype), c)
            assert norm(a, c) <= max(1e-13 * np.sqrt(c.size), 2 * max(norm(b, c), rounded))


IDS = dict(q_segment_ids=np.array([[0, 1, -1]] * 2), kv_segment_ids=np.array([[0] * 9 + [1] * 6 + [-1] * 2] * 2))
OPTIONS = {
    "all keys": {},
    "window": dict(window=(4, 1)),
    "causal window, softcap and sinks": dict(causal=True, window=5, softcap=1.5, sinks=np.ones((3, 2))),
    "segments": IDS | dict(causal=True),
    "mask and bias": dict(mask=np.arange(3 * 3 * 17).reshape(3, 3, 17) % 5 > 1, bias=np.arange(17.0) / 9),
    "dropout": dict(dropout_rate=0.4, dropout_key=jax.random.key(3)),
    "scale": dict(softmax_scale=jnp.float32(0.3)),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_those_of_the_expanded_form(options, x64):
    x, options = arrays(3, 17), OPTIONS[options]
    assert absorbed.absorbs(*prepared(x, **options))
    for config in (None, KernelConfig(block_q=2, block_k=5)):
        found = ejkernel.lax.flash_mla(**x, **options, return_lse=True, config=config)
        for a, b in zip(found, by(expanded, x, **options), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6 if "softmax_scale" in options else 1e-12, atol=1e-12)


def test_more_queries_than_keys(x64):
    """Those before the first key have o = 0 and lse = −∞."""
    o, lse = by(absorbed, arrays(33, 17), causal=True)
    assert not o[:, :16].any() and (lse[:, :, :16] == -np.inf).all() and np.isfinite(lse[:, :, 16:]).all()


def test_every_example_may_have_its_own_projections(x64):
    x = arrays(2, 40)
    many = {n: jnp.stack([a, 2 * a]) if n.startswith("w") else a for n, a in x.items()}
    found = jax.vmap(lambda x: ejkernel.lax.flash_mla(**x, causal=True), ({n: 0 if n[0] == "w" else None for n in x},))
    for i, o in enumerate(found(many)):
        np.testing.assert_allclose(o, by(expanded, x | {n: many[n][i] for n in NAMES[3:]}, causal=True).o, atol=1e-12)


# --- The choice -------------------------------------------------------------------------------------------------------


def decoding(batch=1, queries=1, keys=4096, heads=16, dtype=jnp.bfloat16, **options):
    """A step of decoding of DeepSeek-V3."""
    x, spec = deepseek(batch, keys, heads, dtype, **options)
    return x._replace(q=jax.ShapeDtypeStruct((batch, queries, heads, 192), dtype)), spec


def test_few_queries_are_absorbed():
    """By flops alone, as long as S·(2·R − Dn − V) < R·(Dn + V), S < 171; with one head the bytes decide sooner."""
    absorbs = lambda **sizes: absorbed.absorbs(*decoding(**sizes))
    assert all(absorbs(queries=n, batch=b) for n in (1, 4, 128) for b in (1, 64))
    assert not absorbs(queries=512) and not absorbs(queries=4096) and not absorbs(keys=0)
    assert absorbs(queries=64, heads=128) and absorbs(heads=1)


def test_bits_of_a_row_do_not_depend_on_the_batch(x64):
    """With batch_invariant."""
    x = arrays(2, 300, batch=3, dtype=jnp.float32)
    call = jax.jit(partial(ejkernel.lax.flash_mla, causal=True, batch_invariant=True, return_lse=True))
    alone = call(**{n: a if n.startswith("w") else a[:1] for n, a in x.items()})
    assert absorbed.absorbs(*prepared(x, causal=True))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), call(**x), alone)


def largest(text):
    """The elements of the largest array in a program, of HLO or of StableHLO."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text) + re.findall(r"tensor<((?:\d+x)+)", text)
    return max(math.prod(map(int, re.findall(r"\d+", shape))) for shape in shapes)


def test_memory_is_that_of_the_latents():
    """No array has keys or values of all heads, K·H·Dn numbers; the program is compiled, and not run."""
    x, _ = decoding(dtype=jnp.float32)
    x = dict(zip(NAMES, (*x[:3], *(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in x[3:5])), strict=True))
    compiled = jax.jit(partial(ejkernel.lax.flash_mla, causal=True)).lower(**x).compile()
    assert largest(compiled.as_text()) == 4096 * 576 < 4096 * 16 * 128
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 4096 * 576
