"""`jax.vmap` equals a loop over the mapped axis, for any mapped operands and any of their axes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    DIFFERENTIABLE,
    assert_close,
    each,
    each_by_kind,
    first_of_each,
    gradient,
    oracle,
    tangent,
    with_another_operand,
    with_primitives,
)
from programs import equations

from ejkernel.primitives._axes import position
from ejkernel.primitives._factory import PRIMITIVES

COUNT = 3


IN_FULL = first_of_each(CASES)
"""What these take, all of an operation takes: the rules of vmap know operands by their axes alone."""


def test_every_operand_has_the_axis_into_which_a_mapped_one_is_folded():
    """Constants of a call too: under a mapped `jax.lax.cond` JAX maps every residual of a gradient."""
    for name, primitive in PRIMITIVES.items():
        without = [n for n, of in primitive.table.items() if position(of, primitive.layout.fold) is None]
        assert not without, name


def mappings(names):
    """Every set of mapped names; with more than ten names, sets of up to two, and the complements of these."""
    count = len(names)
    sizes = range(1, count + 1) if count <= 10 else (1, 2, count - 2, count - 1, count)
    return [some for n in sizes for some in itertools.combinations(names, n)]


def each_and_all(names):
    """Each name alone, and all: of any two, one is mapped where the other is not, and both are."""
    return [some for some in mappings(names) if len(some) in (1, len(names))]


def just_all(names):
    return [names]


def stacked(arrays, axis):
    """`jnp.stack`, by NumPy where it has the dtype, which compiles nothing."""
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays):
        return jnp.stack(arrays, axis)
    return jnp.asarray(np.stack([np.asarray(x) for x in arrays], axis))


def check(f, wanted, examples, mapped, axis, at_once=False):
    """vmap of f against `wanted` of each example; arrays that are not mapped are those of the first example.

    Where several mappings of a call are checked, operations run one by one, compiled once for all; a single mapping
    compiles faster `at_once`.
    """
    stack = lambda *x: stacked(x, axis)
    batch = {n: jax.tree.map(stack, *(e[n] for e in examples)) if n in mapped else x for n, x in examples[0].items()}
    mapping = jax.vmap(f, ({name: axis if name in mapped else None for name in batch},))
    found = (jax.jit(mapping) if at_once else mapping)(batch)
    found = jax.tree.map(np.asarray, found)
    for i, example in enumerate(examples):
        alone = {name: (example if name in mapped else examples[0])[name] for name in batch}
        assert_close(jax.tree.map(lambda x, i=i: x[i], found), wanted(alone), what=f"{mapped} mapped, example {i}: ")


def along(derivative):
    """A derivative as a function of one dict: the arrays, and the "direction"."""
    return lambda x: derivative({name: a for name, a in x.items() if name != "direction"}, x["direction"])


@each_by_kind(CASES, rest=(pytest.mark.slow,), first_over=())
def test_vmap(case):
    check_mappings(case, each_and_all, axis=0)


@each([case for case in CASES if case not in IN_FULL and case in with_another_operand(CASES)], first=())
def test_vmap_of_all(case):
    """Mapping each operand alone is tested by another case of the operation; here it is a slow test."""
    check_mappings(case, just_all, axis=0, at_once=True)


@pytest.mark.slow
@each([case for case in CASES if case not in with_another_operand(CASES)], first=())
def test_vmap_of_all_with_other_options(case):
    check_mappings(case, just_all, axis=0, at_once=True)


@each(CASES, first=(), rest=(pytest.mark.slow,))
def test_vmap_of_the_last_axis(case):
    check_mappings(case, just_all, axis=-1)


@pytest.mark.slow
@each(CASES, first=())
def test_vmap_of_the_last_axis_of_each(case):
    check_mappings(case, each_and_all, axis=-1)


def check_mappings(case, choose, axis, at_once=False):
    examples = [case.arrays(seed) for seed in range(COUNT)]
    for mapped in choose(tuple(examples[0])):
        check(case.call, oracle(case), examples, mapped, axis, at_once)


@pytest.mark.slow
@each(CASES, first=())
def test_vmap_of_every_choice(case):
    check_mappings(case, mappings, axis=0)


@each_by_kind(DIFFERENTIABLE, rest=(pytest.mark.slow,))
def test_vmap_of_grad(case):
    examples = [{**(x := case.arrays(seed)), "direction": case.cotangents(x, seed)} for seed in range(COUNT)]
    check_derivative(case, gradient, examples)


@each(DIFFERENTIABLE, first=(), rest=(pytest.mark.slow,))
def test_vmap_of_jvp(case):
    examples = [{**case.arrays(seed), "direction": case.tangents(seed + 1)} for seed in range(COUNT)]
    check_derivative(case, tangent, examples)


def check_derivative(case, transform, examples):
    """All operands and the direction mapped, the direction alone, and each operand if the case is tested in full."""
    f, wanted = along(transform(case.call, case.differentiable)), along(oracle(case, transform))
    names = tuple(examples[0])
    for mapped in each_and_all(names) if case in IN_FULL else [("direction",), names]:
        check(f, wanted, examples, mapped, 0)


@each(CASES, first=(), rest=(pytest.mark.slow,))
def test_vmap_of_vmap(case):
    """Two mapped axes: of the same operands, or of every second operand along one axis and the rest along the other."""
    names = tuple(case.operands)
    check_nested(case, names, names)
    if case in IN_FULL and len(names) > 1:
        check_nested(case, names[::2], names[1::2])
        check_nested(case, names[1::2], names[::2])


@pytest.mark.slow
@each(IN_FULL, first=())
def test_vmap_of_vmap_of_each(case):
    """Each operand along one axis while the others go along the other."""
    names = tuple(case.operands)
    for name in names if len(names) > 1 else ():
        check_nested(case, (name,), tuple(other for other in names if other != name))


def check_nested(case, inner, outer, counts=(2, 3)):
    of_seed = functools.cache(case.arrays)
    value = lambda name, i, j: of_seed(10 * (i if name in outer else 0) + (j if name in inner else 0))[name]

    def batch(name):
        rows = [[value(name, i, j) for j in range(counts[1])] for i in range(counts[0])]
        rows = [stacked(row, 0) if name in inner else row[0] for row in rows]
        return stacked(rows, -1) if name in outer else rows[0]

    axes = lambda mapped, axis: ({name: axis if name in mapped else None for name in case.operands},)
    found = jax.jit(jax.vmap(jax.vmap(case.call, axes(inner, 0)), axes(outer, -1)))(
        {name: batch(name) for name in case.operands}
    )
    found = jax.tree.map(np.asarray, found)
    for i, j in itertools.product(*map(range, counts)):
        wanted = oracle(case)({name: value(name, i, j) for name in case.operands})
        part = jax.tree.map(lambda x, at=(i, j): x[at], found)
        assert_close(part, wanted, what=f"{inner} mapped inside {outer}, example {i, j}: ")


def chooses(case):
    """Whether queries select keys: then their lists are mapped with them, and every example reads the keys."""
    return "block_indices" in case.algorithm.operands._fields and "block_indices" not in case.operands


@each([case for case in with_primitives(DIFFERENTIABLE) if case.algorithm.forward.layout.group and not chooses(case)])
def test_shared_keys_and_values_are_not_repeated(case):
    """Under mapped queries, or other arrays with their heads, the kernel reads shared keys and values unrepeated."""
    arrays = case.arrays()
    heads, groups = case.algorithm.forward.layout.group
    q = next(name for name in arrays if heads in case.operands[name].axes.split())
    shared = [name for name, operand in case.operands.items() if groups in operand.axes.split()]
    cotangents = case.cotangents(arrays)
    forward = lambda x: case.call({**arrays, q: x})
    backward = lambda x: gradient(case.call, (q,))({**arrays, q: x}, cotangents)
    for f in (forward, backward):
        for kernel in equations(jax.make_jaxpr(jax.vmap(f))(jnp.stack([arrays[q]] * COUNT)), case.operation):
            sizes = {n: x.aval.size for n, x in zip(kernel.params["operands"], kernel.invars, strict=True)}
            assert sizes[q] == COUNT * arrays[q].size
            assert {name: sizes[name] for name in shared} == {name: arrays[name].size for name in shared}
