"""flash_attention over two GPUs: nothing is communicated, and the bits are those of one."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, equations

import ejkernel

GPUS = jax.devices() if jax.default_backend() == "gpu" else []
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(GPUS) < 2, reason="there are no two GPUs")]

BATCH, HEADS = P("x"), P(None, None, "x")
B, S, H, G, D = 4, 300, 4, 2, 64


def attention(q, k, v):
    return ejkernel.lax.flash_attention(q, k, v, causal=True, window=(100, None), return_lse=True)


def gradient(q, k, v):
    """With a cotangent that varies."""
    (o, lse), pull = jax.vjp(attention, q, k, v)
    return pull((jnp.cos(o), jnp.sin(lse)))


def tangent(q, k, v):
    return jax.jvp(attention, (q, k, v), (jnp.sin(q), jnp.sin(k), jnp.sin(v)))


each_transform = pytest.mark.parametrize("transform", (attention, gradient, tangent), ids=lambda f: f.__name__)
each_split = pytest.mark.parametrize("split", (BATCH, HEADS), ids=("batch", "heads"))


def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, S, heads, D)), jnp.bfloat16) for heads in (H, G, G)]


def check(function, transform, split, mesh):
    """The same bits as on one GPU, by Triton's kernels, and no collective."""
    single = jax.device_put(operands(), GPUS[0])
    wanted = jax.jit(transform)(*single)
    arrays = [jax.device_put(x, NamedSharding(mesh, split)) for x in operands()]
    traced = jax.jit(function).trace(*arrays)
    configs = [equation.params["config"].platform for equation in equations(traced.jaxpr, "flash_attention")]
    compiled = traced.lower().compile()
    for a, b in zip(jax.tree.leaves(compiled(*arrays)), jax.tree.leaves(wanted), strict=True):
        assert len(a.sharding.device_set) == 2
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert collectives(compiled.as_text()) == Counter()
    assert set(configs) == {"triton"}, configs


@each_transform
@each_split
@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_mesh(types, split, transform):
    check(transform, transform, split, jax.make_mesh((2,), ("x",), devices=GPUS[:2], axis_types=(types,)))


@each_transform
@each_split
def test_shard_map(split, transform):
    mesh = jax.make_mesh((2,), ("x",), devices=GPUS[:2], axis_types=(AxisType.Explicit,))
    of_lse = P("x") if split is BATCH else P(None, "x")
    results = (split,) * 3 if transform is gradient else (split, of_lse)
    results = (results, results) if transform is tangent else results
    function = jax.shard_map(transform, mesh=mesh, in_specs=(split,) * 3, out_specs=results)
    check(function, transform, split, mesh)
