"""Operations on the registers of a tile, and barriers against what ptxas would do with them."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

# The rows of a wgmma, which a warpgroup computes, and the threads of a warpgroup.
ROWS, THREADS = 64, 128
WGMMA, SPLAT = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
PER_ROW, PER_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
# In the WGMMA layout a thread holds two numbers of every 8 columns of a row.
COLUMNS = 8
# Of a word.
BITS = 32
# Of every 16 keys a thread holds four after q·kᵀ; as an operand in eight bits it holds four consecutive ones.
KEYS = 16


def fragment(like: Any, registers: np.ndarray, layout: Any = None, is_signed: bool | None = None) -> Any:
    """A `FragmentedArray` built from new registers, in the layout of `like` unless another is given."""
    return type(like)(_registers=registers, _layout=like.layout if layout is None else layout, _is_signed=is_signed)


def compare_columns(comparison: str, limits: Array, shape: tuple[int, int]) -> Array:
    """column `comparison` limits[row] for the columns 0, 1, …: a mask, for which a thread compares with constants."""

    @plgpu.inline_mgpu(arg_types=(PER_ROW,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.bool_, WGMMA))
    def emit(_, limits):
        i32, predicate = ir.IntegerType.get_signless(32), arith.CmpIPredicate[comparison]
        constant = lambda n: arith.constant(i32, n)
        text = "{ .reg .b32 x; mov.u32 x, %laneid; and.b32 x, x, 3; add.u32 $0, x, x; }"
        first = llvm.inline_asm(i32, [], text, "=r")
        limits = limits.broadcast_in_dim(shape, (0,), WGMMA.to_mgpu())
        of_rows = limits.registers.reshape(shape[1] // COLUMNS, -1)[0]
        of_rows = [arith.subi(vector.extract(x, [], [0]), first) for x in of_rows]
        registers = np.empty((shape[1] // COLUMNS, len(of_rows)), object)
        for (n, row), _ in np.ndenumerate(registers):
            pair = [arith.cmpi(predicate, constant(n * COLUMNS + i), of_rows[row]) for i in range(2)]
            registers[n, row] = vector.from_elements(ir.VectorType.get((2,), pair[0].type), pair)
        return fragment(limits, registers.reshape(limits.registers.shape), is_signed=False)

    return emit(limits)


def times_columns(s: Array, scales: Any) -> Array:
    """s [64, columns] times a factor for each column: scales [columns], both float32, these in shared memory."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, WGMMA))
    def emit(_, s, scales):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        text = "{ .reg .b32 x; mov.u32 x, %laneid; and.b32 x, x, 3; shl.b32 x, x, 3; add.u32 $0, $1, x; }"
        address = llvm.inline_asm(i32, [llvm.ptrtoint(i32, utils.memref_ptr(scales))], text, "=r,r")
        registers = np.empty((s.shape[1] // COLUMNS, s.registers.size * COLUMNS // s.shape[1]), object)
        of_columns = s.registers.reshape(registers.shape)
        two = ir.Type.parse("!llvm.struct<(f32, f32)>")
        for n, pairs in enumerate(of_columns):
            text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {4 * COLUMNS * n}];"
            loaded = llvm.inline_asm(two, [address], text, "=f,=f,r,~{memory}", has_side_effects=True)
            factors = vector.from_elements(pairs[0].type, [llvm.extractvalue(f32, loaded, [i]) for i in range(2)])
            registers[n] = [arith.mulf(pair, factors) for pair in pairs]
        return fragment(s, registers.reshape(s.registers.shape))

    return emit(s, scales)


def where_bits(words: Sequence[Array], s: Array) -> Array:
    """s float32, −∞ where a bit is 0: bit n of word w, of which each row has its own, is that of column 32·w + n."""

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, *(PER_ROW,) * len(words)), return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, WGMMA)
    )
    def emit(_, s, *words):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        text = "{ .reg .b32 x; mov.u32 x, %laneid; and.b32 x, x, 3; add.u32 x, x, x; shr.b32 $0, $1, x; }"
        words = [x.broadcast_in_dim(s.shape, (0,), WGMMA.to_mgpu()).registers for x in words]
        of_rows = [x.reshape(s.shape[1] // COLUMNS, -1)[0] for x in words]
        shifted = lambda x: llvm.inline_asm(i32, [vector.extract(x, [], [0])], text, "=r,r")
        of_rows = [[shifted(x) for x in row] for row in of_rows]
        registers = np.empty((s.shape[1] // COLUMNS, len(of_rows[0])), object)
        for (n, row), pair in np.ndenumerate(s.registers.reshape(registers.shape)):
            word, place = of_rows[n * COLUMNS // BITS][row], n * COLUMNS % BITS
            shown = (
                f"{{ .reg .pred p; .reg .b32 x; and.b32 x, $2, {1 << place + i}; setp.ne.b32 p, x, 0; "
                "selp.f32 $0, $1, 0fFF800000, p; }"
                for i in range(2)
            )
            numbers = [vector.extract(pair, [], [i]) for i in range(2)]
            numbers = [llvm.inline_asm(f32, [x, word], text, "=f,f,r") for x, text in zip(numbers, shown, strict=True)]
            registers[n, row] = vector.from_elements(pair.type, numbers)
        return fragment(s, registers.reshape(s.registers.shape))

    return emit(s, *words)


def powers_of_pairs(s: Array, exponent: Array, base: Array) -> Array:
    """2^(s·exponent − base) in float16, with one base per row, by `ex2.approx.f16x2`: two numbers per instruction."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, SPLAT, PER_ROW), return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, WGMMA))
    def emit(_, s, exponent, base):
        i32 = ir.IntegerType.get_signless(32)
        word, pairs = ir.VectorType.get((1,), i32), ir.Type.parse("!llvm.struct<(i32, i32)>")
        text = "{ .reg .b16 x; cvt.rn.f16.f32 x, $1; mov.b32 $0, {x, x}; }"
        exponent = llvm.inline_asm(i32, [exponent.registers[()]], text, "=r,f")
        text = (
            "{ .reg .b32 b; .reg .b16 x, y; cvt.rn.f16x2.f32 b, $3, $2; neg.f16x2 b, b; "
            "mov.b32 {x, y}, b; mov.b32 $0, {x, x}; mov.b32 $1, {y, y}; }"
        )
        bases = llvm.inline_asm(pairs, [vector.extract(x, [], [0]) for x in base.registers.flat], text, "=r,=r,f,f")
        of_rows = [llvm.extractvalue(i32, bases, [i]) for i in range(2)]
        registers = np.empty((s.shape[1] // COLUMNS, len(of_rows)), object)
        for (n, row), x in np.ndenumerate(s.registers.reshape(registers.shape)):
            pair = vector.extract(vector.bitcast(word, x), [], [0])
            text = "{ .reg .b32 t; fma.rn.f16x2 t, $1, $2, $3; ex2.approx.f16x2 $0, t; }"
            pair = llvm.inline_asm(i32, [pair, exponent, of_rows[row]], text, "=r,r,r,r")
            registers[n, row] = vector.bitcast(x.type, vector.broadcast(word, pair))
        return fragment(s, registers.reshape(s.registers.shape))

    return emit(s, jnp.float32(exponent), base)


def thread_partial_row_sums(x: Array) -> Array:
    """Partial row sums, [rows, COLUMNS] float32: each thread adds the numbers of a row that it holds.

    Pallas reduces a row over its four threads too, by shuffles in every block of keys. These sums are reduced once, in
    the epilogue.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((x.shape[0], COLUMNS), x.dtype, WGMMA))
    def emit(_, x):
        return _of_columns(x, x.registers, arith.addf)

    return emit(x).astype(jnp.float32)


def _of_columns(like: Any, registers: np.ndarray, operation: Any) -> Any:
    """[rows, COLUMNS], of the registers of a tile: those of a row reduced within a thread."""
    rows = registers.reshape(like.shape[1] // COLUMNS, -1).T
    reduced = np.array([reduce(operation, row) for row in rows], object)
    return fragment(like, reduced.reshape(like.layout.registers_shape((like.shape[0], COLUMNS))))


def powers_of_polynomial(x: Array, coefficients: Sequence[float], base: Array) -> tuple[Array, Array]:
    """2^(x·(c₀ + c₁·x² + …) − base), with one base per row; and the greatest x² of a row that a thread holds.

    The operations of a number stand together. Where whole arrays follow one another, ptxas computes all polynomials
    before most of the powers, which then wait for one another.
    """
    sizes = x.shape, (x.shape[0], COLUMNS)
    results = tuple(plgpu.ShapeDtypeStruct(size, jnp.float32, WGMMA) for size in sizes)

    @plgpu.inline_mgpu(arg_types=(WGMMA, PER_ROW), return_type=results)
    def emit(_, x, base):
        f32, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
        *lower, last = (
            arith.constant(pair, ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get(f32, c))) for c in coefficients
        )
        bases = base.broadcast_in_dim(x.shape, (0,), WGMMA.to_mgpu()).registers
        powers, squares = np.empty(x.registers.shape, object), np.empty(x.registers.shape, object)
        for at, numbers in np.ndenumerate(x.registers):
            square, slope = arith.mulf(numbers, numbers), last
            for coefficient in reversed(lower):
                slope = math.fma(slope, square, coefficient)
            exponents = math.fma(numbers, slope, arith.negf(bases[at]))
            each = (vector.extract(exponents, [], [i]) for i in range(2))
            each = [llvm.inline_asm(f32, [n], "ex2.approx.ftz.f32 $0, $1;", "=f,f") for n in each]
            powers[at], squares[at] = vector.from_elements(pair, each), square
        return fragment(x, powers), _of_columns(x, squares, arith.maxnumf)

    return emit(x, base)


def reciprocal(x: Array) -> Array:
    """1 / x of float32 in one instruction, to one unit in the last place: for x that is at least 1 or infinite."""

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, WGMMA))
    def emit(_, x):
        f32, registers = ir.F32Type.get(), np.empty(x.registers.shape, object)
        for at, numbers in np.ndenumerate(x.registers):
            numbers = [vector.extract(numbers, [], [i]) for i in range(numbers.type.shape[0])]
            numbers = [llvm.inline_asm(f32, [n], "rcp.approx.ftz.f32 $0, $1;", "=f,f") for n in numbers]
            registers[at] = vector.from_elements(x.registers[at].type, numbers)
        return fragment(x, registers)

    return emit(x)


def e4m3_operand(p: Array) -> Array:
    """The weights, float32 or float16, rounded to e4m3 as the register operand of wgmma, without a shuffle of keys."""
    layout = plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, jnp.float8_e4m3fn, layout))
    def emit(_, p):
        i32, four = ir.IntegerType.get_signless(32), ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        to = layout.to_mgpu()
        registers = np.empty(to.registers_shape(p.shape), object)
        single = ir.VectorType.get((1,), i32)
        if isinstance(p.mlir_dtype, ir.F16Type):
            numbers = lambda pair: [vector.extract(vector.bitcast(single, pair), [], [0])]
            source, low, high, constraints = "f16x2", "$1", "$2", "=r,r,r"
        else:
            numbers = lambda pair: [vector.extract(pair, [], [i]) for i in range(2)]
            source, low, high, constraints = "f32", "$2, $1", "$4, $3", "=r,f,f,f,f"
        round_pair = f"cvt.rn.satfinite.e4m3x2.{source}"
        text = f"{{ .reg .b16 lo, hi; {round_pair} lo, {low}; {round_pair} hi, {high}; mov.b32 $0, {{lo, hi}}; }}"
        for n, quad in enumerate(p.registers.reshape(p.shape[1] // KEYS, 2, -1)):
            for row, (first, second) in enumerate(zip(*quad, strict=True)):
                word = llvm.inline_asm(i32, numbers(first) + numbers(second), text, constraints)
                registers.reshape(p.shape[1] // KEYS, -1)[n, row] = vector.bitcast(four, vector.broadcast(single, word))
        return fragment(p, registers, layout=to)

    return emit(p)


# ---- What ptxas cannot see through


def opaque_barrier(weights: Array) -> None:
    """A no-op `bar.warp.sync` whose mask depends on all weights: keeps ptxas from hoisting the next product over them.

    There are not enough registers for both. The mask is ~(weights & 0), all threads, where ptxas does not know that the
    second operand is 0: it is the index of the thread block along a grid axis of size 1.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA,))
    def emit(_, weights):
        void, i32 = ir.Type.parse("!llvm.void"), ir.IntegerType.get_signless(32)
        word = ir.VectorType.get((1,), i32)
        words = [vector.extract(vector.bitcast(word, x), [], [0]) for x in weights.registers.flat]
        text = "{ .reg .b32 x; mov.u32 x, %ctaid.z; and.b32 x, x, $0; not.b32 x, x; bar.warp.sync x; }"
        llvm.inline_asm(void, [reduce(arith.ori, words)], text, "r", has_side_effects=True)

    emit(weights)


def opaque_copy(number: Array | int) -> Array:
    """A copy by inline assembly, which ptxas does not identify with `number`: it recomputes addresses from the copy at
    each use, where it would keep those from `number` in registers over the mainloop, and spill.
    """

    @plgpu.inline_mgpu(
        arg_types=(SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT),
    )
    def emit(_, number):
        i32 = ir.IntegerType.get_signless(32)
        copy = llvm.inline_asm(i32, [number.registers[()]], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return fragment(number, np.array(copy, object), is_signed=True)

    return emit(jnp.int32(number))
