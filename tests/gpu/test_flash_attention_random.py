"""A thousand random calls of flash_attention in Triton on a GPU, of random shapes and features, against float64.

Compiling takes most of the time. So there are 125 random programs, and each runs on eight random draws of everything
that may vary at run time: values and their family, segments, sequences of a packed call, masks, dropout.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.primitives.flash_attention import FlashAttentionSpec

from .attention_cases import Case, check_near
from .test_flash_attention import Kernels

pytestmark = pytest.mark.gpu

PROGRAMS, DRAWS = 125, 8
LENGTHS = ((1, 1), (1, 77), (16, 16), (33, 129), (64, 64), (100, 40), (127, 127), (128, 192), (200, 200), (256, 256))
FEATURES = ((16, 16), (32, 32), (40, 24), (64, 64), (64, 64), (80, 80), (96, 96), (128, 128), (128, 128), (192, 128))
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (3, 1), (6, 2))
WINDOWS = (None, None, (5, 0), (40, None), (None, 7), (17, 30), (3, -2))
DTYPES = (jnp.bfloat16, jnp.bfloat16, jnp.float16, jnp.float32)
FAMILIES = ("normal", "normal", "large", "uniform")  # of the draws in turn


def program(number: int) -> tuple[Case, type]:
    """The static part of a call: sizes, options, operands, and the dtype."""
    rng = np.random.default_rng(number)
    pick = lambda of: of[rng.integers(len(of))]
    chance = lambda share: rng.random() < share
    axes = lambda: "".join(axis for axis in "bhst" if chance(0.6))
    (S, K), (D, V), (H, G) = pick(LENGTHS), pick(FEATURES), pick(HEADS)
    divided = pick(("", "", "", "segments", "packed"))
    spec = FlashAttentionSpec(
        causal=chance(0.5),
        window=pick(WINDOWS) or (None, None),
        softcap=2.0 if chance(0.25) else None,
        dropout_rate=0.3 if chance(0.25) else 0.0,
    )
    case = Case(
        f"program {number}", S, K, int(rng.integers(1, 4)), H, G, D, V, spec,
        bias=axes() if chance(0.25) and divided != "packed" else None,
        mask=axes() if chance(0.25) else None,
        segments=divided == "segments",
        packed=divided == "packed",
        sinks=int(rng.integers(1, 4)) if chance(0.25) else 0,
        scale=pick(("h", "bh")) if chance(0.2) else None,
    )  # fmt: skip
    return case, pick(DTYPES)


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_random(number):
    case, dtype = program(number)
    run = Kernels(*case.make(1, dtype))
    for seed in range(DRAWS):
        family = FAMILIES[seed % len(FAMILIES)]
        x, spec = replace(case, family=family).make(1, dtype, seed)
        results, cotangents, tangents = run(x, spec, seed)
        try:
            check_near(results, x, spec, cotangents, tangents._asdict(), dtype)
        except AssertionError as error:
            raise AssertionError(f"{case}, {dtype.dtype.name}, {family}, draw {seed}: {error}") from error
