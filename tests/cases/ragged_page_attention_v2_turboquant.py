"""Steps of ragged_page_attention_v2_turboquant with prefill, decode, and a sequence without tokens.

Two devices split the heads. Tables with different seeds fit together. The letter z is the slots of a page: its size is
fixed.
"""

import numpy as np

from ejkernel.quantization.turboquant import solve_lloyd_max

from ._case import Case, Operand
from ._feature import DTYPES, operand, option, plain, sized
from .page_attention import pages_of, positive
from .ragged_page_attention_v3 import all_but_one, context_lens, query_start_loc


def any_bytes(rng, shape):
    return rng.integers(0, 256, shape).astype(np.uint8)


def rotation(rng, shape):
    return np.linalg.qr(rng.standard_normal(shape))[0]


def projection(rng, shape):
    return rng.standard_normal(shape) / np.sqrt(shape[0])


def codebook(rng, shape):
    """Ascending entries for coordinates of unit vectors of about 8 features."""
    return np.sort(rng.standard_normal(shape)) / 3


SIZES = dict(t=10, h=4, g=2, d=8, f=8, p=10, z=4, n=4, m=5, j=4, one=1, i=4, e=16, w=2, k=4, v=8)
POOLS = dict(
    key_indices_pages=Operand("p z g i", any_bytes),
    key_signs_pages=Operand("p z g w", any_bytes),
    key_norms_pages=Operand("p z g 2", positive),
    value_indices_pages=Operand("p z g i", any_bytes),
    value_norms_pages=Operand("p z g", positive),
)
MATRICES = dict(
    rotation_matrix=Operand("f d", rotation),
    qjl_projection=Operand("e f", projection),
    key_codebook=Operand("k", codebook),
    value_codebook=Operand("v", codebook),
)
TABLES = dict(
    context_lens=Operand("n", context_lens),
    block_tables=Operand("n j", pages_of(10)),
    query_start_loc=Operand("m", query_start_loc),
    num_seqs=Operand("one", all_but_one),
)
OPERANDS = dict(q="t h d") | POOLS | TABLES | MATRICES


def case(name, sizes=(), operands=(), **options):
    results = ("t h d", "t h") if options.get("return_lse") else ("t h d",)
    sizes, operands = {**SIZES, **dict(sizes)}, {**OPERANDS, **dict(operands)}
    return Case("ragged_page_attention_v2_turboquant", name, sizes, operands, results, options)


CASES = (
    case("mixed", return_lse=True),
    case("window_softcap_sinks", dict(x=2), dict(sinks="h x"), window=5, softcap=2.0, softmax_scale=0.5),
    case("one_kv_head", dict(g=1, k=8, v=16)),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


LENGTHS = (30, 1, 0, 29)
WIDE = dict(t=64, d=64, f=64, i=32, e=64, w=8, z=16, p=24, k=8, v=16)


def of_lloyd_and_max(rng, shape):
    """The Lloyd-Max codebook of TurboQuant for 64 features."""
    return solve_lloyd_max(bits=shape[0].bit_length() - 1, dim=64).centroids.astype(np.float64)


CODEBOOKS = dict(key_codebook=Operand("k", of_lloyd_and_max), value_codebook=Operand("v", of_lloyd_and_max))


def family(name, values=lambda rng, shape: rng.standard_normal(shape), norms=positive, sizes=(), context=60):
    """64 tokens of 4 heads, one of them in decode, with contexts of that length."""
    sizes = WIDE | dict(sizes)
    arrays = dict(q=Operand("t h d", values))
    arrays |= dict(key_norms_pages=Operand("p z g 2", norms), value_norms_pages=Operand("p z g", norms))
    tables = dict(
        context_lens=Operand("n", lambda rng, shape: np.full(shape, context, np.int32)),
        block_tables=Operand("n j", pages_of(sizes["p"])),
        query_start_loc=Operand("m", lambda rng, shape: np.cumsum([0, *LENGTHS]).astype(np.int32)),
    )
    return case(name, sizes, arrays | tables | CODEBOOKS, return_lse=True)


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape), lambda rng, shape: 9 * positive(rng, shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family(
        "long_uniform",
        lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape),
        sizes=dict(z=128, p=64, j=16),
        context=2000,
    ),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain(
    "ragged_page_attention_v2_turboquant",
    dict(t=64, h=4, g=2, d=128, f=128, p=10, z=16, n=4, m=5, j=4, one=1, x=2, i=64, e=128, w=16, k=8, v=16),
    OPERANDS,
)

FEATURES = DTYPES | {
    "all sequences": operand("sequences", num_seqs=Operand("", lambda rng, shape: np.int32(4))),
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h x"),
    "window": option("window", window=20),
    "window to the left": option("window", window=(20, None)),
    "softcap": option(softcap=20.0),
    "scale": option(softmax_scale=0.3),
    "lse": option(return_lse=True),
    "two bits": sized("bits", k=2, v=4),
    "few signs": sized("signs", e=32, w=4),
    "one token": sized("tokens", t=1),
    "one head": sized("heads", h=1, g=1),
}
