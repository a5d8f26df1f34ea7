"""The XLA implementation of blocksparse_attention: results against a formula in NumPy, and its cost."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._xla._blocks import cut
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig

pytestmark = pytest.mark.usefixtures("x64")

B, S, K, H, G, D, V = 2, 40, 52, 4, 2, 8, 12
SIZES = {"even": (8, 13), "uneven": (11, 9), "small": (3, 2), "large": (30, 24)}
TILES = {"blocks": None, "parts of blocks": dict(block_q=4, block_k=4), "several": dict(block_q=24, block_k=32)}
LEADING = {"all": (), "heads": (H,), "batch": (B, 1), "batch and heads": (B, H)}


def normal(*shape):
    return np.random.default_rng([*shape]).standard_normal(shape)


def block_mask(leading, size, share=0.4):
    """A random block mask, with nothing in the first row."""
    shape = *leading, math.ceil(S / size[0]), math.ceil(K / size[1])
    kept = np.random.default_rng([*shape]).random(shape) < share
    kept[..., :1, :] = False
    return kept


def formula(q, k, v, seen, do, dlse):
    """o [B,S,H,V], lse [B,H,S], and the gradients of Σ do·o + Σ dlse·lse in q, k and v; seen [B,H,S,K]."""
    k, v = (np.repeat(x, H // G, 2) for x in (k, v))
    s = np.where(seen, np.einsum("bihd,bjhd->bhij", q, k) * D**-0.5, -np.inf)
    some = seen.any(-1)
    weights = np.exp(np.where(seen, s, 0)) * seen
    total = np.where(some, weights.sum(-1), 1)
    p = weights / total[..., None]
    o = np.einsum("bhij,bjhe->bihe", p, v)
    dp = np.einsum("bihe,bjhe->bhij", do, v)
    delta = np.einsum("bihe,bihe->bhi", do, o) - dlse
    ds = p * (dp - delta[..., None]) * D**-0.5
    of_groups = lambda x: x.reshape(B, K, G, H // G, -1).sum(3)
    dk, dv = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihe->bjhe", p, do)
    lse = np.where(some, np.log(total), -np.inf)
    return o, lse, (np.einsum("bhij,bjhd->bihd", ds, k), of_groups(dk), of_groups(dv))


def entries(kept, size):
    """[B,H,S,K] bool."""
    rows, columns = np.arange(S) // size[0], np.arange(K) // size[1]
    return np.broadcast_to(kept[..., rows, :][..., columns], (B, H, S, K))


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13)


QKV = normal(B, S, H, D), normal(B, K, G, D), normal(B, K, G, V)
DO, DLSE = normal(B, S, H, V), normal(B, H, S)


def triples():
    """Sizes, tilings and kinds of masks, all combined; a normal run has as many as cover every pair with a mask."""
    for i, size in enumerate(SIZES):
        for j, tiles in enumerate(TILES):
            for k, leading in enumerate(LEADING):
                marks = () if (i + j + k) % len(TILES) == 0 else pytest.mark.slow
                yield pytest.param(size, tiles, leading, marks=marks)


@pytest.mark.parametrize("size, tiles, leading", list(triples()))
def test_equals_the_formula(size, tiles, leading):
    size = SIZES[size]
    kept = block_mask(LEADING[leading], size)

    @jax.jit
    def run(kept, *qkv):
        config = TILES[tiles] and (TILES[tiles], TILES[tiles])
        call = lambda *x: ejkernel.lax.blocksparse_attention(
            *x, kept, block_size=size, causal=True, return_lse=True, config=config
        )
        (o, lse), pull = jax.vjp(call, *qkv)
        _, moved = jax.jvp(call, qkv, qkv[:1] + qkv[1:])
        return o, lse, pull((DO, jnp.where(jnp.isfinite(lse), DLSE, 0))), moved

    seen = entries(kept, size) & (np.arange(K) <= np.arange(S)[:, None] + K - S)
    assert seen.any() and not seen.any(-1).all()
    o, lse, gradients = formula(*QKV, seen, DO, np.where(seen.any(-1), DLSE, 0))
    found_o, found_lse, found, moved = run(kept, *QKV)
    close(found_o, o)
    close(found_lse, lse)
    for a, b in zip(found, gradients, strict=True):
        close(a, b)
    along = sum((a * b).sum() for a, b in zip(gradients, QKV, strict=True))  # <Jᵀu, t> = <u, Jt>
    close(np.sum(moved[0] * DO) + np.where(seen.any(-1), moved[1] * DLSE, 0).sum(), along)


@pytest.mark.parametrize("kept", (False, True))
def test_no_block_and_every_block(kept):
    size = SIZES["uneven"]
    mask = np.full(block_mask((), size).shape, kept)
    o, lse = ejkernel.lax.blocksparse_attention(*QKV, mask, block_size=size, return_lse=True)
    wanted = formula(*QKV, entries(mask, size), DO, DLSE)
    close(o, wanted[0])
    close(lse, wanted[1])


def test_keys_outside_all_blocks_may_be_nan():
    """Blocks that are not kept, and hidden keys of kept ones, affect neither results nor gradients."""
    size, kept = (8, 13), np.zeros((5, 4), bool)
    kept[1, 1] = kept[2, 2] = True
    position = np.arange(S)[:, None] + K - S
    seen = entries(kept, size) & (np.arange(K) <= position) & (np.arange(K) >= position - 4)
    rows, columns = seen.any(-1)[0, 0], seen.any(-2)[0, 0]
    q, k, v = (np.where(of[:, None, None], x, np.nan) for of, x in zip((rows, columns, columns), QKV, strict=True))
    do = np.where(rows[:, None, None], DO, np.nan)
    call = lambda *x: ejkernel.lax.blocksparse_attention(*x, kept, block_size=size, window=(4, 0), return_lse=True)
    (o, lse), pull = jax.vjp(call, q, k, v)
    wanted = formula(*QKV, seen, np.nan_to_num(do), 0 * DLSE)
    close(o, wanted[0])
    close(lse, wanted[1])
    for a, b in zip(pull((do, 0 * DLSE)), wanted[2], strict=True):
        close(a, b)


# --- What it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", LEADING)
def test_only_kept_blocks_are_computed(leading):
    """Each as often as the block mask keeps one that is not hidden by causality."""
    size = (8, 13)
    kept = block_mask(LEADING[leading], size)
    spec, seen = BlocksparseAttentionSpec(causal=True, block_size=size), []
    mask = jnp.asarray(kept).reshape((1,) * (4 - kept.ndim) + kept.shape)
    x, tiles = cut(Operands(*QKV, mask), spec, KernelConfig(block_q=8, block_k=13))

    def of_tile(x):
        jax.debug.callback(lambda: seen.append(1))
        return {"m": x.q.sum(-1, keepdims=True)}

    nothing = lambda: {"m": jnp.zeros((*x.q.shape[:4], 1))}
    jax.block_until_ready(tiles.sweep(of_tile, (x,), lambda a, b: {"m": a["m"] + b["m"]}, nothing))
    jax.effects_barrier()
    first, last = np.arange(4) * 13, np.minimum(np.arange(5) * 8 + 8, S) - 1 + K - S
    assert len(seen) == (kept & (first <= last[:, None])).sum()


def test_an_empty_batch_with_segment_ids_and_a_mask():
    x, ids, pairs = jnp.zeros((0, 11, 2, 24)), jnp.zeros((0, 11), jnp.int32), jnp.ones((0, 1, 11, 11), bool)
    given = dict(block_size=(16, 8), q_segment_ids=ids, kv_segment_ids=ids, mask=pairs)
    call = lambda q: ejkernel.lax.blocksparse_attention(q, x, x, jnp.ones((0, 1, 1, 2), bool), **given)
    assert call(x).shape == jax.grad(lambda q: call(q).sum())(x).shape == x.shape


@pytest.mark.parametrize("heads", (1, 2))
def test_a_step_of_a_loop_copies_nothing_as_long_as_the_sequence(heads):
    """Otherwise the time of a block would grow with the sequence."""
    x, mask = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32), jax.ShapeDtypeStruct((heads, 32, 32), bool)
    call = lambda q, k, v, mask: ejkernel.lax.blocksparse_attention(q, k, v, mask).sum()
    text = jax.jit(jax.grad(call, (0, 1, 2))).lower(x, x, x, mask).compile().as_text()
    loops = [text.split(f"%{body} (")[1].split("\n}")[0] for body in re.findall(r"body=%([\w.\-]+)", text)]
    assert len(loops) >= 3, "the forward, δ, and the gradients"
    copies = re.findall(r"\[([\d,]+)\]\S* copy\(", "\n".join(loops))
    assert not [shape for shape in copies if "4096" in shape.split(",")]


@pytest.mark.parametrize("heads", (1, 2))
def test_memory_of_128k_tokens(heads):
    """No array has the size of the logits, forward or backward; programs are compiled, and not run."""
    tokens, block = 2**17, 128
    x = jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)
    mask = jax.ShapeDtypeStruct((heads, tokens // block, tokens // block), bool)
    call = lambda q, k, v, mask: ejkernel.lax.blocksparse_attention(q, k, v, mask, causal=True).sum()
    compiled = jax.jit(jax.grad(call, (0, 1, 2))).lower(x, x, x, mask).compile()
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) <= tokens * 2 * 64
    assert compiled.memory_analysis().temp_size_in_bytes < 2**30
