"""The gated delta rule in Triton: chunks in the WY form, and single tokens for decoding (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig


def supports(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    return _reason("gated_delta_rule", operands, target)


def supports_jvp(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent cannot run on these operands, or None."""
    if reason := _reason("gated_delta_rule_jvp", operands, target):
        return reason
    if (features := operands.q.shape[3]) > (most := _most_features(operands) // 2):
        return f"q has {features} features; the tangent takes up to {most} in {operands.q.dtype}: more spill registers"
    return None


def supports_bwd(spec: GatedDeltaRuleSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    return _reason("gated_delta_rule_bwd", operands, target)


def _most_features(x: Operands) -> int:
    """The most features of q. In float32 sums over more exceed the error bound, and spill registers."""
    return _launch.MOST_FEATURES if x.q.dtype.name == "bfloat16" else _launch.MOST_FEATURES // 2


def _reason(operation: str, x: Operands, target: Target) -> str | None:
    if reason := _launch.refusal(target) or _launch.dtype_refusal("q", x.q):
        return reason
    for name, a, most in (("q", x.q, _most_features(x)), ("v", x.v, 2 * _most_features(x))):
        if a.shape[3] > most or a.shape[3] % 8:
            rule = f"multiples of 8 up to {most} in {a.dtype}"
            return f"{name} has {a.shape[3]} features; Triton's kernels take {rule}"
    if 0 in x.v.shape:
        return "an empty batch or sequence"
    from .configs import LONGEST, least_memory

    if reason := _launch.memory_refusal(least_memory(operation, x), target):
        return reason
    if operation != "gated_delta_rule" and x.q.shape[1] <= LONGEST and x.spans is None:
        return f"up to {LONGEST} tokens: the kernels of derivatives compute chunks of 16 or more"
    return None


_kernels = _launch.trio(__name__, "gated_delta_rule", GatedDeltaRuleSpec, Operands, Outputs, RecurrenceConfig)

gated_delta_rule = _kernels.forward("forward", supports, ("steps",))
gated_delta_rule_jvp = _kernels.tangent("tangent", supports_jvp)
gated_delta_rule_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register("gated_delta_rule", gated_delta_rule, gated_delta_rule_jvp, gated_delta_rule_bwd)
