"""native_sparse_attention in Triton: every kernel's masks, lists and indices, by the interpreter."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, assert_close

from ejkernel.kernels._native_sparse import NONE, Lists
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._xla.native_sparse_attention import reference
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import KernelConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.native_sparse_attention import problem  # noqa: E402

from . import against_xla, interpreter, large_logits  # noqa: E402

pytestmark = pytest.mark.usefixtures("strict")
NAME = "native_sparse_attention"
GIVEN = [case for case in CASES if case.operation == NAME and "block_indices" in case.operands]
KINDS = ("", "_bwd", "_jvp")


def implementations(platform, backend=None):
    found = [kernel_registry.find(NAME + kind, *[a for a in (platform, backend) if a]) for kind in KINDS]
    return [entry.implementation for entry in found]


def results(of, x, spec, tangents, cotangents, wrt=("q", "k", "v"), **how):
    forward, backward, tangent = of
    outputs = forward(*x, spec=spec, **how)
    gradients = backward(x, outputs, cotangents, wrt=wrt, spec=spec, **how)
    return outputs, gradients, tangent(x, outputs, tangents, spec=spec, **how)


def check(case, config, monkeypatch):
    """Forward, backward and tangent against those in plain JAX."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec, tangents = against_xla.prepared(case)
    outputs = implementations("xla")[0](*x, spec=spec)
    cotangents = jax.tree.map(lambda a: against_xla._like(a, 2), outputs)
    wanted = results(implementations("xla"), x, spec, tangents, cotangents)
    found = results(implementations("triton", "gpu"), x, spec, tangents, cotangents, config=config)
    assert_close(found, wanted)


@pytest.mark.parametrize("case", GIVEN, ids=str)
@pytest.mark.parametrize("rows, item", (pytest.param(16, 512, marks=pytest.mark.slow), (32, 4)), ids=("whole", "items"))
def test_in_the_interpreter(case, rows, item, monkeypatch):
    """A block whose queries are one work item, and one with several that are added up."""
    monkeypatch.setattr(problem, "ITEM", item)
    check(case.resized(dict(b=2)), KernelConfig(block_q=rows, block_k=16, block_d=rows), monkeypatch)


@pytest.mark.parametrize(
    "b, s, g, n, slots", ((2, 300, 3, 5, 9), (1, 1, 1, 4, 7), (1, 70000, 2, 3, 2**17)), ids=("", "one query", "33 bits")
)
def test_items(b, s, g, n, slots):
    """Each slot has the queries that list it, in ascending order."""
    rng = np.random.default_rng(0)
    listed = rng.integers(0, slots, (b, s, g, 1)) + np.arange(n) * (slots // n)
    listed = np.where(rng.random(listed.shape) < 0.2, NONE, listed % slots).astype(np.int32)
    lists = Lists(jnp.asarray(listed), None, None)
    items = problem.items_of(lists, problem.Problem(b, s, s, g, g, 16, 16, 16, 1.0, n, slots))
    query, slot, begin, end, first = map(np.asarray, items)
    assert (begin <= end).all() and (end - begin <= problem.ITEM).all()
    for i, j in np.ndindex(b, g):
        of_item = [query[i, j, begin[i, j, m] : end[i, j, m]] for m in range(first[i, j, -1])]
        assert (slot[i, j, first[i, j, -1] :] == slots).all()
        found = np.stack([np.repeat(slot[i, j, : len(of_item)], list(map(len, of_item))), np.concatenate(of_item)])
        at, entry = np.nonzero(listed[i, :, j] != NONE)
        wanted = np.stack([listed[i, :, j][at, entry], at])
        np.testing.assert_array_equal(found, wanted[:, np.lexsort(wanted[::-1])])


@pytest.mark.slow
def test_blocks_of_several_steps(monkeypatch):
    """Of 20 keys in steps of 16, and groups of three heads in tiles of four rows."""
    case = GIVEN[0].resized(dict(b=1, s=33, t=50, h=6, g=2, d=24, n=3))
    check(replace(case, options=dict(block_size=20)), KernelConfig(block_q=16, block_k=16, block_d=16), monkeypatch)


@pytest.mark.parametrize("platform, dtype", [("triton", "float32"), ("triton", "bfloat16"), ("xla", "float32")])
def test_gradients_of_logits_near_1e12(platform, dtype, monkeypatch):
    """Of queries that have all blocks in their lists."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x = large_logits.operands(jnp.dtype(dtype))
    spec = NativeSparseAttentionSpec(block_size=16, softmax_scale=large_logits.SPEC.softmax_scale)
    listed = lambda of: Operands(*of[:3], jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (1, 40, 2, 3)))
    kernels = implementations(platform, None if platform == "xla" else "gpu")[1:]
    config = KernelConfig(block_q=16, block_k=16, block_d=16)
    large_logits.check(large_logits.of_kernels(*kernels, x, spec, listed, config=config), x)


@pytest.mark.slow
def test_the_tangent_of_large_logits(monkeypatch):
    """Errors of rounding to 16 bits are relative to the result: s_dot of hundreds, where one key has all the weight."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    rng, shape = np.random.default_rng(0), (1, 64, 2, 64)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float16)
    lists = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (1, 64, 2, 4))
    x, moved = Operands(30 * normal(*shape), normal(*shape), normal(*shape), lists), [normal(*shape) for _ in range(3)]
    spec = NativeSparseAttentionSpec(block_size=16, softmax_scale=0.125)
    forward, _, tangent = implementations("triton", "gpu")
    config = KernelConfig(block_q=16, block_k=16, block_d=16)
    outputs = forward(*x, spec=spec, config=config)
    found = tangent(x, outputs, Operands(*moved, None), spec=spec, config=config)

    def formula(dtype):
        of = lambda arrays: [a.astype(dtype) for a in arrays]
        return jax.jvp(lambda *a: reference(*a, lists, spec=spec), of(x[:3]), of(moved))[1]

    rounded = formula(jnp.float16)
    with jax.enable_x64(True):
        exact = formula(jnp.float64)
    for ours, theirs, wanted in zip(found, rounded, exact, strict=True):
        error, unit = (np.linalg.norm(np.asarray(a, np.float64) - np.asarray(wanted)) for a in (ours, theirs))
        assert error <= 3 * unit
