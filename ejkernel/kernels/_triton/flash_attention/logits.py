"""What the kernels of flash_attention compute of a tile: logits, weights, and their derivatives.

Index tensors are given as [rows, 1] and [1, columns], or the other way round where a tile is transposed: what is
computed from them follows their shapes. See sequence_info.py.

Since lse is rounded, the weights exp(s − lse) of a row do not sum to 1 exactly: an lse of 200 in float32 is off by up
to 8e-6, and so is every weight of the row, relatively. In 16 bits that is negligible. In float32 the row is multiplied
by its correction, the reciprocal of the sum (see rows.py), unless it has keys in other splits too.
"""

import triton
import triton.language as tl

from .problem import LARGEST_EXPONENT as LARGEST
from .sequence_info import pairs_at

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.9259629911e-08)  # log₂e less its rounding to float32
LN2 = tl.constexpr(0.6931471805599453)
LARGEST_EXPONENT = tl.constexpr(LARGEST)
SMALLEST_SUM = tl.constexpr(2.0**-100)  # below it, all weights of the row underflow


@triton.jit
def biases(bias, i, j, info, problem: tl.constexpr):
    """The biases of a tile; None where there are none."""
    if bias is None:
        return
    else:
        strides: tl.constexpr = problem.bias_strides
        address, inside = pairs_at(bias, i, j, info, strides)
        return tl.load(address, mask=inside, other=0.0)


@triton.jit
def total_scale(softmax_scale, info, problem: tl.constexpr):
    """The factor of q·kᵀ."""
    if softmax_scale is None:
        scale: tl.constexpr = problem.scale
        return scale
    else:
        strides: tl.constexpr = problem.scale_strides
        return problem.scale * tl.load(softmax_scale + info.batch * strides.b + info.head * strides.h)


@triton.jit
def capped(product, scale, bias, problem: tl.constexpr):
    """The logits of a tile, or q·kᵀ itself if the problem folds the scale into the exponent."""
    if problem.folded:
        return product
    elif bias is None and problem.softcap is None:
        # A multiplication alone would be fused with the subtraction in s − m, where m is the rounded maximum: the
        # exponent of the largest weight would not be 0 but the rounding error of m, from m = 2³¹ on up to 128.
        return tl.fma(product, scale, 0.0)
    else:
        s = product * scale
        if bias is not None:
            s += bias.to(tl.float32)
        if problem.softcap is not None:
            s = problem.softcap * tanh(s * (1 / problem.softcap), problem.caps_far)
        return s


@triton.jit
def exponential(s, row, problem: tl.constexpr):
    """exp(logits − row), with one number per row."""
    return power(exponent(s, row, problem), problem)


@triton.jit
def weights_of_maximum(s, m, problem: tl.constexpr):
    """exp(s − m) with the maximum m of each row, both in the unit of `capped`; exactly 1 where s = m.

    If the scale is folded, one multiply-add computes s·c − m·c with m·c rounded. From m·c = 2²⁶ on, this rounding error
    may be 4 or more in the exponent: a factor of 16. But float32 resolves such logits in steps of 8 or more, so that
    weights are 1 or nearly 0 for any larger c as well: the next power of two is taken, with which products are exact.
    """
    if problem.folded:
        c: tl.constexpr = problem.scale * LOG2E
        # As float32 arrays: Triton would make a Python number outside of the normal float32 range a float64.
        exact = tl.full(m.shape, problem.factor_of_large_logits, tl.float32)
        factor = tl.where(tl.abs(m) * c < 2.0**26, tl.full(m.shape, c, tl.float32), exact)
        return tl.exp2(s * factor[:, None] - (m * factor)[:, None])
    else:
        return exponential(s, m[:, None], problem)


@triton.jit
def weights_of_lse(s, lse, problem: tl.constexpr, CORRECTED: tl.constexpr):
    """exp(s − lse), kept finite where rounding makes s larger than lse.

    Near 10⁹ float32 resolves logits in steps of 64, and q·kᵀ summed in another order than in the forward may exceed lse
    by so much that the exponential overflows. Weights that are corrected by their sum keep their ratios, up to an
    exponent that leaves sums finite. Others become exp(−|s − lse|), which is as close to the weight, and costs nothing:
    the hardware's ex2 takes −|x| as an operand.
    """
    x = exponent(s, lse, problem)
    if CORRECTED:
        return power(tl.minimum(x, LARGEST_EXPONENT, tl.PropagateNan.ALL), problem)
    else:
        return power(-tl.abs(x), problem)


@triton.jit
def exponent(s, row, problem: tl.constexpr):
    """logits − row, as an exponent of e in float32 and of 2 otherwise.

    If the scale is folded, it is one multiply-add.
    """
    if problem.folded:
        return s * (problem.scale * LOG2E) - row * LOG2E
    elif problem.exact:
        return s - row
    else:
        return (s - row) * LOG2E


@triton.jit
def power(x, problem: tl.constexpr):
    """e^x in float32 and 2^x otherwise, for x from `exponent`.

    In float32 the rounding error of the product y = x·log₂e is compensated: exp(x) = 2^y·(1 + (x·log₂e − y)·ln 2).
    """
    if problem.exact:
        x = tl.maximum(x, -1000.0, tl.PropagateNan.ALL)  # the compensation of −∞ would be NaN
        y = x * LOG2E
        lost = tl.fma(x, LOG2E, -y) + x * LOG2E_REST
        rounded = tl.exp2(y)
        return tl.fma(rounded, lost * LN2, rounded)
    else:
        return tl.exp2(x)


@triton.jit
def tanh(x, OF_SMALL: tl.constexpr):
    """(1 − e) / (1 + e) with e = exp(−2|x|) and the sign of x; with `OF_SMALL`, its series where x is small."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    y = (1 - e) / (1 + e)
    y = tl.where(x < 0, -y, y)
    if OF_SMALL:  # 1 − e cancels for a small x
        z = x * x
        series = x + x * z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835))))
        y = tl.where(z < 0.0625, series, y)
    return y


@triton.jit
def first_statistics(sinks, info, problem: tl.constexpr, ROWS: tl.constexpr):
    """The initial maximum (in the unit of `capped`) and sum of every row: those of the sinks."""
    if sinks is None:
        return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    else:
        strides: tl.constexpr = problem.sinks_strides
        n = tl.arange(0, problem.SINKS_PAD)
        sinks += info.batch * strides.b + info.head * strides.h
        sink = tl.load(sinks + n, mask=n < problem.sinks, other=float("-inf"))
        m = tl.max(sink, 0)
        l = tl.sum(tl.exp2((sink - tl.where(m == float("-inf"), 0.0, m)) * LOG2E), 0)
        return tl.full([ROWS], 0.0, tl.float32) + m / problem.unit, tl.full([ROWS], 0.0, tl.float32) + l


@triton.jit
def kept(dropout, i, j, info, problem: tl.constexpr):
    """Whether dropout keeps weight (i, j): word 0 of Philox-4x32-10 at counter (j', i', batch, head) is large enough.

    i' and j' are the places of query and key in the whole of which the call is a part.
    """
    dropout += (info.batch * problem.H + info.head) * 8
    key_0, key_1 = tl.load(dropout), tl.load(dropout + 1)
    batch, head = tl.load(dropout + 2) + tl.cast(info.sequence, tl.uint32), tl.load(dropout + 3)
    i = tl.load(dropout + 4) + tl.load(dropout + 5) * i.to(tl.uint32)
    j = tl.load(dropout + 6) + tl.load(dropout + 7) * j.to(tl.uint32)
    word, _, _, _ = tl.random.philox_impl(j, i, batch, head, key_0, key_1)
    return word >= tl.full([], problem.keep_from, tl.uint32)


@triton.jit
def keep_factor(dropout, i, j, info, problem: tl.constexpr):
    """The factor of each weight of a tile by dropout: 0 or 1 / (1 − rate)."""
    if dropout is None:
        return 1.0
    else:
        return tl.where(kept(dropout, i, j, info, problem), problem.keep_scale, 0.0)


@triton.jit
def weights_and_logit_cotangents(
    product, dp, lse, correction, delta, scale, bias, dropout, i, j, info, problem: tl.constexpr
):  # fmt: skip
    """p, p̃ and ds of a tile before masking, from q·kᵀ, do·vᵀ, and lse, correction and delta of its rows.

    p = exp(s − lse)·correction,  p̃ = p ∘ keep/(1 − rate),  ds = (p̃ ∘ dp − p·delta) ∘ (1 − (s/softcap)²)
    """
    s = capped(product, scale, bias, problem)
    p, left, ds = weights_and_differences(
        s, dp, lse, correction, delta, dropout, i, j, info, problem, correction is not None
    )
    if problem.softcap is not None:
        ds *= softcap_slope(s, problem)
    return p, left, ds


@triton.jit
def weights_and_differences(s, dp, lse, correction, delta, dropout, i, j, info, problem: tl.constexpr,
                            CORRECTED: tl.constexpr):  # fmt: skip
    """p, p̃ and p̃ ∘ dp − p·delta of a tile; CORRECTED if weights are corrected by their sum, or summed for it here."""
    p = weights_of_lse(s, lse, problem, CORRECTED)
    if correction is not None:
        p *= correction
    keep = keep_factor(dropout, i, j, info, problem)
    return p, p * keep, p * (dp * keep - delta)


@triton.jit
def softcap_slope(s, problem: tl.constexpr):
    """The derivative of softcap·tanh(x/softcap) at the x for which it is s: 1 − (s/softcap)²."""
    ratio = s * (1 / problem.softcap)
    return 1 - ratio * ratio


@triton.jit
def logits_tangent(s_dot, s, product, scale, scale_dot, bias_dot, info, problem: tl.constexpr):
    """The tangent of the logits s, from q·kᵀ (product), its tangent (s_dot), and the tangent of the bias."""
    s_dot *= scale
    if scale_dot is not None:
        s_dot += total_scale(scale_dot, info, problem) * product
    if bias_dot is not None:
        s_dot += bias_dot.to(tl.float32)
    if problem.softcap is not None:
        s_dot *= softcap_slope(s, problem)
    return s_dot


@triton.jit
def weights_and_logit_tangents(product, s_dot, lse, scale, scale_dot, bias, bias_dot, info, problem: tl.constexpr,
                               LOGITS_MOVE: tl.constexpr):  # fmt: skip
    """p and s_dot of a tile before masking, from q·kᵀ, its tangent, and lse of its rows."""
    s = capped(product, scale, bias, problem)
    if LOGITS_MOVE:
        s_dot = logits_tangent(s_dot, s, product, scale, scale_dot, bias_dot, info, problem)
    return weights_of_lse(s, lse, problem, problem.corrected), s_dot


@triton.jit
def sinks_weights(sinks, sinks_dot, lse, info, problem: tl.constexpr, CORRECTED: tl.constexpr):
    """Σ_n exp(sink_n − lse) and Σ_n exp(sink_n − lse)·sink_dot_n for every row."""
    total = tl.zeros([lse.shape[0]], tl.float32)
    moved = total
    if sinks is not None:
        strides: tl.constexpr = problem.sinks_strides
        n = tl.arange(0, problem.SINKS_PAD)
        start = info.batch * strides.b + info.head * strides.h
        sink = tl.load(sinks + start + n, mask=n < problem.sinks, other=float("-inf"))
        largest: tl.constexpr = LARGEST_EXPONENT if CORRECTED else 0.0
        weights = tl.exp2(tl.minimum((sink[None, :] - lse) * LOG2E, largest, tl.PropagateNan.ALL))
        total = tl.sum(weights, 1)
        if sinks_dot is not None:
            sink_dot = tl.load(sinks_dot + start + n, mask=n < problem.sinks, other=0.0)
            moved = tl.sum(weights * sink_dot[None, :], 1)
    return total, moved


@triton.jit
def correction_of(total):
    """1 / Σ exp(s − lse) over keys and sinks; 1 for a fully masked row."""
    return 1 / tl.where(total < SMALLEST_SUM, 1.0, total)


@triton.jit
def compensated(total, lost, x):
    """total + x, and its rounding error, which the next call subtracts from its x (Kahan's summation)."""
    x -= lost
    new = total + x
    return new, (new - total) - x
