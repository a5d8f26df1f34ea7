"""Tiles whose rows are keys or features and whose columns are queries: reductions, transposes and stores of them."""

from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .registers import COLUMNS, PER_COLUMN, ROWS, SPLAT, THREADS, WGMMA, fragment

WARPS = THREADS // 32
# Bytes of eight rows of a tile that is swizzled by 128 bytes, and of one.
EIGHT_ROWS, ROW = 1024, 128


def scratch_of_columns(columns: int) -> tuple[int, int]:
    """The shape, in float32, of what `reduce_columns` needs of shared memory for each warpgroup."""
    return WARPS, columns


def reduce_columns(operation: str, tile: Array, scratch: Any) -> Array:
    """The maximum ("max") or sum ("add") of every column of a tile [64, columns] float32.

    The rows are in all four warps, which exchange their parts in shared memory. A kernel of Pallas has one scratch for
    that; here two warpgroups reduce at once, each with a scratch of its own. A warpgroup waits for its own warps, and
    there has to be another wait before it uses `scratch` again.
    """
    columns = tile.shape[1]
    of_columns = plgpu.ShapeDtypeStruct((columns,), jnp.float32, PER_COLUMN)

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=of_columns)
    def emit(_, tile, scratch):
        i32, f32, void = _types()
        row, lane = _place()
        instruction = f"{operation}.f32 $0, $1, $2;"
        combine = lambda x, y: llvm.inline_asm(f32, [x, y], instruction, "=f,f,f")
        # From the rows that a thread has to those of its warp: they are in lanes with the same remainder of 4.
        exchange = "\n".join(
            f"shfl.sync.bfly.b32 t, x, {lanes}, 31, 0xffffffff; {operation}.f32 x, x, t;" for lanes in (4, 8, 16)
        )
        of_warp = lambda x: llvm.inline_asm(
            f32, [x], f"{{ .reg .f32 x, t; mov.f32 x, $1; {exchange} mov.f32 $0, x; }}", "=f,f", has_side_effects=True
        )
        registers = tile.registers.reshape(columns // COLUMNS, -1)
        number = lambda pair, i: vector.extract(pair, [], [i])
        found = [[of_warp(reduce(combine, [number(x, i) for x in row_])) for i in range(2)] for row_ in registers]
        base = llvm.ptrtoint(i32, utils.memref_ptr(scratch))
        of_lane = arith.addi(base, arith.muli(lane, arith.constant(i32, 8)))
        warp = arith.divui(row, arith.constant(i32, 16))
        to = arith.addi(of_lane, arith.muli(warp, arith.constant(i32, 4 * columns)))
        for n, pair in enumerate(found):
            text = (
                "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 28; setp.eq.u32 p, t, 0; "
                f"@p st.shared.v2.f32 [$0 + {32 * n}], {{$1, $2}}; }}"
            )
            llvm.inline_asm(void, [to, *pair], text, "r,f,f", has_side_effects=True)
        utils.warpgroup_barrier()
        result = np.empty(len(found), object)
        two, pairs = ir.Type.parse("!llvm.struct<(f32, f32)>"), ir.VectorType.get((2,), f32)
        for n in range(len(found)):
            of_warps = []
            for other in range(WARPS):
                text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {4 * columns * other + 32 * n}];"
                loaded = llvm.inline_asm(two, [of_lane], text, "=f,=f,r", has_side_effects=True)
                of_warps.append([llvm.extractvalue(f32, loaded, [i]) for i in range(2)])
            result[n] = vector.from_elements(pairs, [reduce(combine, x) for x in zip(*of_warps, strict=True)])
        layout = PER_COLUMN.to_mgpu()
        return fragment(tile, result.reshape(layout.registers_shape((columns,))), layout)

    return emit(tile, scratch)


def store_transposed(target: Any, tile: Array) -> None:
    """target [columns, 64] = tileᵀ, of 16 bits a number, in the swizzle of 128 bytes, which moves 16 bytes at a time.

    A thread has two adjacent columns in one register, which the transpose puts into two rows, so that it stores numbers
    of 16 bits one by one. Eight lanes have consecutive rows of a column, and the swizzle puts the four columns of a
    warp into different banks.
    """
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), WGMMA))
    def emit(_, target, tile):
        i32, _, void = _types()
        row, lane = _place()
        constant = lambda n: arith.constant(i32, n)
        base = llvm.ptrtoint(i32, utils.memref_ptr(target))
        registers = tile.registers.reshape(tile.shape[1] // COLUMNS, 2)
        for half in range(2):
            at = arith.muli(arith.addi(row, constant(8 * half)), constant(2))
            for i in range(2):
                column = arith.addi(arith.muli(lane, constant(2)), constant(i))
                swizzled = arith.xori(at, arith.muli(column, constant(16)))
                address = arith.addi(base, arith.addi(arith.muli(column, constant(ROW)), swizzled))
                for n, pair in enumerate(registers[:, half]):
                    text = f"st.shared.b16 [$0 + {EIGHT_ROWS * n}], $1;"
                    llvm.inline_asm(void, [address, _bits(pair, i)], text, "r,h", has_side_effects=True)

    emit(target, tile)


def store_registers_to_smem(target: Any, tile: Array) -> None:
    """Writes the registers of a float32 tile to shared memory, for `load_registers_from_smem` of another warpgroup.

    Pallas stores to a ref of the shape and dtype of the tile. Here each thread stores its registers one after the
    other, without bank conflicts, over a tile of any shape and dtype that is no longer used and has as many bytes.
    """

    @plgpu.inline_mgpu(arg_types=(_swizzled(), WGMMA))
    def emit(_, target, tile):
        _, _, void = _types()
        address = _of_thread(target)
        for n, pair in enumerate(tile.registers.flat):
            numbers = [vector.extract(pair, [], [i]) for i in range(2)]
            text = f"st.shared.v2.f32 [$0 + {8 * THREADS * n}], {{$1, $2}};"
            llvm.inline_asm(void, [address, *numbers], text, "r,f,f", has_side_effects=True)

    emit(target, tile)


def load_registers_from_smem(source: Any, like: Array) -> Array:
    """The tile that another warpgroup has stored by `store_registers_to_smem`, of the shape of `like`.

    A thread loads the registers that the thread of the same place in that warpgroup has stored.
    """

    @plgpu.inline_mgpu(
        arg_types=(_swizzled(), WGMMA), return_type=plgpu.ShapeDtypeStruct(like.shape, jnp.float32, WGMMA)
    )
    def emit(_, source, like):
        _, f32, _ = _types()
        two, pairs = ir.Type.parse("!llvm.struct<(f32, f32)>"), ir.VectorType.get((2,), f32)
        address, registers = _of_thread(source), np.empty(like.registers.size, object)
        for n in range(registers.size):
            text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {8 * THREADS * n}];"
            loaded = llvm.inline_asm(two, [address], text, "=f,=f,r", has_side_effects=True)
            registers[n] = vector.from_elements(pairs, [llvm.extractvalue(f32, loaded, [i]) for i in range(2)])
        return fragment(like, registers.reshape(like.registers.shape))

    return emit(source, like)


def store_columns(o: Any, lse: Any, tile: Array, of_columns: Array, first: Array, columns: Array, half: int) -> None:
    """o[first + n, half] = tile[:, n] and lse[first + n, half] = of_columns[n] for the columns 0 ≤ n < `columns`.

    `tile` [features, ·] has 16 or 32 bits a number. Stores of Pallas have no mask, which the columns need.
    """
    (_, halves, features), itemsize = o.shape, tile.dtype.itemsize
    of_half = plgpu.RefType(), plgpu.RefType(), WGMMA, PER_COLUMN, SPLAT, SPLAT

    @plgpu.inline_mgpu(arg_types=of_half)
    def emit(_, o, lse, tile, of_columns, first, columns):
        i32, _, void = _types()
        i64 = ir.IntegerType.get_signless(64)
        row, lane = _place()
        constant = lambda n, of=i32: arith.constant(of, n)
        first, columns = (x.registers[()] for x in (first, columns))
        pointers = [llvm.ptrtoint(i64, utils.memref_ptr(x)) for x in (o, lse)]
        is_first = arith.cmpi(arith.CmpIPredicate.eq, row, constant(0))
        registers = tile.registers.reshape(features // ROWS, -1, 2)
        kind, store = ("h", "b16") if itemsize == 2 else ("f", "f32")
        for n, i in np.ndindex(registers.shape[1], 2):
            column = arith.addi(arith.muli(lane, constant(2)), constant(COLUMNS * n + i))
            inside = arith.cmpi(arith.CmpIPredicate.slt, column, columns)
            at = arith.extsi(i64, arith.addi(first, column))
            at = arith.addi(arith.muli(at, constant(halves, i64)), constant(half, i64))
            address = arith.addi(pointers[0], arith.muli(at, constant(features * itemsize, i64)))
            address = arith.addi(address, arith.extsi(i64, arith.muli(row, constant(itemsize))))
            for m, eight in np.ndindex(registers.shape[0], 2):
                pair = registers[m, n, eight]
                number = _bits(pair, i) if itemsize == 2 else vector.extract(pair, [], [i])
                place = (ROWS * m + 8 * eight) * itemsize
                text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.{store} [$0 + {place}], $1; }}"
                operands = [address, number, arith.extui(i32, inside)]
                llvm.inline_asm(void, operands, text, f"l,{kind},r", has_side_effects=True)
            number = vector.extract(of_columns.registers.flat[n], [], [i])
            text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }"
            address = arith.addi(pointers[1], arith.muli(at, constant(4, i64)))
            operands = [address, number, arith.extui(i32, arith.andi(inside, is_first))]
            llvm.inline_asm(void, operands, text, "l,f,r", has_side_effects=True)

    emit(o, lse, tile, of_columns, first, columns)


def _types() -> tuple[Any, Any, Any]:
    return ir.IntegerType.get_signless(32), ir.F32Type.get(), ir.Type.parse("!llvm.void")


def _place() -> tuple[Any, Any]:
    """The first row of a tile that a thread of the warpgroup has, and which two of every eight columns."""
    i32 = ir.IntegerType.get_signless(32)
    numbers = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32)>"), [],
        "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 1; and.b32 $0, $0, 48; bfe.u32 t, t, 2, 3; "
        "or.b32 $0, $0, t; mov.u32 t, %tid.x; and.b32 $1, t, 3; }", "=r,=r",
    )  # fmt: skip
    return tuple(llvm.extractvalue(i32, numbers, [i]) for i in range(2))


def _bits(pair: Any, i: int) -> Any:
    """A number of a pair of 16 bits each."""
    return arith.bitcast(ir.IntegerType.get_signless(16), vector.extract(pair, [], [i]))


def _swizzled() -> Any:
    return plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def _of_thread(target: Any) -> Any:
    """The address in shared memory of a thread's first eight bytes."""
    i32 = ir.IntegerType.get_signless(32)
    text = f"{{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1}; shl.b32 t, t, 3; add.u32 $0, $1, t; }}"
    return llvm.inline_asm(i32, [llvm.ptrtoint(i32, utils.memref_ptr(target))], text, "=r,r")
