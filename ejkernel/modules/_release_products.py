"""grouped_matmul, quantized_matmul and mean_pooling in the form of ejkernel 0.0.78."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..errors import shown, value_error
from ..kernels._registry import Platform, kernel_registry
from ..xla_utils.groups import group_bounds
from ..xla_utils.search import entries_until
from ._release import Present, arrays_of, entries_of, run, translates
from .operations._arguments import int32
from .operations.grouped_matmul import checked_offset, result_dtype


@translates
def grouped_matmul(grouped: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """The product of each group's rows and matrix, plus `rhs_bias` [E, 1, N] and existing_out.

    lhs and rhs of two float dtypes are promoted to a common one, as in `jnp.matmul`. rhs_scale may be [E, 1, 1, N].
    Calls that give group_offset or existing_out by position are in this form too. In this form existing_out is added to
    every row, and with group_offset the rows of lhs begin with the first group in rhs. use_v2 and use_v3 choose among
    the kernels of 0.0.78, and exclude each other.
    """
    if call["use_v2"] and call["use_v3"]:
        raise value_error("grouped_matmul", "use_v2 and use_v3 are mutually exclusive; give one of them")
    lhs, rhs, sizes, existing, scale, bias = arrays_of(
        call, "lhs", "rhs", "group_sizes", "existing_out", "rhs_scale", "rhs_bias"
    )
    lhs, rhs = with_one_dtype(lhs, rhs)
    if call["group_offset"] is not None:
        sizes = _sizes_from(call["group_offset"], sizes, rhs)
    if scale is not None and scale.ndim == 4:
        if scale.shape[1:3] != (1, 1):
            raise value_error(
                "grouped_matmul",
                "rhs_scale has a scale for parts of a column; it must be [E, 1, 1, N]",
                rhs_scale=scale,
            )
        scale = scale[:, 0]
    for name, x in (("existing_out", existing), ("rhs_bias", bias)):
        if x is not None and call["mesh"] is not None:
            raise value_error("grouped_matmul", f"{name} and a mesh are given; call it inside jax.shard_map")
    arguments = dict(lhs=lhs, rhs=rhs, group_sizes=sizes, rhs_scale=scale, transpose_rhs=call["transpose_rhs"])
    wanted = call["preferred_element_type"]
    if existing is None and bias is None:
        return run(grouped, call, arguments | dict(preferred_element_type=wanted), specs)
    wanted, wide = result_dtype(wanted, lhs), np.promote_types(lhs.dtype, np.float32)
    o = run(grouped, call, arguments | dict(preferred_element_type=wide), specs)
    if bias is not None:
        _require_shape("rhs_bias", bias, ((rhs.shape[0], 1, o.shape[1]), (rhs.shape[0], o.shape[1])))
        o += _bias_of_rows(bias.astype(wide), sizes, lhs.shape[0])
    if existing is not None:
        _require_shape("existing_out", existing, (o.shape,))
        o += existing.astype(wide)
    return o.astype(wanted)


def _sizes_from(offset: Any, sizes: jax.Array, rhs: jax.Array) -> jax.Array:
    """The sizes of the groups that rhs has, which begin at an offset; 0 for those after the last group."""
    first, matrices = checked_offset(offset, sizes, rhs).reshape(()), rhs.shape[0]
    return sizes.at[first + jnp.arange(matrices)].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _require_shape(name: str, x: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> None:
    if x.shape not in shapes:
        raise value_error("grouped_matmul", f"{name} must be {' or '.join(map(str, map(list, shapes)))}", **{name: x})


def _bias_of_rows(bias: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """The bias of each row [rows, N] from that of groups, [E, 1, N] or [E, N]; 0 for rows after the last group."""
    bias = bias.reshape(bias.shape[0], bias.shape[-1])
    ends = group_bounds(int32(sizes)[None], None, bias.shape[0], rows)[0, 1:]
    group = entries_until(ends, jnp.arange(rows))
    return bias.at[group].get(mode="fill", fill_value=0)


def with_one_dtype(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """lhs and rhs promoted to a common float dtype; int8 and float8 matrices are unchanged."""
    if lhs.dtype == rhs.dtype or rhs.dtype.itemsize == 1 or not jnp.issubdtype(rhs.dtype, jnp.floating):
        return lhs, rhs
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    return lhs.astype(common), rhs.astype(common)


@translates
def quantized_matmul(product: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """A product with quantised weights, whose layout `axis` names: "row" is transpose=False, "col" transpose=True.

    fuse, strict_fuse, allow_dense_fallback and tpu_path choose among the kernels of 0.0.78. All their values are
    accepted, since no implementation here dequantises a large matrix as a whole, which is what strict_fuse asks for;
    contradicting values raise, as in 0.0.78. A platform without an implementation means "auto", and so does "pallas",
    by which 0.0.78 has every mode and any number of rows: the kernel for TPUs has few rows of affine codes.
    """
    _check_fusion(**{name: call[name] for name in ("fuse", "strict_fuse", "allow_dense_fallback", "tpu_path")})
    transpose, axis, platform = call["transpose"], call["axis"], call["platform"]
    if axis is not None and axis not in ("row", "col"):
        raise value_error("quantized_matmul", f"axis is {shown(axis)}; it must be 'row' or 'col'")
    known = {str(found.platform) for found in kernel_registry.list_implementations("quantized_matmul")}
    if platform in list(Platform) and platform not in known - {Platform.PALLAS}:
        call |= dict(platform="auto")
    x, w, scales, zeros = arrays_of(call, "x", "w", "scales", "zeros")
    arguments = dict(x=x, w=w, scales=scales, zeros=zeros, transpose=transpose if axis is None else axis == "col")
    return run(product, call, arguments | {n: call[n] for n in ("group_size", "bits", "mode")}, specs)


def _check_fusion(fuse: Any, strict_fuse: Any, allow_dense_fallback: Any, tpu_path: Any) -> None:
    for name, x in (("fuse", fuse), ("strict_fuse", strict_fuse), ("allow_dense_fallback", allow_dense_fallback)):
        if x not in (True, False, *(() if name == "fuse" else (None,))):
            raise value_error("quantized_matmul", f"{name} is {shown(x)}; it must be True or False")
    if strict_fuse and not fuse:
        raise value_error("quantized_matmul", "strict_fuse is True but fuse is False; it needs fuse")
    if strict_fuse and allow_dense_fallback:
        raise value_error("quantized_matmul", "strict_fuse and allow_dense_fallback are True; one excludes the other")
    if tpu_path not in (None, "hybrid", "packed", "predecode"):
        raise value_error("quantized_matmul", f"tpu_path is {shown(tpu_path)}; it must be hybrid, packed or predecode")


@translates
def mean_pooling(pooled: Present, call: dict[str, Any], specs: dict[str, Any]) -> Any:
    """The mean [B, H, D] of x [B, S, H, D] over S."""
    (x,) = arrays_of(call, "x")
    if call["cu_seqlens"] is not None:
        raise value_error("mean_pooling", "x has 4 axes and cu_seqlens is given; it must be [T, D] with these", x=x)
    batch, length, heads, features = x.shape
    if any(entry is not None for entry in entries_of(specs, "x", 4)[2:]):
        raise value_error("mean_pooling", "in_specs split the heads or features of x; split its batch", x=x)
    specs = {n: PartitionSpec(*tuple(spec)[:2]) for n, spec in specs.items()}
    if call["out_specs"] is not None:
        call |= dict(out_specs=PartitionSpec(*tuple(call["out_specs"])[:1]))
    arguments = dict(x=x.reshape(batch, length, heads * features), chunk_size=call["chunk_size"])
    return run(pooled, call, arguments, specs).reshape(batch, heads, features)
