"""Attention of ragged steps over a cache on TPU: results, in the interpreter that simulates the chip.

They are compared with the definition in float64, with NaN in unread entries and any numbers in unused table entries.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from . import paged as mixed
from .tpu_paged import check, prepared, rubbish, slow, step, without, writing


@pytest.mark.parametrize(
    "sizes, config, options",
    [
        pytest.param(dict(h=4, dtype="bfloat16", sinks=True), (8, 2), dict(window=9), id="bf16"),
        pytest.param(dict(drafts=3), (8, 2), dict(window=9), marks=slow, id="drafts"),
        pytest.param(dict(h=4, drafts=130, dtype="bfloat16"), (1, 2), {}, marks=slow, id="many drafts"),
        pytest.param(dict(), (1, 1), dict(softcap=2.0, batch_invariant=True), marks=slow, id="alone"),
        pytest.param(dict(), (16, 5), dict(softmax_scale=-0.3), marks=slow, id="one block"),
        pytest.param(dict(h=12, g=4, d=8), (32, 1), dict(window=20), marks=slow, id="large tiles"),
        pytest.param(dict(h=3, g=1, d=256, dtype="bfloat16"), (8, 2), {}, marks=slow, id="two parts"),
        pytest.param(dict(h=4, dtype="bfloat16", pages="int8", scales=(2,)), (8, 2), {}, marks=slow, id="int8"),
        pytest.param(dict(h=4, pages="float8_e4m3fn", scales=()), (8, 2), dict(window=9), marks=slow, id="e4m3"),
        pytest.param(
            dict(h=3, g=1, dtype="bfloat16", pages="int8", scales="slots", sinks=True),
            (8, 2),
            dict(window=9),
            id="one head of int8, scales of slots",
        ),
        pytest.param(
            dict(h=4, dtype="bfloat16", pages="int8", scales="slots", drafts=3),
            (8, 2),
            {},
            marks=slow,
            id="drafts, scales of slots",
        ),
        pytest.param(
            dict(h=12, g=4, d=8, pages="float8_e4m3fn", scales="slots"),
            (32, 1),
            dict(softcap=2.0),
            marks=slow,
            id="large tiles, scales of slots",
        ),
        pytest.param(
            dict(h=16, g=1, dtype="bfloat16", pages="float8_e4m3fn", scales="slots"),
            (1, 3),
            dict(batch_invariant=True, window=20),
            marks=slow,
            id="alone, scales of slots",
        ),
        pytest.param(dict(h=6, g=3, dtype="bfloat16"), (8, 2), {}, marks=slow, id="three heads"),
        pytest.param(dict(h=4, dtype="float16", drafts=3), (8, 2), dict(window=9), marks=slow, id="float16"),
        pytest.param(dict(h=6, g=3, d=192, pages="int8", scales=(3,)), (8, 2), {}, marks=slow, id="192 features"),
    ],
)
def test_ragged_page_attention(sizes, config, options):
    x = step(**sizes)
    wanted = mixed.ragged_defined(x, **{name: option for name, option in options.items() if name != "batch_invariant"})
    config = RaggedPageAttentionConfig(*config)
    check("ragged_page_attention", rubbish(x), config, wanted, x, return_lse=True, **options)


@pytest.mark.parametrize("window", (None, pytest.param(3, marks=slow)))
@pytest.mark.parametrize("tokens", (8, pytest.param(1, marks=slow)))
@pytest.mark.parametrize("scales", (None, pytest.param("slots", marks=slow)))
def test_a_draft_that_no_token_sees_may_hold_nan(tokens, window, scales):
    x = step(drafts=3, scales=scales)
    x["draft_mask"] = x["draft_mask"].at[:, 1].set(False)
    wanted = mixed.ragged_defined(x, window=window)
    poisoned = x | without(mixed.hidden_slots(x, window), x)
    config = RaggedPageAttentionConfig(tokens, 2)
    check("ragged_page_attention", poisoned, config, wanted, x, return_lse=True, window=window)


@slow
@pytest.mark.parametrize("count", range(7))
def test_any_number_of_sequences(count):
    """None too, with tables that have no valid entries for missing sequences."""
    x = step() | dict(num_seqs=jnp.array([count]))
    wanted = mixed.ragged_defined(x)
    check("ragged_page_attention", x, RaggedPageAttentionConfig(8, 3), wanted, return_lse=True)


@pytest.mark.parametrize(
    "sizes, config, options",
    [
        pytest.param(dict(h=4, dtype="bfloat16"), (8, 2), dict(window=9), id="bf16"),
        pytest.param(dict(), (1, 3), dict(softcap=2.0), marks=slow, id="float32"),
        pytest.param(dict(g=1, h=4, lengths=(1, 1, 1, 1, 1, 1)), (8, 1), {}, marks=slow, id="decode"),
        pytest.param(dict(lengths=(0, 0, 0, 30, 0, 0)), (8, 1), {}, marks=slow, id="prefill"),
        pytest.param(dict(h=6, g=3, dtype="bfloat16"), (8, 2), {}, marks=slow, id="three heads"),
        pytest.param(dict(h=4, dtype="float16"), (8, 2), {}, marks=slow, id="float16"),
    ],
)
def test_ragged_page_attention_v3(sizes, config, options):
    """The pool, byte for byte, and the results of the second version with that pool."""
    x = writing(**sizes)
    formula = kernel_registry.find("ragged_page_attention_v3", "xla").implementation
    operands, spec = prepared("ragged_page_attention_v3", x, **options)
    pool = formula(*operands, spec=spec).new_pages[0].reshape(x["kv_pages"].shape)
    exact = mixed.ragged_defined({n: a for n, a in x.items() if n not in ("k", "v")} | dict(kv_pages=pool), **options)
    config = RaggedPageAttentionConfig(*config)
    found = check("ragged_page_attention_v3", x, config, exact, return_lse=True, **options)
    bits = lambda a: np.asarray(a).reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(bits(found.new_pages), bits(pool))
    assert (bits(found.new_pages) != bits(x["kv_pages"])).any()
