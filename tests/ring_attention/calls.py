"""Direct calls of ring_attention: over some devices, on the whole sequence, or on shards."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import lax

LAYOUTS = ("contiguous", "striped", "zigzag")
STRATEGIES = ("ring", "all_gather", "ulysses")
KEPT = jax.checkpoint_policies.save_only_these_names("ring_attention_o", "ring_attention_lse")
QKV = dict(q=(2, 12, 4, 8), k=(2, 12, 2, 8), v=(2, 12, 2, 8))


def mesh_of(size, types=AxisType.Auto):
    return jax.make_mesh((size,), ("x",), devices=jax.devices()[:size], axis_types=(types,))


def random(seed=0, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def in_sequence(size, layout, **options):
    """Arrays of a sequence -> o of the sequence, in `ring_order` over that many devices; others are replicated."""

    def run(arrays):
        order, inverse = lax.ring_order(arrays["q"].shape[1], size, layout)
        arrays = {name: x[:, order] if name in "qkv" else x for name, x in arrays.items()}
        specs = {name: P(None, "x") if name in "qkv" else P() for name in arrays}
        call = lambda x: lax.ring_attention(**x, axis_name="x", layout=layout, **options)
        o = jax.shard_map(call, mesh=mesh_of(size), in_specs=(specs,), out_specs=P(None, "x"))(arrays)
        return [o[:, inverse]]

    return run


def local_call(size, length=64, **options):
    """The call on sharded arrays and their types, in the order of their shards."""
    mesh = mesh_of(size, AxisType.Explicit)
    sharding = NamedSharding(mesh, P(None, "x"))
    x = {name: jax.ShapeDtypeStruct((1, length * size, 2, 8), jnp.float32, sharding=sharding) for name in "qkv"}
    call = lambda x: lax.ring_attention(**x, axis_name="x", **options)
    return jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")), x


def squares(f):
    return jax.grad(lambda x: (f(x) ** 2).sum())


def sines(f):
    return lambda x: jnp.sin(3 * f(x)).sum()
