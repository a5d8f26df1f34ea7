"""ragged_page_attention with a mask of drafts on Hopper: the cached keys by Mosaic GPU, then the drafts by Triton."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.ragged_page_attention import BLOCKS

from .device import ON_HOPPER
from .test_mosaic_ragged_page_attention import PADDING, check, step

pytestmark = ON_HOPPER


@pytest.mark.parametrize("d", BLOCKS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("options", [{}, dict(softcap=5.0), dict(batch_invariant=True), dict(window=700)], ids=str)
@pytest.mark.parametrize("drafts", (20, 600))
def test_drafts_continue_the_softmax(drafts, options, dtype, d):
    """Triton's kernel has them, and the sinks count once. Of several sequences, and of few, whose keys are split."""
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal(8), jnp.float32)
    for of in (dict(), dict(lengths=(90,), contexts=(9000,))):
        x = step(d=d, dtype=dtype, window=options.get("window"), **of)
        mask = np.random.default_rng(2).random((len(x["q"]), drafts)) < 0.6
        check(x | dict(draft_mask=jnp.asarray(mask), sinks=sinks), **options)


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("drafts", (40, 600))
@pytest.mark.parametrize("window", (None, 100, 900))
def test_drafts_that_are_seen_as_without_a_mask(window, drafts, d):
    """Of prefills all, which Mosaic GPU has, and of others the first, before trees."""
    lengths, rng = (1, 17, 512, 128, 0, 300, 40, 60), np.random.default_rng(3)
    x = step(d=d, lengths=lengths, window=window)
    place = np.concatenate([*map(np.arange, lengths), np.arange(PADDING)])[:, None]
    sinks = jnp.asarray(rng.standard_normal(8), jnp.float32)
    length = np.append(np.repeat(lengths, lengths), [0] * PADDING)[:, None]
    tree = np.where(np.arange(drafts) < 5, np.arange(drafts) <= place, rng.random((len(place), drafts)) < 0.6)
    mask = np.where(length > 100, np.arange(drafts) <= place, tree)
    check(x | dict(draft_mask=jnp.asarray(mask), sinks=sinks), window=window)
