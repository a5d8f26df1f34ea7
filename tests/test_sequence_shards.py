"""A linear recurrence over a sharded sequence equals that over the whole, through every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, curvature, curvature_by_reverse, oracle, pullback, tangent
from cases._case import Operand
from cases._recurrence import case, gate, remembering
from jax.sharding import AxisType

from tests.sequence_shards import CASES, OF_THE_WHOLE, SIZES, packed, sharded


def check(of, size, transform=pullback, types=AxisType.Auto):
    """Results and gradients, or another transform, against the formula in float64."""
    arrays = of.arrays()
    cotangents, tangents = of.cotangents(arrays), of.tangents()
    args = {pullback: (arrays, cotangents), tangent: (arrays, tangents)}.get(transform, (arrays, cotangents, tangents))
    found = jax.jit(transform(sharded(of, size, types), of.differentiable))(*args)
    assert_close(found, oracle(of, transform)(*args), 1e-4 if len(args) == 3 else 2e-5, f"{of} {size}")


CORE = {("packed", 3)}
DEFAULT = {("gla", 2), ("lightning", 4), ("every_decay", 3)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(*call, marks=[pytest.mark.core] if call in CORE else [] if call in DEFAULT else [pytest.mark.slow])
        for name in CASES
        for size in (1, 2, 3, 4, 8)
        for call in [(name, size)]
    ],
)
def test_results_and_gradients(name, size):
    check(CASES[name], size)


@pytest.mark.parametrize("reverse", (pytest.param(False, marks=pytest.mark.slow), True))
def test_any_cuts(reverse):
    """Sequences that begin and end anywhere, also at shard boundaries, empty ones, and tokens of no sequence."""
    of = packed("any_cuts", ("gk",), reverse=reverse)
    arrays, rng = of.arrays(), np.random.default_rng(0)
    whole, found = jax.jit(of.call), jax.jit(sharded(of, 4))
    for _ in range(60):
        places = rng.choice([0, 6, 12, 18, 24, *rng.integers(0, 25, 5)], 7)
        arrays |= dict(cu_seqlens=jnp.asarray(np.sort(places), jnp.int32))
        assert_close(found(arrays), whole(arrays), 2e-5, str(arrays["cu_seqlens"]))


@pytest.mark.parametrize(
    ("name", "size"),
    [("packed", 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("every_decay", 3), ("packed_reversed", 8)))],
)
def test_tangents(name, size):
    check(CASES[name], size, tangent)


TINY = dict(b=1, s=4, h=2, g=1, d=2, e=2)
SECOND = case("gla", "second", dict(gk=gate("b s h d"), initial_state="b h d e"), TINY, return_state=True)


@pytest.mark.parametrize("transform", [curvature, pytest.param(curvature_by_reverse, marks=pytest.mark.slow)])
def test_second_order(transform):
    check(SECOND, 2, transform)


def test_explicit_axes_outside():
    check(CASES["gla"], 2, types=AxisType.Explicit)


# --- Precision and what belongs to no sequence ------------------------------------------------------------------------


def long(tokens, **sizes):
    """A call of gla whose decays keep the state for about that many tokens."""
    gates = dict(gk=Operand("b s h d", remembering(tokens)))
    return case("gla", f"kept_for_{tokens:g}", gates, sizes, return_state=True)


def check_precision(of, size):
    """In bfloat16, at most twice the error of the formula, three times for gradients."""
    arrays = of.arrays(dtype=jnp.bfloat16)
    args = arrays, of.cotangents(arrays)
    run = lambda f: jax.jit(pullback(f, of.differentiable))(*args)
    found, formula, exact = run(sharded(of, size)), run(of.formula), oracle(of, pullback)(*args)
    for factor, x, y, z in zip((2, 3), found, formula, exact, strict=True):
        for a, b, c in zip(*map(jax.tree.leaves, (x, y, z)), strict=True):
            distance = lambda a, c=c: np.linalg.norm(np.asarray(a, np.float64) - c)
            assert distance(a) <= factor * max(distance(b), distance(jnp.asarray(c, a.dtype)))


@pytest.mark.parametrize("tokens", (30, pytest.param(1e6, marks=pytest.mark.slow)))
def test_bfloat16_errs_as_the_formula_does(tokens):
    check_precision(long(tokens, b=1, s=96, h=2, g=1, d=16, e=16), 4)


def test_tokens_of_no_sequence_may_hold_nan():
    """They affect neither results nor gradients of any device."""
    of = CASES["packed"]
    clean = of.arrays()
    token = np.arange(SIZES["s"])
    outside = (token < 1) | (token >= 23)
    of_tokens = [name for name in clean if name not in OF_THE_WHOLE]
    fill = lambda x, value: jnp.where(outside.reshape(1, -1, *[1] * (x.ndim - 2)), value, x)
    filled = lambda value: clean | {name: fill(clean[name], value) for name in of_tokens}
    f, cotangents = jax.jit(pullback(sharded(of, 3), of.differentiable)), of.cotangents(clean)
    assert_close(f(filled(np.nan), cotangents), jax.tree.map(np.asarray, f(filled(1.0), cotangents)), 1e-6)
