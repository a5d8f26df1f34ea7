"""grouped_matmul as an operation: from the public arguments to the operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Integer

from ...errors import shown, type_error, value_error
from ...ops.utils.operands import is_array, random_like
from ...primitives.grouped_matmul import GroupedMatmulSpec, Operands
from ...primitives.grouped_matmul import grouped_matmul as algorithm
from ...types.grouped_matmul import GroupedMatmulConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, int32, require_dtype, require_known, require_rank, static_bool

NAME = algorithm.name
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
RESULTS = ("float32", "bfloat16", "float16")


Matrices: TypeAlias = Float[Array, "groups k n"] | Int8[Array, "groups k n"]
MatricesTransposed: TypeAlias = Float[Array, "groups n k"] | Int8[Array, "groups n k"]
RhsScale: TypeAlias = Float[Array, ""] | Float[Array, " groups"] | Float[Array, "groups n"] | Float[Array, "groups 1 n"]


def grouped_matmul_arguments(
    lhs: Float[Array, "m k"],
    rhs: Matrices | MatricesTransposed,
    group_sizes: Integer[Array, " all_groups"],
    group_offset: int | Integer[Array, ""] | Integer[Array, " 1"] | None = None,
    existing_out: Float[Array, "m n"] | None = None,
    rhs_scale: RhsScale | None = None,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike = jnp.float32,
) -> Prepared[Float[Array, "m n"]]:
    """The rows of each group times the matrix of that group: the product of a mixture of experts.

    With g(i) the group of row i, where group g begins at row Σ_{h<g} group_sizes_h:

        o_in = scale_{g(i),n} Σ_k lhs_ik rhs_{g(i),k,n},        rows after the last group: existing_out, or 0

    Sums are in float32. Groups may be empty and of any sizes, which may be traced. If the sizes add up to more than M,
    even to more than an int32 holds, groups end at the last row. Rows after the last group may hold anything, even NaN:
    neither results nor gradients depend on them.
    Differentiable in lhs, rhs, existing_out and rhs_scale, to any order.

    Args:
        lhs: rows [M, K] of a float dtype, sorted by group.
        rhs: a matrix for each group [E, K, N], or [E, N, K] with transpose_rhs; in the dtype of lhs, or int8 or fp8,
            which are converted to it.
        group_sizes: [E] integers ≥ 0, may be traced: how many rows each group has. With group_offset [F], F ≥ E.
        group_offset: an integer ≥ 0, scalar or [1], may be traced: rhs holds the groups from this one on, and rows of
            other groups are treated as those after the last group. A device that has some of the experts so computes
            its own rows.
        existing_out: floats [M, N], the result for rows of no group.
        rhs_scale: a float factor of rhs: a scalar, [E], or [E, N] with one for each column (or [E, 1, N]).
        transpose_rhs: the matrices of rhs are given as [N, K].
        preferred_element_type: the dtype of the result: float32, bfloat16, float16, or float64 if lhs is float64.

    Returns:
        o [M, N] in preferred_element_type.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    MegaBlocks, arXiv 2211.15841.
    """
    lhs, rhs, group_sizes = (
        array(NAME, name, x) for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes))
    )
    transpose_rhs = static_bool(NAME, "transpose_rhs", transpose_rhs)
    _check_arrays(lhs, rhs, group_sizes, transpose_rhs)
    spec = GroupedMatmulSpec(result_dtype(preferred_element_type, lhs), transpose_rhs)
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    operands = Operands(
        lhs[None],
        rhs[None],
        int32(group_sizes)[None],
        group_offset=_offset(group_offset, group_sizes, rhs),
        existing_out=_existing(existing_out, lhs, rhs, algorithm.forward.dtypes({"lhs": lhs.dtype}, spec)["o"]),
        rhs_scale=_scale(rhs_scale, lhs, rhs),
    )
    named = align(algorithm.forward, {name: x for name, x in operands._asdict().items() if x is not None})
    return Prepared(named, spec, lambda out: out["o"][0])


def _check_arrays(lhs, rhs, group_sizes, transpose_rhs: bool) -> None:
    require_rank(NAME, 2, "rows, contracted features", lhs=lhs)
    require_rank(NAME, 3, "groups, " + ("columns, features" if transpose_rhs else "features, columns"), rhs=rhs)
    require_rank(NAME, 1, "groups", group_sizes=group_sizes)
    require_dtype(NAME, np.floating, "a float type", lhs=lhs)
    require_dtype(NAME, np.integer, "an integer type", group_sizes=group_sizes)
    if rhs.dtype != lhs.dtype and rhs.dtype.name not in NARROW:
        raise type_error(
            NAME, f"rhs is {rhs.dtype} but lhs is {lhs.dtype}; it must be that or {', '.join(NARROW)}", lhs=lhs, rhs=rhs
        )
    depth = rhs.shape[2 if transpose_rhs else 1]
    if depth != lhs.shape[1]:
        raise value_error(
            NAME, f"rhs has {depth} features but lhs has {lhs.shape[1]}; they must be equal", lhs=lhs, rhs=rhs
        )
    require_known(NAME, "the number of groups", group_sizes.shape[0], group_sizes=group_sizes)
    for name, size in zip(("groups", "rows", "columns"), rhs.shape, strict=True):
        if size == 0:
            raise value_error(NAME, f"rhs has 0 {name}; it must have some", rhs=rhs)


def result_dtype(dtype: Any, lhs: Array) -> str:
    """The name of preferred_element_type; raises unless it is a dtype that the result may have."""
    try:
        name = None if dtype is None or is_array(dtype) else np.dtype(dtype).name
    except Exception:  # of many kinds, for values that numpy takes for the description of a structured dtype
        name = None
    if name is None:
        raise type_error(NAME, f"preferred_element_type is {shown(dtype)}; it must be a dtype")
    allowed = (*RESULTS, "float64") if lhs.dtype == np.float64 else RESULTS
    if name not in allowed:
        raise type_error(NAME, f"preferred_element_type is {name}; it must be one of {', '.join(allowed)}", lhs=lhs)
    return name


def _offset(offset, group_sizes, rhs):
    matrices, groups = rhs.shape[0], group_sizes.shape[0]
    if offset is None:
        if groups != matrices:
            raise value_error(
                NAME,
                f"group_sizes has {groups} groups but rhs has {matrices}; they must be equal, or group_offset be given",
                rhs=rhs,
                group_sizes=group_sizes,
            )
        return None
    return checked_offset(offset, group_sizes, rhs)


def checked_offset(offset: Any, group_sizes: Array, rhs: Array) -> Array:
    """group_offset as [1] int32; raises unless it is one integer, and there are sizes for all matrices."""
    matrices, groups = rhs.shape[0], group_sizes.shape[0]
    if isinstance(offset, int) and not isinstance(offset, bool):
        if not 0 <= offset < 2**31:
            raise value_error(
                NAME, f"group_offset is {shown(offset)}; it must be at least 0 and below 2**31", group_sizes=group_sizes
            )
        offset = np.int32(offset)
    offset = array(NAME, "group_offset", offset)
    require_dtype(NAME, np.integer, "an integer type", group_offset=offset)
    if offset.shape not in ((), (1,)):
        raise value_error(NAME, "group_offset must be a scalar or [1]", group_offset=offset)
    if groups < matrices:
        raise value_error(
            NAME, f"group_sizes has {groups} groups but rhs has {matrices}; they must be at least as many", rhs=rhs
        )
    return int32(offset).reshape(1)


def _existing(existing_out, lhs, rhs, dtype):
    if existing_out is None:
        return None
    existing_out = array(NAME, "existing_out", existing_out)
    require_dtype(NAME, np.floating, "a float type", existing_out=existing_out)
    shape = (lhs.shape[0], rhs.shape[2])
    if existing_out.shape != shape:
        raise value_error(
            NAME, f"existing_out must be {shape}, rows of lhs and columns of rhs", existing_out=existing_out
        )
    return existing_out.astype(dtype)[None]


def _scale(scale, lhs, rhs):
    """rhs_scale as [1, e or 1, n or 1]."""
    if scale is None:
        return None
    scale = array(NAME, "rhs_scale", scale)
    require_dtype(NAME, np.floating, "a float type", rhs_scale=scale)
    (groups, _, columns), shape = rhs.shape, scale.shape
    if shape not in ((), (groups,), (groups, columns), (groups, 1, columns)):
        raise value_error(
            NAME,
            f"rhs_scale must be a scalar, [{groups}] or [{groups}, {columns}], one of each group or column",
            rhs_scale=scale,
        )
    wide = scale.astype(np.promote_types(lhs.dtype, np.float32))
    return wide.reshape(1, groups if shape else 1, columns if len(shape) > 1 else 1)


class GroupedMatmul(Operation):
    """A product with one matrix for each group of rows: `ejkernel.lax.grouped_matmul` as a kernel object."""

    algorithm = algorithm
    config_class = GroupedMatmulConfig
    prepare_arguments = staticmethod(grouped_matmul_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with four matrices and enough rows to fill the tiles of every implementation, in bfloat16."""
        array = jax.ShapeDtypeStruct
        rows, matrices = array((512, 128), jnp.bfloat16), array((4, 128, 128), jnp.bfloat16)
        sizes = array((4,), jnp.int32)
        return dict(lhs=rows, rhs=matrices, group_sizes=sizes, preferred_element_type=jnp.bfloat16)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; the groups whose matrices are in rhs have all rows, in uneven shares."""
        values = random_like(dict(operands))
        rows, groups = operands["lhs"].shape[1], operands["rhs"].shape[1]
        of = operands["group_sizes"]
        ends = np.round(rows * np.linspace(0, 1, groups + 1) ** 1.3).astype(np.int32)
        sizes = np.pad(np.diff(ends), (0, of.shape[1] - groups))
        values["group_sizes"] = jnp.broadcast_to(jnp.asarray(sizes), of.shape)
        if "group_offset" in operands:
            values["group_offset"] = jnp.zeros(operands["group_offset"].shape, jnp.int32)
        return values
