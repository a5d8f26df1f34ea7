"""blocksparse_attention in Triton on a GPU: every feature, dtype and derivative against the formula in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._triton import blocksparse_attention as triton
from ejkernel.kernels._xla._blocks import within_blocks

from .attention_cases import CAUSAL, Case, check_all, derivatives, differentiable, like
from .blocksparse_cases import SPARSE_CASES, SparseCase, poisoned_cotangents_in_blocks, poisoned_in_blocks
from .device import TARGET

pytestmark = pytest.mark.gpu


def computed(x, spec, seed: int = 1, kernels=triton):
    """(outputs, gradients by name, tangents) with NaN in unread entries, and the cotangents and tangents."""
    compiled = lambda f, **how: jax.jit(partial(f, spec=spec, config=f.heuristic(spec, x, TARGET), **how))
    wrt = differentiable(x)
    tangents = x._replace(**{name: like(getattr(x, name), seed) if name in wrt else None for name in x._fields})
    given = poisoned_in_blocks(x, spec)
    outputs = compiled(kernels.blocksparse_attention)(*given)
    cotangents = like(outputs, seed + 1)
    backward = compiled(kernels.blocksparse_attention_bwd, wrt=wrt)
    gradients = backward(given, outputs, poisoned_cotangents_in_blocks(cotangents, x, spec))
    moved = compiled(triton.blocksparse_attention_jvp)(given, outputs, poisoned_in_blocks(x, spec, tangents))
    return (outputs, dict(zip(wrt, gradients, strict=True)), moved), cotangents, tangents


def compare(case: SparseCase, length: int, dtype, kernels=triton):
    x, spec = case.make(length, dtype)
    results, cotangents, tangents = computed(x, spec, kernels=kernels)
    moved = tangents.attention._asdict()
    oracle, reference = (
        derivatives(within_blocks(x, spec), spec, cotangents, moved, kind) for kind in (jnp.float64, dtype)
    )
    check_all(results, oracle, reference)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.name)
def test_feature(case, dtype):
    """With blocks four times as large as in the interpreter."""
    compare(enlarged(case), 256, dtype)


@pytest.mark.parametrize("name", ["causal", "segments", "packed, causal"])
def test_float16(name):
    compare(enlarged(named(name)), 256, jnp.float16)


def enlarged(case: SparseCase) -> SparseCase:
    return replace(case, size=tuple(4 * n for n in case.size))


def named(name: str) -> SparseCase:
    return next(case for case in SPARSE_CASES if case.flash.name == name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("size", [(16, 16), (32, 64), (48, 96), (128, 16), (256, 256)], ids=str)
def test_sizes_of_blocks(size, dtype):
    compare(SparseCase(Case("sizes", S=0.9, H=4, G=2, D=64, V=64, spec=CAUSAL), "h", size), 600, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("D, V", [(16, 16), (40, 40), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_feature_sizes(D, V, dtype):
    compare(SparseCase(Case("sizes", S=0.9, H=4, G=2, D=D, V=V, spec=CAUSAL), "h", (64, 64)), 320, dtype)


@pytest.mark.parametrize("causal", [True, False])
def test_four_thousand_tokens(causal):
    case = Case("long", B=1, H=2, G=1, D=128, V=128, spec=replace(CAUSAL, causal=causal))
    compare(SparseCase(case, "h", (128, 128), 0.25), 4096, jnp.bfloat16)


@pytest.mark.parametrize("name", ["causal", "grouped heads", "segments", "packed, causal", "dropout"])
def test_reruns_give_the_same_bits(name):
    x, spec = replace(named(name), size=(64, 64)).make(1000, jnp.bfloat16)
    first, second = (computed(x, spec)[0] for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_the_public_function_takes_it():
    """Under jit, grad and vmap over block masks that are traced."""
    x, _ = SparseCase(Case("public", H=4, G=2, D=64, V=64, spec=CAUSAL), "h", (64, 64)).make(512, jnp.bfloat16)
    arrays = dict(q=x.q, k=x.k, v=x.v, block_mask=x.block_mask[0])
    options = dict(block_size=(64, 64), causal=True)
    assert "triton/gpu with" in str(ejkernel.explain("blocksparse_attention", **arrays, **options))
    call = lambda q, mask, **how: ejkernel.lax.blocksparse_attention(q, x.k, x.v, mask, **options, **how)
    loss = lambda q, mask, **how: (call(q, mask, **how).astype(jnp.float32) ** 2).sum()
    masks = jnp.stack([x.block_mask[0], ~x.block_mask[0]])
    found = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(x.q, masks)
    plain = jax.jit(jax.vmap(jax.value_and_grad(partial(loss, config=dict(platform="xla"))), (None, 0)))(x.q, masks)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (a, b)), rtol=5e-2, atol=5e-2)
