"""Every config that Mamba-2's state space in Triton may be run with compiles for every GPU, and fits into its memory.

At sm_90 no kernel gives up running matrix products asynchronously.
"""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton.state_space_v2 import state_space_v2, state_space_v2_bwd, state_space_v2_jvp
from ejkernel.kernels._triton.state_space_v2.configs import space
from ejkernel.primitives.state_space_v2 import Operands, Outputs, StateSpaceSpec

from . import compiler
from .test_triton_compile import KINDS

SPEC = StateSpaceSpec()
LENGTHS = {"chunks": 256, "steps": 1}
KERNELS = {f.__name__: f for f in (state_space_v2, state_space_v2_bwd, state_space_v2_jvp)}
# What takes a core of CI twenty seconds; the others are slow tests.
ALWAYS = (("sm_90", "state_space_v2"), ("sm_90", "state_space_v2_bwd"), ("gfx942", "state_space_v2"))


def operands(length: int) -> Operands:
    """Of heads of Mamba-2 with one group of B and C, a state given."""
    array = lambda *shape, dtype=jnp.bfloat16: jnp.zeros((1, *shape), dtype)
    x, B, dt = array(length, 4, 64), array(length, 1, 128), array(length, 4)
    A, state = array(4, dtype=jnp.float32), array(1, 4, 64, 128, dtype=jnp.float32)
    return Operands(x, A, B, B, dt, D=A, initial_state=state)


def call(kernel: str, x: Operands, config):
    """The kernel, in all directions, to be traced."""
    f, wrt = KERNELS[kernel], tuple(name for name in x._fields if getattr(x, name) is not None)
    if f is state_space_v2:
        return f(*x, spec=SPEC, config=config)
    if f is state_space_v2_jvp:
        return f(x, None, x, spec=SPEC, config=config)
    return f(x, None, Outputs(x.x, x.initial_state), wrt=wrt, spec=SPEC, config=config)


@pytest.mark.parametrize("way", LENGTHS)
@pytest.mark.parametrize(
    "target, kernel",
    [
        pytest.param(target, kernel, marks=[] if (target, kernel) in ALWAYS else pytest.mark.slow)
        for target in KINDS
        for kernel in KERNELS
    ],
)
def test_compiles(target, kernel, way, monkeypatch):
    if way == "steps" and kernel != "state_space_v2":
        pytest.skip("only the forward has a way of its own for single tokens")
    x, kind, trouble = operands(LENGTHS[way]), KINDS[target], []
    monkeypatch.setattr(_launch, "is_rocm", lambda: kind.platform == "rocm")
    monkeypatch.setattr(_launch, "compute_capability", lambda: kind.compute_capability or 90)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    configs = space(kernel, shapes, SPEC, kind)
    for config in configs[:1] if (target, kernel) in ALWAYS else configs:
        for launch in compiler.launches(monkeypatch, _launch, lambda config=config: call(kernel, x, config)):
            binary = compiler.binary(launch, compiler.TARGETS[target])
            if binary.shared > shared_memory_limit(kind):
                trouble.append(f"{launch}: {binary.shared} bytes of shared memory")
            if target == "sm_90" and binary.serialized:
                trouble.append(f"{launch}: products one after the other")
    assert not trouble, "\n".join(trouble)
