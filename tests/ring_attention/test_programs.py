"""Programs of a ring: collectives, memory, and what is computed once."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import all_equations, collectives, equations

from ejkernel import lax
from ejkernel.checkpoint_policies import save_kernels

from .calls import KEPT, LAYOUTS, local_call, squares

KEEPING = ("cond", "optimization_barrier")  # they return an array in memory


def in_16_bits(x):
    return {name: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding) for name, a in x.items()}


def found_collectives(f, x):
    return dict(collectives(jax.jit(f).lower(x).compile().as_text()))


@pytest.mark.core
def test_collectives_of_a_ring():
    """n − 1 permutes of k and of v; in a backward as many again, and of dk and dv."""
    f, x = local_call(3, causal=True, strategy="ring")
    assert found_collectives(f, x) == {"collective-permute": 4}
    for arrays in (in_16_bits(x), x):
        found = found_collectives(squares(f), arrays)
        assert found.keys() == {"collective-permute"}
        # XLA may find that hops of the backward receive the same k and v as hops before them.
        assert 8 <= found["collective-permute"] <= 12


@pytest.mark.parametrize("strategy", ("ring", "ulysses"))
def test_a_platform_alone_is_that_of_each_attention(strategy):
    f, x = local_call(2, causal=True, strategy=strategy, config={"platform": "xla"})
    plain, _ = local_call(2, causal=True, strategy=strategy)
    configs = lambda f: [e.params["config"] for e in equations(jax.make_jaxpr(squares(f))(x).jaxpr, "flash_attention")]
    assert configs(f) == configs(plain) != []
    assert {config.platform for config in configs(f)} == {"xla"}


@pytest.mark.core
def test_a_window_ends_the_ring():
    """Of eight shards of 64 tokens a window of 65 keys spans two; a window to the right adds one on the other side."""
    f, x = local_call(8, layout="contiguous", strategy="ring", window=(64, 0))
    assert found_collectives(f, x) == {"collective-permute": 2}
    f, x = local_call(8, layout="contiguous", strategy="ring", window=(64, 1))
    assert found_collectives(f, x) == {"collective-permute": 4}


def test_collectives_of_the_others():
    f, x = local_call(2, causal=True, strategy="all_gather")
    assert found_collectives(f, x) == {"all-gather": 2}
    assert found_collectives(squares(f), x) == {"all-gather": 4, "reduce-scatter": 2}
    f, x = local_call(2, causal=True, strategy="ulysses")
    assert found_collectives(f, x).keys() == found_collectives(squares(f), x).keys() == {"all-to-all"}


def test_collectives_of_a_ring_across_and_an_exchange_within():
    """q, k, v and o are exchanged within; k and v are sent by one hop of the ring across, and back in the backward."""
    types = (AxisType.Explicit,) * 2
    mesh, of = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=types), P(None, ("a", "b"))
    call = lambda x: lax.ring_attention(**x, axis_name=("a", "b"), strategy="usp", causal=True)
    f = jax.shard_map(call, mesh=mesh, in_specs=of, out_specs=of)
    x = jax.ShapeDtypeStruct((1, 256, 2, 8), jnp.bfloat16, sharding=NamedSharding(mesh, of))
    found = found_collectives(f, dict.fromkeys("qkv", x))
    assert found == {"all-to-all": 4 * 2, "collective-permute": 2}  # XLA exchanges an array for each device
    assert found_collectives(squares(f), dict.fromkeys("qkv", x)).keys() == found.keys()


@pytest.mark.parametrize("layout", ("contiguous", pytest.param("zigzag", marks=pytest.mark.slow)))
def test_the_memory_of_a_gradient_does_not_grow_with_the_ring(layout):
    def temporary(size):
        f, x = local_call(size, 256, causal=True, layout=layout, strategy="ring")
        return jax.jit(squares(f)).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) < 1.1 * temporary(4)


@pytest.mark.core
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_computes_no_forward_again(layout):
    """The calls that the forward has, and a backward for each; in float32 a tangent too, of the sums of weights."""
    names = lambda program: Counter(e.primitive.name for e in equations(program, "flash_attention"))
    f, x = local_call(3, causal=True, layout=layout, strategy="ring")
    forward = names(jax.make_jaxpr(f)(x))["flash_attention"]
    found = names(jax.make_jaxpr(squares(f))(in_16_bits(x)))
    assert found == {"flash_attention": forward, "flash_attention_bwd": forward}
    found = names(jax.make_jaxpr(squares(f))(x))
    assert found == {
        "flash_attention": forward,
        "flash_attention_jvp": forward,
        "flash_attention_bwd": forward,
    }


def test_a_hop_has_one_conditional_in_each_direction():
    """In zigzag the first hop has none; that of a backward is not preceded by another for its residuals."""
    f, x = local_call(3, causal=True, strategy="ring")
    x = in_16_bits(x)
    conditionals = lambda f: len(re.findall(r" conditional\(", jax.jit(f).lower(x).compile().as_text()))
    assert (conditionals(f), conditionals(squares(f))) == (2, 4)


def test_rows_that_are_merged_are_updated_in_place():
    """They are read and written at one place, which is no constant: XLA slices constant rows, and then writes all."""
    f, x = local_call(2, causal=True, strategy="ring")
    program = list(all_equations(jax.make_jaxpr(f)(in_16_bits(x))))
    of_rows = lambda name: [
        (e.invars[0], e.invars[-3])
        for e in program
        if e.primitive.name == name and e.invars[0].aval.shape == (1, 64, 2, 8)
    ]
    assert len(of_rows("dynamic_slice")) == 1
    assert of_rows("dynamic_slice") == of_rows("dynamic_update_slice")


def test_a_backward_of_two_hops_fetches_keys_while_it_computes():
    """The second hop waits for the first, the fetch of its keys does not."""
    f, x = local_call(2, causal=True, strategy="ring")
    program = jax.make_jaxpr(squares(f))(in_16_bits(x))
    inside = [getattr(e.params.get("jaxpr"), "eqns", ()) for e in all_equations(program)]
    (backward,) = (x for x in inside if "flash_attention_bwd" in [e.primitive.name for e in x])
    made_by = {a: e for e in backward for a in e.outvars}

    def needed(equation):
        makers = [made_by[a] for a in equation.invars if not hasattr(a, "val") and a in made_by]  # no literals
        return {equation.primitive.name}.union(*map(needed, makers))

    (second,) = (e for e in backward if e.primitive.name == "device_switch")
    fetches = [e for e in backward if e.primitive.name == "ppermute" and "device_switch" not in needed(e)]
    assert "flash_attention_bwd" in needed(second)
    assert len(fetches) == 2
    assert not any("flash_attention_bwd" in needed(e) for e in fetches)


def test_kernels_run_once_where_all_keys_are_gathered():
    f, x = local_call(2, causal=True, layout="contiguous", strategy="all_gather")
    program = jax.jit(squares(f)).trace(x).jaxpr
    assert [e.primitive.name for e in equations(program, "flash_attention")].count("flash_attention") == 1


@pytest.mark.core
def test_gathered_keys_are_not_moved():
    """Under a causal mask: where the last query is aligned is an operand of the kernel."""
    f, x = local_call(2, causal=True, layout="contiguous", strategy="all_gather")
    program = all_equations(jax.make_jaxpr(f)(x))
    made = {e.primitive.name for e in program for a in e.outvars if a.aval.shape == (1, 2 * 64, 2, 8)}
    assert made.isdisjoint(("pad", "concatenate", "dynamic_slice"))
    assert any(name.startswith("all_gather") for name in made)


def test_hops_in_which_nothing_is_seen_are_not_computed():
    """Of two hops the causal contiguous ring has one program with a call and one without; zigzag halves its calls."""
    f, x = local_call(2, causal=True, layout="contiguous", strategy="ring")
    calls = equations(jax.make_jaxpr(f)(in_16_bits(x)), "flash_attention")
    assert [e.invars[0].aval.shape[1] for e in calls] == [64, 64]
    f, x = local_call(2, causal=True, layout="zigzag", strategy="ring")
    calls = equations(jax.make_jaxpr(f)(in_16_bits(x)), "flash_attention")
    assert [tuple(x.aval.shape[1] for x in e.invars[:2]) for e in calls] == [(64, 64), (32, 64), (64, 32)]


def test_a_checkpointed_ring_runs_its_forward_once_if_its_results_are_saved():
    """Three hops; the backward recomputes them, all together, only if o and lse are not saved."""

    def forwards(policy):
        f, x = local_call(3, layout="contiguous", strategy="ring")
        program = jax.make_jaxpr(squares(jax.checkpoint(f, policy=policy)))(in_16_bits(x))
        return [e.primitive.name for e in equations(program, "flash_attention")].count("flash_attention")

    assert [forwards(policy) for policy in (None, KEPT, save_kernels)] == [6, 3, 3]


def test_the_output_of_two_devices_is_never_in_float32():
    """Between the hops it has the dtype of the hop's result, and after the last the dtype that is returned."""
    f, x = local_call(2, causal=True, strategy="ring")
    passed = [
        a.aval
        for e in all_equations(jax.make_jaxpr(f)(in_16_bits(x)))
        if e.primitive.name in KEEPING
        for a in e.outvars
    ]
    assert {a.dtype for a in passed if a.ndim == 4} == {jnp.dtype(jnp.bfloat16)}
