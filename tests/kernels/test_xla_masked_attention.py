"""Masking in flash_attention in XLA: fully masked rows, NaN, other sequences, skipped tiles."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._xla import _attention, _tiles
from ejkernel.kernels._xla.flash_attention import flash_attention, reference
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .xla_attention import (
    LENGTHS,
    SMALL,
    SPEC,
    B,
    D,
    E,
    G,
    H,
    S,
    T,
    case,
    cotangent,
    directions,
    distance,
    normal,
    of_kernel,
    of_reference,
    plain,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_fully_masked_rows_are_zero():
    operands = plain()._replace(mask=np.arange(S)[:, None] % 2 * np.ones((1, 1, 1, T)) > 0)
    run = jax.jit(of_kernel, static_argnums=1)
    (o, lse), tangents, gradients = run(operands, SPEC, directions(operands), cotangent(operands, SPEC))
    assert not o[:, ::2].any() and (lse[:, :, ::2] == -jnp.inf).all()
    assert not tangents.o[:, ::2].any() and not tangents.lse[:, :, ::2].any() and not gradients["q"][:, ::2].any()
    sinks = normal(1, H, 2)
    o, lse = flash_attention(*operands._replace(sinks=sinks), spec=SPEC, config=SMALL)
    assert not o[:, ::2].any()
    np.testing.assert_allclose(lse[0, :, 0], jax.nn.logsumexp(sinks[0], axis=-1), rtol=1e-14)


@pytest.mark.parametrize("name", ("segments", "mask_of_columns", "packed", "far_window"))
def test_invisible_keys_may_be_nan(name):
    far = Operands(*plain(s=5)), FlashAttentionSpec(softmax_scale=1.0, window=(3, 0))
    operands, spec = far if name == "far_window" else case(name)
    x = _attention.folded(operands, spec)
    is_visible = jnp.broadcast_to(_attention.visible(x), (B, G, H // G, *operands.q.shape[1:2], T)).any((2, 3))
    fully_masked = ~is_visible.transpose(0, 2, 1)[..., None]
    assert fully_masked.any()
    poisoned = operands._replace(
        k=jnp.where(fully_masked, jnp.nan, operands.k), v=jnp.where(fully_masked, jnp.nan, operands.v)
    )
    moved, cotangents = directions(operands), cotangent(operands, spec)
    for run in (of_kernel, of_reference):
        run = jax.jit(run, static_argnames="spec")
        clean, found = run(operands, spec, moved, cotangents), run(poisoned, spec, moved, cotangents)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), clean, found)), run


def test_packed_sequences_are_independent():
    """Equal to each sequence alone; tokens of no sequence have o = 0 and lse = −∞."""
    operands, spec = plain(), FlashAttentionSpec(causal=True, softmax_scale=D**-0.5)
    o, lse = jax.jit(partial(flash_attention, spec=spec, config=SMALL))(*operands._replace(**LENGTHS))
    (starts_q,), (starts_k,) = LENGTHS.values()
    last_q, last_k = slice(*starts_q[-2:]), slice(*starts_k[-2:])
    alone = jax.jit(partial(reference, spec=spec))(operands.q[:, last_q], operands.k[:, last_k], operands.v[:, last_k])
    here = Outputs(o[:, last_q], lse[:, :, last_q])
    assert max(jax.tree.leaves(distance(here, alone))) < 1e-14
    assert not o[:, starts_q[-1] :].any() and (lse[:, :, starts_q[-1] :] == -jnp.inf).all()


@pytest.mark.parametrize("run", (of_kernel, of_reference))
def test_tokens_of_no_sequence_have_no_sinks(run):
    operands, spec = case("packed", "sinks")
    end = LENGTHS["cu_seqlens_q"][0, -1]
    cotangents = cotangent(operands, spec)
    without = Outputs(cotangents.o.at[:, end:].set(0), cotangents.lse.at[:, :, end:].set(0))
    run = jax.jit(run, static_argnums=1)
    (o, lse), tangents, gradients = run(operands, spec, directions(operands), cotangents)
    assert not o[:, end:].any() and (lse[:, :, end:] == -jnp.inf).all() and jnp.isfinite(lse[:, :, :end]).all()
    assert not tangents.o[:, end:].any() and not tangents.lse[:, :, end:].any()
    np.testing.assert_array_equal(gradients["sinks"], run(operands, spec, directions(operands), without)[2]["sinks"])


@pytest.mark.parametrize("s, t", ((0, 5), (5, 0)))
def test_nothing_of_nothing(s, t):
    operands = plain(s=s, t=t)
    (o, lse), tangents, gradients = of_kernel(operands, SPEC, directions(operands), cotangent(operands, SPEC))
    assert o.shape == (B, s, H, E) and not o.any() and (lse == -jnp.inf).all() and not tangents.o.any()
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    "s, t, window, causal", [*itertools.product((40, 7), (40, 64), ((9, 3), (None, 0), (0, None)), (0, 1))]
)
def test_a_tile_is_computed_if_some_pair_in_it_is_visible(s, t, window, causal):
    spec = FlashAttentionSpec(causal=bool(causal), window=window)
    operands = plain(s=s, t=t)
    _, grid = _tiles.cut(operands, spec, KernelConfig(block_q=8, block_k=16))
    is_visible = np.asarray(_attention.visible(_attention.folded(operands, spec))).reshape(s, t)
    is_visible = np.pad(is_visible, [(0, -n % size) for n, size in zip(is_visible.shape, grid.size, strict=True)])
    rows, columns = grid.size
    tiles = is_visible.reshape(is_visible.shape[0] // rows, rows, -1, columns).any((1, 3))
    assert list(zip(*grid.starts, strict=True)) == [(i * rows, j * columns) for i, j in np.argwhere(tiles)]
