"""quantized_matmul in Triton: masks, indices and numbers of its kernel, by the interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases.quantized_matmul import few_rows

from ejkernel.kernels._target import lowering_for
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives.quantized_matmul import Operands, Outputs
from ejkernel.quantization import dequantize
from ejkernel.types import Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.quantized_matmul import kernels  # noqa: E402

from . import against_xla, interpreter  # noqa: E402

# Tiles beyond the rows, the codes of a row and the rows of codes; groups that are wider than a tile, and many in one;
# more rows than a config has; codes of a row in one word.
CALLS = [
    few_rows(bits, group, transpose, rows, *sizes)
    for bits, group, transpose, rows, sizes in (
        (4, 16, False, 3, (40, 48)),
        (4, 64, False, 1, (50, 192)),
        (8, 16, False, 8, (17, 32)),
        (2, 32, False, 5, (33, 96)),
        (4, 16, True, 3, (48, 40)),
        (4, 64, True, 1, (192, 50)),
        (8, 32, True, 8, (96, 33)),
        (2, 16, True, 5, (32, 17)),
        (2, 16, False, 16, (16, 16)),
        (4, 32, True, 20, (32, 17)),
    )
]


@pytest.mark.parametrize("parts", (1, 2), ids=("whole", "parts"))
@pytest.mark.parametrize("of", CALLS, ids=lambda of: of.name)
def test_in_the_interpreter(of, parts, monkeypatch):
    """Forward, backward and tangent; the features whole, and in parts that are added up."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_ptx", lambda: False)
    monkeypatch.setattr(kernels, "_parts", lambda tiles, steps: min(parts, steps))
    config = QuantizedMatmulConfig(16, 32, 16)
    against_xla.check(of, against_xla.prepared(of), "triton", "gpu", config)


def test_terms_of_a_tangent_beyond_float16(monkeypatch):
    """ẋ · W is 80000 and x · Ẇ −64000; in float16 their sum is finite, and either may not be."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_ptx", lambda: False)
    codes, ones = np.full((16, 4), 0x01010101, np.uint32), np.ones((16, 1), np.float16)
    x, zeros = np.ones((2, 16), np.float16), np.zeros((16, 1), np.float16)
    call = OPERATIONS["quantized_matmul"].prepare_arguments(x, codes, ones, zeros, bits=8, group_size=16)
    primals = Operands(**call.named)
    tangents = Operands(jnp.full_like(primals.x, 5000), None, jnp.full_like(primals.scales, -4000), None)
    with lowering_for(Target("cuda", "NVIDIA H200")):
        config = QuantizedMatmulConfig(16, 32, 16)
        found = kernels.quantized_matmul_jvp(primals, None, tangents, spec=call.spec, config=config).o
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(np.asarray(found, np.float64), 16000)


# Columns beyond the end; features that are no multiple of a step, and more than a block; rows of several tiles, and of
# more than one program; every number of bits, and of words.
REGISTERS = (
    (4, 16, 3, (40, 48), 16, 16),
    (4, 32, 8, (64, 96), 32, 32),
    (4, 64, 20, (50, 192), 8, 64),
    (8, 16, 9, (34, 64), 4, 32),
    (8, 32, 1, (96, 32), 16, 16),
    (2, 32, 5, (32, 96), 32, 32),
    (2, 16, 16, (18, 16), 16, 16),
)


@pytest.mark.parametrize(("parts", "block_m"), ((1, 16), (2, 32)), ids=("whole", "parts"))
@pytest.mark.parametrize(("bits", "group", "rows", "sizes", "of_lane", "features"), REGISTERS)
def test_registers_in_the_interpreter(bits, group, rows, sizes, of_lane, features, parts, block_m, monkeypatch):
    """x · W, and x · Wᵀ in the cotangent of x, as each lane of `mma.sync` has its operands and sums."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_ptx", lambda: False)
    monkeypatch.setattr(kernels, "_parts_in_registers", lambda problem: min(parts, problem.blocks))
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**32, (sizes[0], sizes[1] * bits // 32), np.uint32)
    scales, zeros = (
        rng.uniform(0.5, most, (sizes[0], sizes[1] // group)).astype(np.float16) for most in (1.5, 2**bits)
    )
    x = rng.standard_normal((rows, sizes[0])).astype(np.float16)
    of = dict(bits=bits, group_size=group)
    call = lambda x, **of: OPERATIONS["quantized_matmul"].prepare_arguments(x, codes, scales, zeros, **of)
    of_warps = dict(num_warps=2, algorithm="registers", platform="triton")
    config = QuantizedMatmulConfig(block_m, 16 * of_lane, features, **of_warps)
    with lowering_for(Target("cuda", "NVIDIA H200")):
        forward = call(x, **of)
        operands = Operands(**forward.named)
        o = kernels.quantized_matmul(*operands, spec=forward.spec, config=config).o
        backward = call(np.zeros((rows, sizes[1]), np.float16), **of, transpose=True)
        operands, do = Operands(**backward.named), Outputs(jnp.asarray(x).reshape(1, *x.shape, 1, 1))
        (dx,) = kernels.quantized_matmul_bwd(operands, None, do, wrt=("x",), spec=backward.spec, config=config)
    wanted = np.asarray(x, np.float64) @ np.asarray(dequantize(codes, scales, zeros, **of), np.float64)
    for found in (o, dx):
        error = np.linalg.norm(np.asarray(found, np.float64).reshape(rows, -1) - wanted)
        assert error <= 2 * np.finfo(np.float16).eps * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("sizes", "given", "message"),
    (
        ((64, 64), dict(transpose=True), "the codes of a word are contracted"),
        ((63, 64), {}, "63 features are contracted"),
        ((64, 64), dict(dtype=np.float32), "scales is float16"),
        ((64, 64), dict(of_lane=32), "each lane 32 columns"),
        ((64, 48), dict(of_lane=12), "each lane 12 columns"),
        ((64, 64), dict(features=128), "128 features at a time; its registers hold 128 and 64"),
        ((64, 64), dict(rows=64), "each lane 256 sums"),
    ),
)
def test_a_config_for_registers_that_does_not_fit(sizes, given, message):
    """It is refused with the reason, before anything is compiled."""
    of_lane, dtype, transpose = given.get("of_lane", 16), given.get("dtype", np.float16), given.get("transpose", False)
    features, rows = given.get("features", 32), given.get("rows", 2)
    zeros = np.zeros((sizes[0], sizes[1] // 16), np.float16)
    codes, x = np.zeros((sizes[0], sizes[1] // 8), np.uint32), np.zeros((rows, sizes[transpose]), dtype)
    options = dict(bits=4, group_size=16, transpose=transpose)
    prepared = OPERATIONS["quantized_matmul"].prepare_arguments(x, codes, zeros, zeros, **options)
    config = QuantizedMatmulConfig(64, 32 * of_lane, features, num_warps=4, algorithm="registers", platform="triton")
    with lowering_for(Target("cuda", "NVIDIA H200")), pytest.raises(ValueError, match=message):
        kernels.quantized_matmul(*Operands(**prepared.named), spec=prepared.spec, config=config)
