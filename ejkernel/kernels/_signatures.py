"""Whether two implementations of an algorithm have one signature."""

import inspect
import re
from collections.abc import Callable
from typing import Any


def parameters(implementation: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of an implementation, with annotations evaluated where possible."""
    try:
        signature = inspect.signature(implementation, eval_str=True)
    except Exception:  # an annotation that names what is imported for type checkers alone stays a string
        signature = inspect.signature(implementation)
    return list(signature.parameters.values())


def mismatches(reference: Callable[..., Any], other: Callable[..., Any], to: str, of: str) -> list[str]:
    """The differences between the signatures of two implementations, which `to` and `of` name."""
    ours, theirs = parameters(reference), parameters(other)
    if [p.name for p in ours] != [p.name for p in theirs]:
        return [f"{of} takes {[p.name for p in theirs]}, {to} takes {[p.name for p in ours]}"]
    return [
        f"{of} differs from {to} in the {what} of {a.name}: {getattr(b, what)} against {getattr(a, what)}"
        for a, b in zip(ours, theirs, strict=True)
        for what, equivalent in (("kind", _equal), ("default", _equal), ("annotation", _types_are_equivalent))
        if not equivalent(getattr(a, what), getattr(b, what))
    ]


def _equal(a: Any, b: Any) -> bool:
    return a is b or a == b


def _types_are_equivalent(a: Any, b: Any) -> bool:
    """Equal as types, or in their text without modules, quotes and spaces (a string against the type it names)."""
    text = lambda annotation: re.sub(r"\b(\w+\.)+|['\"\s]", "", inspect.formatannotation(annotation))
    return a == b or text(a) == text(b)
