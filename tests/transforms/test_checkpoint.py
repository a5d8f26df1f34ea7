"""Under `jax.checkpoint` a forward kernel runs twice, or once if a policy saves its results."""

import jax
import jax.numpy as jnp
import pytest
from cases import DIFFERENTIABLE, assert_close, each, each_by_kind, first_of_each, oracle, pullback, with_primitives
from programs import equations, scopes

from ejkernel import checkpoint_policies

# Their backward in XLA recomputes what kernels of other platforms take from the forward.
TAKES_NOTHING_IN_XLA = ("native_sparse_attention",)


def check_count(case, f, times, *args):
    """The forward kernel occurs that often in the jaxpr and in the compiled program: XLA merged and dropped none.

    Where the backward uses no result of the forward, the forward is never recomputed; where only XLA's does not, the
    second forward is in the jaxpr but not in the compiled program.
    """
    times = times if case.algorithm.residuals else 1
    traced = jax.jit(f).trace(*args)
    kernels = [e.primitive.name for e in equations(traced.jaxpr, case.operation)]
    assert kernels.count(case.operation) == times
    assert kernels.count(f"{case.operation}_bwd") == 1
    compiled = traced.lower().compile()
    run = 1 if case.operation in TAKES_NOTHING_IN_XLA else times
    assert len(scopes(compiled.as_text(), case.operation)) == run
    return compiled(*args)


@each_by_kind(with_primitives(DIFFERENTIABLE), rest=(pytest.mark.slow,))
@pytest.mark.parametrize("policy, times", [(None, 2), (checkpoint_policies.save_kernels, 1)], ids=("none", "kernels"))
def test_checkpoint(case, policy, times):
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    layer = jax.checkpoint(case.call, policy=policy)
    found = check_count(case, pullback(layer, case.differentiable), times, arrays, cotangents)
    assert_close(found, oracle(case, pullback)(arrays, cotangents))


@each(first_of_each(with_primitives(DIFFERENTIABLE)), first=())
@pytest.mark.parametrize(
    "kept", ("names", *(pytest.param(x, marks=pytest.mark.slow) for x in ("nothing", "kernels", "operation")))
)
def test_checkpoint_under_scan(case, kept):
    """Checkpointed layers under `jax.lax.scan`."""
    names = [f"{case.operation}_{result}" for result in case.algorithm.outputs._fields]
    policy, times = {
        "nothing": (None, 2),
        "kernels": (checkpoint_policies.save_kernels, 1),
        "operation": (checkpoint_policies.save_only(case.operation), 1),
        "names": (jax.checkpoint_policies.save_only_these_names(*names), 1),
    }[kept]
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    keep = lambda layer: jax.checkpoint(layer, policy=policy)
    found = check_count(case, pullback_of_layers(case.call, case.differentiable, keep), times, arrays, cotangents)
    assert_close(found, oracle(case, pullback_of_layers)(arrays, cotangents))


@each([case for case in first_of_each(DIFFERENTIABLE) if case.is_composed], first=())
@pytest.mark.parametrize("policy", (None, checkpoint_policies.save_kernels), ids=("none", "kernels"))
def test_checkpoint_of_composed_operations(case, policy):
    """How often the kernels of its parts run depends on the operation; the numbers do not change."""
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    layer = jax.checkpoint(case.call, policy=policy)
    found = jax.jit(pullback(layer, case.differentiable))(arrays, cotangents)
    assert_close(found, oracle(case, pullback)(arrays, cotangents))


def test_a_policy_for_an_operation_that_does_not_exist():
    with pytest.raises(ValueError, match=r"no such operation: flash_atention; known are .*flash_attention"):
        checkpoint_policies.save_only("flash_atention")


def pullback_of_layers(f, wrt, keep=lambda layer: layer):
    """The pullback of a sum of three layers, each f of the arrays times a factor, under `jax.lax.scan`."""

    def layers(arrays):
        def layer(total, factor):
            scaled = {name: x * factor.astype(x.dtype) if name in wrt else x for name, x in arrays.items()}
            return [a + b for a, b in zip(total, f(scaled), strict=True)], None

        zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(f, arrays)]
        return jax.lax.scan(keep(layer), zeros, jnp.array([0.5, 1.0, 1.5]))[0]

    return pullback(layers, wrt)
