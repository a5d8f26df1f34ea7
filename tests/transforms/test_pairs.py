"""Calls with any two features are lowered for every platform from a host without accelerators.

The features are those of `tests/cases`. A normal run lowers calls with many features each, chosen so that every pair
of features is in a call which is run by the same implementations as the pair alone: otherwise a feature which one
platform leaves to XLA would hide the others from its kernels. XLA's formula is the same program wherever it runs a
whole call: of the platforms that leave a call to XLA, one lowers it, for the next call another. Each single pair on
every platform, CUDA included, where Triton compiles every kernel in lowering, is a slow test.
"""

import functools
import inspect

import jax
import pytest
from cases import PLAIN, TESTED_ELSEWHERE, call_with, features_of, pairs, together

import ejkernel
from ejkernel.errors import UnsupportedError
from ejkernel.kernels._dispatch import select
from ejkernel.modules._operation import OPERATIONS
from ejkernel.ops.utils.devices import target_of
from ejkernel.types import Platform

PARTS = 4
TARGETS = {platform: target_of(platform) for platform in ("cpu", "rocm", "tpu")}


@pytest.mark.parametrize("operation", PLAIN)
def test_every_argument_is_in_a_feature(operation):
    calls = [call_with(operation, names)[0] for names in [(), *((name,) for name in features_of(operation))]]
    had = {name for case in calls for name in (*case.operands, *case.options)}
    arguments = set(inspect.signature(getattr(ejkernel.lax, operation)).parameters) - {
        "config",
        *TESTED_ELSEWHERE[operation],
    }
    # A recurrence over a mesh is tested in test_sequence_shards.py; ring attention is always called over one.
    assert arguments - {"axis_name"} <= had <= arguments


# Over a mesh a program is compiled for longer.
each_operation = pytest.mark.parametrize(
    "operation", [pytest.param(n, marks=[pytest.mark.slow] if case.over else []) for n, case in PLAIN.items()]
)


@each_operation
def test_a_pair_is_refused_by_name(operation):
    """For example packed sequences with batch_invariant: no implementation supports them, and each gives a reason."""
    for names in pairs(operation):
        if implementations(operation, names) is None:
            with pytest.raises((UnsupportedError, ValueError), match=f"^{operation}"):
                lower(operation, names, ("cpu",))


@pytest.mark.parametrize("part", range(PARTS))
@each_operation
def test_pairs_are_lowered(operation, part):
    for turn, names in list(enumerate(covering(operation)))[part::PARTS]:
        lower(operation, names, platforms(operation, names, turn))


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation, names",
    [
        pytest.param(operation, names, id=f"{operation}-{' and '.join(names) or 'plain'}".replace(" ", "_"))
        for operation in PLAIN
        for names in pairs(operation)
    ],
)
def test_a_pair_is_lowered(operation, names):
    pytest.importorskip("jax_triton")
    if implementations(operation, names) is not None:
        lower(operation, names, ("cpu", "cuda", "rocm", "tpu"))


def lower(operation, names, platforms):
    """Lowers the forward, with the gradient in all float arrays where there is one."""
    case, dtype = call_with(operation, names)
    arrays = case.types(dtype)
    wrt = [name for name, x in arrays.items() if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]

    def with_gradient(arrays):
        results, pull = jax.vjp(lambda moving: case.call({**arrays, **moving}), {name: arrays[name] for name in wrt})
        return results, pull(jax.tree.map(jax.numpy.ones_like, results))

    has_gradient = case.is_composed or case.algorithm.differentiable
    traced = jax.jit(with_gradient if has_gradient else case.call).trace(arrays)
    for platform in platforms:
        try:
            traced.lower(lowering_platforms=(platform,))
        except UnsupportedError:
            raise
        except Exception as error:
            raise AssertionError(f"{operation} of {names} for {platform}: {error}") from error


@functools.cache
def implementations(operation, names):
    """What runs the primitives on each platform, of composed operations nothing; None if unsupported."""
    case, dtype = call_with(operation, names)
    arrays = case.types(dtype)
    if case.is_composed:
        return () if is_taken(case, arrays) else None
    found = {}

    def look(arrays):
        call = OPERATIONS[operation].prepare_arguments(**arrays, **case.options)
        operands = case.algorithm.operands(**{name: jax.typeof(x) for name, x in call.named.items()})
        for platform, target in TARGETS.items():
            chosen = [select(primitive.name, call.spec, operands, target) for primitive in case.algorithm.primitives]
            found[platform] = tuple(entry.platform for entry in chosen)

    try:
        jax.eval_shape(look, arrays)
    except UnsupportedError:
        return None
    return tuple(found.items())


def platforms(operation, names, turn):
    """The platforms with kernels for the call, and in turn one that leaves all of it to XLA; for composed ones all."""
    if not (taken := dict(implementations(operation, names))):
        return tuple(TARGETS)
    left = [platform for platform, chosen in taken.items() if set(chosen) == {Platform.XLA}]
    return tuple(platform for platform in taken if platform not in left or platform == left[turn % len(left)])


def is_taken(case, arrays):
    """Whether a composed operation supports a call, or rejects it with its own error."""
    try:
        jax.eval_shape(case.call, arrays)
    except (UnsupportedError, ValueError) as error:
        if not str(error).startswith(case.operation):
            raise
        return False
    return True


@functools.cache
def covering(operation):
    """Sets of features that contain every pair: each is a pair, extended by features that cover further pairs."""
    left = [set(names) for names in pairs(operation) if implementations(operation, names) is not None]
    chosen = []

    def covered(names):
        if (taken := implementations(operation, names)) is None:
            return []
        return [p for p in left if p <= set(names) and implementations(operation, ordered(operation, p)) == taken]

    while left:
        names = ordered(operation, left[-1])
        for name in features_of(operation):
            more = ordered(operation, {*names, name})
            if together(operation, more) and len(covered(more)) > len(covered(names)):
                names = more
        done = covered(names)
        left = [pair for pair in left if pair not in done]
        chosen.append(names)
    return chosen


def ordered(operation, names):
    return tuple(name for name in features_of(operation) if name in names)
