"""Inline assembly, and all that the kernels touch of Mosaic GPU beside its public names.

A function stands here where Pallas has no operation for what it does; its docstring says what for. Registers of a
tile are private to `FragmentedArray`, and so is how one is made of new ones (`fragment`): inline assembly takes and
gives single registers. `_internals.moved` looks whether the installed JAX has what is used here.

Seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

# Rows that a warpgroup computes on: the height of a wgmma; and its threads.
ROWS, THREADS = 64, 128
WGMMA, SPLAT = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
PER_ROW, PER_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
# A thread has two numbers of every so many columns.
COLUMNS = 8
# Of so many keys a thread has four after q·kᵀ, which the next product wants of four in a row.
KEYS = 16


def fragment(like: Any, registers: np.ndarray, layout: Any = None, is_signed: bool | None = None) -> Any:
    """A `FragmentedArray` of other registers: in the layout of `like`, unless another is given."""
    return type(like)(_registers=registers, _layout=like.layout if layout is None else layout, _is_signed=is_signed)


# ---- Votes and barriers


def in_warp(conditions: Array, layout) -> Array:
    """Whether one of the conditions that the threads of this warp have is true."""
    of_all = plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=of_all)
    def emit(_, conditions):
        i32 = ir.IntegerType.get_signless(32)
        each = [vector.extract(x, [], [i]) for x in conditions.registers.flat for i in range(x.type.shape[0])]
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        some = llvm.inline_asm(i32, [arith.extui(i32, reduce(arith.ori, each))], text, "=r,r", has_side_effects=True)
        return type(conditions).splat(some, (), is_signed=True)

    return emit(conditions) != 0


def named_barrier(operation: str, barrier: int | Array, warpgroups: int) -> None:
    """`bar.arrive` or `bar.sync`, one instruction a warp: an arrival at a barrier of Mosaic GPU is one a thread."""

    @plgpu.inline_mgpu(arg_types=(SPLAT,))
    def emit(_, number):
        void = ir.Type.parse("!llvm.void")
        text = f"bar.{operation} $0, {warpgroups * THREADS};"
        llvm.inline_asm(void, [number.registers[()]], text, "r", has_side_effects=True)

    emit(jnp.int32(barrier))


# ---- Semaphores in device memory (flash_attention/dq_semaphore.py)


def count_of(semaphore: Any) -> Array:
    """How many tiles have added to the block of queries that a semaphore, in device memory, is of.

    Nobody waits for the answer before it is looked at. All threads ask: of a warp they are one request.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT))
    def emit(_, semaphore):
        i32 = ir.IntegerType.get_signless(32)
        count = _with_pointer(i32, "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", semaphore)
        return fragmented_array.FragmentedArray.splat(count, (), is_signed=True)

    return emit(semaphore)


def await_rank(semaphore: Any, count: Array, rank: Array) -> None:
    """Waits until so many tiles have added; `count` is how many had when that was last asked.

    No thread reads dq, so none acquires it: TMA adds in the L2 cache, and is sent there after the count came from it.
    """
    text = """{
        .reg .pred p; .reg .b32 count;
        mov.b32 count, $1;
        LOOK: setp.eq.s32 p, count, $2;
        @p bra DUE;
        ld.relaxed.gpu.global.b32 count, [$0];
        bra LOOK;
        DUE: fence.proxy.async.global;
    }"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, SPLAT))
    def emit(_, semaphore, count, rank):
        _with_pointer(None, text, "l,r,r,~{memory}", semaphore, count.registers[()], rank.registers[()])

    emit(semaphore, jnp.int32(count), jnp.int32(rank))


def count_up(semaphore: Any) -> None:
    """Counts this thread block at a semaphore, whose copies to device memory are complete."""
    text = f"""{{
        .reg .pred p; .reg .b32 t;
        mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1}; setp.eq.u32 p, t, 0;
        fence.proxy.async.global;
        @p red.release.gpu.global.add.s32 [$0], 1;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, semaphore):
        _with_pointer(None, text, "l,~{memory}", semaphore)

    emit(semaphore)


def _with_pointer(result: Any, text: str, constraints: str, semaphore: Any, *operands: Any) -> Any:
    """Inline assembly whose first operand is the address of a semaphore."""
    pointer = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(semaphore))
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, [pointer, *operands], text, constraints, has_side_effects=True)


# ---- What ptxas cannot see through


def opaque_barrier(weights: Array) -> None:
    """A no-op `bar.warp.sync` whose mask depends on all weights: keeps ptxas from hoisting the next product over them.

    There are no registers for both at once. The mask is that of all threads but (weights and 0), of a 0 that ptxas does
    not know: the index of a thread block along an axis of one.
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
    """A copy of a number that ptxas cannot see through: what depends on it is computed again, not kept in registers."""

    @plgpu.inline_mgpu(
        arg_types=(SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT),
    )
    def emit(_, number):
        i32 = ir.IntegerType.get_signless(32)
        copy = llvm.inline_asm(i32, [number.registers[()]], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return fragment(number, np.array(copy, object), is_signed=True)

    return emit(jnp.int32(number))


# ---- Tiles in registers


def compare_columns(comparison: str, limits: Array, shape: tuple[int, int]) -> Array:
    """Where columns, numbered from 0, compare so with the bound of a row. A thread compares with constants."""

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


def powers_of_pairs(s: Array, exponent: Array, base: Array) -> Array:
    """2^(s·exponent − base) of float16, two numbers at once, as no operation of Pallas has it; a base for each row."""

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


def of_threads(x: Array) -> Array:
    """[rows, COLUMNS] float32: the sums of the numbers of a row that a thread has."""

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((x.shape[0], COLUMNS), x.dtype, WGMMA))
    def emit(_, x):
        sums = [reduce(arith.addf, row) for row in x.registers.reshape(x.shape[1] // COLUMNS, -1).T]
        registers = np.array(sums, object).reshape(x.layout.registers_shape((x.shape[0], COLUMNS)))
        return fragment(x, registers)

    return emit(x).astype(jnp.float32)


def e4m3_operand(p: Array) -> Array:
    """The weights, float32 or float16, in e4m3 as the first operand of a product, with its keys in their order."""
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


# ---- Rows of tiles, some of which are left out, in shared and in device memory

# Columns of 16 bits in a row of a tile that is swizzled by 128 bytes, and rows after which the swizzle repeats.
TILE_COLUMNS, TILE_ROWS = 64, 8


def zero_rows(tile: Any, begin: Array, end: Array) -> None:
    """Zeros in the rows of a tile [rows, columns] that are not begin ≤ row < end, for the products of this warpgroup.

    Several warpgroups may do so at once. The tile is of 16 bits in parts of 8 rows × 128 bytes, within whose rows the
    swizzle moves 16 bytes at a time; here it only spreads the threads over the banks.
    """
    rows, columns = tile.shape
    transforms = plgpu.TilingTransform((TILE_ROWS, TILE_COLUMNS)), plgpu.SwizzleTransform(128)
    parts, part_bytes = columns // TILE_COLUMNS, TILE_ROWS * 128

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), SPLAT, SPLAT))
    def emit(_, tile, begin, end):

        stores = "\n".join(
            f"xor.b32 a, x, {16 * chunk}; add.u32 a, a, r;\n"
            + "\n".join(f"@p st.shared.v4.b32 [a + {part * part_bytes}], {{z, z, z, z}};" for part in range(parts))
            for chunk in range(8)
        )
        text = f"""{{
            .reg .pred p, q; .reg .b32 t, r, x, a, z;
            mov.b32 z, 0;
            mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1};
            setp.lt.s32 p, t, $1; setp.ge.s32 q, t, $2; or.pred p, p, q;
            setp.lt.s32 q, t, {rows}; and.pred p, p, q;
            and.b32 x, t, {TILE_ROWS - 1}; shr.u32 r, t, 3;
            mul.lo.u32 r, r, {parts * part_bytes}; add.u32 r, r, $0;
            shl.b32 a, x, 7; add.u32 r, r, a; shl.b32 x, x, 4;
            {stores}
        }}"""
        i32, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        address = llvm.ptrtoint(i32, utils.memref_ptr(tile))
        llvm.inline_asm(void, [address, begin.registers[()], end.registers[()]], text, "r,r,r", has_side_effects=True)

    emit(tile, begin, end)
    plgpu.commit_smem()


def store_rows(o: Any, lse: Any, tile: Array, of_rows: Array, first: Array, rows: Array, head: Array) -> None:
    """o[first + n, head] = tile[n] and lse[first + n, head] = of_rows[n] for the rows 0 ≤ n < `rows` of a warpgroup.

    `tile` [64, columns] is of 16 bits. A thread has two columns of every eight, which it stores from its registers.
    """
    (_, heads, columns), itemsize = o.shape, tile.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), WGMMA, PER_ROW, SPLAT, SPLAT, SPLAT))
    def emit(_, o, lse, tile, of_rows, first, rows, head):

        i32, i64, void = (*map(ir.IntegerType.get_signless, (32, 64)), ir.Type.parse("!llvm.void"))
        word = ir.VectorType.get((1,), i32)
        first, rows, head = (x.registers[()] for x in (first, rows, head))
        pointers = [llvm.ptrtoint(i64, utils.memref_ptr(x)) for x in (o, lse)]
        numbers = llvm.inline_asm(
            ir.Type.parse("!llvm.struct<(i32, i32)>"), [],
            "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 1; and.b32 $0, $0, 48; bfe.u32 t, t, 2, 3; "
            "or.b32 $0, $0, t; mov.u32 t, %tid.x; and.b32 $1, t, 3; }", "=r,=r",
        )  # fmt: skip
        row, lane = (llvm.extractvalue(i32, numbers, [i]) for i in range(2))
        constant = lambda n, of=i32: arith.constant(of, n)
        wide = lambda x: arith.extsi(i64, x)
        words = tile.registers.reshape(columns // 8, 2)
        for half, of_row in enumerate(of_rows.registers.flat):
            n = arith.addi(row, constant(8 * half))
            inside = arith.cmpi(arith.CmpIPredicate.slt, n, rows)
            at = arith.addi(arith.muli(wide(arith.addi(first, n)), constant(heads, i64)), wide(head))
            address = arith.addi(pointers[0], arith.muli(at, constant(columns * itemsize, i64)))
            address = arith.addi(address, wide(arith.muli(lane, constant(2 * itemsize))))
            for part, pair in enumerate(words[:, half]):
                bits = vector.extract(vector.bitcast(word, pair), [], [0])
                text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0 + {8 * itemsize * part}], $1; }}"
                llvm.inline_asm(void, [address, bits, arith.extui(i32, inside)], text, "l,r,r", has_side_effects=True)
            alone = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0)))
            number = vector.extract(of_row, [], [0])
            text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }"
            address = arith.addi(pointers[1], arith.muli(at, constant(4, i64)))
            llvm.inline_asm(void, [address, number, arith.extui(i32, alone)], text, "l,f,r", has_side_effects=True)

    assert tile.shape[0] == ROWS
    emit(o, lse, tile, of_rows.astype(jnp.float32), first, rows, head)
