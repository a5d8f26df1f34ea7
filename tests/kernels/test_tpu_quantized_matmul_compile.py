"""The kernel of quantized_matmul, with each of its configs, passes the compilers of all TPUs."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import types_of_call
from ejkernel.primitives.quantized_matmul import Operands, Outputs

from .tpu_compiler import TARGETS, compiled

pytest.importorskip("libtpu")


def call(rows, features, columns, bits=4, group_size=64, dtype=jnp.bfloat16, transpose=False):
    """The operands, do, and the spec."""
    array = jax.ShapeDtypeStruct
    of_codes, codes = (columns, features) if transpose else (features, columns)
    groups = array((of_codes, codes // group_size), dtype)
    arrays = dict(x=array((rows, features), dtype), w=array((of_codes, codes * bits // 32), jnp.uint32))
    options = dict(bits=bits, group_size=group_size, transpose=transpose)
    named, spec = types_of_call("quantized_matmul", **arrays, scales=groups, zeros=groups, **options)
    do = (1, rows, columns, 1, 1) if transpose else (1, rows, 1, columns // group_size, group_size)
    return Operands(**named), array(do, dtype), spec


CALLS = {
    "llama3-70b, 16 rows": call(16, 8192, 28672),
    "transposed": call(16, 4096, 11008, transpose=True),
    "8 bits, 512 rows": call(512, 4096, 4096, bits=8),
    "2 bits, float32, one tile": call(3, 50, 192, bits=2, group_size=32, dtype=jnp.float32),
    "1 bit, float32": call(200, 1000, 4160, bits=1, dtype=jnp.float32),
    "wide groups": call(1, 8192, 28672, group_size=1024),
    "narrow groups": call(200, 1000, 2112, group_size=16),
}
QUICK = "transposed", "2 bits, float32, one tile"


@pytest.mark.parametrize(
    "generation", [pytest.param(name, marks=() if name == "tpu7x" else pytest.mark.slow) for name in TARGETS]
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CALLS])
def test_every_config(name, generation):
    x, do, spec = CALLS[name]
    forward, backward = (
        kernel_registry.find(op, "pallas", "tpu").implementation for op in ("quantized_matmul", "quantized_matmul_bwd")
    )
    assert forward.supports(spec, x, TARGETS[generation]) is None
    for config in forward.space(spec, x, TARGETS[generation]):
        product = compiled(lambda *x, config=config: forward(*x, spec=spec, config=config), generation, *x)
        pull = lambda x, do, config=config: backward(
            x, Outputs(None), Outputs(do), wrt=("x",), spec=spec, config=config
        )
        assert all("tpu_custom_call" in p.as_text() for p in (product, compiled(pull, generation, x, do)))
