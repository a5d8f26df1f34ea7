"""Features of calls: changes of sizes, operands, options or dtype of a plain call.

Each file of an operation has them in `FEATURES`, and the call without any in `PLAIN`. Every argument of the operation
is in one of these; `transforms/test_pairs.py` checks that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._case import Case


@dataclass(frozen=True)
class Feature:
    """A change of the plain call; features of one `group` are alternatives."""

    group: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    operands: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None


def option(group: str = "", **options: Any) -> Feature:
    return Feature(group, options=options)


def operand(group: str = "", **operands: Any) -> Feature:
    return Feature(group, operands=operands)


def sized(group: str, **sizes: int) -> Feature:
    return Feature(group, sizes=sizes)


def plain(operation: str, sizes: Mapping[str, int], operands: Mapping[str, Any], **options: Any) -> Case:
    return Case(operation, "plain", sizes, operands, ("",), options)


DTYPES = {"float32": Feature("dtype", dtype="float32"), "float16": Feature("dtype", dtype="float16")}
"""Of every operation; the plain call is in bfloat16."""

S, T = 200, 260
TOKENS = dict(b=2, s=S, t=T, h=4, g=2, d=64, e=64, n=3, m=5)
"""Sizes of a plain call on sequences: of S queries, T keys, four heads on two."""
