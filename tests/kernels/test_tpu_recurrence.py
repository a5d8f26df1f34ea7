"""The linear recurrence on TPU: numbers in the interpreter that finds races, and the real compilers of all TPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.recurrence_cases import Case, check, differentiable, formula, like, normal, poisoned

from .tpu_compiler import TARGETS, by_generation, compile_recurrence
from .tpu_interpreter import interpreted

forward, backward, tangent = (
    kernel_registry.find("recurrent" + kind, "pallas", "tpu").implementation for kind in ("", "_bwd", "_jvp")
)
CONFIG = RecurrenceConfig(chunk_size=16, subchunk_size=8)
CASES = (
    Case("by head", dict(g=1.0, g_gamma=0.5)),
    Case("by feature, reversed", dict(gk=1.0), reverse=True),
    Case("by value feature", dict(gv=1.0)),
    Case("all of them", dict(g=1.0, gk=1.0, gv=0.5, g_gamma=0.5)),
    Case("no decay", {}),
    Case("packed", dict(g_gamma=0.5), ends=(0, 0.7, 0.7, 0.75, 1.6)),
    Case("packed by feature, reversed", dict(gk=0.5), ends=(0.1, 0.8, 1.5), reverse=True),
    Case("values in parts", dict(g=1.0), D=8, V=384),
    Case("values in parts by both features, packed", dict(gk=0.5, gv=0.5), D=8, V=384, H=2, G=1, ends=(0, 0.3, 0.9)),
)


# The interpreter and a compiler take ten seconds a case, and 30 where there are more features.
QUICK = ("by head", "packed")


def quick(name: str, value) -> object:
    return pytest.param(value, id=name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("case", [quick(case.name, case) for case in CASES])
def test_in_the_interpreter(case):
    """Forward, backward and tangent in float32; the last chunk is not full, and tokens of no sequence hold NaN."""
    x, spec = case.make(40, jnp.float32)
    exact_of = partial(formula, x, spec)
    x = poisoned(x)
    assert forward.supports(spec, x, TARGETS["v5e"]) is None
    wrt = differentiable(x)
    outputs = interpreted(lambda *x: forward(*x, spec=spec, config=CONFIG))(*x)
    cotangents = like(outputs)
    pull = lambda x, ct: backward(x, None, ct, wrt=wrt, spec=spec, config=CONFIG)
    gradients = interpreted(pull)(x, cotangents)
    exact, rounded = (exact_of(cotangents, dtype) for dtype in (jnp.float64, None))
    check((outputs, dict(zip(wrt, gradients, strict=True))), exact, rounded, jnp.float32)

    moving = x._replace(**{name: normal(8, getattr(x, name).shape, getattr(x, name).dtype) for name in wrt})
    push = lambda x, t: tangent(x, None, t, spec=spec, config=CONFIG)
    dots = interpreted(push)(x, moving)
    in_pairs = lambda a, b: sum(
        float(jnp.vdot(s, t)) for s, t in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    along = in_pairs(gradients, [getattr(moving, name) for name in wrt])
    assert in_pairs(cotangents, dots) == pytest.approx(along, rel=1e-4, abs=1e-3)


def call(*, gates: str = "", batch: int = 2, values: int = 64, sequences: int | None = None) -> Operands:
    """Operands without contents."""
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((batch, 1000, *shape), dtype)
    wide = dict(g=array(8), gk=array(8, 128), gv=array(8, values), g_gamma=jax.ShapeDtypeStruct((1, 8), jnp.float32))
    spans = sequences and jax.ShapeDtypeStruct((1, sequences, 2), jnp.int32)
    x = Operands(array(8, 128), array(4, 128), array(4, values), spans=spans)
    return x._replace(**{name: wide[name] for name in gates.split()})


CALLS = {
    "no decay": call(),
    "by head": call(gates="g"),
    "by key feature": call(gates="gk"),
    "by value feature": call(gates="gv"),
    "all of them": call(gates="g gk gv g_gamma"),
    "packed": call(gates="g_gamma", batch=1, sequences=5),
    "packed batches, values in parts": call(gates="g", values=512, sequences=5),
}


@by_generation
@pytest.mark.parametrize("name", [quick(name, name) for name in CALLS])
def test_the_compilers_take_them(name, generation):
    x, spec = CALLS[name], RecurrenceSpec()
    ct = jax.eval_shape(lambda *x: kernel_registry.find("recurrent", "xla").implementation(*x, spec=spec), *x)
    compile_recurrence((forward, backward, tangent), generation, spec, x, ct, differentiable(x))
