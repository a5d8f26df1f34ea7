"""The interface of named calls: their arguments, and the work from which rates are computed."""

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
        name: the name of the call, unique among all operations.
        convention: how `work` is counted, in a sentence.
        rivals: names of other implementations, as in records; `benchmarks/<operation>.py` calls them.
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
        """The dtypes of arrays that do not have the dtype of the call."""
        return {}

    @property
    def options(self) -> Mapping[str, Any]:
        """The static arguments of the call."""
        return {}

    def indices(self, seed: int = 0) -> Mapping[str, np.ndarray]:
        """The values of arrays that are not random numbers: lengths, tables, masks."""
        del seed
        return {}

    def arguments(self, dtype: Any) -> dict[str, Any]:
        """The arguments of `ejkernel.lax.<operation>`, arrays as their types."""
        arrays = {name: jax.ShapeDtypeStruct(size, self.dtypes.get(name, dtype)) for name, size in self.sizes.items()}
        return {**arrays, **self.options}

    @property
    @abstractmethod
    def modes(self) -> tuple[str, ...]:
        """The passes that are measured: "fwd", "bwd", "fwd_bwd", "jvp"; only "fwd" if there is no derivative."""

    @abstractmethod
    def work(self, mode: str) -> float:
        """FLOPs or bytes of a call, by the convention."""

    def unit(self, mode: str) -> str:
        """The unit of rates: "TFLOP/s", or "TB/s" if the call is bound by memory."""
        del mode
        return TFLOPS
