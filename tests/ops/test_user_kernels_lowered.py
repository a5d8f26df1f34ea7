"""A user's kernel on platforms and on meshes: which method runs, with which config, and how it is partitioned."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.ops import Invocation, Kernel
from tests.ops.products import A, B, Config, Product, executor, ours, plain, same


class Everywhere(Kernel[Config, jax.Array]):
    def __init__(self):
        super().__init__(name="everywhere")

    def run_triton(self, a, *, cfg):
        return jnp.sin(a) * cfg.block

    def run(self, a, *, cfg):
        return jnp.tanh(a) * cfg.block

    def heuristic_cfg(self, inv: Invocation):
        return Config(block={"cpu": 2, "cuda": 3, "tpu": 4}[inv.target.platform])


@pytest.mark.parametrize("methods", [("run_triton", "run_cuda", "run_cute"), ("run_cuda", "run_cute"), ("run_cute",)])
def test_on_cuda_the_first_method_that_exists(methods):
    class Written(Everywhere):
        run_triton = None

    for factor, name in enumerate(methods, 2):
        setattr(Written, name, lambda self, a, *, cfg, factor=factor: a * (100.0 + factor))
    call = lambda platform: (
        jax.jit(lambda a: executor(Written(), a)).trace(jnp.ones(4)).lower(lowering_platforms=(platform,))
    )
    assert "dense<1.020000e+02>" in call("cuda").as_text()
    assert "tanh" in call("tpu").as_text() and "tanh" in call("cpu").as_text()


def lowered(platform, cfg=None):
    step = jax.jit(lambda a: executor(Everywhere(), a, cfg=cfg))
    return step.trace(jnp.ones(4)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform, operation, block", [("cpu", "tanh", 2), ("cuda", "sine", 3), ("tpu", "tanh", 4)])
def test_a_config_is_chosen_again_for_another_platform(platform, operation, block):
    assert operation in lowered(platform) and f"dense<{block}.0" in lowered(platform)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_given_config_is_used_on_every_platform(platform):
    assert "dense<7.0" in lowered(platform, Config(block=7))


def test_export_round_trip():
    exported = jax.export.export(jax.jit(ours(Product())), platforms=("cpu", "cuda", "tpu"))(A, B)
    same(jax.export.deserialize(exported.serialize()).call(A, B), plain(A, B))


# --- Meshes


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


class Elementwise(Product):
    def run(self, a, b, *, cfg):
        return a * jnp.sin(b)


def test_explicit_sharding_is_kept(mesh):
    a = jax.device_put(jnp.asarray(A[:2]), NamedSharding(mesh, P("x")))
    call = lambda a: executor(Elementwise(), a, a)
    out, grad = jax.jit(call)(a), jax.jit(jax.grad(lambda a: call(a).sum()))(a)
    assert jax.typeof(out).sharding.spec == jax.typeof(grad).sharding.spec == P("x", None)
    same(out, A[:2] * np.sin(A[:2]))
    same(grad, np.sin(A[:2]) + A[:2] * np.cos(A[:2]))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_inside_shard_map_with_a_replicated_operand(axis_type):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(axis_type,))
    a = jax.device_put(jnp.asarray(A[:2]), NamedSharding(mesh, P("x")))
    b = jax.device_put(jnp.asarray(A[2:]), NamedSharding(mesh, P()))

    def step(f):
        inside = jax.shard_map(lambda a, b: f(a, b), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        return jax.jit(jax.grad(lambda a, b: inside(a, b).sum(), (0, 1)))(a, b)

    same(step(lambda a, b: executor(Elementwise(), a, b)), step(lambda a, b: a * jnp.sin(b)))


def test_collectives_inside_a_kernel(mesh):
    class Summed(Product):
        def run(self, a, *, cfg):
            return jax.lax.psum(a, "x")

    a = jax.device_put(jnp.asarray(A[:2]), NamedSharding(mesh, P("x")))
    inside = jax.shard_map(lambda a: executor(Summed(), a), mesh=mesh, in_specs=P("x"), out_specs=P())
    same(jax.jit(inside)(a), A[:1] + A[1:2])
