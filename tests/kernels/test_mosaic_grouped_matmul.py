"""The backward of grouped_matmul in Mosaic GPU, lowered for a Hopper GPU without one."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel import lax
from ejkernel.kernels._pallas.gpu.grouped_matmul import grouped_matmul_bwd, supports
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.shapes import shapes_of

HOPPER = Target("cuda", "NVIDIA H200")
array = jax.ShapeDtypeStruct


def call(shape, **others) -> Operands:
    sizes = {name: array((1, *size), jnp.bfloat16) for name, size in shape.sizes.items()}
    return Operands(**{**sizes, "group_sizes": array((1, shape.groups), jnp.int32), **others})


def lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


SHAPES = list(shapes_of("grouped_matmul").values())
CONFIGS = [
    pytest.param(shape, config, id=f"{shape.name}-{config.block_k}x{config.num_stages}")
    for shape in SHAPES
    for config in grouped_matmul_bwd.space(GroupedMatmulSpec(), call(shape), HOPPER)
]


@pytest.mark.parametrize("shape, config", CONFIGS)
def test_lowers(shape, config):
    x, spec = call(shape), GroupedMatmulSpec("bfloat16")
    do = array((1, shape.rows, shape.columns), jnp.bfloat16)
    backward = lambda x, do: grouped_matmul_bwd(x, Outputs(None), Outputs(do), wrt=("rhs",), spec=spec, config=config)
    assert supports(spec, x, HOPPER) is None
    assert "mosaic_gpu_v2" in lowered(backward, x, do)


@pytest.mark.parametrize("batch, groups", [(1, 8), (1, 60), (1, 64), (3, 60)])
def test_every_operand_fills_whole_lines_of_256_bytes(batch, groups):
    """Mosaic GPU refuses operands that begin elsewhere, and XLA packs temporaries one after the other."""
    sizes = {"lhs": (batch, 8192, 128), "rhs": (batch, groups, 128, 128), "do": (batch, 8192, 128)}
    x = {name: array(size, jnp.bfloat16) for name, size in sizes.items()}
    operands = Operands(x["lhs"], x["rhs"], array((batch, groups), jnp.int32))
    spec = GroupedMatmulSpec("bfloat16")
    (config, *_) = grouped_matmul_bwd.space(spec, operands, HOPPER)
    backward = lambda x, do: grouped_matmul_bwd(x, Outputs(None), Outputs(do), wrt=("rhs",), spec=spec, config=config)
    (taken,) = re.findall(r"@mosaic_gpu_v2.*: \((.*)\) ->", lowered(backward, operands, x["do"]))
    shapes = re.findall(r"tensor<([\dx]+)x(i32|bf16)>", taken)
    assert len(shapes) == 3
    for shape, dtype in shapes:
        assert math.prod(map(int, shape.split("x"))) * {"i32": 4, "bf16": 2}[dtype] % 256 == 0, f"{shape} of {dtype}"


@pytest.mark.parametrize("transpose_rhs", (False, True))
def test_gradients_are_of_both_kernels(transpose_rhs):
    rhs = array((4, 512, 256) if transpose_rhs else (4, 256, 512), jnp.bfloat16)
    loss = lambda *a: lax.grouped_matmul(*a, transpose_rhs=transpose_rhs).sum()
    text = lowered(jax.grad(loss, (0, 1)), array((1024, 256), jnp.bfloat16), rhs, array((4,), jnp.int32))
    assert text.count("@mosaic_gpu_v2") == 1
    assert text.count("@triton_kernel_call_ffi") == 1, "the gradient of the rows; nobody asks for the result"


SMALL = shapes_of("grouped_matmul")["qwen3-30b-up"]
REFUSED = {
    "compute capability 9.0": (call(SMALL), Target("cuda", "NVIDIA A100")),
    "bfloat16": (call(SMALL, lhs=array((1, SMALL.rows, SMALL.features), jnp.float32)), HOPPER),
    "multiples of 8": (call(SMALL.at(32769)), HOPPER),
    "rows a group": (call(SMALL.at(1024)), HOPPER),
    "shared by a batch": (call(SMALL, lhs=array((2, SMALL.rows, SMALL.features), jnp.bfloat16)), HOPPER),
    "rhs_scale": (call(SMALL, rhs_scale=array((1, 1, 1), jnp.float32)), HOPPER),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_calls_give_a_reason(reason):
    operands, target = REFUSED[reason]
    assert reason in supports(GroupedMatmulSpec(), operands, target)
