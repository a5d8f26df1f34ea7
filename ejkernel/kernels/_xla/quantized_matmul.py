"""quantized_matmul in plain JAX: the formula, and its decomposition into blocks of columns.

With v the value of a code, γ its group and W_rc = (v_rc − z_rγ) s_rγ, in float32 and then rounded to the dtype of x:

    o  = x · W                  do → dx = do · Wᵀ
    ȯ  = ẋ · W + x · Ẇ          Ẇ_rc = (v_rc − z_rγ) ṡ_rγ − s_rγ ż_rγ
    dW = xᵀ · do                ds_rγ = Σ_{c∈γ} dW_rc (v_rc − z_rγ)      dz_rγ = −s_rγ Σ_{c∈γ} dW_rc

and with Wᵀ in the place of W if the rows of the codes are its columns. Blocks are dequantised and multiplied one after
the other: W, Ẇ and dW are never in memory as a whole, not even in derivatives of any order.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.quantized_matmul import Operands, Outputs, QuantizedMatmulSpec
from ejkernel.quantization._formats import scales_of, values_of
from ejkernel.quantization._packing import unpacked
from ejkernel.types import Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

from .._registry import Backend, Platform, configured_by, kernel_registry
from ._tiles import varying_like


def reference(*operands, spec=QuantizedMatmulSpec()) -> Outputs:
    """The formula: the whole matrix in the dtype of x, and one product; differentiable to any order."""
    operands = Operands(*operands)
    matrix = _matrix(_rows_of(operands, spec), spec, operands.x.dtype)
    return _outputs(_dot(_plain(operands.x), matrix, spec.transpose), operands, spec)


# --- Configs ---------------------------------------------------------------------------------------------------------

MANY_ROWS = 64


def heuristic(spec: QuantizedMatmulSpec, operands: Operands, target: Target) -> QuantizedMatmulConfig:
    """Blocks of columns of 2^25 floats; on a CPU 2^20 for many rows or if columns are rows of codes, else 2^17.

    On two cores of a server these are the fastest of 2^15 to 2^21: the cache holds a block until it is multiplied, but
    that matters little where the product takes most of the time.
    """
    batch, rows, *features = operands.x.shape
    most = 2**25
    if target.platform == "cpu":
        most = 2**20 if spec.transpose or batch * rows >= MANY_ROWS else 2**17
    return QuantizedMatmulConfig(block_n=max(1, most // max(1, math.prod(features))))


def space(spec: QuantizedMatmulSpec, operands: Operands, target: Target) -> list[QuantizedMatmulConfig]:
    """The config of the heuristic alone, as blocks are chosen by their memory."""
    return [heuristic(spec, operands, target)]


# --- Implementations -------------------------------------------------------------------------------------------------


@kernel_registry.register("quantized_matmul", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def quantized_matmul(
    *operands: Array | None,
    spec: QuantizedMatmulSpec = QuantizedMatmulSpec(),
    config: QuantizedMatmulConfig = QuantizedMatmulConfig(),
) -> Outputs:
    """o, some columns at a time."""
    operands = Operands(*operands)

    def of_block(x, block):
        return {}, {"o": _dot(x, _matrix(block.rows, spec, x.dtype), spec.transpose)}

    _, parts = _sweep(of_block, _plain(operands.x), _Block(_rows_of(operands, spec)), spec, config)
    return _outputs(parts["o"], operands, spec)


@kernel_registry.register("quantized_matmul_jvp", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("spec", "config"))
def quantized_matmul_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: QuantizedMatmulSpec = QuantizedMatmulSpec(),
    config: QuantizedMatmulConfig = QuantizedMatmulConfig(),
) -> Outputs:
    """The tangent of o; a tangent of None is zero."""
    moving = _Rows(None, *(None if a is None else _merged(a) for a in (tangents.scales, tangents.zeros)))

    def of_block(xs, block):
        x, dx = xs
        terms = [] if dx is None else [_dot(dx, _matrix(block.rows, spec, x.dtype), spec.transpose)]
        if block.tangents != _Rows():
            terms.append(_dot(x, _matrix_tangent(block.rows, block.tangents, spec, x.dtype), spec.transpose))
        return {}, {"o": sum(terms)}

    xs = _plain(primals.x), None if tangents.x is None else _plain(tangents.x)
    _, parts = _sweep(of_block, xs, _Block(_rows_of(primals, spec), tangents=moving), spec, config)
    return _outputs(parts["o"], primals, spec)


@kernel_registry.register("quantized_matmul_bwd", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@partial(jax.jit, static_argnames=("wrt", "spec", "config"))
def quantized_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: QuantizedMatmulSpec = QuantizedMatmulSpec(),
    config: QuantizedMatmulConfig = QuantizedMatmulConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt."""

    def of_block(x, block):
        sums, parts, wide = {}, {}, _wide(x.dtype)
        if "x" in wrt:
            sums["x"] = _dot(block.do, _matrix(block.rows, spec, x.dtype), not spec.transpose)
        if "scales" in wrt or "zeros" in wrt:
            of_matrix = _in_groups(_matrix_cotangent(x, block.do, block.rows, spec), spec)
            relative = _relative(block.rows, spec, wide)
            found = {"scales": (of_matrix * relative).sum(-1), "zeros": -block.rows.scales * of_matrix.sum(-1)}
            parts = {name: _of_batch(found[name], block.rows, name) for name in ("scales", "zeros") if name in wrt}
        return sums, parts

    block = _Block(_rows_of(primals, spec), do=_plain(cotangents.o))
    sums, parts = _sweep(of_block, _plain(primals.x), block, spec, config)
    like = {name: getattr(primals, name) for name in wrt}
    return tuple((sums | parts)[name].astype(x.dtype).reshape(x.shape) for name, x in like.items())


# --- Blocks of columns -----------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows of codes: words [b?, rows, groups, words of a group], scales and zeros [b?, rows, groups] as floats."""

    w: Any = None
    scales: Any = None
    zeros: Any = None


class _Block(NamedTuple):
    """The arrays of a block of columns: codes, tangents of scales and zeros, and do [b, m, columns]."""

    rows: _Rows
    tangents: _Rows = _Rows()
    do: Any = None


def _rows_of(x: Operands, spec: QuantizedMatmulSpec) -> _Rows:
    """The codes without the axes of the other layout; scales are decoded here, once, and not for every code."""
    scales = scales_of(x.scales, spec.format, _wide(x.x.dtype))
    return _Rows(_merged(x.w), _merged(scales), None if x.zeros is None else _merged(x.zeros))


def _merged(a: Array) -> Array:
    """[b?, k · n, g · h, …] of [b?, k, n, g, h, …]."""
    b, k, n, g, h, *words = a.shape
    return a.reshape(b, k * n, g * h, *words)


def _plain(x: Array) -> Array:
    """[b, m, features] of x, or [b, m, columns] of o."""
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))


def _outputs(o: Array, x: Operands, spec: QuantizedMatmulSpec) -> Outputs:
    """o with the axes of both layouts."""
    columns = (x.w.shape[2], 1, 1) if spec.transpose else (1, x.w.shape[3], spec.group_size)
    return Outputs(o.astype(x.x.dtype).reshape(*o.shape[:2], *columns))


def _sweep(
    of_block: Callable[..., tuple[dict, dict]],
    x: Any,
    whole: _Block,
    spec: QuantizedMatmulSpec,
    config: QuantizedMatmulConfig,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """of_block(x, block) → (sums, parts) for every block of columns, with sums added and parts side by side.

    Parts are written into their places in the whole. Derivatives store only the place of a block and recompute it.
    """
    axis, columns = (1, 1) if spec.transpose else (2, spec.group_size)
    count = whole.rows.w.shape[axis]
    blocks = -(-count // max(1, min(config.block_n // columns, count)))
    size = -(-count // blocks)
    if blocks == 1:
        return of_block(x, whole)

    def cut(start, size):
        of_rows = lambda a: lax.dynamic_slice_in_dim(a, start, size, axis)
        do = None if whole.do is None else lax.dynamic_slice_in_dim(whole.do, start * columns, size * columns, 2)
        return _Block(*jax.tree.map(of_rows, whole[:2]), do)

    @partial(jax.checkpoint, prevent_cse=False)
    def of_cut(x, block):
        return of_block(x, block)

    place = lambda name: (2, columns) if name == "o" else (axis, 1)

    def step(carry, start, size):
        sums, parts = carry
        more, found = of_cut(x, cut(start, size))
        for name, part in found.items():
            along, width = place(name)
            parts = parts | {name: lax.dynamic_update_slice_in_dim(parts[name], part, start * width, along)}
        return jax.tree.map(jnp.add, sums, more), parts

    def empty(name, part):
        along, width = place(name)
        return jnp.zeros((*part.shape[:along], count * width, *part.shape[along + 1 :]), part.dtype)

    sums, parts = jax.eval_shape(lambda: of_block(x, cut(0, size)))
    sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums)
    carry = varying_like((x, whole), (sums, {name: empty(name, part) for name, part in parts.items()}))
    starts = np.arange(count // size, dtype=np.int32) * np.int32(size)
    carry, _ = lax.scan(lambda carry, start: (step(carry, start, size), None), carry, starts)
    rest = count % size
    return step(carry, np.int32(count - rest), rest) if rest else carry


# --- The parts of the formula ----------------------------------------------------------------------------------------


def _wide(dtype: np.dtype) -> np.dtype:
    return np.promote_types(dtype, np.float32)


def _in_groups(matrix: Array, spec: QuantizedMatmulSpec) -> Array:
    """[b?, rows, groups, codes of a group] of [b?, rows, codes]."""
    return matrix.reshape(*matrix.shape[:2], matrix.shape[2] // spec.group_size, spec.group_size)


def _relative(rows: _Rows, spec: QuantizedMatmulSpec, dtype: np.dtype) -> Array:
    """v − z of every code, [b?, rows, groups, codes of a group]."""
    values = values_of(unpacked(rows.w, spec.bits), spec.format, dtype)
    return values if rows.zeros is None else values - rows.zeros.astype(dtype)[..., None]


def _flat(groups: Array, dtype: np.dtype) -> Array:
    return groups.reshape(*groups.shape[:2], groups.shape[2] * groups.shape[3]).astype(dtype)


def _matrix(rows: _Rows, spec: QuantizedMatmulSpec, dtype: np.dtype) -> Array:
    """W [b?, rows, codes], in a dtype."""
    return _flat(_relative(rows, spec, rows.scales.dtype) * rows.scales[..., None], dtype)


def _matrix_tangent(rows: _Rows, tangents: _Rows, spec: QuantizedMatmulSpec, dtype: np.dtype) -> Array:
    """Ẇ, from those tangents that are present."""
    wide, terms = _wide(dtype), []
    if tangents.scales is not None:
        terms.append(_relative(rows, spec, wide) * tangents.scales.astype(wide)[..., None])
    if tangents.zeros is not None:
        moved = rows.scales * tangents.zeros.astype(wide)
        terms.append(jnp.broadcast_to(-moved[..., None], (*moved.shape, spec.group_size)))
    return _flat(sum(terms), dtype)


def _matrix_cotangent(x: Array, do: Array, rows: _Rows, spec: QuantizedMatmulSpec) -> Array:
    """dW [b?, rows, codes], summed over the batch if W is shared by it."""
    b = "b" if any(a is not None and a.shape[0] != 1 for a in rows) else ""
    first, second = (do, x) if spec.transpose else (x, do)
    found = _product(f"bmr,bmc->{b}rc", first, second)
    return found if b else found[None]


def _of_batch(found: Array, rows: _Rows, name: str) -> Array:
    """The cotangent of the scales or zeros, summed over the batch if they are shared by it."""
    return found.sum(0, keepdims=True) if getattr(rows, name).shape[0] == 1 else found


def _dot(x: Array, matrix: Array, transpose: bool) -> Array:
    """x [b, m, i] times a matrix [b?, i, o], or the transpose of [b?, o, i], summed in float32."""
    b, matrix = ("", matrix[0]) if matrix.shape[0] == 1 else ("b", matrix)
    return _product(f"bmi,{b}{'oi' if transpose else 'io'}->bmo", x, matrix)


def _product(equation: str, x: Array, y: Array) -> Array:
    """An einsum in the precision of x and y, summed in float32; a CPU multiplies 16 bits as float32, exactly."""
    product = partial(jnp.einsum, equation, precision=lax.Precision.HIGHEST, preferred_element_type=_wide(x.dtype))
    if x.dtype.itemsize > 2:
        return product(x, y)
    widened = lambda *factors: product(*(factor.astype(jnp.float32) for factor in factors))
    return lax.platform_dependent(x, y, cpu=widened, default=product)
