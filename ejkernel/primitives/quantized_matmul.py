"""quantized_matmul: rows times a matrix of codes of a few bits, in which each group of codes shares a scale.

Codes are stored in rows, and groups are parts of rows. These are the rows of the matrix, or its columns if the spec
says that it is transposed. One table has the axes of both layouts; axes of the layout that is not used have size 1:

    b batch · m rows of x
    k contracted features, one for each row of codes · n columns, one for each row of codes, if transposed
    g groups of columns                              · h groups of contracted features, if transposed
    j columns of a group                             · i contracted features of a group, if transposed
    p words of the codes of a group

    not transposed    x [b,m,k,1,1] · w [b?,k,1,g,1,p] = o [b,m,1,g,j]
    transposed        x [b,m,1,h,i] · w [b?,1,n,1,h,p]ᵀ = o [b,m,n,1,1]

`b? …` may have size 1 and is then broadcast. Rows of x, columns and groups of columns are computed independently, so
that they may be split over devices like the batch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..quantization import Format
from ..types import ShortRepr
from ._axes import axes
from ._sharding import Layout
from ._trio import Trio


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    x [b,m,k,h,i]; w [b?,k,n,g,h,p] uint32; scales [b?,k,n,g,h], float or uint8 by the mode; columns [b?,j] int32,
    0 … j − 1: the columns of a group, whose axis no other operand has; zeros [b?,k,n,g,h] float, for mode affine.
    """

    x: Any
    w: Any
    scales: Any
    columns: Any
    zeros: Any = None


class Outputs(NamedTuple):
    """o [b,m,n,g,j] in the dtype of x."""

    o: Any


@dataclass(frozen=True, repr=False)
class QuantizedMatmulSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        mode: the format of codes and scales.
        bits: bits of a code.
        group_size: codes that share a scale.
        transpose: the rows of the codes are the columns of the matrix.
    """

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64
    transpose: bool = False

    @property
    def format(self) -> Format:
        """The format of the weights."""
        return Format(self.mode, self.bits, self.group_size)


TABLE = {
    "x": axes("b m k h i"),
    "w": axes("b? k n g h p"),
    "scales": axes("b? k n g h"),
    "columns": axes("b? j"),
    "zeros": axes("b? k n g h"),
    "o": axes("b m n g j"),
}

quantized_matmul = Trio(
    "quantized_matmul",
    Operands,
    Outputs,
    TABLE,
    differentiable=("x", "scales", "zeros"),
    dtypes=lambda dtypes, spec: {"o": dtypes["x"]},
    layout=Layout(
        split=("b", "m", "n", "g"), group=None, advice="split the contracted features under shard_map, and psum"
    ),
    residuals=(),
    linear=[("x",), ("scales",)],
)
