"""What the Mosaic GPU kernels refuse for the same reason: another GPU, operands that they do not take, a scale."""

from collections.abc import Sequence
from typing import Protocol

from ejkernel.types import Target

from ._assembler import serializes
from ._internals import moved

HOPPER = 90
# The error of tanh in the kernels is 1e-7 by exponentials, and by the polynomial as much for logits that take it: the
# softcap multiplies it in the logits.
MOST_SOFTCAP = 100.0


class Scaled(Protocol):
    """The spec of an attention: logits are softmax_scale · q·k, and softcap · tanh(logits / softcap) with a softcap."""

    softmax_scale: float
    softcap: float | None


def refuses_target(target: Target) -> str | None:
    """Why no kernel of Mosaic GPU runs on the target, or None."""
    if target.platform != "cuda":
        return f"Mosaic GPU runs on cuda, not on {target.platform}"
    if target.compute_capability != HOPPER:
        return f"the kernels are for compute capability 9.0, not {target.capability}"
    return moved() or serializes()


def refuses_given(operands: tuple, names: Sequence[str]) -> str | None:
    """The first of the named operands that is given and not taken, or None."""
    given = (name for name in names if getattr(operands, name) is not None)
    return next((f"{name} is not supported by these kernels" for name in given), None)


def refuses_scale(spec: Scaled) -> str | None:
    """What the kernels have against softmax_scale and softcap, or None."""
    if spec.softmax_scale <= 0:
        return f"softmax_scale is {spec.softmax_scale:g}; the kernels take row maxima before scaling: it must be > 0"
    if (softcap := spec.softcap or 1.0) > MOST_SOFTCAP:
        return f"softcap is {softcap:g}; the tanh of the kernels is accurate enough up to {MOST_SOFTCAP:g}"
    if spec.softmax_scale / softcap > 1e38:
        return f"softmax_scale / softcap is {spec.softmax_scale:g} / {softcap:g}, which overflows float32"
    return None
