"""The compiled kernel of quantized_matmul, without a GPU: shared memory, and no spills."""

import re

import jax
import jax.numpy as jnp
import pytest

triton = pytest.importorskip("triton")
from ejkernel.kernels._target import lowering_for  # noqa: E402
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.quantized_matmul import configs, kernels  # noqa: E402
from ejkernel.modules._operation import types_of_call  # noqa: E402
from ejkernel.primitives.quantized_matmul import Operands  # noqa: E402
from ejkernel.types import Target  # noqa: E402

from . import compiler  # noqa: E402

KINDS = dict(sm_80="NVIDIA A100", sm_90="NVIDIA H200", sm_100="NVIDIA B200", sm_120="NVIDIA GeForce RTX 5090")
KINDS |= dict(gfx942=None, gfx90a=None)


def operands_of(rows, bits, transpose, dtype):
    """Of a layer of 4096 features and 4096 columns, in groups of 64."""
    array = jax.ShapeDtypeStruct
    groups = array((4096, 64), dtype)
    arrays = dict(x=array((rows, 4096), dtype), w=array((4096, 128 * bits), jnp.uint32), scales=groups, zeros=groups)
    named, spec = types_of_call("quantized_matmul", **arrays, bits=bits, transpose=transpose)
    return Operands(**named), spec


@pytest.mark.parametrize(
    ("name", "rows", "bits", "dtype", "every"),
    [
        ("sm_90", 16, 4, "bfloat16", False),
        ("gfx942", 16, 4, "bfloat16", False),
        *(
            pytest.param(name, rows, bits, dtype, True, marks=pytest.mark.slow)
            for name in KINDS
            for rows, bits, dtype in ((1, 4, "bfloat16"), (64, 8, "float16"), (16, 2, "bfloat16"))
        ),
    ],
)
@pytest.mark.parametrize("transpose", (False, True), ids=("over rows", "over codes"))
def test_the_kernel_is_compiled(name, rows, bits, dtype, every, transpose, monkeypatch):
    x, spec = operands_of(rows, bits, transpose, jnp.dtype(dtype))
    target = Target("cuda", KINDS[name]) if KINDS[name] else Target("rocm", name)
    arrays = lambda: Operands(*(jnp.zeros(a.shape, a.dtype) for a in x))
    for config in configs.space("quantized_matmul", x, spec, target)[: None if every else 1]:
        with lowering_for(target):
            call = lambda config=config: kernels.quantized_matmul(*arrays(), spec=spec, config=config)
            (launch,) = compiler.launches(monkeypatch, _launch, call)
        found = compiler.binary(launch, compiler.TARGETS[name])
        assert found.shared <= configs.shared_memory("quantized_matmul", x, config), (str(launch), found)
        assert found.spilled == 0 and not found.serialized, (str(launch), found)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "sm_90" else pytest.mark.slow) for name in KINDS if name[:2] == "sm"],
)
def test_sums_of_32_rows_are_in_registers(name, bits, monkeypatch):
    """Codes are read once for 17 to 32 rows, and the sums of a lane are not spilled."""
    x, spec = operands_of(32, bits, False, jnp.dtype("bfloat16"))
    target = Target("cuda", KINDS[name])
    arrays = lambda: Operands(*(jnp.zeros(a.shape, a.dtype) for a in x))
    found = [c for c in configs.space("quantized_matmul", x, spec, target) if c.algorithm == "registers"]
    assert found and all(config.block_m == 32 for config in found)
    for config in found:
        with lowering_for(target):
            call = lambda config=config: kernels.quantized_matmul(*arrays(), spec=spec, config=config)
            (launch,) = compiler.launches(monkeypatch, _launch, call)
        assert compiler.binary(launch, compiler.TARGETS[name]).spilled == 0, str(launch)


@pytest.mark.parametrize("name", ("sm_80", pytest.param("sm_120", marks=pytest.mark.slow), "sm_90"))
def test_lanes_of_registers(name, monkeypatch):
    """Instructions of `mma.sync` take element l of each 32 from lane l: no tensor in the loop has another layout."""
    x, spec = operands_of(8, 4, False, jnp.dtype("bfloat16"))
    target = Target("cuda", KINDS[name])
    config = configs.space("quantized_matmul", x, spec, target)[0]
    assert config.algorithm == "registers"
    with lowering_for(target):
        call = lambda: kernels.quantized_matmul(*(jnp.zeros(a.shape, a.dtype) for a in x), spec=spec, config=config)
        (launch,) = compiler.launches(monkeypatch, _launch, call)
    ttgir = compiler.binary(launch, compiler.TARGETS[name]).ttgir
    lanes = rf"sizePerThread = \[1\], threadsPerWarp = \[32\], warpsPerCTA = \[{config.num_warps}\], order = \[0\]"
    (layout,) = re.findall(rf"^(#\w+) = #ttg.blocked<{{{lanes}}}>", ttgir, re.MULTILINE)
    of_instructions = re.findall(r"tt\.elementwise_inline_asm.*:(.*) loc", ttgir)
    assert len(of_instructions) > 8
    assert set(re.findall(r"#\w+", " ".join(of_instructions))) == {layout}
    (loop,) = re.findall(r"scf\.for.*?scf\.yield", ttgir, re.DOTALL)
    assert "convert_layout" not in loop
