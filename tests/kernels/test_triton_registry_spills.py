"""No Triton kernel of any operation in the registry spills more than 512 bytes of registers with its heuristic config.

NVIDIA's assembler says so, without a GPU, of the features that models have. These are slow tests: an operation has
dozens of kernels.
"""

import itertools

import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.types import Platform

from . import compiler
from .bound import bound_by, written_in
from .test_triton_compile import KINDS
from .test_triton_spills import over_the_limit

# In float32 the tangents of attention with 256 features spill.
KNOWN = {*itertools.product(("flash_attention", "flash_mla"), ("sm_80", "sm_90", "sm_100"), (256,), ("float32",))}


def cases() -> list:
    """An operation, a GPU, the features, and the dtype."""
    targets, dtypes = ("sm_80", "sm_90", "sm_100"), ("bfloat16", "float16", "float32")
    marks = lambda case: pytest.mark.xfail(strict=True, raises=AssertionError) if case in KNOWN else ()
    found = itertools.product(written_in(Platform.TRITON), targets, (64, 128, 256), dtypes)
    return [pytest.param(*case, marks=marks(case)) for case in found]


@pytest.mark.slow
@pytest.mark.parametrize("operation, target, features, dtype", cases())
def test_every_kernel(operation, target, features, dtype, monkeypatch):
    calls = bound_by(operation, [jnp.dtype(dtype)], features)
    launches = {x for call in calls for x in launches_of(call, target, monkeypatch)}
    assert not over_the_limit(launches, target)


def launches_of(call, target, monkeypatch) -> list[compiler.Launch]:
    """The launches of a bound primitive with the heuristic config, if Triton takes it."""
    with lowering_for(KINDS[target]):
        entry = call.implementation(Platform.TRITON, KINDS[target])
        if entry is None:
            return []
        config = call.config(entry, KINDS[target])

        def trace():
            call.traced(entry, config)

        return compiler.launches(monkeypatch, _launch, trace)
