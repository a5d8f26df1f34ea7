"""grouped_matmul: the rows of each group times a matrix of that group, o = lhs·rhs[group of the row].

The groups are consecutive rows of lhs, and their sizes are known only when the program runs:

    b batch · m rows · k contracted features · e groups whose matrices are here · n columns · f groups in all

`b? …` may have size 1 and is then broadcast. Every column is computed by itself, so that columns may be split over
devices like the batch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..types import ShortRepr
from ._axes import axes
from ._sharding import Layout
from ._trio import Trio


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    lhs [b,m,k]; rhs [b?,e,k,n] in the dtype of lhs, or a narrower one that is converted to it; group_sizes [b?,f]
    int32; group_offset [b?] int32, the first group of rhs; existing_out [b,m,n] in the dtype of o;
    rhs_scale [b?,e?,n?] float32, a factor of the columns of rhs.
    """

    lhs: Any
    rhs: Any
    group_sizes: Any
    group_offset: Any = None
    existing_out: Any = None
    rhs_scale: Any = None


class Outputs(NamedTuple):
    """The results: the product o [b,m,n]."""

    o: Any


@dataclass(frozen=True, repr=False)
class GroupedMatmulSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        preferred_element_type: the dtype of o, by name; float64 if lhs is float64.
        transpose_rhs: rhs [b?,e,k,n] is the transposed view of an array stored as [b?,e,n,k]. It changes no result: an
            implementation that reads the stored array transposes back, and XLA cancels the two transpositions.
    """

    preferred_element_type: str = "float32"
    transpose_rhs: bool = False


TABLE = {
    "lhs": axes("b m k"),
    "rhs": axes("b? e k n"),
    "group_sizes": axes("b? f"),
    "group_offset": axes("b?"),
    "existing_out": axes("b m n"),
    "rhs_scale": axes("b? e? n?"),
    "o": axes("b m n"),
}


def result_dtype(lhs: Any, spec: GroupedMatmulSpec) -> np.dtype:
    """The dtype of o, from that of lhs."""
    return np.dtype(np.float64 if lhs == np.float64 else spec.preferred_element_type)


grouped_matmul = Trio(
    "grouped_matmul",
    Operands,
    Outputs,
    TABLE,
    differentiable=("lhs", "rhs", "existing_out", "rhs_scale"),
    dtypes=lambda dtypes, spec: {"o": result_dtype(dtypes["lhs"], spec)},
    layout=Layout(split=("b", "n"), group=None, advice="split the experts under shard_map with group_offset, and psum"),
    residuals=(),
    linear=[("lhs", "existing_out"), ("rhs", "existing_out"), ("rhs_scale", "existing_out")],
)
