"""multi_latent_page_attention with a mask of drafts, in Triton by the interpreter."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives.multi_latent_page_attention import Operands

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.multi_latent_page_attention.kernel import multi_latent_page_attention  # noqa: E402

from . import interpreter  # noqa: E402
from .latent_pages import LENGTHS, PAGE, poisoned, step, tree  # noqa: E402
from .paged import close, hidden_slots  # noqa: E402
from .test_triton_multi_latent_page_attention import CONFIGS, NAME, run  # noqa: E402


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)


@pytest.mark.parametrize("options", ({}, dict(softcap=2.0, window=9)), ids=str)
def test_drafts_continue_the_softmax_of_the_cached_keys(options):
    """As another kernel leaves it, with the sinks."""
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal(4), jnp.float32)
    call = OPERATIONS[NAME].prepare_arguments(**step(), draft_mask=tree(12), sinks=sinks, **options)
    x, of = Operands(**call.named), kernel_registry.find(NAME, "xla").implementation
    of_cached = of(*x._replace(draft_mask=jnp.zeros_like(x.draft_mask)), spec=call.spec)
    for config in (CONFIGS[0], CONFIGS[2], replace(CONFIGS[3], num_splits=1)):
        found = multi_latent_page_attention(x._replace(sinks=None), call.spec, config, of_cached)
        jax.tree.map(partial(close, tolerance=2e-6), found, of(*x, spec=call.spec))


def test_an_invisible_draft_may_be_nan():
    """Between drafts that some token of its row sees."""
    mask = tree(5).at[:, 2].set(False)
    x, _ = poisoned(step() | dict(draft_mask=mask))
    first = int(x["context_lens"][0]) - LENGTHS[0] + 2
    with_nan = x | dict(pages=x["pages"].at[first // PAGE, first % PAGE].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, run(with_nan), run(x))


def test_a_draft_that_no_window_and_no_context_has_may_be_nan():
    """Drafts in a mask that are outside the window of a token, or in no context."""
    mask = tree(5).at[:2, 0].set(False).at[3, 0].set(True)  # the fourth token's window begins after the first draft
    mask = mask.at[11:13, 2].set(True).at[13:16, 2].set(False)  # of five tokens with three keys
    x, _ = poisoned(step() | dict(draft_mask=mask))
    hidden = hidden_slots(x, window=2)
    with_nan = x | dict(pages=jnp.where(hidden[..., None], jnp.nan, x["pages"]))
    jax.tree.map(np.testing.assert_array_equal, run(with_nan, window=2), run(x, window=2))
