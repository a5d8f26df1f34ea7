"""The linear recurrence on TPU: numbers in the interpreter that finds races, and the real compilers of all TPUs."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.types import KernelConfig
from tests.gpu.recurrence_cases import Case, check, differentiable, formula, like, normal

from .tpu_compiler import TARGETS, compiled
from .tpu_interpreter import interpreted

forward, backward, tangent = (kernel_registry.get("recurrent" + kind, "pallas", "tpu") for kind in ("", "_bwd", "_jvp"))
CONFIG = KernelConfig(block_q=16, block_k=8)
CASES = (
    Case("by head", dict(g=1.0, g_gamma=0.5)),
    Case("by feature, reversed", dict(gk=1.0), reverse=True),
    Case("all of them", dict(g=1.0, gk=1.0, g_gamma=0.5)),
    Case("no decay", {}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_the_interpreter(case):
    """Forward, backward and tangent in float32; the last chunk is not full."""
    x, spec = case.make(40, jnp.float32)
    assert forward.supports(spec, x, TARGETS["v5e"]) is None
    wrt = differentiable(x)
    outputs = interpreted(lambda *x: forward(*x, spec=spec, config=CONFIG))(*x)
    cotangents = like(outputs)
    pull = lambda x, ct: backward(x, None, ct, wrt=wrt, spec=spec, config=CONFIG)
    gradients = interpreted(pull)(x, cotangents)
    exact, rounded = (formula(x, spec, cotangents, dtype) for dtype in (jnp.float64, None))
    check((outputs, dict(zip(wrt, gradients, strict=True))), exact, rounded, jnp.float32)

    moving = x._replace(**{name: normal(8, getattr(x, name).shape, getattr(x, name).dtype) for name in wrt})
    push = lambda x, t: tangent(x, None, t, spec=spec, config=CONFIG)
    dots = interpreted(push)(x, moving)
    in_pairs = lambda a, b: sum(
        float(jnp.vdot(s, t)) for s, t in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    along = in_pairs(gradients, [getattr(moving, name) for name in wrt])
    assert in_pairs(cotangents, dots) == pytest.approx(along, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize(
    "generation", [pytest.param(name, marks=() if name == "tpu7x" else pytest.mark.slow) for name in TARGETS]
)
@pytest.mark.parametrize("gates", ("g", "gk", "g gk g_gamma", ""))
def test_the_compilers_take_them(gates, generation):
    """Every config for one generation, and the heuristic one for the others."""
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    x = Operands(array(2, 1000, 8, 128), array(2, 1000, 4, 128), array(2, 1000, 4, 64))
    wide = dict(g=array(2, 1000, 8), gk=array(2, 1000, 8, 128), g_gamma=array(1, 8, dtype=jnp.float32))
    x, spec = x._replace(**{name: wide[name] for name in gates.split()}), RecurrenceSpec()
    wrt, run = differentiable(x), lambda *x, config: forward(*x, spec=spec, config=config)
    ct = jax.eval_shape(lambda *x: kernel_registry.get("recurrent", "xla")(*x, spec=spec), *x)
    for config in forward.space(spec, x, TARGETS[generation])[: None if generation == "v5e" else 1]:
        compiled(lambda *x, config=config: run(*x, config=config), generation, *x)
        compiled(
            lambda x, ct, config=config: backward(x, None, ct, wrt=wrt, spec=spec, config=config), generation, x, ct
        )
        compiled(lambda x, t, config=config: tangent(x, None, t, spec=spec, config=config), generation, x, x)
