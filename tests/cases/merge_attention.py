"""Calls of merge_attention. Four devices can split the batch, two the heads; some rows see no key of the first set."""

import jax.numpy as jnp
import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, Feature, S, plain, sized


def formula(o_a, lse_a, o_b, lse_b, heads_last=False):
    """lse = log(exp(lse_a) + exp(lse_b)),  o = exp(lse_a − lse)·o_a + exp(lse_b − lse)·o_b."""
    lse = jnp.logaddexp(lse_a, lse_b)
    share = lambda part: jnp.exp(part - lse)[..., None] if heads_last else jnp.exp(part - lse).mT[..., None]
    return share(lse_a) * o_a + share(lse_b) * o_b, lse.astype(np.promote_types(lse.dtype, np.float32))


def some_fully_masked(rng, shape):
    """Logsumexps, some of them −∞."""
    lse = rng.standard_normal(shape)
    lse[..., ::3] = -np.inf
    return lse


def case(name, sizes, of_o="b s h e", of_lse="b h s", lse_a="b h s", **more):
    operands = dict(o_a=of_o, lse_a=lse_a, o_b=of_o, lse_b=of_lse)
    split = tuple(letter for letter in "bh" if letter in sizes)
    return Case(
        "merge_attention",
        name,
        sizes,
        operands,
        (of_o, of_lse),
        composed_formula=formula,
        composed_split=split,
        **more,
    )


CASES = (
    case("dense", dict(b=4, s=6, h=2, e=4), tiny=dict(b=1, s=2, h=2, e=2)),
    case("fully_masked", dict(b=4, s=6, h=2, e=4), lse_a=Operand("b h s", some_fully_masked)),
    case("paged", dict(s=6, h=2, e=4), "s h e", "s h", "s h", options=dict(heads_last=True)),
)

# --- For the tests of precision ---------------------------------------------------------------------------------------

FAMILIES = (
    case("normal", dict(b=2, s=64, h=2, e=16)),
    case(
        "large", dict(b=2, s=64, h=2, e=16), lse_a=Operand("b h s", lambda rng, shape: 30 * rng.standard_normal(shape))
    ),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

OPERANDS = dict(o_a="b s h e", lse_a="b h s", o_b="b s h e", lse_b="b h s")
PLAIN = plain("merge_attention", dict(b=2, s=S, h=4, e=64), OPERANDS)

FEATURES = DTYPES | {
    "paged": Feature(
        "", operands=dict(o_a="s h e", lse_a="s h", o_b="s h e", lse_b="s h"), options=dict(heads_last=True)
    ),
    "one token": sized("tokens", s=1),
}
