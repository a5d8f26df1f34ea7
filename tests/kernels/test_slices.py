"""Kernels get aligned arrays: XLA copies slices that it may otherwise let them read where they are."""

import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel import lax
from ejkernel.kernels._target import lowering_for
from ejkernel.types import Target
from ejkernel.xla_utils.slices import aligned

CALLS = {"triton": "triton_kernel_call_ffi", "pallas": "mosaic_gpu_v2"}
KIB = 1024


def barriers(*shape: int, dtype=jnp.bfloat16) -> int:
    """The number of barriers in front of such an array."""
    return str(jax.make_jaxpr(aligned)(jax.ShapeDtypeStruct(shape, dtype))).count("optimization_barrier")


def test_a_small_array_and_one_of_an_odd_size_are_apart_from_what_they_are_sliced_from():
    assert barriers(4) == barriers(1024, 8) == barriers(1023, 33, 9) == 1
    assert (
        barriers(KIB, KIB) == 0 and barriers(KIB, KIB, dtype=jnp.int32) == barriers(KIB, KIB, dtype=jnp.int8) + 1 == 1
    )
    assert aligned((None, 7)) == (None, 7)


@pytest.mark.parametrize("platform", CALLS)
def test_a_kernel_reads_and_writes_no_slice_at_an_odd_place(platform):
    def flat(x):
        q, k, v = (x[i : i + 32768].reshape(1, 512, 1, 64) for i in (1, 32769, 65537))
        o = lax.flash_attention(q, k, v, platform=platform)
        return x.at[3 : 3 + o.size].set(o.reshape(-1))

    with lowering_for(Target("cuda", "NVIDIA H200")):
        program = jax.jit(flat).trace(jax.ShapeDtypeStruct((100_000,), jnp.bfloat16))
        text = program.lower(lowering_platforms=("cuda",)).as_text()
    [(result, operands)] = re.findall(rf"(%\d+):2 = stablehlo.custom_call @{CALLS[platform]}\((.*?)\)", text)
    before = re.findall(r"(%\d+) = stablehlo.optimization_barrier", text)
    after = re.findall(r"= stablehlo.optimization_barrier (%\d+)#", text)
    assert set(operands.split(", ")) <= set(before) and after.count(result) == 2
