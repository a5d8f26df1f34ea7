"""The kernels of grouped_matmul and mean_pooling, with each of their configs, pass the compilers of all TPUs."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.primitives import grouped_matmul as grouped
from ejkernel.primitives import mean_pooling as pooling

from .tpu_compiler import TARGETS, compiled

pytest.importorskip("libtpu")


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def product(rows, features, columns, groups, dtype=jnp.bfloat16, of_rhs=None, batch=1, **arrays):
    sizes = array(jnp.int32, 1, groups)
    lhs, rhs = array(dtype, batch, rows, features), array(of_rhs or dtype, 1, groups, features, columns)
    return grouped.Operands(lhs, rhs, sizes, **arrays)


GROUPED = {
    "mixtral": (product(8192, 4096, 14336, 8), grouped.GroupedMatmulSpec("bfloat16")),
    "transposed": (product(1024, 768, 2048, 128), grouped.GroupedMatmulSpec("bfloat16", transpose_rhs=True)),
    "float32, a batch": (product(512, 256, 100, 4, jnp.float32, batch=3), grouped.GroupedMatmulSpec()),
    "int8": (
        product(
            2048,
            512,
            384,
            16,
            of_rhs=jnp.int8,
            existing_out=array(jnp.float32, 1, 2048, 384),
            rhs_scale=array(jnp.float32, 1, 16, 384),
        ),
        grouped.GroupedMatmulSpec(),
    ),
    "one feature": (product(64, 1, 128, 2), grouped.GroupedMatmulSpec()),
    "one column": (product(64, 128, 1, 2), grouped.GroupedMatmulSpec(transpose_rhs=True)),
}
POOLING = {
    "chunks": pooling.Operands(array(jnp.bfloat16, 1, 131072, 2048), array(jnp.int32, 1, 2048, 2)),
    "dense": pooling.Operands(array(jnp.float32, 8, 4096, 1000)),
    "small": pooling.Operands(array(jnp.bfloat16, 2, 300, 96), array(jnp.int32, 1, 7, 2)),
}
QUICK = ("mixtral", "one feature", "chunks")
some_are_quick = lambda calls: [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in calls]
each_generation = pytest.mark.parametrize(
    "generation", [pytest.param(name, marks=() if name == "tpu7x" else pytest.mark.slow) for name in TARGETS]
)


@each_generation
@pytest.mark.parametrize("name", some_are_quick(GROUPED))
def test_grouped_matmul(name, generation):
    x, spec = GROUPED[name]
    forward, backward = (
        kernel_registry.find(op, "pallas", "tpu").implementation for op in ("grouped_matmul", "grouped_matmul_bwd")
    )
    target = TARGETS[generation]
    do = array(grouped.result_dtype(x.lhs.dtype, spec), *x.lhs.shape[:2], x.rhs.shape[3])
    wrt = tuple(n for n in ("lhs", "rhs", "rhs_scale") if (a := getattr(x, n)) is not None and a.dtype != jnp.int8)
    assert forward.supports(spec, x, target) is None and backward.supports(spec, x, target) is None
    for config in forward.space(spec, x, target):
        compiled(lambda *x, config=config: forward(*x, spec=spec, config=config), generation, *x)
        pull = lambda x, do, config=config: backward(
            x, grouped.Outputs(None), grouped.Outputs(do), wrt=wrt, spec=spec, config=config
        )
        compiled(pull, generation, x, do)


@each_generation
@pytest.mark.parametrize("name", some_are_quick(POOLING))
def test_mean_pooling(name, generation):
    x, spec = POOLING[name], pooling.MeanPoolingSpec()
    forward, backward = (
        kernel_registry.find(op, "pallas", "tpu").implementation for op in ("mean_pooling", "mean_pooling_bwd")
    )
    target, segments = TARGETS[generation], 1 if x.segments is None else x.segments.shape[1]
    do = array(x.x.dtype, x.x.shape[0], segments, x.x.shape[2])
    assert forward.supports(spec, x, target) is None
    for config in forward.space(spec, x, target):
        compiled(lambda *x, config=config: forward(*x, spec=spec, config=config), generation, *x)
        pull = lambda x, do, config=config: backward(
            x, pooling.Outputs(None), pooling.Outputs(do), wrt=("x",), spec=spec, config=config
        )
        compiled(pull, generation, x, do)
