"""The compiled kernel of grouped_matmul, without a GPU, for properties that no interpreter shows."""

import re

import jax
import jax.numpy as jnp
import pytest

triton = pytest.importorskip("triton")
from triton.compiler import ASTSource, make_backend  # noqa: E402

from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.grouped_matmul.configs import NARROW_LARGE  # noqa: E402
from ejkernel.kernels._triton.grouped_matmul.forward import BAND, rows_kernel  # noqa: E402
from ejkernel.kernels._triton.grouped_matmul.problem import problem_of  # noqa: E402
from ejkernel.primitives.grouped_matmul import Operands  # noqa: E402

from . import compiler  # noqa: E402


@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn"])
def test_products_with_left_factors_in_registers_are_waited_for(weights, monkeypatch):
    """No wait allows products to run while their registers are overwritten; results would differ from run to run."""
    monkeypatch.setattr(_launch, "has_descriptors", lambda: True)
    array = jax.ShapeDtypeStruct
    x = Operands(array((1, 1024, 512), "bfloat16"), array((1, 2, 512, 768), weights), array((1, 2), "int32"))
    rows, columns, depth, warps, stages = NARROW_LARGE[0]
    narrow = {"int8": "i8", "float8_e4m3fn": "fp8e4nv"}[weights]
    constants = dict(problem=problem_of(x, jnp.bfloat16, False), PROGRAMS=264, BLOCK_M=rows, BLOCK_N=columns)
    constants |= dict(BLOCK_K=depth, BAND=BAND, group_offset=None, existing_out=None, rhs_scale=None)
    given = dict(
        lhs=f"tensordesc<bf16[{rows}, {depth}]>", rhs=f"tensordesc<{narrow}[1, {depth}, {columns}]>",
        group_sizes="*i32", o="*bf16",
    )  # fmt: skip
    types = {name: given.get(name, "constexpr") for name in rows_kernel.arg_names}
    target = compiler.TARGETS["sm_90"]
    options = make_backend(target).parse_options(dict(num_warps=warps, num_stages=stages)).__dict__
    text = triton.compile(ASTSource(rows_kernel, types, constants), target, options).asm["ptx"]
    factors = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\{|%)", text)
    assert factors and set(factors) == {"{"}, "the left factor is in registers"
    assert set(re.findall(r"wgmma\.wait_group\S* (\d+)", text)) == {"0"}
