"""Packed sequences over devices: cu_seqlens are those of the whole sequence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from jax.sharding import PartitionSpec as P
from programs import equations

from ejkernel import lax

from .calls import mesh_of, random, sines

T = 48
QKV = dict(q=(T, 4, 8), k=(T, 2, 8), v=(T, 2, 8))
each_call = pytest.mark.parametrize(
    ("size", "layout", "options"),
    [
        (2, "zigzag", dict(strategy="ring", causal=True)),
        (3, "zigzag", dict(strategy="ring", causal=True, window=(4, None))),
        (3, "striped", dict(strategy="ring")),
        (4, "contiguous", dict(strategy="all_gather", causal=True, softcap=5.0)),
        (3, "striped", dict(strategy="all_gather", max_seqlen_k=20)),
        (2, "zigzag", dict(strategy="ulysses", causal=True)),
        (4, "contiguous", dict(strategy="ring", causal=True, max_seqlen_q=T)),
    ],
    ids=lambda x: x if isinstance(x, str) else str(x) if isinstance(x, int) else "-".join(map(str, x.values())),
)


def in_sequence(size, layout, **options):
    """Arrays of a packed sequence and cuts -> (o, lse), over that many devices."""

    def run(x, cuts):
        order, inverse = lax.ring_order(T, size, layout)
        call = lambda x, cuts: lax.ring_attention(
            **x, cu_seqlens_q=cuts, cu_seqlens_k=cuts, axis_name="x", layout=layout, return_lse=True, **options
        )
        over = dict(mesh=mesh_of(size), in_specs=(P("x"), P()), out_specs=(P("x"), P(None, "x")))
        o, lse = jax.shard_map(call, **over)({name: a[order] for name, a in x.items()}, cuts)
        return o[inverse], lse[:, inverse]

    return run


def on_one_device(x, cuts, **options):
    return lax.flash_attention(**x, cu_seqlens_q=cuts, cu_seqlens_k=cuts, return_lse=True, **options)


@each_call
def test_results_and_gradients(size, layout, options):
    check(size, layout, options, (3, 10, 20, 40))


@pytest.mark.core
@pytest.mark.parametrize("cuts", [(0, T), (0, 5, 5, 30, T)])
def test_cuts(cuts):
    check(2, "zigzag", dict(strategy="ring", causal=True), cuts)


def check(size, layout, options, cuts):
    """The results and gradients of one device."""
    x, cuts = random(**QKV), jnp.asarray(cuts)
    whole = partial(on_one_device, **{name: value for name, value in options.items() if name != "strategy"})
    ring = in_sequence(size, layout, **options)
    assert_close(jax.jit(ring)(x, cuts), whole(x, cuts), 1e-5)
    gradient = lambda f: jax.jit(jax.grad(sines(lambda x: f(x, cuts)[0])))(x)
    assert_close(gradient(ring), gradient(whole), 1e-5)


@pytest.mark.core
def test_hops_farther_than_the_longest_sequence_are_not_computed():
    """Sequences of up to 13 tokens span two devices, of 12 tokens each; unbounded ones span all four."""

    def calls(**bound):
        run = in_sequence(4, "contiguous", strategy="ring", causal=True, **bound)
        program = jax.make_jaxpr(run)(random(**QKV), jnp.asarray((0, 13, 26, 39, T)))
        return len(equations(program, "ppermute"))

    arrays = 3  # k, v and the segment ids of keys
    assert calls() == 3 * arrays
    assert calls(max_seqlen_q=13) == calls(max_seqlen_k=13, max_seqlen_q=40) == arrays


@pytest.mark.core
@pytest.mark.parametrize(
    ("lengths", "options"), [((T, T), dict(causal=True)), ((T, T), dict(window=4)), ((T, 2 * T), dict(causal=True))]
)
def test_other_sequences_of_keys_have_no_common_band(lengths, options):
    """Without causal and window they are allowed."""
    q_cuts, k_cuts = np.array((0, 20, T)), np.array((0, 30, lengths[1]))
    x = random(q=(T, 4, 8), k=(lengths[1], 2, 8), v=(lengths[1], 2, 8))

    def ring(x, **options):
        call = lambda x: lax.ring_attention(
            **x, cu_seqlens_q=q_cuts, cu_seqlens_k=k_cuts, axis_name="x", layout="contiguous", **options
        )
        return jax.shard_map(call, mesh=mesh_of(2), in_specs=(P("x"),), out_specs=P("x"))(x)

    assert_close(ring(x), lax.flash_attention(**x, cu_seqlens_q=q_cuts, cu_seqlens_k=k_cuts), 1e-5)
    with pytest.raises(
        ValueError, match=r"^ring_attention: sequences are aligned by their last tokens; with causal or"
    ):
        ring(x, **options)
