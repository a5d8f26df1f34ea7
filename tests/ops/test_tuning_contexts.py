"""On which values candidates are measured, in which contexts, and where measuring is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shown import HEURISTIC, OTHER, TUNED, Shown, executor, ones, ran

from ejkernel.ops import Tuner, autotune, pmap_with_config, vmap_with_config
from ejkernel.ops.utils.operands import random_like

quick = Tuner(warmup=1, iters=3)

# --- Where and on what it is measured


def traced_inside(transform, *args):
    """What a call inside a transform uses for measuring, with leak checks."""
    with jax.checking_leaks():
        return transform(lambda a: executor(autotune=True, tuner=quick)(Shown(), a))(*args)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda f: jax.jit(jax.vmap(f)),
        lambda f: jax.jit(lambda a: jax.lax.scan(lambda c, x: (c, f(x)), 0, a)[1]),
        lambda f: jax.jit(lambda a: jax.jvp(f, (a,), (a,))[0]),
        lambda f: jax.jit(lambda a: jax.checkpoint(f)(a)),
        lambda f: lambda a: jax.eval_shape(f, a) and f(a),
    ],
    ids=["jit", "vmap", "scan", "jvp", "checkpoint", "eval_shape"],
)
def test_inside_a_trace(transform):
    assert ran(traced_inside(transform, ones())) == TUNED


def test_inside_an_explicit_mesh_the_shard_of_one_device_is_measured():
    shapes = []

    class Watching(Shown):
        def synthetic_inputs(self, inv):
            args, kwargs = super().synthetic_inputs(inv)
            shapes.append(args[0].shape)
            return args, kwargs

    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    a = jax.device_put(ones(8, 4), NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        assert ran(jax.jit(lambda a: executor(autotune=True)(Watching(), a))(a)) == TUNED
    assert shapes == [(2, 4)]


@pytest.mark.parametrize("context", [jax.enable_x64(True), jax.default_matmul_precision("highest")])
def test_in_the_contexts_of_the_caller(context):
    seen = []

    class Watching(Shown):
        def run(self, a, *, cfg):
            seen.append((a.dtype.name, jax.config.jax_default_matmul_precision))
            return a

    with context:
        jax.jit(lambda a: executor(autotune=True)(Watching(), a))(np.ones(4))
    assert len(set(seen)) == 1


def test_on_the_values_of_an_eager_call_and_on_random_ones_of_a_traced_one():
    seen = []

    class Watching(Shown):
        def synthetic_inputs(self, inv):
            args, kwargs = super().synthetic_inputs(inv)
            seen.append(np.asarray(args[0]))
            return args, kwargs

    executor(autotune=True)(Watching(), ones())
    jax.jit(lambda a: executor(autotune=True)(Watching(), a))(ones())
    eager, traced = seen
    assert (eager == 1).all() and 0.5 < traced.std() < 2


def test_a_kernel_can_generate_its_operands():
    class Lengths(Shown):
        def run(self, a, lengths, *, cfg):
            return super().run(a, cfg=cfg) + 0 * lengths.sum()

        def synthetic_inputs(self, inv):
            assert not any(isinstance(x, jax.core.Tracer) for x in inv.args)
            return (jnp.ones(inv.args[0].shape), jnp.full(inv.args[1].shape, 100)), {}

    run = executor(autotune=True)
    assert ran(jax.jit(lambda a, lengths: run(Lengths(), a, lengths))(ones(), jnp.arange(3))) == TUNED


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "int32", "uint8", "uint32", "complex64", "key"]
)
def test_random_values_have_the_type_and_are_not_all_alike(dtype):
    dtype = jax.random.key(0).dtype if dtype == "key" else jnp.dtype(dtype)
    drawn = random_like(jax.ShapeDtypeStruct((8, 8), dtype))
    assert (drawn.shape, drawn.dtype) == ((8, 8), dtype)
    values = jax.random.key_data(drawn) if jnp.issubdtype(dtype, jax.dtypes.prng_key) else drawn
    assert len(np.unique(np.asarray(values).astype(np.complex64))) > 1


# --- Where it is refused


def test_under_shard_map_it_is_refused_with_one_warning():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    a = jax.device_put(ones(), NamedSharding(mesh, P("x")))
    run = executor(autotune=True)
    step = lambda a: run(Shown(), run(Shown(), a) - HEURISTIC.block * 2**-23)
    with pytest.warns(UserWarning, match="configs are not measured under shard_map or pmap") as warned:
        out = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(a)
    assert ran(out) == HEURISTIC and len(warned) == 1


def test_with_several_processes_measuring_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.warns(UserWarning, match="configs are not measured with several processes"):
        assert ran(executor(autotune=True)(Shown(), ones())) == HEURISTIC
    with pytest.warns(UserWarning, match="configs are not measured with several processes"):
        assert autotune(Shown(), ones()) == HEURISTIC


# --- Batches


def test_one_config_for_a_batch_is_measured_on_one_example():
    chosen = []
    run = executor(autotune=True, on_event=lambda *event: chosen.append(event))
    assert ran(vmap_with_config(Shown(), in_axes=1, executor=run)(ones(4, 3))) == TUNED
    assert ran(pmap_with_config(Shown(), axis_name="i", executor=run)(ones(8, 4))) == TUNED
    measured = [key for event, _, key, _ in chosen if event == "autotune_start"]
    assert len(measured) == 1 and "f32[4]" in measured[0]
    assert ran(vmap_with_config(Shown(), executor=run)(ones(2, 4), cfg=OTHER)) == OTHER
