"""Fully masked queries and keys may be NaN, in XLA: no result, gradient or tangent depends on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import curvature, curvature_by_reverse, pullback, tangent

import ejkernel
from ejkernel.kernels._xla.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import CASES, CAUSAL, Case, differentiable, like, poisoned, poisoned_cotangents

SMALL, CAPPED = KernelConfig(block_q=16, block_k=32), FlashAttentionSpec(softcap=2.0)
HIDING = [
    *(case for case in CASES if case.spec.window != (None, None) or case.mask or case.segments or case.packed),
    Case("causal, more queries, capped", S=1.1, K=0.6, spec=FlashAttentionSpec(causal=True, softcap=2.0)),
    Case("causal, more queries, sinks, bias", S=1.1, K=0.6, sinks=2, bias="hst", spec=CAUSAL),
    Case("causal, bias, capped", bias="hst", spec=FlashAttentionSpec(causal=True, softcap=2.0)),
    Case("mask, sinks, scale, bias, capped", mask="bst", sinks=1, scale="h", bias="bt", spec=CAPPED),
    Case("packed, causal, sinks, scale", packed=True, sinks=1, scale="h", spec=CAUSAL),
]  # fmt: skip


@pytest.mark.parametrize("case", HIDING, ids=lambda case: case.name)
def test_of_attention(case):
    x, spec = case.make(40, jnp.float32)
    wrt = differentiable(x)
    moved = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})
    cotangents = like(jax.eval_shape(lambda x: flash_attention(*x, spec=spec, config=SMALL), x), 2)

    @jax.jit
    def run(x, moved, cotangents):
        outputs = flash_attention(*x, spec=spec, config=SMALL)
        gradients = flash_attention_bwd(x, outputs, cotangents, wrt=wrt, spec=spec, config=SMALL)
        return outputs, gradients, flash_attention_jvp(x, outputs, moved, spec=spec, config=SMALL)

    found = run(poisoned(x, spec), poisoned(x, spec, moved), poisoned_cotangents(cotangents, x, spec))
    wanted = run(x, moved, cotangents._replace(lse=jnp.where(found[0].lse == -jnp.inf, 0, cotangents.lse)))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), found, wanted))


TOKENS, INSIDE, CUTS = 20, np.arange(20) < 11, np.array([0, 4, 4, 11, 11])
SIZES, NOT_EMPTY = np.array([4, 0, 4, 3, 0]), np.array([True, False, True, True, False])


def normal(**shapes):
    return {
        name: jnp.asarray(np.random.default_rng(n).standard_normal(x)) for n, (name, x) in enumerate(shapes.items())
    }


def with_nan(arrays, axes):
    """NaN where the named arrays have False along an axis: {name: (axis, which)}."""

    def of(name, a):
        if name not in axes:
            return a
        axis, kept = axes[name]
        return jnp.where(jnp.expand_dims(kept, [n for n in range(a.ndim) if n != axis]), a, jnp.nan)

    return {name: of(name, a) for name, a in arrays.items()}


def same(f, arrays, axes, of_results):
    """f, its derivatives and their derivatives are the same without NaN and with it, also in the cotangents."""
    moved = normal(**{name: a.shape for name, a in arrays.items()})
    shapes = {name: a.shape for name, a in jax.eval_shape(f, arrays).items()}
    cotangents = normal(**shapes)

    @jax.jit
    def run(x, moved, cotangents):
        of = lambda transform, *given: transform(f, tuple(arrays))(x, *given)
        both = [of(transform, cotangents, moved) for transform in (curvature, curvature_by_reverse)]
        return of(pullback, cotangents), of(tangent, moved), both

    wanted = run(arrays, moved, cotangents)
    found = run(with_nan(arrays, axes), with_nan(moved, axes), with_nan(cotangents, of_results))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("options", (dict(), dict(rhs_scale=(5, 6)), dict(rhs_scale=(5, 6), existing_out=(20, 6))))
def test_of_grouped_matmul(options):
    """Rows of no group, existing_out of other rows, and the matrices of empty groups."""
    f = lambda x: dict(o=ejkernel.lax.grouped_matmul(group_sizes=SIZES, **x))
    axes = dict(lhs=(0, INSIDE), rhs=(0, NOT_EMPTY), rhs_scale=(0, NOT_EMPTY), existing_out=(0, ~INSIDE))
    arrays = normal(lhs=(20, 8), rhs=(5, 8, 6), **options)
    same(f, arrays, axes, {} if "existing_out" in options else dict(o=(0, INSIDE)))


def test_of_grouped_matmul_where_no_group_has_rows():
    f = lambda x: dict(o=ejkernel.lax.grouped_matmul(group_sizes=0 * SIZES, **x))
    none = {name: (0, np.zeros(n, bool)) for name, n in dict(lhs=20, rhs=5, rhs_scale=5, o=20).items()}
    arrays = normal(lhs=(20, 8), rhs=(5, 8, 6), rhs_scale=(5, 6))
    gradients = jax.jit(lambda x, ct: pullback(f, tuple(arrays))(x, ct))
    found = gradients(with_nan(arrays, none), with_nan(normal(o=(20, 6)), none))
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(found))


def test_of_mean_pooling():
    f = lambda x: dict(o=ejkernel.lax.mean_pooling(x["x"], CUTS))
    same(f, normal(x=(TOKENS, 8)), dict(x=(0, INSIDE)), dict(o=(0, np.diff(CUTS) > 0)))


@pytest.mark.parametrize(
    "operation, gates, options",
    (
        ("recurrent", dict(g=(1, TOKENS, 2), gk=(1, TOKENS, 2, 8), gv=(1, TOKENS, 2, 8), g_gamma=(2,)), {}),
        ("gla", dict(gk=(1, TOKENS, 2, 8)), dict(reverse=True)),
        ("lightning_attention", {}, dict(layer_idx=1, num_layers=4)),
    ),
)
def test_of_the_recurrence(operation, gates, options):
    """Tokens of no sequence, beside a scale that has a gradient."""
    tokens = dict(q=(1, TOKENS, 2, 8), k=(1, TOKENS, 1, 8), v=(1, TOKENS, 1, 8), **gates)
    arrays = normal(**tokens, softmax_scale=(), initial_state=(4, 2, 8, 8))
    call = functools.partial(getattr(ejkernel.lax, operation), cu_seqlens=CUTS, return_state=True, **options)
    axes = {name: (1, INSIDE) for name, shape in tokens.items() if len(shape) > 1}
    same(lambda x: dict(zip(("o", "state"), call(**x), strict=True)), arrays, axes, dict(o=(1, INSIDE)))
