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
from .paged import close, hidden_slots, in_pages  # noqa: E402
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


@pytest.mark.parametrize("config", (CONFIGS[0], CONFIGS[2]), ids=str)
@pytest.mark.parametrize("drafts", (33, 140))
@pytest.mark.parametrize("pages", ("float32", "int8"))
def test_more_drafts_than_a_tile_has(pages, drafts, config):
    """Bits are in several words, of which a tile reads those of its own drafts; of eight bits, beside cached keys."""
    rng, lengths, contexts = np.random.default_rng(2), (130, 1, 40, 5), (171, 40, 33, 9)
    columns = -(-max(contexts) // PAGE)
    of = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    x = dict(
        q_latent=of(sum(lengths), 4, 16),
        q_rope=of(sum(lengths), 4, 8),
        pages=in_pages(of(4 * columns, PAGE, 24), pages),
    )
    x |= dict(block_tables=jnp.arange(4 * columns).reshape(4, columns), context_lens=jnp.asarray(contexts))
    x |= dict(query_start_loc=jnp.asarray(np.cumsum([0, *lengths])), num_seqs=jnp.asarray([4]))
    x |= dict(draft_mask=jnp.asarray(rng.random((sum(lengths), drafts)) < 0.5))
    call = OPERATIONS[NAME].prepare_arguments(**x)
    operands = Operands(**call.named)
    found = multi_latent_page_attention(operands, call.spec, config)
    wanted = kernel_registry.find(NAME, "xla").implementation(*operands, spec=call.spec)
    jax.tree.map(partial(close, tolerance=2e-6), found, wanted)


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
