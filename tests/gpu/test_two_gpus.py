"""flash_attention over two GPUs: no communication, and the bits of one GPU."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, equations

import ejkernel

from .device import ON_HOPPER

GPUS = jax.devices() if jax.default_backend() == "gpu" else []
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(GPUS) < 2, reason="there are no two GPUs")]

BATCH, HEADS = P("x"), P(None, None, "x")
B, S, H, G, D = 4, 304, 4, 2, 64
WINDOWS = {"triton": (100, None), "pallas": None}
"""By whose kernels take such calls: those in Mosaic GPU leave short windows to Triton's."""


def attention(window, q, k, v, batch_invariant=False):
    options = dict(causal=True, window=window, batch_invariant=batch_invariant)
    return ejkernel.lax.flash_attention(q, k, v, **options, return_lse=True)


def gradient(window, q, k, v):
    """The gradient with a varying cotangent; the order of its sums depends on the batch unless it is invariant."""
    (o, lse), pull = jax.vjp(partial(attention, window, batch_invariant=True), q, k, v)
    return pull((jnp.cos(o), jnp.sin(lse)))


def tangent(window, q, k, v):
    return jax.jvp(partial(attention, window), (q, k, v), (jnp.sin(q), jnp.sin(k), jnp.sin(v)))


def calls():
    """Each transform on each platform; gradients of Mosaic GPU do not have the same bits in every run."""
    for platform in WINDOWS:
        for transform in (attention, gradient, tangent):
            if (transform, platform) != (gradient, "pallas"):
                marks = ON_HOPPER if platform == "pallas" else ()
                yield pytest.param(transform, platform, id=f"{transform.__name__}, {platform}", marks=marks)


each_call = pytest.mark.parametrize("transform, platform", list(calls()))
each_split = pytest.mark.parametrize("split", (BATCH, HEADS), ids=("batch", "heads"))


def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, S, heads, D)), jnp.bfloat16) for heads in (H, G, G)]


def check(function, call, platform, split, mesh):
    """The same bits as on one GPU, by the platform's kernels, and no collective."""
    single = jax.device_put(operands(), GPUS[0])
    wanted = jax.jit(call)(*single)
    arrays = [jax.device_put(x, NamedSharding(mesh, split)) for x in operands()]
    traced = jax.jit(function).trace(*arrays)
    ran = [equation.params["config"].platform for equation in equations(traced.jaxpr, "flash_attention")]
    compiled = traced.lower().compile()
    for a, b in zip(jax.tree.leaves(compiled(*arrays)), jax.tree.leaves(wanted), strict=True):
        assert len(a.sharding.device_set) == 2
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert collectives(compiled.as_text()) == Counter()
    assert set(ran) == {platform}, ran


@each_call
@each_split
@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_mesh(types, split, transform, platform):
    call = partial(transform, WINDOWS[platform])
    check(call, call, platform, split, jax.make_mesh((2,), ("x",), devices=GPUS[:2], axis_types=(types,)))


@each_call
@each_split
def test_shard_map(split, transform, platform):
    call = partial(transform, WINDOWS[platform])
    mesh = jax.make_mesh((2,), ("x",), devices=GPUS[:2], axis_types=(AxisType.Explicit,))
    of_lse = P("x") if split is BATCH else P(None, "x")
    results = (split,) * 3 if transform is gradient else (split, of_lse)
    results = (results, results) if transform is tangent else results
    function = jax.shard_map(call, mesh=mesh, in_specs=(split,) * 3, out_specs=results)
    check(function, call, platform, split, mesh)
