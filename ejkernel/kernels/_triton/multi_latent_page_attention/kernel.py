"""Absorbed latent attention over pages: every slot is read once, as the key of all heads and, but for its rotary part,
as their value.

A row is some tokens of one sequence, one in a decode. A program has the heads of a row, or as many of them as a tile
has, and one part of the keys that its tokens see, and leaves its own o and lse:

    s_j = softcap·tanh(scale·(q_latent·c_j + q_rope·r_j) / softcap)
    lse_p = log(Σ_j exp s_j + [p = 0] Σ_x exp sinks_x),    o_p = Σ_j exp(s_j − lse_p) c_j

of which `merge_parts` makes those of all parts. The parts are of whole tiles, which begin where a tile of the cache
does: of a row of one token they depend on its sequence alone.

Statistics are relative to maxima in logits of base 2. Slots that no token of a row sees are not read.

Of tokens with lists of keys each is a row, whose keys are in the places of its list: j numbers these, and a table of
slots says where in the pool they stand. −1 is not read, and has no weight.

Transposed, tiles of logits have keys as rows: Hopper's products, of 64 rows and from 8 columns on, then have the keys
and features for these, and few heads for those.
"""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._paged import SMALLEST_TILE
from ejkernel.kernels._triton._paged.attend import in_dtype, tanh
from ejkernel.kernels._triton._paged.parts import merge_parts
from ejkernel.kernels._triton._paged.softmax import LN2, LOG2E
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

from .configs import of_launch, rows_of
from .problem import Problem, strides_of
from .rows import step_of, step_of_lists


def multi_latent_page_attention(
    x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig, of_cached: Outputs | None = None
) -> Outputs:
    """o [b,t,h,c] and lse [b,t,h]; of_cached: those of the cached keys and sinks, where only drafts are left."""
    (B, T, H, R), D, lists = x.q_latent.shape, x.q_rope.shape[3], x.indices is not None
    heads, tokens = rows_of(H, config)
    if lists:
        step, x = step_of_lists(x, spec)
    else:
        step = step_of(x, spec, 1 if spec.batch_invariant else tokens, is_of_drafts=of_cached is not None)
    (_, pages, page, _), (_, sequences, columns) = x.pages.shape, x.block_tables.shape
    splits, rows = spec.num_splits or config.num_splits, step.rows.shape[1]
    problem = Problem(
        T, H, R, D, rows, sequences, pages, page, columns, lists, splits,
        0 if step.drafts is None else step.drafts.shape[2], spec.softmax_scale, spec.softcap,
        strides_of(x.pages.shape[:3]),
        0 if x.sinks is None or x.sinks.shape[0] == 1 else H,
        None if x.k_scale is None else strides_of(x.k_scale.shape[:3]),
    )  # fmt: skip
    of, dtype = jax.ShapeDtypeStruct, x.q_latent.dtype
    o, lse = _launch.launch(
        latent_kernel,
        x.q_latent, x.q_rope, x.pages, x.block_tables, step.rows, step.first, step.stop, step.cached, step.drafts,
        step.drafts_of_row, None if x.sinks is None else jax.nn.logsumexp(x.sinks, axis=-1), x.k_scale,
        *(of_cached or (None, None)),
        out_type=(of((B, T, splits, H, R), dtype if splits == 1 else jnp.float32), of((B, T, splits, H), jnp.float32)),
        grid=B * rows * splits * triton.cdiv(H, heads),
        config=of_launch(config),
        problem=problem,
        HEADS=heads,
        TOKENS=tokens,
        BLOCK_K=config.keys_per_block,
        WIDTH=max(SMALLEST_TILE, triton.next_power_of_2(R)),
        ROPE=max(SMALLEST_TILE, triton.next_power_of_2(D)),
        TRANSPOSED=config.algorithm == "transposed",
    )  # fmt: skip
    if splits == 1:
        o, lse = o[:, :, 0], lse[:, :, 0]
    else:
        o, lse = merge_parts(o.reshape(-1, R), lse.reshape(-1, 1), None, splits, H, dtype, spec.batch_invariant)
        o, lse = o.reshape(B, T, H, R), lse.reshape(B, T, H)
    valid = step.valid[..., None]  # of other tokens nothing is written
    return Outputs(jnp.where(valid[..., None], o, np.zeros((), dtype)), jnp.where(valid, lse, np.float32(-np.inf)))


@triton.jit
def latent_kernel(
    q_latent, q_rope, pages, block_tables, rows, first, stop, cached, drafts, drafts_of_row, sinks, k_scale,
    o_cached, lse_cached, o, lse,
    problem: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    KEYS: tl.constexpr = 0 if TRANSPOSED else 1  # the axis of a tile of logits that they are along
    head_blocks: tl.constexpr = (problem.H + HEADS - 1) // HEADS
    part = tl.program_id(0) // head_blocks % problem.splits
    row = tl.program_id(0) // (head_blocks * problem.splits)  # of all batches
    batch = row // problem.rows
    sequence, token, count = tl.load(rows + row * 3), tl.load(rows + row * 3 + 1), tl.load(rows + row * 3 + 2)
    if count == 0:
        return
    m, c, d = tl.arange(0, TOKENS * HEADS), tl.arange(0, WIDTH), tl.arange(0, ROPE)
    head = tl.program_id(0) % head_blocks * HEADS + m % HEADS
    is_token = m // HEADS < count
    inside = is_token & (head < problem.H)
    at = batch * problem.T + token + m // HEADS  # of the tokens of all batches
    query = at.to(tl.int64) * problem.H + head
    latents = load_rows(q_latent, query * problem.R, inside, c, problem.R, WIDTH)
    ropes = load_rows(q_rope, query * problem.D, inside, d, problem.D, ROPE)

    first_of, stop_of = tl.load(first + at, mask=is_token, other=0), tl.load(stop + at, mask=is_token, other=0)
    high = tl.max(stop_of, 0)
    low = tl.min(tl.where(first_of < stop_of, first_of, high), 0)
    first_tile = low // BLOCK_K
    each = tl.cdiv(tl.cdiv(high, BLOCK_K) - first_tile, problem.splits)
    begin = first_tile + part * each
    end = tl.minimum(begin + each, tl.cdiv(high, BLOCK_K))

    maximum, total, acc = softmax_before(
        sinks, o_cached, lse_cached, part, batch, head, query, inside, c, problem, WIDTH, TRANSPOSED
    )
    # Every token of a row sees the cached keys, as far as its window, and bits of drafts say which others. These take
    # registers: tiles of drafts have few keys. With pages of eight bits two loops would spill, and all keys have one.
    two_loops: tl.constexpr = drafts is not None and pages.dtype == q_latent.dtype
    BLOCK_DRAFTS: tl.constexpr = 16 if two_loops else BLOCK_K
    low, high = tl.maximum(low, begin * BLOCK_K), tl.minimum(high, end * BLOCK_K)
    stop_cached, new_from = high, 0
    if drafts is not None:
        new_from = tl.load(cached + batch * problem.T + token)
        stop_cached = tl.minimum(tl.maximum(new_from, low), high) if two_loops else low
    for tile in tl.range(begin, tl.where(low < stop_cached, tl.cdiv(stop_cached, BLOCK_K), begin)):
        maximum, total, acc = attend_tile(
            tile, low, stop_cached, first_of, stop_of, batch, sequence, row, at, is_token, c, d, latents, ropes, pages,
            block_tables, new_from, drafts, drafts_of_row, k_scale, maximum, total, acc,
            problem, BLOCK_K, WIDTH, ROPE, TRANSPOSED, DRAFTS=False, CUT=two_loops,
        )  # fmt: skip
    if drafts is not None:
        begin = stop_cached // BLOCK_DRAFTS
        for tile in tl.range(begin, tl.where(stop_cached < high, tl.cdiv(high, BLOCK_DRAFTS), begin)):
            maximum, total, acc = attend_tile(
                tile, stop_cached, high, first_of, stop_of, batch, sequence, row, at, is_token, c, d, latents, ropes,
                pages, block_tables, new_from, drafts, drafts_of_row, k_scale, maximum, total, acc,
                problem, BLOCK_DRAFTS, WIDTH, ROPE, TRANSPOSED, DRAFTS=True, CUT=two_loops,
            )  # fmt: skip
    acc /= tl.expand_dims(tl.where(total == 0.0, 1.0, total), KEYS)
    if TRANSPOSED:
        acc = tl.trans(acc)
    out = (at.to(tl.int64) * problem.splits + part) * problem.H + head
    is_written = inside[:, None] if problem.R == WIDTH else inside[:, None] & (c < problem.R)[None, :]
    tl.store(o + out[:, None] * problem.R + c[None, :], acc.to(o.dtype.element_ty), mask=is_written)
    tl.store(lse + out, maximum * LN2 + tl.log(total), mask=inside)


@triton.jit
def softmax_before(
    sinks, o_cached, lse_cached, part, batch, head, query, inside, c,
    problem: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The softmax of a row before its keys: that of the cached ones and sinks, of the sinks alone, or of nothing."""
    rows: tl.constexpr = head.shape[0]
    maximum = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([WIDTH, rows] if TRANSPOSED else [rows, WIDTH], tl.float32)
    if sinks is not None:
        is_first = inside & (part == 0)
        maximum = LOG2E * tl.load(sinks + batch * problem.sinks + head, mask=is_first, other=float("-inf"))
        total = is_first.to(tl.float32)
    if o_cached is not None:
        maximum = LOG2E * tl.load(lse_cached + query, mask=inside, other=float("-inf"))
        total = (maximum > float("-inf")).to(tl.float32)
        acc = load_rows(o_cached, query * problem.R, inside, c, problem.R, WIDTH).to(tl.float32)
        if TRANSPOSED:
            acc = tl.trans(acc)
    return maximum, total, acc


@triton.jit
def attend_tile(
    tile, low, high, first_of, stop_of, batch, sequence, row, at, is_token, c, d, latents, ropes, pages,
    block_tables, new_from, drafts, drafts_of_row, k_scale, maximum, total, acc,
    problem: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TRANSPOSED: tl.constexpr,
    DRAFTS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The softmax so far, with the keys of one tile.

    DRAFTS: whether drafts may be among them; CUT: whether those outside of low ≤ j < high are another loop's.
    """
    KEYS: tl.constexpr = 0 if TRANSPOSED else 1  # the axis of a tile of logits that they are along
    position = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    at_key = tl.expand_dims(position, 1 - KEYS)
    visible = (at_key >= tl.expand_dims(first_of, KEYS)) & (at_key < tl.expand_dims(stop_of, KEYS))
    needed = (position >= low) & (position < high)
    if CUT:
        visible &= tl.expand_dims(needed, 1 - KEYS)
    if DRAFTS:
        new = position - new_from
        tokens, asked = tl.expand_dims(at, KEYS), tl.expand_dims(is_token, KEYS)
        first_draft = tile * BLOCK_K - new_from
        visible &= (at_key < new_from) | of_drafts(
            drafts, tokens, asked, at_key - new_from, first_draft, problem, BLOCK_K
        )
        row_of = tl.zeros_like(new) + row
        needed &= (new < 0) | of_drafts(drafts_of_row, row_of, new >= 0, new, first_draft, problem, BLOCK_K)
    table = (batch * problem.sequences + sequence).to(tl.int64) * problem.columns
    if problem.lists:
        slot = tl.load(block_tables + table + position, mask=needed, other=-1).to(tl.int64)
        needed &= slot >= 0
        visible &= tl.expand_dims(slot >= 0, 1 - KEYS)
    else:
        slot = place(block_tables + table, position, needed, problem)
    start = (batch.to(tl.int64) * problem.slots.batch + slot) * (problem.R + problem.D)
    keys = in_dtype(load_rows(pages, start, needed, c, problem.R, WIDTH), latents)
    key_ropes = in_dtype(load_rows(pages, start + problem.R, needed, d, problem.D, ROPE), latents)
    if TRANSPOSED:
        s = tl.dot(keys, tl.trans(latents), input_precision="ieee")
        s = tl.dot(key_ropes, tl.trans(ropes), s, input_precision="ieee") * problem.scale
    else:
        s = tl.dot(latents, tl.trans(keys), input_precision="ieee")
        s = tl.dot(ropes, tl.trans(key_ropes), s, input_precision="ieee") * problem.scale
    if k_scale is not None:
        factor = tl.expand_dims(load_scales(k_scale, batch, slot, needed, problem), 1 - KEYS)
        s *= factor
    if problem.softcap is not None:
        s = problem.softcap * tanh(s * (1 / problem.softcap))
    s = tl.where(visible, s * LOG2E, float("-inf"))
    highest = tl.maximum(maximum, tl.max(s, KEYS))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(s - tl.expand_dims(base, KEYS))
    alpha = tl.exp2(maximum - base)
    total = total * alpha + tl.sum(p, KEYS)
    if k_scale is not None:
        p *= factor
    acc *= tl.expand_dims(alpha, KEYS)
    if TRANSPOSED:
        acc = tl.dot(tl.trans(keys), p.to(keys.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(keys.dtype), keys, acc, input_precision="ieee")
    return highest, total, acc


@triton.jit
def load_rows(x, start, mask, column, size: tl.constexpr, WIDTH: tl.constexpr):
    """`size` numbers from each start on, in a tile of WIDTH columns; 0 where the mask is False."""
    if size == WIDTH:
        return tl.load(x + start[:, None] + column[None, :], mask=mask[:, None], other=0.0)
    else:
        return tl.load(x + start[:, None] + column[None, :], mask=mask[:, None] & (column < size)[None, :], other=0.0)


@triton.jit
def place(table, position, needed, problem: tl.constexpr):
    """Which slot of the pool the keys at these positions have; a page that is not in it is the nearest one that is."""
    page = tl.load(table + position // problem.page, mask=needed, other=0)
    page = tl.minimum(tl.maximum(page, 0), problem.pages - 1)
    # Triton takes all of these for multiples of what the first one of a page is a multiple of: it would copy rows of 72
    # bytes by 16 at a time. What is said here replaces what it found.
    return tl.multiple_of(page.to(tl.int64) * problem.page + position % problem.page, 1)


@triton.jit
def of_drafts(drafts, token, mask, new, first, problem: tl.constexpr, BLOCK_K: tl.constexpr):
    """Whether each token sees the drafts with these numbers, from `first` on; both of shapes that broadcast."""
    words: tl.constexpr = problem.draft_words
    of_tile: tl.constexpr = (BLOCK_K + 30) // 32 + 1  # the most words that BLOCK_K bits are in
    told = tl.zeros_like(token) | tl.zeros_like(new)
    for n in tl.static_range(min(words, of_tile)):
        word, asked = n, mask
        if words > of_tile:
            word = (first >> 5) + n
            asked = mask & (word >= 0) & (word < words)
        bits = tl.load(drafts + token.to(tl.int64) * words + word, mask=asked, other=0)
        place = new - 32 * word
        told |= tl.where((place >= 0) & (place < 32), (bits >> (place & 31)) & 1, 0)
    return told != 0


@triton.jit
def load_scales(k_scale, batch, slot, needed, problem: tl.constexpr):
    """The factors of the keys in these slots, 0 where they are not needed."""
    strides: tl.constexpr = problem.k_scale
    at = batch.to(tl.int64) * strides.batch + slot // problem.page * strides.page + slot % problem.page * strides.slot
    return tl.load(k_scale + at, mask=needed, other=0.0)
