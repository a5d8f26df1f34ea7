"""Calls without batch, queries or keys over a mesh: numbers as on one device, or an error that names the operand.

XLA crashes when it compiles a `jax.shard_map` with an array without elements beside others (jax 0.10.2 to 0.12, for
example `lambda x, y: (x, 2 * y)`): no equation may read the empty array, so that it is no operand.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, assert_close, called_alone, first_of_each, gradient
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded import BATCH, both, call_of, mesh_of, placed

from ejkernel import lax

EMPTY = re.compile(r"\b(?:\d+x)*0x")
FULL = re.compile(r"tensor<(?!0x)(?!(?:\d+x)+0x)")


def calls(transforms):
    """Each operation without batch, tokens or keys, where it supports that."""
    of = {"eval": None, "grad": gradient}
    return pytest.mark.parametrize(
        ("case", "transform"),
        [
            pytest.param(
                case.resized({letter: 0}),
                of[name],
                id=f"{case}-{letter}-{name}",
                marks=() if (case.operation, letter) in AT_ONCE else (pytest.mark.slow,),
            )
            for case in called_alone(first_of_each(CASES))
            for letter in ("b", "s", "t")
            if letter in case.sizes and case.operation != "blocksparse_attention"  # whose blocks must fit the lengths
            for name in transforms
            if name == "eval" or case.differentiable
        ],
    )


AT_ONCE = {("state_space_v2", "s"), ("flash_attention", "t"), ("ragged_page_attention_v3_turboquant", "t")}


def is_refused(case):
    """Whether the operation rejects such a call with its own error."""
    try:
        jax.eval_shape(case.call, case.arrays())
    except ValueError as error:
        assert str(error).startswith(f"{case.operation}: ") and re.search(r"\b0\b", str(error)), error
        return True
    return False


def check(case, call, transform, args):
    f, _ = call_of(case, transform, call)
    lowered = jax.jit(f).lower(*args)
    for operands in re.findall(r"sdy.manual_computation\(.*\} : \((.*)\) ->", lowered.as_text()):
        assert not (EMPTY.search(operands) and FULL.search(operands)), operands
    alone, whole = call_of(case, transform)
    assert_close(lowered.compile()(*args), jax.jit(alone)(*whole))


@calls(("eval", "grad"))
def test_in_a_shard_map(case, transform):
    if is_refused(case):
        return
    mesh, split = mesh_of(AxisType.Auto, shape=(2, 2)), both(case)
    specs, results = case.specs(split), case.result_specs(split)
    call = jax.shard_map(case.call, mesh=mesh, in_specs=(specs,), out_specs=results)
    check(case, call, transform, call_of(case, transform)[1])


@calls(("eval",))
def test_in_a_shard_map_beside_an_explicit_axis(case, transform):
    if is_refused(case):
        return
    mesh = mesh_of(shape=(2, 2))
    specs, results = case.specs(BATCH), case.result_specs(BATCH)
    call = jax.shard_map(case.call, mesh=mesh, in_specs=(specs,), out_specs=results, axis_names={"x"})
    check(case, call, transform, placed(case, call_of(case, transform)[1], both(case), mesh))


@calls(("eval", "grad"))
def test_vmap(case, transform):
    """A mapped axis is merged with an empty axis, also for operands of size 1 there that are broadcast."""
    if is_refused(case):
        return
    f, args = call_of(case, transform)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), args)
    found = jax.jit(jax.vmap(f))(*stacked)
    for i in range(2):
        assert_close(jax.tree.map(lambda x, i=i: x[i], found), jax.jit(f)(*args))


# --- Over a sequence of no tokens -------------------------------------------------------------------------------------


def over_devices(call, *arrays):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    specs = tuple(P(None, "x") for _ in arrays)
    f = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))
    return jax.jit(f)(*arrays), jax.jit(jax.grad(lambda *x: f(*x).sum(), range(len(arrays))))(*arrays)


def zeros_alike(found, *arrays):
    o, gradients = found
    assert o.shape == arrays[0].shape and not o.any()
    for x, dx in zip(arrays, gradients, strict=True):
        assert x.shape == dx.shape and not dx.any()


SIZES = {"no_batch": (0, 8, 8), "no_queries": (2, 0, 8), "no_keys": (2, 8, 0), "none": (2, 0, 0)}


@pytest.mark.parametrize("strategy", ("auto", "ring", "all_gather", "ulysses"))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_ring_attention(strategy, sizes):
    batch, queries, keys = sizes
    arrays = jnp.ones((batch, queries, 4, 8)), *(jnp.ones((batch, keys, 4, 8)),) * 2
    call = lambda *x: lax.ring_attention(*x, axis_name="x", strategy=strategy, causal=True)
    if strategy == "auto":
        zeros_alike(over_devices(call, *arrays), *arrays)
    else:
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
        f = jax.shard_map(call, mesh=mesh, in_specs=(P(None, "x"),) * 3, out_specs=P(None, "x"))
        assert jax.eval_shape(jax.grad(lambda *x: f(*x).sum()), *arrays).shape == arrays[0].shape


@pytest.mark.parametrize("sizes", ((0, 8), (2, 0)), ids=("no_batch", "no_tokens"))
def test_recurrent(sizes):
    x = jnp.ones((*sizes, 4, 8))
    zeros_alike(over_devices(lambda q, k, v: lax.recurrent(q, k, v, axis_name="x"), x, x, x), x, x, x)
