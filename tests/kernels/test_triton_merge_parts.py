"""The launch that merges the splits of rows, by the interpreter, against its formula in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._paged.parts import merge_parts

from . import interpreter


@pytest.mark.parametrize("parts, inner, outer", [(1, 5, 2), (3, 4, 3), (66, 2, 1), (300, 1, 2)])
@pytest.mark.parametrize("with_sinks", (False, True))
def test_parts(parts, inner, outer, with_sinks, monkeypatch):
    """Some splits have no keys, and one row has none in any split."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    rng, features = np.random.default_rng(0), 200
    o, lse = rng.standard_normal((outer, parts, inner, features)), 3 * rng.standard_normal((outer, parts, inner))
    sinks = rng.standard_normal((outer, inner)) if with_sinks else np.full((outer, inner), -np.inf)
    lse[:, 1::2, 0] = lse[0, :, -1] = sinks[0, -1] = -np.inf
    with np.errstate(divide="ignore"):
        weights = np.exp(lse)
        total = weights.sum(1) + np.exp(sinks)
        wanted = (weights[..., None] * o).sum(1) / np.where(total == 0, 1, total)[..., None]
        of_all = np.log(total)
    columns = np.stack([lse, np.full_like(lse, np.nan)], -1)  # the second is not read
    flat = lambda x, *last: jnp.asarray(x.reshape(-1, *last), jnp.float32)
    given = flat(o, features), flat(columns, 2), flat(sinks) if with_sinks else None
    found = merge_parts(*given, parts, inner, jnp.dtype("float32"))
    np.testing.assert_allclose(found[0], wanted.reshape(-1, features), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], of_all.reshape(-1), rtol=1e-5, atol=1e-5)


def test_the_order_of_sums_is_that_of_any_number_of_parts(monkeypatch):
    """A longer sequence in the batch means more splits for all rows: empty ones, which change no bit."""
    tiles = []

    def launch(*args, **options):
        tiles.append((options["ROWS"], options["PARTS"]))
        return interpreter.launch(*args, **options)

    monkeypatch.setattr(_launch, "launch", launch)
    rng, found = np.random.default_rng(0), []
    o, lse = rng.standard_normal((40, 200)), rng.standard_normal((40, 1))
    for parts in (3, 5, 8, 40):
        empty = np.full((40, 1), -np.inf)
        empty[:3] = lse[:3]
        given = jnp.asarray(o[:parts], jnp.float32), jnp.asarray(empty[:parts], jnp.float32)
        found.append(merge_parts(*given, None, parts, 1, jnp.dtype("float32"), batch_invariant=True))
    assert len(set(tiles)) == 1
    for results in found[1:]:
        for a, b in zip(results, found[0], strict=True):
            np.testing.assert_array_equal(a, b)
