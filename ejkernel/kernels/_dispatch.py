"""Which implementation of an operation a target gets: the highest priority that has no reason against this call."""

from collections.abc import Sequence
from typing import Any

import jax

from ..errors import UnsupportedError
from ..types import Backend, Platform, Target
from ..xla_utils.symbolic import is_symbolic
from ._registry import KernelSpec, kernel_registry

Candidate = tuple[KernelSpec, str | None]


def candidates(
    operation: str, spec: Any, operands: Any, target: Target, platform: Platform | str = "auto"
) -> list[Candidate]:
    """Every registered implementation by descending priority, with the reason why it is passed over, or None."""
    return [
        (entry, _reason(entry, spec, operands, target, platform))
        for entry in kernel_registry.list_implementations(operation)
    ]


def select(operation: str, spec: Any, operands: Any, target: Target, platform: Platform | str = "auto") -> KernelSpec:
    """The implementation that runs; raises `UnsupportedError` with the table of reasons where there is none."""
    # One after the other: of those that come later nothing is asked, whose answer may take an import of seconds.
    found = []
    for entry in kernel_registry.list_implementations(operation):
        found.append((entry, _reason(entry, spec, operands, target, platform)))
        if found[-1][1] is None:
            return entry
    asked = "" if platform in ("auto", None) else f" with platform {platform!r}"
    raise UnsupportedError(f"{operation}: no implementation on {target}{asked}\n{table(found)}")


def table(found: Sequence[Candidate]) -> str:
    """One line for each implementation: priority, platform, backend, and why it is passed over."""
    if not found:
        return "  (nothing is registered)"
    return "\n".join(
        f"  {entry.priority:>4}  {entry.platform + '/' + entry.backend:<12}  {_one_line(reason) or _takes(entry)}"
        for entry, reason in found
    )


def _one_line(reason: str | None) -> str:
    """Some hold the message of an exception, which may have many."""
    return " ".join((reason or "").split())


def _takes(entry: KernelSpec) -> str:
    """That it takes the call, and what a config may ask it for besides."""
    variants = getattr(entry.implementation, "variants", ())
    return "takes this call" + "".join(f"; also with algorithm={name!r} in the config" for name in variants)


def _reason(entry: KernelSpec, spec: Any, operands: Any, target: Target, platform: Platform | str) -> str | None:
    if entry.backend not in (Backend.ANY, target.backend):
        return f"runs on {entry.backend}, not on {target.backend}"
    if platform not in ("auto", None, entry.platform):
        return f"platform {platform!r} was asked for"
    if entry.platform != Platform.XLA and any(map(is_symbolic, jax.tree.leaves(operands))):
        return "an operand has symbolic dimensions; kernels are made for sizes that are known"
    return entry.implementation.supports(spec, operands, target)
