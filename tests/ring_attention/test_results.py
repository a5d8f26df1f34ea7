"""o, lse and gradients equal those of the whole sequence for every ring size, layout and strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, Operand, assert_close, jitted, oracle, pullback
from cases.flash_attention import case as flash_case
from cases.flash_attention import chance, key, scalar
from cases.ring_attention import CASES, IDS, case, some

from ejkernel import lax

from .calls import LAYOUTS, STRATEGIES, in_sequence, random, sines

LSE_AND = dict(
    causal=dict(causal=True),
    full=dict(),
    window=dict(sizes=dict(n=2), operands=dict(sinks="h n"), window=(7, 3), softcap=2.0),
    pairs=dict(operands=dict(bias="h s c", mask=Operand("b 1 s c", chance(0.7))), causal=True),
    rows=dict(operands=dict(bias="s 1", mask=Operand("1 c", some)), window=(None, 2)),
    segments=dict(operands={**IDS, "sinks": "h"}, causal=True),
    cross=dict(sizes=dict(t=48, c=48), operands=dict(softmax_scale=Operand("", scalar)), causal=True, window=9),
    fewer_keys=dict(sizes=dict(s=48), causal=True, window=(30, 0)),
)


def check(of):
    arrays = of.arrays()
    cotangents = of.cotangents(arrays)
    assert_close(jitted(of, Case.call, pullback)(arrays, cotangents), oracle(of, pullback)(arrays, cotangents), 2e-5)


ALWAYS = ("ring_striped_segments", "gathered_zigzag_window", "exchanged_zigzag_segments")


@pytest.mark.parametrize(
    "of", [pytest.param(of, id=str(of), marks=[] if of.name in ALWAYS else [pytest.mark.slow]) for of in CASES[1:]]
)
def test_each_case(of):
    """The generated tests take the first case; of the others, those not in ALWAYS are slow tests."""
    check(of)


def takes(name, size, layout, strategy):
    """Whether a strategy supports a call; `test_refusals` checks the reasons."""
    if strategy == "ulysses":
        return size <= 2 and name not in ("pairs", "rows")
    return strategy != "all_gather" or layout != "striped" or name == "full"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "layout", "strategy"),
    [
        call
        for name in LSE_AND
        for strategy in STRATEGIES
        for layout in LAYOUTS
        for size in (2, 3, 4)
        for call in [(name, size, layout, strategy)]
        if takes(*call)
    ],
)
def test_each_ring(name, size, layout, strategy):
    of = dict(LSE_AND[name])
    sizes = dict(b=2, s=24, t=24, c=24, e=4) | of.pop("sizes", {})
    check(case(name, strategy, layout, sizes, of.pop("operands", ()), size, **of))


OF_ALL_ROWS = dict(
    keys=dict(bias=Operand("b 1 1 c", sums=2), mask=Operand("h 1 c", some)),
    batch_elements=dict(bias="h 1 1", mask=Operand("b 1 1 1", lambda rng, shape: np.arange(4).reshape(shape) % 2 == 0)),
)


@pytest.mark.parametrize("name", OF_ALL_ROWS)
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("ulysses", "zigzag"),
        *(
            pytest.param(*call, marks=pytest.mark.slow)
            for call in (
                ("ulysses", "striped"),
                ("ulysses", "contiguous"),
                ("ring", "zigzag"),
                ("all_gather", "zigzag"),
            )
        ),
    ],
)
def test_a_bias_and_a_mask_that_all_queries_share(name, strategy, layout):
    """Of keys, of heads and of batch elements; every strategy takes them."""
    check(case(name, strategy, layout, dict(b=4, s=16, t=16, c=16), OF_ALL_ROWS[name], causal=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", (1, 8))
def test_one_device_and_eight(size, layout):
    check(case("causal", "ring", layout, dict(b=1, s=32, t=32), (), size, causal=True))


@pytest.mark.parametrize(
    ("size", "layout", "strategy"),
    [
        (2, "zigzag", "ring"),
        *(
            pytest.param(*call, marks=pytest.mark.slow)
            for call in (
                (1, "zigzag", "auto"),
                (3, "zigzag", "ring"),
                (2, "striped", "ring"),
                (4, "contiguous", "ring"),
                (2, "zigzag", "all_gather"),
                (3, "contiguous", "all_gather"),
                (2, "striped", "ulysses"),
                (2, "contiguous", "ulysses"),
            )
        ),
    ],
)
def test_dropout_drops_the_same_as_for_the_whole_sequence(size, layout, strategy):
    """Arrays with a token axis go through `ring_order` and back."""
    of = flash_case(
        "dropout", dict(b=2, s=24, t=24, e=4), dict(dropout_key=Operand("", key)), causal=True, dropout_rate=0.3
    )
    args = of.arrays(), of.cotangents(of.arrays())
    found = jax.jit(pullback(in_sequence(size, layout, strategy=strategy, **of.options), of.differentiable))(*args)
    assert_close(found, oracle(of, pullback)(*args), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ("ring", "all_gather"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_without_a_mask(layout, strategy):
    of = flash_case("dropout", dict(b=2, s=24, t=24, e=4), dict(dropout_key=Operand("", key)), dropout_rate=0.3)
    args = of.arrays(), of.cotangents(of.arrays())
    found = jax.jit(pullback(in_sequence(2, layout, strategy=strategy, **of.options), of.differentiable))(*args)
    assert_close(found, oracle(of, pullback)(*args), 2e-5)


@pytest.mark.parametrize(
    "strategy", ("ring", *(pytest.param(x, marks=pytest.mark.slow) for x in ("all_gather", "ulysses")))
)
def test_padding_that_holds_nan(strategy):
    """Keys, values and queries of negative segments change neither results nor gradients."""
    of = case("segments", strategy, "zigzag", dict(b=2), IDS, causal=True)
    clean = of.arrays()
    padding = {"q": clean["q_segment_ids"] < 0, "k": clean["kv_segment_ids"] < 0, "v": clean["kv_segment_ids"] < 0}
    filled = lambda value: clean | {n: jnp.where(m[..., None, None], value, clean[n]) for n, m in padding.items()}
    f, cotangents = jitted(of, Case.call, pullback), of.cotangents(clean)
    assert_close(f(filled(np.nan), cotangents), jax.tree.map(np.asarray, f(filled(1.0), cotangents)), 1e-6)


@pytest.mark.core
@pytest.mark.parametrize(("size", "layout"), [(2, "contiguous"), (2, "zigzag"), (3, "zigzag")])
def test_several_tiles(size, layout):
    """Longer shards, of more than one tile of the kernel in XLA, with grouped heads and a batch."""
    length = 64 * size if layout == "zigzag" else 128 * size
    x = random(q=(4, length, 8, 32), k=(4, length, 2, 32), v=(4, length, 2, 32))
    found = jax.jit(jax.value_and_grad(sines(lambda x: in_sequence(size, layout, strategy="ring", causal=True)(x)[0])))(
        x
    )
    wanted = jax.jit(jax.value_and_grad(sines(lambda x: lax.flash_attention(**x, causal=True))))(x)
    assert_close(found, wanted, 2e-5)
