"""Errors of operations without a derivative suggest an alternative; in-place results are written in place."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FORWARD_ONLY, assert_close, each_by_kind, oracle
from jax.sharding import AxisType, NamedSharding
from sharded import rest

each_forward_only = each_by_kind(FORWARD_ONLY, rest=(pytest.mark.slow,))
IN_PLACE = [case for case in FORWARD_ONLY if case.algorithm.in_place]
each_in_place = each_by_kind(IN_PLACE)


def floats(arrays):
    return {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}


@each_forward_only
def test_derivatives_are_refused(case):
    """In each operand, by any transform."""
    arrays = case.arrays()
    wanted = rf"{case.operation} has no derivative; {case.algorithm.instead}"
    for name, x in floats(arrays).items():
        of = lambda x, name=name: sum(y.sum() for y in case.call({**arrays, name: x}))
        for transform in (jax.grad, jax.jacfwd, lambda f: partial(jax.linearize, f)):
            with pytest.raises(NotImplementedError, match=re.escape(wanted)):
                transform(of)(x)


@each_forward_only
def test_constant_operands_need_no_derivative(case):
    """A loss may use the operation's results as constants."""
    arrays = case.arrays()
    results = case.call(arrays)
    loss = lambda w: (w * jax.lax.stop_gradient(case.call(arrays)[0].astype(w.dtype))).sum()
    assert jax.grad(loss)(jnp.ones(())) == results[0].astype(jnp.float32).sum()


def donated(case, arrays, transform=lambda f: f):
    """The compiled call with every operand donated that a result overwrites, these operands, and the others."""
    pools = {name: arrays[name] for name in case.algorithm.in_place.values()}
    rest = {name: x for name, x in arrays.items() if name not in pools}
    call = jax.jit(transform(lambda pools, rest: case.call({**rest, **pools})), donate_argnums=0)
    return call.lower(pools, rest).compile(), pools, rest


@each_in_place
@pytest.mark.parametrize("mapped", (False, True), ids=("", "vmap"))
def test_a_donated_operand_is_not_copied(case, mapped):
    """The result has its buffer, by the program's memory analysis, and no instruction copies it."""
    arrays = case.arrays()
    if mapped:
        arrays = {name: jnp.stack([x, x, x]) for name, x in arrays.items()}
    compiled, pools, _ = donated(case, arrays, jax.vmap) if mapped else donated(case, arrays)
    hlo = compiled.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?) \}", hlo)
    assert aliases, hlo.splitlines()[0]
    places = re.findall(r"\{\d+\}: \((\d+), \{\}, may-alias\)", aliases[1])
    assert sorted(map(int, places)) == list(range(len(pools)))
    for x in pools.values():
        assert not re.search(rf"= \w+\[{','.join(map(str, x.shape))}\]\S* copy\(", hlo)
    assert compiled.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in pools.values())


@each_in_place
def test_without_donation_the_operand_stays(case):
    arrays = case.arrays()
    before = {name: np.asarray(x) for name, x in arrays.items()}
    found = jax.jit(case.call)(arrays)
    jax.tree.map(np.testing.assert_array_equal, before, {name: np.asarray(x) for name, x in arrays.items()})
    assert_close(found, oracle(case)(arrays))


@each_in_place
@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_donation_over_a_mesh(case, types):
    """Each device keeps its shard of the buffer."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(types,) * 2)
    specs = case.specs(rest(case))
    arrays = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in case.arrays().items()}
    wanted = oracle(case)(case.arrays())
    compiled, pools, others = donated(case, arrays)
    parts = sum(x.addressable_shards[0].data.nbytes for x in pools.values())
    assert compiled.memory_analysis().alias_size_in_bytes == parts
    assert_close(compiled(pools, others), wanted)
