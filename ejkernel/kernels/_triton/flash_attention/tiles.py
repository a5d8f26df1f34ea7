"""The pieces that the kernels of flash_attention are made of.

A program holds one block of queries (or of keys) of one head, and loops over the blocks of keys (or queries) that it
can see. Rows i and columns j count within the sequence. Index tensors are given as [rows, 1] and [1, columns], or the
other way round where a tile is held transposed: what is computed from them follows their shapes.

Every loop is one loop, which masks the tiles that are not seen whole, and stands in a branch that is taken if it is not
empty: where the accumulator of a loop that may be empty meets its initial value, ptxas gives up running the matrix
products asynchronously (its remark C7515).

The frame of a program is where it works: (batch, head, sequence, q_start, q_len, k_start, k_len). In a dense call the
sequence is number 0, and begins at 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911e-08)  # log₂e less its rounding to float32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def place(BLOCKS: tl.constexpr, HEADS: tl.constexpr):
    """The block, the head and the batch index of this program."""
    pid = tl.program_id(0)
    return pid % BLOCKS, pid // BLOCKS % HEADS, pid // (BLOCKS * HEADS)


@triton.jit
def sequence_of(block, batch, cu_q, cu_k, problem: tl.constexpr, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """Where a block of queries (or keys) begins in its sequence, and (sequence, q_start, q_len, k_start, k_len).

    Blocks of a packed call are numbered through its sequences, of which sequence n has ceil(length_n / BLOCK). The
    tokens past the last sequence are treated as one more, which has no tokens on the other side.
    """
    if problem.N is None:
        return block * BLOCK, 0, 0, problem.S, 0, problem.K
    else:
        cu_q += batch * problem.cu_q_strides.b
        cu_k += batch * problem.cu_k_strides.b
        cu = cu_k if OF_KEYS else cu_q
        tokens: tl.constexpr = problem.K if OF_KEYS else problem.S
        n = tl.arange(0, problem.N_PAD)
        starts = tl.load(cu + n, mask=n <= problem.N, other=tokens)
        stops = tl.load(cu + n + 1, mask=n < problem.N, other=tokens)
        blocks = (stops - starts + BLOCK - 1) // BLOCK
        sequence = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
        first = (block - tl.sum(tl.where(n < sequence, blocks, 0), 0)) * BLOCK
        here = tl.minimum(sequence, problem.N)
        q_start, k_start = tl.load(cu_q + here), tl.load(cu_k + here)
        after = tl.minimum(sequence + 1, problem.N)
        q_stop, k_stop = tl.load(cu_q + after), tl.load(cu_k + after)
        if OF_KEYS:
            k_stop = tl.where(sequence == problem.N, tokens, k_stop)
        else:
            q_stop = tl.where(sequence == problem.N, tokens, q_stop)
        return first, sequence, q_start, q_stop - q_start, k_start, k_stop - k_start


@triton.jit
def schedule(first, low, high, length, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, HELD: tl.constexpr,
             STEP: tl.constexpr):  # fmt: skip
    """The bounds of a loop by STEP over the y in [0, length) with x + low ≤ y ≤ x + high for some x in
    [first, first + HELD); and the first and the last tile whose every y is seen by every x, which needs no mask.
    """
    begin, end, first_full, last_full = 0, length, 0, length - STEP
    if HAS_LOW:
        begin = tl.maximum(first + low, 0) // STEP * STEP
        first_full = first + HELD - 1 + low
    if HAS_HIGH:
        end = tl.minimum(end, first + HELD + high)
        last_full = tl.minimum(last_full, first + high + 1 - STEP)
    return begin, end, first_full, last_full


@triton.jit
def load_tile(ptr, first, begin, end, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              CHECKED: tl.constexpr):  # fmt: skip
    """Rows first … first + ROWS of a matrix of WIDTH columns as a tile [ROWS, PADDED].

    Where CHECKED, rows outside of [begin, end) are not read, but zero.
    """
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    address = ptr + tl.cast(first, tl.int64) * stride + (rows * stride + columns)
    inside = (first + rows >= begin) & (first + rows < end)
    if CHECKED and WIDTH != PADDED:
        return tl.load(address, mask=inside & (columns < WIDTH), other=0.0)
    elif CHECKED:
        return tl.load(address, mask=inside, other=0.0)
    elif WIDTH != PADDED:
        return tl.load(address, mask=columns < WIDTH, other=0.0)
    else:
        return tl.load(address)


@triton.jit
def store_tile(ptr, tile, first, length, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Stores what `load_tile` loads."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    address = ptr + tl.cast(first, tl.int64) * stride + (rows * stride + columns)
    tl.store(address, tile.to(ptr.dtype.element_ty), mask=(first + rows < length) & (columns < WIDTH))


@triton.jit
def load_rows(ptr, first, length, ROWS: tl.constexpr, CHECKED: tl.constexpr, other):
    """Numbers first … first + ROWS of a vector."""
    rows = first + tl.arange(0, ROWS)
    if CHECKED:
        return tl.load(ptr + rows, mask=rows < length, other=other)
    else:
        return tl.load(ptr + rows)


@triton.jit
def at(ptr, batch, row, ROWS: tl.constexpr, head, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The pointer to [batch, row, head, 0] of a dense [·, ROWS, HEADS, WIDTH]."""
    return ptr + ((tl.cast(batch, tl.int64) * ROWS + row) * HEADS + head) * WIDTH


@triton.jit
def pairs_at(ptr, i, j, frame, strides: tl.constexpr):
    """Pointers to elements (i, j) of this head and sequence, in an array whose axes (b, h, s, t) have these strides."""
    batch, head, _, q_start, _, k_start, _ = frame
    row = tl.cast(i + q_start, tl.int64) * strides.s + tl.cast(head, tl.int64) * strides.h
    return ptr + tl.cast(batch, tl.int64) * strides.b + row + (j + k_start) * strides.t


@triton.jit
def total_scale(softmax_scale, frame, problem: tl.constexpr):
    """The factor of q·kᵀ."""
    if softmax_scale is None:
        return problem.scale
    else:
        strides: tl.constexpr = problem.scale_strides
        return problem.scale * tl.load(softmax_scale + frame[0] * strides.b + frame[1] * strides.h)


@triton.jit
def logits(product, scale, bias, i, j, frame, problem: tl.constexpr):
    """The logits, or q·kᵀ itself where the problem's scale is folded into the exponent."""
    if problem.folded:
        return product
    else:
        s = product * scale
        if bias is not None:
            _, _, _, _, q_len, _, k_len = frame
            strides: tl.constexpr = problem.bias_strides
            inside = (i < q_len) & (j < k_len)
            s += tl.load(pairs_at(bias, i, j, frame, strides), mask=inside, other=0.0).to(tl.float32)
        if problem.softcap is not None:
            s = problem.softcap * tanh(s * (1 / problem.softcap))
        return s


@triton.jit
def exponential(s, row, problem: tl.constexpr):
    """exp of the logits less a number for each row; with one multiply-add for an exponent where the scale is folded.

    In float32, what the product y = x·log₂e loses in rounding is put back: exp(x) = 2^y·(1 + (x·log₂e − y)·ln 2).
    """
    if problem.folded:
        return tl.exp2(s * (problem.scale * LOG2E) - row * LOG2E)
    elif problem.exact:
        x = tl.maximum(s - row, -1000.0, tl.PropagateNan.ALL)  # of infinite differences nothing is lost
        y = x * LOG2E
        lost = tl.fma(x, LOG2E, -y) + x * LOG2E_REST
        power = tl.exp2(y)
        return tl.fma(power, lost * LN2, power)
    else:
        return tl.exp2((s - row) * LOG2E)


@triton.jit
def tanh(x):
    """(1 − e) / (1 + e) with e = exp(−2|x|), and the sign of x."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    y = (1 - e) / (1 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def first_statistics(sinks, frame, problem: tl.constexpr, ROWS: tl.constexpr):
    """The maximum (as a number of `logits`) and the sum that rows begin with: those of the sinks."""
    if sinks is None:
        return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    else:
        strides: tl.constexpr = problem.sinks_strides
        n = tl.arange(0, problem.SINKS_PAD)
        sinks += frame[0] * strides.b + frame[1] * strides.h
        sink = tl.load(sinks + n, mask=n < problem.sinks, other=float("-inf"))
        m = tl.max(sink, 0)
        l = tl.sum(tl.exp2((sink - tl.where(m == float("-inf"), 0.0, m)) * LOG2E), 0)
        return tl.full([ROWS], 0.0, tl.float32) + m / problem.unit, tl.full([ROWS], 0.0, tl.float32) + l


@triton.jit
def band(frame, problem: tl.constexpr):
    """The least and the greatest j − i that is seen; 0 where unbounded."""
    _, _, _, _, q_len, _, k_len = frame
    low = k_len - q_len - problem.left if problem.left is not None else 0
    high = k_len - q_len + problem.right if problem.right is not None else 0
    return low, high


@triton.jit
def seen_keys(frame, problem: tl.constexpr):
    """The bounds of the keys that the band shows to any query."""
    _, _, _, _, q_len, _, k_len = frame
    low, high = band(frame, problem)
    begin, end = 0, k_len
    if problem.left is not None:
        begin = tl.maximum(low, 0)
    if problem.right is not None:
        end = tl.minimum(end, q_len + high)
    return begin, end


@triton.jit
def visible(i, j, masks, frame, problem: tl.constexpr):
    """Whether query i sees key j, by the lengths, the band, the mask and the segment ids."""
    mask, q_segment_ids, kv_segment_ids = masks
    batch, _, _, q_start, q_len, k_start, k_len = frame
    low, high = band(frame, problem)
    ok = (i < q_len) & (j < k_len)
    if problem.left is not None:
        ok &= j >= i + low
    if problem.right is not None:
        ok &= j <= i + high
    if mask is not None:
        strides: tl.constexpr = problem.mask_strides
        ok &= tl.load(pairs_at(mask, i, j, frame, strides), mask=ok, other=0) != 0
    if q_segment_ids is not None:
        q_segment_ids = at(q_segment_ids, batch, q_start, problem.S, 0, 1, 1)
        kv_segment_ids = at(kv_segment_ids, batch, k_start, problem.K, 0, 1, 1)
        q_segment = tl.load(q_segment_ids + i, mask=i < q_len, other=-1)
        kv_segment = tl.load(kv_segment_ids + j, mask=j < k_len, other=-1)
        ok &= (q_segment == kv_segment) & (q_segment >= 0)
    return ok


@triton.jit
def drop_unseen(tile, ok, AXIS: tl.constexpr):
    """The tile with zeros in the rows that nothing sees: AXIS of `ok` runs over those who might."""
    seen = tl.max(ok.to(tl.int32), AXIS) > 0
    return tl.where(seen[:, None], tile, 0.0)


@triton.jit
def kept(dropout, i, j, frame, problem: tl.constexpr):
    """Whether dropout keeps weight (i, j): word 0 of Philox-4x32-10 at counter (j, i, batch, head) is large enough."""
    dropout += (frame[0] * problem.H + frame[1]) * 4
    key_0, key_1 = tl.load(dropout), tl.load(dropout + 1)
    batch, head = tl.load(dropout + 2) + tl.cast(frame[2], tl.uint32), tl.load(dropout + 3)
    word, _, _, _ = tl.random.philox_impl(j.to(tl.uint32), i.to(tl.uint32), batch, head, key_0, key_1)
    return word >= tl.full([], problem.keep_from, tl.uint32)


@triton.jit
def weights_and_logit_cotangents(
    product, dp, lse, delta, scale, bias, dropout, i, j, frame, problem: tl.constexpr
):  # fmt: skip
    """p̃ and ds of a tile before masks, from q·kᵀ, do·vᵀ, and the rows' logsumexp and delta.

    p = exp(s − lse),  p̃ = p ∘ keep/(1 − rate),  ds = p ∘ (dp ∘ keep/(1 − rate) − delta) ∘ (1 − (s/softcap)²)
    """
    s = logits(product, scale, bias, i, j, frame, problem)
    p = exponential(s, lse, problem)
    left = p
    if dropout is not None:
        keep = tl.where(kept(dropout, i, j, frame, problem), problem.keep_scale, 0.0)
        left, dp = p * keep, dp * keep
    ds = p * (dp - delta)
    if problem.softcap is not None:
        ds *= softcap_slope(s, problem)
    return left, ds


@triton.jit
def softcap_slope(s, problem: tl.constexpr):
    """d(softcap·tanh(x/softcap))/dx at the x that was capped to s."""
    ratio = s * (1 / problem.softcap)
    return 1 - ratio * ratio


@triton.jit
def logits_tangent(s_dot, s, product, scale, scale_dot, bias_dot, i, j, frame, problem: tl.constexpr):
    """The tangent of the logits s, from that of q·kᵀ (s_dot) and q·kᵀ itself (product)."""
    s_dot *= scale
    if scale_dot is not None:
        s_dot += total_scale(scale_dot, frame, problem) * product
    if bias_dot is not None:
        _, _, _, _, q_len, _, k_len = frame
        strides: tl.constexpr = problem.bias_strides
        inside = (i < q_len) & (j < k_len)
        s_dot += tl.load(pairs_at(bias_dot, i, j, frame, strides), mask=inside, other=0.0).to(tl.float32)
    if problem.softcap is not None:
        s_dot *= softcap_slope(s, problem)
    return s_dot


@triton.jit
def sinks_tangent(sinks, sinks_dot, lse, frame, problem: tl.constexpr):
    """Σ_n exp(sink_n − lse)·sink_dot_n of every row."""
    if sinks_dot is None:
        return tl.zeros_like(lse)
    else:
        strides: tl.constexpr = problem.sinks_strides
        n = tl.arange(0, problem.SINKS_PAD)
        start = frame[0] * strides.b + frame[1] * strides.h
        sink = tl.load(sinks + start + n, mask=n < problem.sinks, other=float("-inf"))
        sink_dot = tl.load(sinks_dot + start + n, mask=n < problem.sinks, other=0.0)
        return tl.sum(tl.exp2((sink[None, :] - lse[:, None]) * LOG2E) * sink_dot[None, :], 1)
