"""The features of all operations, which tests combine in pairs. A call has at most one feature of a group."""

import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

from ._case import Case, Operand
from ._feature import Feature

FOLDER = importlib.import_module(__package__).__path__
FILES = [
    importlib.import_module(f"{__package__}.{found.name}")
    for found in pkgutil.iter_modules(FOLDER)
    if not found.name.startswith("_")
]
PLAIN: dict[str, Case] = {file.PLAIN.operation: file.PLAIN for file in FILES}
TESTED_ELSEWHERE: dict[str, tuple[str, ...]] = {
    file.PLAIN.operation: getattr(file, "TESTED_ELSEWHERE", ()) for file in FILES
}
FEATURES: dict[str, dict[str, Feature]] = {file.PLAIN.operation: file.FEATURES for file in FILES}


def features_of(operation: str) -> list[str]:
    """The names of the features of an operation."""
    return list(FEATURES[operation])


def call_with(operation: str, names: tuple[str, ...]) -> tuple[Case, str]:
    """The plain call with these features, and its dtype."""
    plain, dtype = PLAIN[operation], "bfloat16"
    shape, operands, options = dict(plain.sizes), dict(plain.operands), dict(plain.options)
    for name in names:
        feature = FEATURES[operation][name]
        shape |= feature.sizes
        operands |= feature.operands
        options |= feature.options
        dtype = feature.dtype or dtype
    if "cu_seqlens" in operands:
        shape["n"] = shape["m"] - 1
        for name, batch in dict(initial_state="n", g="1", gk="1", gv="1").items():
            if name in operands:
                operands[name] = _of_batch(operands[name], batch)
    return replace(plain, name="-".join(names) or "plain", sizes=shape, operands=operands, options=options), dtype


def _of_batch(x: Operand | str, batch: str) -> Operand:
    """The operand with another letter or number for its axis b."""
    x = Operand(x) if isinstance(x, str) else x
    return replace(x, axes=x.axes.replace("b", batch))


def together(operation: str, names: tuple[str, ...]) -> bool:
    """Whether one call may have all of these features: at most one of each group."""
    groups = [group for name in names if (group := FEATURES[operation][name].group)]
    return len(set(groups)) == len(groups)


def pairs(operation: str) -> Iterator[tuple[str, ...]]:
    """The plain call, each feature alone, and every two that may be combined."""
    names = FEATURES[operation]
    for size in range(3):
        yield from (chosen for chosen in itertools.combinations(names, size) if together(operation, chosen))
