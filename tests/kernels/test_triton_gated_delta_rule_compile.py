"""Every config that the gated delta rule in Triton may be run with compiles for every GPU, and fits into its memory.

At sm_90 no kernel gives up running matrix products asynchronously.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton.gated_delta_rule import gated_delta_rule, gated_delta_rule_bwd, gated_delta_rule_jvp
from ejkernel.kernels._triton.gated_delta_rule.configs import space
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs

from . import compiler
from .test_triton_compile import KINDS

SPEC = GatedDeltaRuleSpec()
KERNELS = {f.__name__: f for f in (gated_delta_rule, gated_delta_rule_bwd, gated_delta_rule_jvp)}
# What takes a core of CI twenty seconds; the others are slow tests.
ALWAYS = (("sm_90", "gated_delta_rule"), ("sm_90", "gated_delta_rule_bwd"), ("gfx942", "gated_delta_rule"))
MOST_SPILLED = 512


def operands(features: int = 128, dtype=jnp.bfloat16, tokens: int = 256) -> Operands:
    """Of two heads with one of queries and keys, a state given."""
    array = lambda *shape, dtype=dtype: jnp.zeros((1, *shape), dtype)
    q, v, beta = array(tokens, 1, features), array(tokens, 2, 128), array(tokens, 2)
    state = array(1, 2, features, 128, dtype=jnp.float32)
    return Operands(q, q, v, beta, g=array(tokens, 2, dtype=jnp.float32), initial_state=state)


def call(kernel: str, x: Operands, config):
    """The kernel, in all directions, to be traced."""
    f, wrt = KERNELS[kernel], tuple(name for name in x._fields if getattr(x, name) is not None)
    if f is gated_delta_rule:
        return f(*x, spec=SPEC, config=config)
    if f is gated_delta_rule_jvp:
        return f(x, None, x, spec=SPEC, config=config)
    return f(x, None, Outputs(x.v, x.initial_state), wrt=wrt, spec=SPEC, config=config)


def troubles(target: str, kernel: str, x: Operands, configs, monkeypatch) -> list[str]:
    """What is wrong with the kernels of a call."""
    kind, found = KINDS[target], []
    monkeypatch.setattr(_launch, "is_rocm", lambda: kind.platform == "rocm")
    monkeypatch.setattr(_launch, "compute_capability", lambda: kind.compute_capability or 90)
    for config in configs:
        for launch in compiler.launches(monkeypatch, _launch, lambda config=config: call(kernel, x, config)):
            binary = compiler.binary(launch, compiler.TARGETS[target])
            if binary.shared > shared_memory_limit(kind):
                found.append(f"{launch}: {binary.shared} bytes of shared memory")
            if target == "sm_90" and binary.serialized:
                found.append(f"{launch}: products one after the other")
            if target.startswith("sm") and config is configs[0] and binary.spilled > MOST_SPILLED:
                found.append(f"{launch}: {binary.spilled} bytes of registers spilled")
    return found


@pytest.mark.parametrize(
    "target, kernel",
    [
        pytest.param(target, kernel, marks=[] if (target, kernel) in ALWAYS else pytest.mark.slow)
        for target in KINDS
        for kernel in KERNELS
    ],
)
def test_compiles(target, kernel, monkeypatch):
    x = operands()
    configs = space(kernel, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x), SPEC, KINDS[target])
    listed = configs[:1] if (target, kernel) in ALWAYS else configs
    assert not (trouble := troubles(target, kernel, x, listed, monkeypatch)), "\n".join(trouble)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ("gated_delta_rule", "gated_delta_rule_bwd"))
@pytest.mark.parametrize("target", [target for target in KINDS if target.startswith("sm")])
def test_choice_for_more_programs_than_multiprocessors(target, kernel, monkeypatch):
    x = operands()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    configs = space(kernel, shapes, SPEC, replace(KINDS[target], core_count=1))
    assert not (trouble := troubles(target, kernel, x, configs[:1], monkeypatch)), "\n".join(trouble)


@pytest.mark.slow
@pytest.mark.parametrize("features, dtype", [(256, jnp.bfloat16), (128, jnp.float32), (64, jnp.float16)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_features_and_dtypes(features, dtype, kernel, monkeypatch):
    x = operands(features, dtype)
    if reason := KERNELS[kernel].supports(SPEC, x, KINDS["sm_90"]):
        assert "features" in reason
        return
    configs = space(kernel, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x), SPEC, KINDS["sm_90"])
    assert not (trouble := troubles("sm_90", kernel, x, configs[:1], monkeypatch)), "\n".join(trouble)


@pytest.mark.parametrize("features, dtype", [(256, jnp.bfloat16), (128, jnp.float32), (72, jnp.float16)])
@pytest.mark.parametrize("target", KINDS)
def test_steps(target, features, dtype, monkeypatch):
    x = operands(features, dtype, tokens=2)
    if reason := gated_delta_rule.supports(SPEC, x, KINDS["sm_90"]):
        assert "features" in reason
        return
    configs = space("gated_delta_rule", x, SPEC, KINDS[target])
    assert {config.algorithm for config in configs} == {"steps"}
    assert not (trouble := troubles(target, "gated_delta_rule", x, configs, monkeypatch)), "\n".join(trouble)
