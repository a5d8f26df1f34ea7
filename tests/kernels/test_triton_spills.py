"""No Triton kernel spills more than 512 bytes of registers a thread with the heuristic config.

NVIDIA's assembler reports it, without a GPU. Tests that take a core of CI a minute always run, the rest are slow tests.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import (
    _launch,
    _recurrence,
    flash_attention,
    gated_delta_rule,
    grouped_matmul,
    mean_pooling,
    ragged_page_attention,
)
from ejkernel.kernels._triton._recurrence.configs import space as recurrence_space
from ejkernel.kernels._triton.flash_attention.configs import space as attention_space
from ejkernel.kernels._triton.gated_delta_rule.configs import space as delta_space
from ejkernel.kernels._triton.grouped_matmul.configs import space as products_space
from ejkernel.kernels._triton.mean_pooling.configs import space as pooling_space
from ejkernel.primitives import _recurrence as of_recurrence
from ejkernel.primitives import gated_delta_rule as of_delta
from ejkernel.primitives import grouped_matmul as of_products
from ejkernel.primitives import mean_pooling as of_pooling
from ejkernel.primitives import ragged_page_attention as over_pages
from ejkernel.primitives._pages import CacheSpec

from . import compiler
from .test_triton_compile import KINDS, OPERATIONS, PACKED, SEGMENTS, Call, implementation

LIMIT = 512
LARGE, SMALL = ("sm_80", "sm_90", "sm_100"), ("sm_120",)
"""GPUs of the largest shared memory of their generation, and one that stands for all that have 99 KiB."""
HALF, SINGLE = ("bfloat16",), ("float32",)
array = jax.ShapeDtypeStruct


def spilling(monkeypatch, target: str, config, call) -> list[str]:
    """Descriptions of the kernels of a call that spill more than the limit."""
    with lowering_for(KINDS[target]):
        launches = compiler.launches(monkeypatch, _launch, partial(call, config))
    assert launches
    return over_the_limit(launches, target)


def over_the_limit(launches, target: str) -> list[str]:
    """Descriptions of the launches that spill more than the limit."""
    found = {launch: compiler.binary(launch, compiler.TARGETS[target]).spilled for launch in launches}
    return [f"{launch}: {spilled} bytes" for launch, spilled in found.items() if spilled > LIMIT]


def zeros(operands):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), operands)


def cases(*axes) -> list:
    """The product of the axes; combinations that are not in ALWAYS are slow."""
    marks = lambda case: [] if case in ALWAYS else pytest.mark.slow
    return [pytest.param(*case, id="-".join(map(str, case)), marks=marks(case)) for case in product(*axes)]


EDGES = dict(S=1000, K=1010, G=2, sinks=1, options={"window": (100, 20), "softcap": 30.0})
ATTENTION = {
    "plain": {},
    "window": dict(options={"causal": True, "window": (100, None)}),
    "segments": dict(has=SEGMENTS),
    "packed": dict(has=PACKED),
    "bias_and_mask": dict(has=("bias", "mask")),
    "dropout": dict(has=("dropout",)),
    "edges": dict(**EDGES, has=("softmax_scale",)),
    "edges_and_bias": dict(**EDGES, has=("bias", "softmax_scale")),
    "all": dict(**EDGES, has=("bias", "mask", *SEGMENTS, "softmax_scale", "dropout")),
    "all_packed": dict(**EDGES, has=(*PACKED, "softmax_scale", "dropout")),
}
WIDTHS = {"64": (64, 64), "80": (80, 80), "96": (96, 96), "128": (128, 128), "160": (160, 160), "192": (192, 192),
          "192/128": (192, 128), "256": (256, 256)}  # fmt: skip
DECAYS = {
    **{"none": (), "gamma": ("g_gamma",), "head": ("g",), "head_and_gamma": ("g", "g_gamma")},
    **{"feature": ("gk",), "value": ("gv",), "both": ("gk", "gv"), "head_and_feature": ("g", "gk")},
}
PRODUCTS = {
    "many_rows": ((1, 4096, 1024), "bfloat16", "bfloat16"),
    "few_rows": ((1, 64, 1024), "bfloat16", "bfloat16"),
    "int8": ((1, 4096, 1024), "bfloat16", "int8"),
    "float16": ((1, 4096, 1024), "float16", "float16"),
    "float32": ((1, 4096, 1024), "float32", "float32"),
}
RECURRENCES = ("recurrence", "recurrence_bwd", "recurrence_jvp")
DELTAS = ("gated_delta_rule", "gated_delta_rule_bwd", "gated_delta_rule_jvp")
# What takes a core of CI about a minute.
ALWAYS = (
    ("sm_80", "flash_attention", "all", "192", "bfloat16"),
    ("sm_80", "flash_attention_bwd", "edges", "256", "bfloat16"),
    ("sm_80", "flash_attention_jvp", "plain", "256", "bfloat16"),
    ("sm_90", "flash_attention_jvp", "plain", "192", "bfloat16"),
    ("sm_100", "flash_attention_bwd", "plain", "256", "bfloat16"),
    ("sm_80", "recurrence_bwd", "gamma", 128, "bfloat16"),
    ("sm_80", "recurrence_jvp", "head", 128, "bfloat16"),
    ("sm_80", "recurrence_bwd", "head", 256, "bfloat16"),
    ("sm_90", "recurrence_bwd", "both", 128, "bfloat16"),
    ("sm_80", "recurrence_bwd", "head", 64, "float32"),
    ("sm_80", "gated_delta_rule", 64, "bfloat16", 8192),
    ("sm_90", "gated_delta_rule_jvp", 128, "bfloat16", 8192),
    ("sm_80", "grouped_matmul_bwd", "many_rows"),
    ("sm_90", "grouped_matmul", "int8"),
    ("sm_90", "prefills", 128, "float32"),
    ("sm_90", "drafts", 64, "bfloat16"),
)


@pytest.mark.parametrize(
    "target, operation, kind, width, dtype",
    cases(LARGE, OPERATIONS, ATTENTION, WIDTHS, HALF)
    + cases(SMALL, OPERATIONS, ("plain", "edges", "all"), ("64", "128", "192", "256"), HALF)
    + cases(LARGE + SMALL, OPERATIONS, ("plain", "all"), ("64", "128", "256"), SINGLE),
)
def test_attention(target, operation, kind, width, dtype, monkeypatch):
    D, V = WIDTHS[width]
    call = Call(D=D, V=V, dtype=dtype, **ATTENTION[kind])
    entry = getattr(flash_attention, operation)
    if reason := entry.supports(call.spec, call.operands, KINDS[target]):
        pytest.skip(reason)
    config = attention_space(operation, call.operands, call.spec, KINDS[target])[0]
    assert not spilling(monkeypatch, target, config, partial(implementation, operation, call))


@pytest.mark.parametrize(
    "target, operation, decay, features, dtype",
    cases(LARGE, RECURRENCES, DECAYS, (64, 128, 256), HALF)
    + cases(SMALL, RECURRENCES, ("gamma", "head", "feature", "both"), (64, 128, 256), HALF)
    + cases(LARGE, RECURRENCES, ("gamma", "head", "feature", "both"), (64, 128, 256), ("float16", *SINGLE)),
)
def test_recurrence(target, operation, decay, features, dtype, monkeypatch):
    B, S, H, D = 1, 256, 2, features
    shapes = dict(g=(B, S, H), gk=(B, S, H, D), gv=(B, S, H, D), g_gamma=(B, H))
    decays = {name: array(shapes[name], "float32" if name == "g_gamma" else dtype) for name in DECAYS[decay]}
    x, spec = of_recurrence.Operands(*[array((B, S, H, D), dtype)] * 3, **decays), of_recurrence.RecurrenceSpec()
    implementation, kind = getattr(_recurrence, operation), KINDS[target]
    if reason := implementation.supports(spec, x, kind):
        pytest.skip(reason)

    def call(config):
        arrays = zeros(x)
        wrt = tuple(name for name, a in zip(x._fields, x, strict=True) if a is not None)
        if operation == "recurrence":
            return implementation(*arrays, spec=spec, config=config)
        if operation == "recurrence_jvp":
            return implementation(arrays, None, arrays, spec=spec, config=config)
        do = of_recurrence.Outputs(arrays.v, None)
        return implementation(arrays, None, do, wrt=wrt, spec=spec, config=config)

    config = recurrence_space(operation, x, spec, kind)[0]
    assert not spilling(monkeypatch, target, config, call)


@pytest.mark.parametrize(
    "target, operation, features, dtype, length",
    cases(LARGE + SMALL, DELTAS, (64, 96, 128, 256), HALF, (512, 8192))
    + cases(LARGE + SMALL, DELTAS, (64, 128), ("float16", *SINGLE), (8192,)),
)
def test_gated_delta_rule(target, operation, features, dtype, length, monkeypatch):
    """With few programs and with many, which have other configs; queries and keys have half of the heads."""
    B, S, H, D = 8192 // length, length, 32, features
    tokens, rows = array((B, S, H, D), dtype), array((B, S, H), dtype)
    x = of_delta.Operands(*[array((B, S, H // 2, D), dtype)] * 2, tokens, rows, rows)
    spec, implementation = of_delta.GatedDeltaRuleSpec(), getattr(gated_delta_rule, operation)
    if reason := implementation.supports(spec, x, KINDS[target]):
        pytest.skip(reason)

    def call(config):
        arrays = zeros(x)
        if operation == "gated_delta_rule":
            return implementation(*arrays, spec=spec, config=config)
        if operation == "gated_delta_rule_jvp":
            return implementation(arrays, None, arrays, spec=spec, config=config)
        do = of_delta.Outputs(arrays.v, None)
        return implementation(arrays, None, do, wrt=("q", "k", "v", "beta", "g"), spec=spec, config=config)

    config = delta_space(operation, x, spec, KINDS[target])[0]
    assert not spilling(monkeypatch, target, config, call)


@pytest.mark.parametrize(
    "target, operation, kind",
    cases(LARGE + SMALL, ("grouped_matmul", "grouped_matmul_bwd"), PRODUCTS),
)
def test_grouped_matmul(target, operation, kind, monkeypatch):
    shape, dtype, weights = PRODUCTS[kind]
    scale = array((1, 8, 1024), "float32") if weights == "int8" else None
    x = of_products.Operands(
        array(shape, dtype), array((1, 8, 1024, 1024), weights), array((1, 8), "int32"), rhs_scale=scale
    )
    spec, implementation = of_products.GroupedMatmulSpec(), getattr(grouped_matmul, operation)

    def call(config):
        arrays = zeros(x)
        if operation == "grouped_matmul":
            return implementation(*arrays, spec=spec, config=config)
        do = of_products.Outputs(jnp.zeros((*shape[:2], 1024), "float32"))
        wrt = ("lhs",) if weights == "int8" else ("lhs", "rhs")
        return implementation(arrays, do, do, wrt=wrt, spec=spec, config=config)

    config = products_space(operation, x, spec, KINDS[target])[0]
    assert not spilling(monkeypatch, target, config, call)


@pytest.mark.parametrize("target", LARGE)
@pytest.mark.parametrize("operation", ["mean_pooling", "mean_pooling_bwd"])
def test_mean_pooling(target, operation, monkeypatch):
    x = of_pooling.Operands(array((1, 8192, 1024), "bfloat16"), array((1, 16, 2), "int32"))
    spec, implementation = of_pooling.MeanPoolingSpec(), getattr(mean_pooling, operation)

    def call(config):
        arrays = zeros(x)
        if operation == "mean_pooling":
            return implementation(*arrays, spec=spec, config=config)
        do = of_pooling.Outputs(jnp.zeros((1, 16, 1024), "bfloat16"))
        return implementation(arrays, do, do, wrt=("x",), spec=spec, config=config)

    config = pooling_space(operation, x, spec, KINDS[target])[0]
    assert not spilling(monkeypatch, target, config, call)


# Tokens of eight sequences, query heads of a key/value head, drafts that a token may see, and the dtype of the pages.
STEPS = {
    "prefills": (4096, 4, 0, None),
    "prefills and drafts": (4096, 4, 8, None),
    "drafts": (64, 8, 8, None),
    "int8": (64, 8, 0, "int8"),
    "int8 and drafts": (64, 8, 8, "int8"),
}
STEPS_OF_E4M3 = {
    "prefills and e4m3": (4096, 4, 0, "float8_e4m3fn"),
    "e4m3": (64, 8, 0, "float8_e4m3fn"),
    "e4m3 and drafts": (64, 8, 8, "float8_e4m3fn"),
}
STEPS_OF_MANY_HEADS = {
    "many heads": (8, 128, 0, None),
    "many heads and drafts": (64, 128, 8, None),
    "many heads and int8": (8, 128, 0, "int8"),
}


@pytest.mark.parametrize(
    "target, kind, features, dtype",
    cases(LARGE, STEPS, (64, 128, 256), HALF)
    + cases(LARGE, ("prefills", "prefills and drafts", "drafts"), (64, 128, 256), SINGLE)
    + cases(("sm_80",), STEPS_OF_E4M3, (64, 128, 256), HALF)
    + cases(LARGE, STEPS_OF_MANY_HEADS, (64, 128), HALF),
)
def test_ragged_page_attention(target, kind, features, dtype, monkeypatch):
    """Prefills and decodes are two launches."""
    (tokens, group, drafts, pages), sequences, heads = (STEPS | STEPS_OF_E4M3 | STEPS_OF_MANY_HEADS)[kind], 8, 8
    x = over_pages.Operands(
        array((1, tokens, heads * group, features), dtype),
        array((1, 512, 16, heads, 2, features), pages or dtype),
        *(array(shape, "int32") for shape in ((1, sequences), (1, sequences, 64), (1, sequences + 1), (1, 1))),
        draft_mask=array((1, tokens, drafts), "bool") if drafts else None,
    )
    spec = CacheSpec()

    def call(config):
        return ragged_page_attention.ragged_page_attention(*zeros(x), spec=spec, config=config)

    config = ragged_page_attention.space(spec, x, KINDS[target])[0]
    assert not spilling(monkeypatch, target, config, call)
