"""quantized_matmul in XLA: blocks of columns, memory, and sharded rows and columns."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives

import ejkernel
from ejkernel import quantization

OF = dict(mode="affine", bits=4, group_size=16)
RNG = np.random.default_rng(0)


def random(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def close(found, wanted, tolerance=2e-6):
    wanted = np.asarray(wanted, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=tolerance * np.abs(wanted).max())


@pytest.fixture(scope="module", params=(False, True), ids=("groups of columns", "groups of features"))
def call(request):
    """(transpose, x [5, 48], weights of 7 groups or 112 columns, the dense matrix [48, 112])."""
    w = random(48, 112)
    packed = quantization.quantize(w.T if request.param else w, axis="col", **OF)
    dense = np.asarray(quantization.dequantize(*packed, **OF), np.float64)
    return request.param, random(5, 48), packed, dense.T if request.param else dense


@pytest.mark.parametrize("columns", (1, 48, 96, 1000))
def test_blocks_that_do_not_divide_the_columns(call, columns):
    """Seven groups in blocks of 1, 3, 6 and all, or 112 columns in blocks of 1, 48, 96 and all."""
    transpose, x, packed, dense = call
    f = lambda x, *packed: ejkernel.lax.quantized_matmul(
        x, *packed, **OF, transpose=transpose, config=dict(block_n=columns)
    )
    close(jax.jit(f)(x, *packed), np.asarray(x, np.float64) @ dense)
    loss = lambda x, scales, zeros: (f(x, packed[0], scales, zeros) ** 2).sum()
    dx, dscales, dzeros = jax.jit(jax.grad(loss, (0, 1, 2)))(x, *packed[1:])
    do = 2 * np.asarray(x, np.float64) @ dense
    close(dx, do @ dense.T)
    dw = np.asarray(x, np.float64).T @ do
    groups = lambda a: (a.T if transpose else a).reshape((*packed[1].shape, 16))
    scales = np.asarray(packed[1], np.float64)[..., None]
    close(dscales, (groups(dw) * groups(dense) / scales).sum(-1), 5e-6)
    close(dzeros, (-groups(dw) * scales).sum(-1), 5e-6)


def test_gradients_of_a_branch_under_vmap(call):
    """A branch that is taken by some examples makes every residual a mapped one, the constants of a call too."""
    transpose, x, packed, _ = call
    loss = lambda x: (ejkernel.lax.quantized_matmul(x, *packed, **OF, transpose=transpose) ** 2).sum()
    of_branch = lambda x, taken: jax.lax.cond(taken, loss, lambda x: 0.0, x)
    found = jax.jit(jax.vmap(jax.grad(of_branch), (None, 0)))(x, jnp.array([True, False]))
    close(found, jnp.stack([jax.grad(loss)(x), jnp.zeros_like(x)]))


@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("derivative", ("none", "of rows", "of all", "second"))
def test_the_matrix_never_exists_as_a_whole(transpose, derivative):
    """With 2048 × 2048 it would be 16 MiB; temporary memory is less than half of that."""
    types = (
        jax.ShapeDtypeStruct((8, 2048), jnp.float32),
        jax.ShapeDtypeStruct((2048, 256), jnp.uint32),
        *[jax.ShapeDtypeStruct((2048, 32), jnp.float32)] * 2,
    )
    config = (dict(block_n=128),) * 2  # of the forward, and of the backward
    f = lambda *a: ejkernel.lax.quantized_matmul(*a, transpose=transpose, config=config)
    loss = lambda *a: (f(*a) ** 2).sum()
    second = lambda x, *a: jax.grad(lambda x: (jax.grad(loss)(x, *a) ** 2).sum())(x)
    programs = {"none": f, "of rows": jax.grad(loss), "of all": jax.grad(loss, (0, 2, 3)), "second": second}
    memory = jax.jit(programs[derivative]).lower(*types).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2**20


@pytest.mark.parametrize("mode", ("nf4", "nvfp8"))
def test_the_loop_over_blocks_has_its_shifts_as_constants_and_decoded_scales(mode):
    """Shifts carried through the loop would prevent vectorisation; scales are decoded before it."""
    packed = quantization.prepack_quantized_weights(random(64, 1024), transpose=False, mode=mode)
    f = partial(ejkernel.lax.quantized_matmul, mode=mode, config=dict(block_n=128))
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in packed if a is not None]
    hlo = jax.jit(f).lower(jax.ShapeDtypeStruct((8, 64), jnp.float32), *types).compile().as_text()
    carried = re.findall(r"= (u\d+)\[([\d,]*)\]\S* get-tuple-element", hlo)
    assert [(dtype, shape.count(",")) for dtype, shape in carried] == [("u32", 3)]  # the words


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_rows_and_columns_are_split_without_communication(types):
    """Rows over one axis of the mesh, columns in whole groups over the other, and the result over both."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(types,) * 2)
    x, w = random(8, 48), random(48, 128)
    packed = quantization.quantize(w, axis="col", **OF)
    dense = np.asarray(quantization.dequantize(*packed, **OF), np.float64)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    for transpose in (False, True):
        of = quantization.quantize(w.T, axis="col", **OF) if transpose else packed
        dense = np.asarray(quantization.dequantize(*of, **OF), np.float64)
        dense = dense.T if transpose else dense
        args = (put(x, "x"), *(put(a, "y") if transpose else put(a, None, "y") for a in of))
        f = jax.jit(lambda *a, transpose=transpose: ejkernel.lax.quantized_matmul(*a, **OF, transpose=transpose))
        compiled = f.lower(*args).compile()
        found = compiled(*args)
        close(found, np.asarray(x, np.float64) @ dense)
        assert not collectives(compiled.as_text())
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
@pytest.mark.parametrize("mode", ("affine", "nf4", "mxfp8", "nvfp4"))
def test_weights_are_quantised_where_they_are(types, mode):
    """Rows over one axis of the mesh and columns over the other: each device has whole groups."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(types,) * 2)
    w = random(8, 256)
    there = jax.device_put(w, NamedSharding(mesh, P("x", "y")))
    quantize, dequantize = (
        jax.jit(lambda *a, f=f: f(*a, mode=mode, axis="col")) for f in (quantization.quantize, quantization.dequantize)
    )
    compiled = quantize.lower(there).compile()
    packed, wanted = compiled(there), quantize(w)
    for a, b in zip(packed, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not collectives(compiled.as_text())
    np.testing.assert_array_equal(dequantize(*packed), dequantize(*wanted))
