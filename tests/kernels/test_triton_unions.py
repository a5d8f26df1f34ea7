"""The launch that makes the unions of tiles, by the interpreter, bit for bit against those by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")
from ejkernel.kernels import _native_sparse as by_xla
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.native_sparse_attention import unions
from ejkernel.primitives.native_sparse_attention import Operands

from . import compiler, interpreter

OTHERS = ("sm_80", "sm_100", "sm_120")
CUTS = ((0, 7, 7, 16, 21), (3, 5, 11, 21, 21))


def lists(n: int, *, g: int, size: int, packed: bool = False, s: int = 21, keys: int = 150, blocks: int | None = None):
    """Lists of two batches, with duplicates, unlisted places and blocks that the query's sequence does not have."""
    rng = np.random.default_rng(n)
    keys = s if packed else keys
    found = rng.integers(-1, keys // size + 3 if blocks is None else blocks, (2, s, g, n))
    found[:, s // 2] = -1
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    q, k = array(2, s, g, 16), array(2, keys, g, 16)
    return by_xla.lists_of(
        Operands(q, k, k, jnp.asarray(found, jnp.int32), jnp.asarray(CUTS, jnp.int32) if packed else None), size
    )


@pytest.mark.parametrize("packed", (False, True), ids=("one sequence", "packed"))
@pytest.mark.parametrize("n, g, size", [(1, 4, 16), (4, 1, 16), (16, 4, 16), (24, 1, 64)])
@pytest.mark.parametrize("queries", (1, 4, 12, 16))
def test_unions(queries, n, g, size, packed, monkeypatch):
    check(lists(n, g=g, size=size, packed=packed), queries, size, monkeypatch)


@pytest.mark.parametrize("blocks", (0, 1, 1000), ids=("empty", "the same block", "few that there are"))
def test_lists_of_few_blocks(blocks, monkeypatch):
    check(lists(4, g=2, size=16, blocks=blocks), 4, 16, monkeypatch)


def test_full_tiles(monkeypatch):
    """All entries of a tile are different slots, as many as a program has."""
    of = lists(4, g=1, size=1, s=16, keys=64)
    slots = jnp.broadcast_to(jnp.arange(63, -1, -1, dtype=jnp.int32).reshape(1, 16, 1, 4), of.slots.shape)
    check(of._replace(slots=slots), 16, 1, monkeypatch)


def test_long_keys(monkeypatch):
    """More slots than 31 bits can have together with a query."""
    monkeypatch.setattr(unions, "_LARGEST", 100)
    check(lists(16, g=2, size=16), 12, 16, monkeypatch)


def test_long_lists_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(unions, "MOST_ENTRIES", 32)
    assert not compiler.launches(monkeypatch, _launch, lambda: unions.unions_of(lists(4, g=2, size=16), 12, 16))


@pytest.mark.parametrize("queries, n", [(4, 16), (12, 16)])
@pytest.mark.parametrize("target", ("sm_90", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)))
def test_compiles(target, queries, n, monkeypatch):
    (launch,) = compiler.launches(monkeypatch, _launch, lambda: unions.unions_of(lists(n, g=4, size=16), queries, 16))
    assert not compiler.binary(launch, compiler.TARGETS[target]).spilled


def check(of, queries, size, monkeypatch):
    wanted = by_xla.unions_of(of, queries, size)
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "launch", interpreter.launch)
        found = unions.unions_of(of, queries, size)
    np.testing.assert_array_equal(found.count, wanted.count)
    there = np.arange(wanted.slots.shape[-1]) < np.asarray(wanted.count)[..., None]
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == jnp.int32
        np.testing.assert_array_equal(np.where(there, ours, 0), np.where(there, theirs, 0))
