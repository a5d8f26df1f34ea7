"""A recurrence over a sequence that is sharded over GPUs: only Triton kernels, each as often as necessary."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("jax_triton")

from ejkernel import lax

DEVICE = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
MESH = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=DEVICE)
TOKENS = P(None, "x")
CALLS = {
    "gla": (lax.gla, True),
    "lightning_attention": (partial(lax.lightning_attention, layer_idx=0, num_layers=2), False),
}


def of_shards(f, has_gates):
    """Over two GPUs, with the types of its arrays: 2 × 4,096 tokens of 32/8 heads of 128."""
    heads = (32, 8, 8, *[32] * has_gates)
    x = [jax.ShapeDtypeStruct((2, 4096, number, 128), jnp.bfloat16) for number in heads]
    return jax.shard_map(partial(f, axis_name="x"), mesh=MESH, in_specs=(TOKENS,) * len(x), out_specs=TOKENS), x


def lowered(f, x):
    with jax.sharding.use_abstract_mesh(MESH):
        return jax.jit(f).trace(*x).lower(lowering_platforms=("cuda",)).as_text()


def gradients(f):
    def run(*x):
        o, pull = jax.vjp(f, *x)
        return pull(jnp.cos(o))

    return run


@pytest.mark.parametrize("name", CALLS)
def test_no_product_and_no_sum_over_tokens_is_left_to_xla(name):
    f, x = of_shards(*CALLS[name])
    for program in (f, gradients(f)):
        text = lowered(program, x)
        assert not any(f"stablehlo.{found}" in text for found in ("dot_general", "while", "reduce_window", "scatter "))
        assert text.count("stablehlo.all_gather") == 1


@pytest.mark.parametrize("name", CALLS)
def test_kernels_that_run(name):
    """One more than on one device, for the states, and one more in a backward, for their cotangents."""
    f, has_gates = CALLS[name]
    over, x = of_shards(f, has_gates)
    local = [jax.ShapeDtypeStruct((a.shape[0], a.shape[1] // 2, *a.shape[2:]), a.dtype) for a in x]
    count = lambda f, x: lowered(f, x).count("@triton_kernel_call")
    assert count(over, x) == count(f, local) + 1
    assert count(gradients(over), x) == count(gradients(f), local) + 2
