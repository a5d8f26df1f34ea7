"""flash_attention on Hopper GPUs: Pallas kernels, compiled by Mosaic GPU.

What stands here imports no Pallas; the kernels are imported when they are first needed.
"""

from functools import partial

from jax import Array

from ejkernel.kernels._registry import configured_by, kernel_registry, supported_if
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 200
HOPPER = 90
# Fewer queries leave most of a tile empty.
LEAST_QUERIES = 64
FEATURES = ((64, 64), (128, 128), (192, 128), (256, 256))
ABSENT = ("bias", "mask", "softmax_scale", "dropout")


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    if target.platform != "cuda":
        return f"Mosaic GPU runs on cuda, not on {target.platform}"
    if target.compute_capability != HOPPER:
        return f"the kernels are for compute capability 9.0, not {target.compute_capability / 10}"
    if operands.q.dtype.name not in ("bfloat16", "float16"):
        return f"q is {operands.q.dtype}; the kernels take bfloat16 and float16"
    if 0 in operands.q.shape or 0 in operands.k.shape:
        return "an empty batch or sequence"
    if (features := (operands.q.shape[3], operands.v.shape[3])) not in FEATURES:
        return f"q and v have {features[0]} and {features[1]} features; the kernels take " + ", ".join(
            f"{d} and {v}" for d, v in FEATURES
        )
    if operands.q.shape[1] < LEAST_QUERIES:
        return f"{operands.q.shape[1]} queries; the tiles of the kernels are for {LEAST_QUERIES} or more"
    if operands.cu_seqlens_q is not None:
        queries, keys, sequences = operands.q.shape[1], operands.k.shape[1], operands.cu_seqlens_q.shape[1] - 1
        if keys > queries and queries < LEAST_QUERIES * sequences:
            return (
                f"{sequences} sequences of {queries} queries: a tile of them would visit the keys of several sequences"
            )
    for name in ABSENT:
        if getattr(operands, name) is not None:
            return f"{name}: the kernels have none"
    if spec.softmax_scale <= 0:
        return f"a scale of {spec.softmax_scale:g}; the kernels look for the greatest logit before they scale"
    return _hidden_keys(spec, operands)


def supports_bwd(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    if spec.deterministic:
        return "dq is summed in no certain order, and so not the same in every run"
    return supports(spec, operands, target)


def supports_jvp(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent cannot run on these operands, or None."""
    return supports(spec, operands, target)


def _hidden_keys(spec: FlashAttentionSpec, operands: Operands) -> str | None:
    """Keys that no query sees may hold anything, and a weight of 0 does not undo that: 0·NaN = NaN.

    Those that segments and the ends of packed sequences hide are known to reach.py.
    """
    if operands.cu_seqlens_q is not None or operands.q_segment_ids is not None:
        return None
    left, right = spec.window
    if left is not None and left < operands.k.shape[1] - operands.q.shape[1]:
        return "the first keys are seen by no query"
    if right is not None and right < 0:
        return "the last keys are seen by no query"
    return None


def _heuristic(operation: str, spec: FlashAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    from .configs import heuristic

    return heuristic(operation, operands, spec, target)


def _space(operation: str, spec: FlashAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    from .configs import space

    return space(operation, operands, spec, target)


def _registered(operation: str, predicate):
    """The decorators of the implementations."""
    register = kernel_registry.register(operation, Platform.PALLAS, Backend.GPU, PRIORITY)
    configured = configured_by(partial(_heuristic, operation), partial(_space, operation))
    return lambda implementation: register(supported_if(predicate)(configured(implementation)))


@_registered("flash_attention", supports)
def flash_attention(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and lse."""
    from .forward import flash_attention

    return flash_attention(*operands, spec=spec, config=config)


def _not_yet(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """What the kernel refuses, and else that it waits for its check."""
    return supports_jvp(spec, operands, target) or "how the kernel rounds was changed and not yet checked on a GPU"


@_registered("flash_attention_jvp", _not_yet)
def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    from .tangent import flash_attention_jvp

    return flash_attention_jvp(primals, outputs, tangents, spec=spec, config=config)


@_registered("flash_attention_bwd", supports_bwd)
def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    from .backward import flash_attention_bwd

    return flash_attention_bwd(primals, outputs, cotangents, wrt=wrt, spec=spec, config=config)
