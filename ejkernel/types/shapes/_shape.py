"""What every named call answers: its arguments, and the work by which it is measured."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

TFLOPS, TBYTES = "TFLOP/s", "TB/s"


@dataclass(frozen=True)
class Shape:
    """One call of an operation, taken from a real model or from published tables.

    Attributes:
        name: by which it is asked for; no two calls of any operations have the same.
        convention: how `work` counts, in a sentence.
        rivals: who computes the same, by the names that stand in records; `benchmarks/<operation>.py` calls them.
    """

    name: str
    convention: ClassVar[str]
    rivals: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the arrays of the call by argument."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The dtypes of those arrays that have not that of the call."""
        return {}

    @property
    def options(self) -> Mapping[str, Any]:
        """The static arguments of the call."""
        return {}

    def indices(self, seed: int = 0) -> Mapping[str, np.ndarray]:
        """The values of those arrays that are no random numbers: lengths, tables, masks."""
        del seed
        return {}

    def arguments(self, dtype: Any) -> dict[str, Any]:
        """The arguments of `ejkernel.lax.<operation>`, arrays as their types."""
        arrays = {name: jax.ShapeDtypeStruct(size, self.dtypes.get(name, dtype)) for name, size in self.sizes.items()}
        return {**arrays, **self.options}

    @property
    @abstractmethod
    def modes(self) -> tuple[str, ...]:
        """What of it is measured: "fwd", "bwd", "fwd_bwd", "jvp"; a forward alone where there is no derivative."""

    @abstractmethod
    def work(self, mode: str) -> float:
        """Operations of floating point or bytes of a call, by the convention."""

    def unit(self, mode: str) -> str:
        """Of a rate: "TFLOP/s", or "TB/s" where memory is the bound."""
        del mode
        return TFLOPS
