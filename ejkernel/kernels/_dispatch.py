"""Dispatch: the implementation of the highest priority that supports a call on a target."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ..errors import UnsupportedError
from ..types import Backend, Platform, Target
from ..xla_utils.symbolic import is_symbolic
from ._registry import KernelSpec, kernel_registry

Candidate = tuple[KernelSpec, str | None]


class Dispatch:
    """The implementations for one call by descending priority, with their answers cached.

    They are asked lazily, one after the other, as an answer may need an import that takes seconds.
    """

    def __init__(
        self, operation: str, spec: Any, operands: Any, target: Target, platform: Platform | str = "auto"
    ) -> None:
        self._call = operation, spec, operands, target, platform
        self._asked: list[Candidate] = []
        self._rest = iter(kernel_registry.list_implementations(operation))

    def __iter__(self) -> Iterator[Candidate]:
        """Yields each implementation with the reason why it does not support the call, or None."""
        yield from self._asked
        _, *call = self._call
        for entry in self._rest:
            self._asked.append((entry, _reason(entry, *call)))
            yield self._asked[-1]

    def taking(self) -> Iterator[KernelSpec]:
        """Those that take the call."""
        return (entry for entry, reason in self if reason is None)

    def first(self) -> KernelSpec:
        """The implementation that runs; raises `UnsupportedError` with the table of reasons where there is none."""
        for entry in self.taking():
            return entry
        operation, _, _, target, platform = self._call
        asked = "" if platform in ("auto", None) else f" with platform {platform!r}"
        raise UnsupportedError(f"{operation}: no implementation on {target}{asked}\n{table(self._asked)}")


def candidates(
    operation: str, spec: Any, operands: Any, target: Target, platform: Platform | str = "auto"
) -> list[Candidate]:
    """Every registered implementation by descending priority, with the reason why it is passed over, or None."""
    return list(Dispatch(operation, spec, operands, target, platform))


def select(operation: str, spec: Any, operands: Any, target: Target, platform: Platform | str = "auto") -> KernelSpec:
    """The implementation that runs; raises `UnsupportedError` with the table of reasons where there is none."""
    return Dispatch(operation, spec, operands, target, platform).first()


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
        return "an operand has symbolic dimensions; the kernels are compiled for static sizes"
    return entry.implementation.supports(spec, operands, target)
