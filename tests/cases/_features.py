"""What a call of each operation may have, one feature at a time: the tests put them together in pairs.

A feature changes the sizes, operands, options or dtype of the plain call. Of those that stand in one group a call has
one at most. Every argument of an operation is in some feature of it, or in the plain call; `test_pairs.py` checks that.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import ragged_page_attention_v3 as pages
from ._case import Case, Operand
from ._recurrence import gate
from .flash_attention import chance, key, lengths, scalar, segments
from .grouped_matmul import one_has_all, positive, sizes, small_integers, up_to
from .mean_pooling import lengths as lengths_with_padding


@dataclass(frozen=True)
class Feature:
    """What of the plain call is another; `group` names what it is an alternative of."""

    group: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    operands: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None


def option(group: str = "", **options: Any) -> Feature:
    return Feature(group, options=options)


def operand(group: str = "", **operands: Any) -> Feature:
    return Feature(group, operands=operands)


def sized(group: str, **sizes: int) -> Feature:
    return Feature(group, sizes=sizes)


def of(operation: str, sizes: Mapping[str, int], operands: Mapping[str, Any], **options: Any) -> Case:
    return Case(operation, "plain", sizes, operands, ("",), options)


# --- The plain calls --------------------------------------------------------------------------------------------------

S, T, M = 200, 260, 300
TOKENS = dict(b=2, s=S, t=T, h=4, g=2, d=64, e=64, n=3, m=5)
PLAIN = {
    "flash_attention": of("flash_attention", TOKENS, dict(q="b s h d", k="b t g d", v="b t g e")),
    "recurrent": of("recurrent", TOKENS, dict(q="b s h d", k="b s g d", v="b s g e")),
    "gla": of("gla", TOKENS, dict(q="b s h d", k="b s g d", v="b s g e", gk=gate("b s h d"))),
    "lightning_attention": of(
        "lightning_attention", TOKENS, dict(q="b s h d", k="b s g d", v="b s g e"), layer_idx=1, num_layers=4
    ),
    "grouped_matmul": of(
        "grouped_matmul",
        dict(m=M, k=256, n=128, e=4, f=6),
        dict(lhs="m k", rhs="e k n", group_sizes=Operand("e", sizes(M))),
    ),
    "ragged_page_attention_v3": of(
        "ragged_page_attention_v3",
        dict(t=64, h=4, g=2, c=4, d=128, p=16, z=16, n=4, m=5, j=4, one=1, x=2),
        pages.OPERANDS,
    ),
    "mean_pooling": of("mean_pooling", dict(b=2, s=S, d=256, m=5), dict(x="b s d")),
}

# --- Their features ---------------------------------------------------------------------------------------------------

DTYPES = {"float32": Feature("dtype", dtype="float32"), "float16": Feature("dtype", dtype="float16")}
PACKED_ATTENTION = dict(
    q="s h d", k="t g d", v="t g e", cu_seqlens_q=Operand("m", lengths(S)), cu_seqlens_k=Operand("m", lengths(T))
)
PACKED = dict(q="1 s h d", k="1 s g d", v="1 s g e", cu_seqlens=Operand("m", lengths(S)))

RECURRENCE = DTYPES | {
    "state": operand(initial_state="b h d e"),
    "packed": operand("batch", **PACKED),
    "scale": option("scale", softmax_scale=0.3),
    "traced scale": operand("scale", softmax_scale=Operand("", scalar)),
    "reverse": option(reverse=True),
    "final state": option(return_state=True),
    "one token": sized("tokens", s=1),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=192),
}

FEATURES: dict[str, dict[str, Feature]] = {
    "flash_attention": DTYPES
    | {
        "bias": operand("bias", bias="h s t"),
        "bias of keys": operand("bias", bias="1 t"),
        "bias of queries": operand("bias", bias="s 1"),
        "bias of heads": operand("bias", bias="h 1 1"),
        "mask": operand("mask", mask=Operand("1 s t", chance(0.7))),
        "mask of keys": operand("mask", mask=Operand("1 t", chance(2.0))),
        "segments": operand("batch", q_segment_ids=Operand("b s", segments), kv_segment_ids=Operand("b t", segments)),
        "packed": operand("batch", **PACKED_ATTENTION),
        "packed, bounded": Feature("batch", operands=PACKED_ATTENTION, options=dict(max_seqlen_q=S, max_seqlen_k=T)),
        "sinks": operand("sinks", sinks="h"),
        "several sinks": operand("sinks", sinks="h n"),
        "dropout": Feature(operands=dict(dropout_key=Operand("", key)), options=dict(dropout_rate=0.3)),
        "causal": option(causal=True),
        "window": option("window", window=(40, 20)),
        "window of keys": option("window", window=64),
        "softcap": option(softcap=20.0),
        "scale": option("scale", softmax_scale=0.3),
        "traced scale": operand("scale", softmax_scale=Operand("", scalar)),
        "lse": option(return_lse=True),
        "deterministic": option(deterministic=True),
        "batch invariant": option(batch_invariant=True),
        "eight bits": option(precision="e4m3"),
        "one query": sized("queries", s=1),
        "one key": sized("keys", t=1),
        "no key": sized("keys", t=0),
        "one head": sized("heads", h=1, g=1),
        "wide values": sized("values", e=96),
    },
    "recurrent": RECURRENCE
    | {
        "g": operand(g=gate("b s h")),
        "gk": operand(gk=gate("b s h d")),
        "gv": operand(gv=gate("b s h e")),
        "g_gamma": operand(g_gamma=gate("h")),
    },
    "gla": RECURRENCE,
    "lightning_attention": RECURRENCE | {"g_gamma": operand(g_gamma=gate("h"))},
    "grouped_matmul": DTYPES
    | {
        "share of the groups": operand(
            "groups", group_sizes=Operand("f", sizes(M)), group_offset=Operand("", up_to(2))
        ),
        "existing out": operand(existing_out="m n"),
        "scale": operand("scale", rhs_scale=Operand("", positive)),
        "scale of groups": operand("scale", rhs_scale=Operand("e", positive)),
        "scale of columns": operand("scale", rhs_scale=Operand("e n", positive)),
        "transposed": Feature("rhs", operands=dict(rhs="e n k"), options=dict(transpose_rhs=True)),
        "int8": operand("rhs", rhs=Operand("e k n", small_integers)),
        "narrow result": option(preferred_element_type="bfloat16"),
        "one row": sized("rows", m=1),
        "one group": Feature("groups", dict(e=1), dict(group_sizes=Operand("e", one_has_all(M)))),
        "uneven": sized("columns", n=100, k=200),
    },
    "ragged_page_attention_v3": DTYPES
    | {
        "all sequences": operand("sequences", num_seqs=Operand("", lambda rng, shape: np.int32(4))),
        "sinks": operand("sinks", sinks="h"),
        "several sinks": operand("sinks", sinks="h x"),
        "window": option("window", window=20),
        "window to the left": option("window", window=(20, None)),
        "softcap": option(softcap=20.0),
        "scale": option(softmax_scale=0.3),
        "lse": option(return_lse=True),
        "one token": sized("tokens", t=1),
        "one head": sized("heads", h=1, g=1, c=2),
    },
    "mean_pooling": DTYPES
    | {
        "packed": operand(x="s d", cu_seqlens=Operand("m", lengths_with_padding(S))),
        "chunks": option(chunk_size=32),
        "one token": sized("tokens", s=1),
        "uneven": sized("features", d=100),
    },
}


def features_of(operation: str) -> list[str]:
    """The names of the features of an operation."""
    return list(FEATURES[operation])


def call_with(operation: str, names: tuple[str, ...]) -> tuple[Case, str]:
    """The plain call with these features, and its dtype."""
    plain, dtype = PLAIN[operation], "bfloat16"
    shape, operands, options = dict(plain.sizes), dict(plain.operands), dict(plain.options)
    for name in names:
        feature = FEATURES[operation][name]
        shape |= feature.sizes
        operands |= feature.operands
        options |= feature.options
        dtype = feature.dtype or dtype
    if "cu_seqlens" in operands and "initial_state" in operands:
        operands["initial_state"], shape["n"] = "n h d e", shape["m"] - 1
    for name, axes in (("g", "1 s h"), ("gk", "1 s h d"), ("gv", "1 s h e")):
        if "cu_seqlens" in operands and name in operands:
            operands[name] = gate(axes)
    return replace(plain, name="-".join(names) or "plain", sizes=shape, operands=operands, options=options), dtype


def together(operation: str, names: tuple[str, ...]) -> bool:
    """Whether one call may have all of them: one of each group."""
    groups = [group for name in names if (group := FEATURES[operation][name].group)]
    return len(set(groups)) == len(groups)


def pairs(operation: str) -> Iterator[tuple[str, ...]]:
    """The plain call, each feature by itself, and every two that one call may have."""
    names = FEATURES[operation]
    for size in range(3):
        yield from (chosen for chosen in itertools.combinations(names, size) if together(operation, chosen))
