"""blocksparse_attention in Triton: every kernel's lists, masks and indices, by the interpreter, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import all_equations

from ejkernel.kernels._xla._blocks import within_blocks
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import CAUSAL, Case, check_near, differentiable, like
from tests.gpu.blocksparse_cases import (
    SPARSE_CASES,
    SparseCase,
    poisoned_cotangents_in_blocks,
    poisoned_in_blocks,
)

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.blocksparse_attention import (  # noqa: E402
    blocksparse_attention,
    blocksparse_attention_bwd,
    blocksparse_attention_jvp,
    lists,
)

from . import interpreter, large_logits  # noqa: E402

LENGTH, B, H = 40, 2, 4
CONFIG = KernelConfig(block_q=16, block_k=32)


# The interpreter takes some seconds a case.
ALWAYS = ("plain, blocks of 32x16 bh", "causal, blocks of 16x16 b", "grouped heads, blocks of 16x32 bh",
          "window of both sides, blocks of 32x16 bh", "packed, causal, blocks of 16x32 b")  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in ALWAYS else pytest.mark.slow) for case in SPARSE_CASES],
)
def test_in_the_interpreter(case, monkeypatch):
    """Forward, backward and tangent of small float32 calls, with NaN in unread entries of kept blocks."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = case.make(LENGTH, jnp.float32)
    wrt = differentiable(x)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})
    given = poisoned_in_blocks(x, spec)
    outputs = blocksparse_attention(*given, spec=spec, config=CONFIG)
    cotangents = like(outputs, 2)
    poisoned_ones = poisoned_cotangents_in_blocks(cotangents, x, spec)
    gradients = blocksparse_attention_bwd(given, outputs, poisoned_ones, wrt=wrt, spec=spec, config=CONFIG)
    moved = blocksparse_attention_jvp(given, outputs, poisoned_in_blocks(x, spec, tangents), spec=spec, config=CONFIG)
    results = outputs, dict(zip(wrt, gradients, strict=True)), moved
    dense, dense_tangents = within_blocks(x, spec), tangents.attention._asdict()
    check_near(results, dense, spec, cotangents, dense_tangents, jnp.float32)


# --- The lists


@pytest.mark.parametrize("leading", [(1, 1), (1, H), (B, 1), (B, H)], ids=str)
@pytest.mark.parametrize("tile", [(16, 32), (32, 16)], ids=str)
def test_lists_hold_the_kept_tiles_that_are_visible(tile, leading):
    """Of every tile, in ascending order; the longest lists first."""
    case = SparseCase(Case("lists", B=B, H=H, G=2, S=3.1, K=4.2, D=16, V=16, spec=CAUSAL), "", (32, 32))
    x, spec = case.make(LENGTH, jnp.float32)
    (S, K), kept = (x.q.shape[1], x.k.shape[1]), np.random.default_rng(0).random((*leading, 4, 6)) < 0.5
    x = x._replace(block_mask=jnp.asarray(kept))
    rows, columns = np.arange(0, S, tile[0]), np.arange(0, K, tile[1])
    last = np.minimum(rows + tile[0], S) - 1 + K - S
    wanted = kept[..., rows // 32, :][..., columns // 32] & (columns <= last[:, None])
    same(lists.lists_of_keys(x, spec, tile), wanted)
    if leading[1] > 1:  # head by head in the list of a group
        wanted = np.moveaxis(wanted.reshape(leading[0], 2, 2, *wanted.shape[2:]), 4, 2)
        same(lists.lists_of_queries(x, spec, tile), wanted.reshape(*wanted.shape[:3], -1))
    else:
        same(lists.lists_of_queries(x, spec, tile), wanted.swapaxes(2, 3))


def same(found, kept):
    for place in np.ndindex(kept.shape[:3]):
        numbers = np.flatnonzero(kept[place])
        np.testing.assert_array_equal(found.entries[place][: found.counts[place]], numbers)
    assert (np.sort(found.order, -1) == np.arange(kept.shape[2])).all()
    assert (np.diff(np.take_along_axis(found.counts, found.order, -1), axis=-1) <= 0).all()


def test_memory_is_that_of_the_blocks(monkeypatch):
    """No array of a forward, backward or tangent is nearly as large as the logits of one head."""
    monkeypatch.setattr(_launch, "launch", lambda *_, out_type, **__: jax.tree.map(jnp.zeros_like, out_type))
    case = SparseCase(Case("long", B=1, D=16, V=16, segments=True, spec=CAUSAL), "h", (64, 64))
    x, spec = case.make(4096, jnp.float32)

    def program(x):
        outputs = blocksparse_attention(*x, spec=spec, config=CONFIG)
        gradients = blocksparse_attention_bwd(x, outputs, outputs, wrt=("q", "k", "v"), spec=spec, config=CONFIG)
        tangents = x._replace(**{name: None for name in x._fields if name not in "qkv"})
        return gradients, blocksparse_attention_jvp(x, outputs, tangents, spec=spec, config=CONFIG)

    sizes = [v.aval.size for e in all_equations(jax.make_jaxpr(program)(x)) for v in e.outvars]
    assert max(sizes) < 4096**2 / 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_logits_near_1e12(dtype, monkeypatch):
    """Of blocks which are all kept."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x = large_logits.operands(jnp.dtype(dtype), sinks=True)
    spec = BlocksparseAttentionSpec(**vars(large_logits.SPEC) | {"block_size": (32, 32)})
    in_blocks = lambda of: Operands(*of[:3], jnp.ones((1, 1, 2, 2), bool), sinks=of.sinks)
    kernels = blocksparse_attention_bwd, blocksparse_attention_jvp
    large_logits.check(large_logits.of_kernels(*kernels, x, spec, in_blocks, config=CONFIG), x)
