"""flash_attention on Hopper GPUs: Pallas kernels, compiled by Mosaic GPU.

Pallas is imported only when a kernel is first needed.

Weights are 2^(s·c − m·c) in one multiply-add, with m·c rounded. Logits have to stay below 10⁹: beyond 1.5·10⁹ half a
unit of the last place of m·c is 128, and weights overflow.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, Platform, Target, visible_pairs

from .._supports import refuses_scale, refuses_target
from . import configs, head_dims

# With fewer queries most rows of a tile are empty.
LEAST_QUERIES = 64
# Blocks have 128 keys: where a query sees fewer than this, Triton's smaller blocks were 1.2 to 1.6 times as fast.
LEAST_KEYS = 256
# With 64 features and at most this length Triton's backward takes 0.93 of the time, 0.85 under a causal mask; at twice
# the length both take the same.
SHORT = 512
SHORT_AND_PADDED = 1024
# Up to so many pairs of query and key there is a table of the order of additions to dq: 4 bytes for 64 × 64 pairs.
MOST_RANKED = 2**36
# The widest q that the tangent holds in registers beside the accumulator of o (configs.MOST_BESIDE_Q).
MOST_IN_REGISTERS = 192
# Where a length is no multiple of 8 the arrays are copied first. Up to so many visible keys of the mean query that
# costs more than Triton's kernel: 0.53 of the time for 257 queries and keys, 0.72 of that of the tangent.
LEAST_KEYS_OF_COPIES = 768
PAIRS = ("bias", "mask")
# What the tangent does not take.
ABSENT_FROM_TANGENT = (*PAIRS, "softmax_scale")
# With a bias or a mask: shorter ones have not been measured, and are left to Triton.
LEAST_OF_PAIRS = 1024
DROPOUT = (
    "dropout: its random numbers take longer than the products, so that these kernels would gain little over Triton"
)


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    if wrong := refuses_target(target):
        return wrong
    if operands.q.dtype.name not in ("bfloat16", "float16"):
        return f"q is {operands.q.dtype}; the kernels take bfloat16 and float16"
    if 0 in operands.q.shape or 0 in operands.k.shape:
        return "an empty batch or sequence"
    if wrong := head_dims.refuses(operands.q.shape[3]) or head_dims.refuses(operands.v.shape[3]):
        return wrong
    if operands.q.shape[1] < LEAST_QUERIES:
        return f"q has a length of {operands.q.shape[1]}; the kernels take {LEAST_QUERIES} queries or more"
    if operands.cu_seqlens_q is not None:
        queries, keys, sequences = operands.q.shape[1], operands.k.shape[1], operands.cu_seqlens_q.shape[1] - 1
        if keys > queries and queries < LEAST_QUERIES * sequences:
            return f"{sequences} sequences in {queries} queries; a tile of queries would load keys of several"
    if operands.dropout is not None:
        return DROPOUT
    return refuses_scale(spec) or _hidden_keys(spec, operands) or configs.refuses_pairs(operands)


def supports_jvp(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent cannot run on these operands, or None."""
    given = (name for name in ABSENT_FROM_TANGENT if getattr(operands, name) is not None)
    untaken = next((f"{name} is not taken by the tangent kernel" for name in given), None)
    if wrong := supports(spec, operands, target) or untaken:
        return wrong
    D, V = operands.q.shape[3], operands.v.shape[3]
    if D % 16 or V % 16:
        return f"q and v have head dims of {D} and {V}; the tangent kernel takes multiples of 16"
    if D != V and (D > MOST_IN_REGISTERS or V > configs.MOST_BESIDE_Q):
        most = f"{MOST_IN_REGISTERS} and {configs.MOST_BESIDE_Q}"
        return f"q and v have head dims of {D} and {V}; the tangent kernel takes different ones up to {most}"
    return None


def supports_bwd(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    (_, queries, heads, _), (_, keys, kv_heads, _) = operands.q.shape, operands.k.shape
    if operands.softmax_scale is not None and operands.softmax_scale.shape[1] > 1 and heads > kv_heads:
        return "softmax_scale: dk is summed over query heads, which have scales of their own"
    arrays = operands.cu_seqlens_q is not None or operands.q_segment_ids is not None
    if spec.batch_invariant and operands.cu_seqlens_q is not None:
        return "batch_invariant: the order of sums within a packed sequence depends on the sequences before it"
    if (spec.deterministic or spec.batch_invariant) and arrays and queries * keys > MOST_RANKED:
        return f"{queries} queries and {keys} keys: the table that orders the additions to dq would be too large"
    return supports(spec, operands, target)


def _hidden_keys(spec: FlashAttentionSpec, operands: Operands) -> str | None:
    """Refuses a band that masks some keys for every query: these may hold NaN, and 0·NaN = NaN.

    Keys that are masked by segments or by the ends of packed sequences are zeroed before the kernel, by mask_info.py.
    """
    if operands.cu_seqlens_q is not None or operands.q_segment_ids is not None:
        return None
    if visibility_of(operands._replace(mask=None), spec).masks_keys:
        return "some keys are masked for every query: they may hold NaN, and these kernels multiply it by 0"
    return None


def takes(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward leaves these operands to others, or None."""
    wrong = supports(spec, operands, target) or _few_keys(spec, operands) or _padded_tiles(operands)
    return wrong or _few_pairs(operands) or _copied_arrays(spec, operands)


def takes_jvp(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent leaves these operands to others, or None."""
    return supports_jvp(spec, operands, target) or _few_keys(spec, operands) or _copied_arrays(spec, operands)


def takes_bwd(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward leaves these operands to others, or None."""
    wrong = supports_bwd(spec, operands, target) or _few_keys(spec, operands) or _few_pairs(operands)
    return wrong or _small_tiles(operands) or _padded_tiles(operands)


def _few_keys(spec: FlashAttentionSpec, operands: Operands) -> str | None:
    keys = visibility_of(operands, spec).most_keys
    if keys < LEAST_KEYS:
        return f"queries see at most {keys} keys; below {LEAST_KEYS} the smaller tiles of Triton are faster"
    return None


def _copied_arrays(spec: FlashAttentionSpec, operands: Operands) -> str | None:
    queries, keys = operands.q.shape[1], operands.k.shape[1]
    if queries % 8 == keys % 8 == 0:
        return None
    if visible_pairs(queries, keys, spec.causal, spec.window) >= LEAST_KEYS_OF_COPIES * queries:
        return None
    return (
        f"{queries} queries and {keys} keys: lengths that are no multiple of 8 are copied first, and Triton is faster "
        f"where a query sees fewer than {LEAST_KEYS_OF_COPIES} keys"
    )


def _few_pairs(operands: Operands) -> str | None:
    queries, keys = operands.q.shape[1], operands.k.shape[1]
    if configs.has_pairs(operands) and min(queries, keys) < LEAST_OF_PAIRS:
        return f"a bias or a mask of {queries} queries and {keys} keys; below {LEAST_OF_PAIRS} Triton is faster"
    return None


def _padded_tiles(operands: Operands) -> str | None:
    """Why a short call is left to Triton: more than a third of a tile's columns would be padding. Else None.

    On an H200 Triton took 0.84 of the time for 729 queries and keys of 72 features.
    """
    (_, queries, _, d), (_, keys, _, v) = operands.q.shape, operands.v.shape
    if head_dims.tile_width(d) + head_dims.tile_width(v) > 1.5 * (d + v) and max(queries, keys) <= SHORT_AND_PADDED:
        return f"{queries} queries and {keys} keys of {d} and {v} features; the narrower tiles of Triton are faster"
    return None


def _small_tiles(operands: Operands) -> str | None:
    (_, queries, _, features), keys = operands.q.shape, operands.k.shape[1]
    if features <= 64 and max(queries, keys) <= SHORT:
        return f"{queries} queries and {keys} keys of {features} features; the smaller tiles of Triton are faster"
    return None


_kernels = KernelTrio(
    __name__,
    "flash_attention",
    FlashAttentionSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.GPU,
    priority=200,
    refuses=configs.refuses,
)

flash_attention = _kernels.forward("forward", takes)
flash_attention_jvp = _kernels.tangent("tangent", takes_jvp)
flash_attention_bwd = _kernels.backward("backward", takes_bwd)
flash_attention_bwd.repeats_if_asked = True

_kernels.register("flash_attention", flash_attention, flash_attention_jvp, flash_attention_bwd)
