"""Steps of multi_latent_page_attention with prefill, decode, and a sequence without tokens. Devices split the heads.

Tables with different seeds fit together, as sequences share pages. The letter z is the slots of a page: its size is
fixed. Of the f = c + d features of a slot c are the latent.
"""

from dataclasses import replace

import numpy as np

from . import ragged_page_attention as ragged
from ._case import Case, Operand
from ._feature import DTYPES, operand, option, plain, sized
from .page_attention import no_work, positive, small_integers


def key_lists(rng, shape):
    """Positions of keys: some twice, some past the token's own, some −1."""
    return rng.integers(-2, 16, shape).astype(np.int32)


SIZES = dict(t=10, h=4, c=12, d=4, f=16, p=10, z=4, n=4, m=5, j=4, w=3, one=1)
TABLES = {n: x for n, x in ragged.OPERANDS.items() if n not in ("q", "kv_pages")}
OPERANDS = dict(q_latent="t h c", q_rope="t h d", pages="p z f") | TABLES


def case(name, sizes=(), operands=(), **options):
    results = ("t h c", "t h") if options.get("return_lse") else ("t h c",)
    sizes, operands = {**SIZES, **dict(sizes)}, {**OPERANDS, **dict(operands)}
    return Case("multi_latent_page_attention", name, sizes, operands, results, options)


CASES = (
    case("mixed", return_lse=True),
    case("window_softcap_sinks", dict(x=2), dict(sinks="h x"), window=5, softcap=2.0, softmax_scale=0.5, num_splits=3),
    case("int8", operands=dict(pages=Operand("p z f", small_integers), k_scale=Operand("p z one", positive))),
    case(
        "drafts",
        dict(l=7, i=2),
        dict(draft_mask=Operand("t w", ragged.tree), plan=Operand("l i 8", no_work), k_scale=Operand("", positive)),
        window=6,
        return_lse=True,
    ),
    case("lists", dict(k=7), dict(indices=Operand("t k", key_lists)), return_lse=True),
    case(
        "lists_with_everything",
        dict(k=5, x=2),
        dict(
            indices=Operand("t k", key_lists),
            draft_mask=Operand("t w", ragged.tree),
            pages=Operand("p z f", small_integers),
            k_scale=Operand("p z one", positive),
            sinks="h x",
        ),
        window=9,
        softcap=2.0,
        num_splits=2,
    ),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, values=lambda rng, shape: rng.standard_normal(shape), sizes=(), context=60):
    """64 tokens of 4 heads, one of them in decode, with contexts of that length."""
    of = ragged.family(name, values, sizes, context)
    tables = {n: x for n, x in of.operands.items() if n in TABLES}
    arrays = {n: Operand(axes, values) for n, axes in dict(q_latent="t h c", q_rope="t h d", pages="p z f").items()}
    return case(name, {**of.sizes, "c": 48, "d": 16, "f": 64}, tables | arrays, return_lse=True)


def listed(name, family):
    """The same with lists of 24 keys for each token."""
    return replace(
        family,
        name=name,
        sizes={**family.sizes, "k": 24},
        operands={**family.operands, "indices": Operand("t k", lambda rng, shape: rng.integers(0, 60, shape))},
    )


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), dict(z=128, p=64, j=16), 2000),
    listed("lists", family("normal")),
    listed("large_lists", family("large", lambda rng, shape: 30 * rng.standard_normal(shape))),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain(
    "multi_latent_page_attention",
    dict(t=64, h=4, c=128, d=64, f=192, p=10, z=16, n=4, m=5, j=4, one=1, x=2, w=3, l=5, i=2, k=24),
    OPERANDS,
)

FEATURES = DTYPES | {
    "all sequences": operand("sequences", num_seqs=Operand("", lambda rng, shape: np.int32(4))),
    "int8": operand("pages", pages=Operand("p z f", small_integers)),
    "scale": operand("scale", k_scale=Operand("", positive)),
    "scale of slots": operand("scale", k_scale=Operand("p z one", positive)),
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h x"),
    "drafts": operand(draft_mask=Operand("t w", ragged.tree)),
    "lists of keys": operand(indices=Operand("t k", key_lists)),
    "plan": operand(plan=Operand("l i 8", no_work)),
    "window": option("window", window=20),
    "window to the left": option("window", window=(20, None)),
    "softcap": option(softcap=20.0),
    "static scale": option(softmax_scale=0.3),
    "splits": option(num_splits=2),
    "lse": option(return_lse=True),
    "batch invariant": option(batch_invariant=True),
    "one token": sized("tokens", t=1),
    "one head": sized("heads", h=1),
}
