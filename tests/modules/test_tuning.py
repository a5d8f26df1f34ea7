"""Built-in operations are tuned like any kernel, on operands that they generate, backward and tangent too."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import ops
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.ops.utils.operands import abstract
from ejkernel.types import KernelConfig

CONFIGS = [KernelConfig(block_q=size, block_k=size, platform="xla", backend="cpu") for size in (32, 64)]


def of_type(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


DENSE = dict(q=of_type(2, 100, 4, 16), k=of_type(2, 100, 2, 16), v=of_type(2, 100, 2, 16))
CALLS = {
    "plain": DENSE,
    "masked": DENSE
    | dict(
        mask=of_type(100, 100, dtype=bool),
        q_segment_ids=of_type(2, 100, dtype=jnp.int32),
        kv_segment_ids=of_type(2, 100, dtype=jnp.int32),
        sinks=of_type(4),
        softmax_scale=of_type(),
    ),
    "dropout": DENSE | dict(dropout_key=of_type(2, dtype=jnp.uint32)),
    "packed": {name: of_type(*x.shape[1:]) for name, x in DENSE.items()}
    | {name: of_type(5, dtype=jnp.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")},
}

ALWAYS = (("masked", ""), ("packed", "_jvp"), ("masked", "_bwd"), ("packed", "_bwd"))


def invocation(arrays):
    """The call as it is recorded: types without values."""
    found = []
    options = dict(causal=True, dropout_rate=0.1 if "dropout_key" in arrays else 0.0)
    jax.eval_shape(lambda x: found.append(OPERATIONS["flash_attention"].invocation(**x, **options)[0]), arrays)
    return ops.Invocation(found[0].kernel, abstract(found[0].args), found[0].kwargs)


def test_a_config_must_be_deterministic_if_its_implementation_can_be(monkeypatch):
    inv, entry = invocation(DENSE), kernel_registry.list_implementations("flash_attention")[-1]
    assert inv.kernel.repeats(inv, CONFIGS[0])
    monkeypatch.setattr(
        entry.implementation, "supports", lambda spec, *_: "adds in any order" if spec.deterministic else None
    )
    assert not inv.kernel.repeats(inv, CONFIGS[0])
    monkeypatch.setattr(entry.implementation, "supports", lambda *_: None)
    monkeypatch.setattr(entry.implementation, "repeats_if_asked", True, raising=False)
    strict = replace(inv, kwargs={**inv.kwargs, "spec": replace(inv.kwargs["spec"], deterministic=True)})
    assert not inv.kernel.repeats(inv, CONFIGS[0]) and inv.kernel.repeats(strict, CONFIGS[0])


def test_a_gradient_measures_no_tangent(monkeypatch):
    for name in ("flash_attention", "flash_attention_jvp", "flash_attention_bwd"):
        for entry in kernel_registry.list_implementations(name):
            monkeypatch.setattr(entry.implementation, "space", lambda *_: CONFIGS)
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "autotune")
    told, selector = [], ops.default_executor().selector
    monkeypatch.setattr(selector, "_on_event", lambda event, operation, *_: told.append((operation[:-3], event)))
    x = {name: jnp.ones(of.shape, of.dtype) for name, of in DENSE.items()}
    jax.make_jaxpr(jax.grad(lambda x: ejkernel.lax.flash_attention(**x).sum()))(x)
    assert ("flash_attention_jvp", "heuristics") in told
    assert [operation for operation, event in told if event == "autotune_finish"] == [
        "flash_attention",
        "flash_attention_bwd",
    ]


def test_the_results_that_a_gradient_is_measured_on_are_computed_by_the_heuristic_config(monkeypatch):
    used, bind = [], KERNELS["flash_attention"].bind
    monkeypatch.setattr(KERNELS["flash_attention"], "bind", lambda *call: used.append(call[2]) or bind(*call))
    inv = derived(invocation(DENSE), "_bwd")
    inv.kernel.synthetic_inputs(inv)
    assert used == [KERNELS["flash_attention"].heuristic_cfg(invocation(DENSE))]


def derived(inv, suffix):
    """The call of the forward, tangent or backward that corresponds to a forward call."""
    named, kernel = inv.kernel.arrays(inv), KERNELS["flash_attention" + suffix]
    if suffix:
        b, s, h, _ = named["q"].shape
        o, lse = of_type(b, s, h, named["v"].shape[-1]), of_type(b, h, s)
        further = {"q_dot": named["q"], "v_dot": named["v"]} if suffix == "_jvp" else {"o_bar": o, "lse_bar": lse}
        results = ("q_bar", "k_bar") if suffix == "_bwd" else None
        inv = kernel.invocation({**named, "o": o, "lse": lse, **further}, inv.kwargs["spec"], results)
    return inv


@pytest.mark.parametrize(
    ("call", "suffix"),
    [
        pytest.param(call, suffix, marks=() if (call, suffix) in ALWAYS else pytest.mark.slow)
        for call in CALLS
        for suffix in ("", "_jvp", "_bwd")
    ],
)
def test_a_config_is_found_by_measuring(call, suffix):
    inv = derived(invocation(CALLS[call]), suffix)
    assert ops.Tuner(warmup=1, iters=1).fastest(inv.kernel, inv, CONFIGS) in CONFIGS


def cost_of(arrays, suffix="", **options):
    """(operations, bytes) of the forward, of the gradient of q and v, or of its tangent."""
    given = []

    def record(x):
        given.append(OPERATIONS["flash_attention"].invocation(**x, **options)[0])

    jax.eval_shape(record, arrays)
    inv, kernel = given[0], KERNELS["flash_attention" + suffix]
    named = {name: abstract(x) for name, x in inv.kernel.arrays(inv).items()}
    b, s, h, _ = named["q"].shape
    o = {"o": of_type(b, s, h, named["v"].shape[-1]), "lse": of_type(b, h, s)}
    if suffix == "_bwd":
        inv = kernel.invocation({**named, **o, "o_bar": o["o"]}, inv.kwargs["spec"], ("q_bar", "v_bar"))
    elif suffix == "_jvp":
        inv = kernel.invocation({**named, **o, "q_dot": named["q"], "v_dot": named["v"]}, inv.kwargs["spec"])
    return kernel.cost(inv)


def test_the_cost_of_attention_counts_the_pairs_that_are_seen():
    arrays = dict(q=of_type(2, 6, 4, 16), k=of_type(2, 9, 2, 16), v=of_type(2, 9, 2, 8))
    q, k, v, o, lse = 2 * 6 * 4 * 16, 2 * 9 * 2 * 16, 2 * 9 * 2 * 8, 2 * 6 * 4 * 8, 2 * 6 * 4
    causal = sum(range(4, 10))  # row i sees i + 9 − 6 and all before it
    assert cost_of(arrays) == (2 * 2 * 4 * 6 * 9 * (16 + 8), 4 * (q + k + v + o + lse))
    assert cost_of(arrays, causal=True)[0] == 2 * 2 * 4 * causal * (16 + 8)
    assert cost_of(arrays, window=(1, 0))[0] == 2 * 2 * 4 * 6 * 2 * (16 + 8)
    assert cost_of(arrays, "_bwd", causal=True) == (
        2 * 2 * 4 * causal * (16 + 8 + 16 + 8),  # s, dp, dq, dv
        4 * (q + k + v + o + lse + o + q + v),
    )
    assert cost_of(arrays, "_jvp", causal=True)[0] == 2 * 2 * 4 * causal * (16 + 16 + 8 + 8)  # s, dq·k, ṡ·v, p·dv


def test_the_cost_is_unknown_if_visibility_depends_on_values():
    assert cost_of(CALLS["plain"]) is not None
    assert cost_of({name: x for name, x in CALLS["masked"].items() if name != "mask"}) is None
    assert cost_of(DENSE | {"mask": of_type(100, 100, dtype=bool)}) is None
    assert cost_of(CALLS["packed"]) is None
