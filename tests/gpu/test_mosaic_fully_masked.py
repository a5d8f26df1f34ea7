"""The kernel that finds the queries that see no key of their segment, and the keys that no query sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.fully_masked import fully_masked
from ejkernel.kernels._visibility import Visibility

from .device import ON_HOPPER

pytestmark = ON_HOPPER
BANDS = {"full": (None, None), "causal": (None, 0), "window": (100, 30), "ahead": (-5, 40), "behind": (200, -3)}


def segments(kind: str, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [2, queries] and [2, keys] int32; negative ones are padding."""
    rng = np.random.default_rng(queries + keys)
    if kind == "sorted":
        return tuple(np.sort(rng.integers(0, 9, (2, n))).astype(np.int32) for n in (queries, keys))
    if kind == "padded":
        return tuple(np.sort(rng.integers(0, 9, (2, n))).astype(np.int32)[:, ::-1] - 3 for n in (queries, keys))
    most = {"few": 3, "many": 2 * (queries + keys)}[kind]
    return tuple(rng.integers(-1, most, (2, n)).astype(np.int32) for n in (queries, keys))


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("kind", ["sorted", "padded", "few", "many"])
@pytest.mark.parametrize("queries, keys", [(1, 1), (64, 64), (200, 333), (1500, 700), (700, 1500)])
def test_it_finds_what_the_formula_says(queries, keys, kind, band):
    visibility = Visibility(queries, keys, *band, segment_ids=tuple(map(jnp.asarray, segments(kind, queries, keys))))
    for of in (visibility, visibility.transposed()):
        np.testing.assert_array_equal(jax.jit(lambda of=of: fully_masked(of))(), of.fully_masked())
