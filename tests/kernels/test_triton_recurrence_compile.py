"""Every config that the linear recurrence in Triton may be run with compiles for every GPU, and fits into its memory.

At sm_90 no kernel gives up running matrix products asynchronously.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton._recurrence import recurrence, recurrence_bwd, recurrence_jvp
from ejkernel.kernels._triton._recurrence.configs import space
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec

from . import compiler
from .test_triton_compile import KINDS

SPEC = RecurrenceSpec(softmax_scale=128**-0.5, return_state=False)
GATES = {
    "none": {},
    "head": dict(g=(1, 256, 2)),
    "feature": dict(gk=(1, 256, 2, 128)),
    "both features": dict(gk=(1, 256, 2, 128), gv=(1, 256, 2, 128)),
}
OPERATIONS = {"recurrence": recurrence, "recurrence_bwd": recurrence_bwd, "recurrence_jvp": recurrence_jvp}
# What takes a core of CI half a minute; the others are slow tests.
ALWAYS = (
    ("sm_90", "feature", "recurrence"),
    ("sm_90", "feature", "recurrence_bwd"),
    ("sm_80", "head", "recurrence"),
    ("gfx942", "feature", "recurrence"),
)


def operands(gates: str) -> Operands:
    array = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
    q, k, v = (array(1, 256, 2, 128) for _ in range(3))
    return Operands(q, k, v, **{name: array(*shape) for name, shape in GATES[gates].items()})


def call(operation: str, x: Operands, config):
    """The operation, in all directions, to be traced."""
    wrt = tuple(name for name in x._fields if getattr(x, name) is not None)
    if operation == "recurrence":
        return recurrence(*x, spec=SPEC, config=config)
    if operation == "recurrence_jvp":
        return recurrence_jvp(x, None, x, spec=SPEC, config=config)
    return recurrence_bwd(x, None, Outputs(x.v, None), wrt=wrt, spec=SPEC, config=config)


def marks(*case: str):
    return [] if case in ALWAYS else pytest.mark.slow


@pytest.mark.parametrize(
    "target, gates, operation",
    [
        pytest.param(
            target, gates, operation, id=f"{target}-{gates}-{operation}", marks=marks(target, gates, operation)
        )
        for target in KINDS
        for gates in GATES
        for operation in OPERATIONS
    ],
)
def test_compiles(target, gates, operation, monkeypatch):
    x, kind, trouble = operands(gates), KINDS[target], []
    monkeypatch.setattr(_launch, "is_rocm", lambda: kind.platform == "rocm")
    monkeypatch.setattr(_launch, "compute_capability", lambda: kind.compute_capability or 90)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    configs = space(operation, shapes, SPEC, kind)
    for config in configs[:1] if (target, gates, operation) in ALWAYS else configs:
        for launch in compiler.launches(monkeypatch, _launch, partial(call, operation, x, config)):
            binary = compiler.binary(launch, compiler.TARGETS[target])
            if binary.shared > shared_memory_limit(kind):
                trouble.append(f"{launch}: {binary.shared} bytes of shared memory")
            if target == "sm_90" and binary.serialized:
                trouble.append(f"{launch}: products one after the other")
    assert not trouble, "\n".join(trouble)
