"""Stores of tiles in shared memory, and of some of their rows only, in shared and in device memory."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .registers import PER_ROW, ROWS, SPLAT, THREADS, WGMMA

# A tile swizzled by 128 bytes has rows of 64 numbers of 16 bits; its swizzle repeats after 8 rows.
TILE_COLUMNS, TILE_ROWS = 64, 8


def swizzle_of(tile: Any) -> int:
    """Bytes of the swizzle of a tile in shared memory."""
    (swizzle,) = (transform.swizzle for transform in tile.transforms if hasattr(transform, "swizzle"))
    return swizzle


def type_of_tile(tile: Any) -> Any:
    """The type of a tile in shared memory that has a swizzle, and tiles of 8 rows."""
    swizzle = swizzle_of(tile)
    tiling = plgpu.TilingTransform((TILE_ROWS, swizzle // tile.dtype.itemsize))
    return plgpu.RefType((tiling, plgpu.SwizzleTransform(swizzle)))


def store_tile(target: Any, tile: Array) -> None:
    """target = tile, in shared memory; target [rows, columns] has a swizzle, and tiles of 8 rows.

    `target[...] = tile` of Pallas also loads what `target` held. Lowering that takes as long as the store, and LLVM
    does not remove an `ldmatrix` whose result is unused.
    """
    swizzle = swizzle_of(target)

    @plgpu.inline_mgpu(arg_types=(type_of_tile(target), WGMMA))
    def emit(_, target, tile):
        tile.store_tiled(target, swizzle=swizzle)

    emit(target, tile)


def zero_rows(tile: Any, begin: Array, end: Array) -> None:
    """Writes zeros to the rows of a tile [rows, columns] outside of begin ≤ row < end, before products read them.

    Several warpgroups may do so at once. The tile has 16 bits a number, in parts of 8 rows as wide as its swizzle. That
    moves 16 bytes at a time within a row; as whole rows are written, it only spreads the threads over the banks.
    """
    rows, columns = tile.shape
    swizzle = swizzle_of(tile)
    parts, part_bytes = 2 * columns // swizzle, TILE_ROWS * swizzle

    @plgpu.inline_mgpu(arg_types=(type_of_tile(tile), SPLAT, SPLAT))
    def emit(_, tile, begin, end):

        stores = "\n".join(
            f"xor.b32 a, x, {chunk}; add.u32 a, a, r;\n"
            + "\n".join(f"@p st.shared.v4.b32 [a + {part * part_bytes}], {{z, z, z, z}};" for part in range(parts))
            for chunk in range(0, swizzle, 16)
        )
        text = f"""{{
            .reg .pred p, q; .reg .b32 t, r, x, a, z;
            mov.b32 z, 0;
            mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1};
            setp.lt.s32 p, t, $1; setp.ge.s32 q, t, $2; or.pred p, p, q;
            setp.lt.s32 q, t, {rows}; and.pred p, p, q;
            and.b32 x, t, {TILE_ROWS - 1}; shr.u32 r, t, 3;
            mul.lo.u32 r, r, {parts * part_bytes}; add.u32 r, r, $0;
            mul.lo.u32 a, x, {swizzle}; add.u32 r, r, a; shl.b32 x, x, 4; and.b32 x, x, {swizzle - 16};
            {stores}
        }}"""
        i32, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        address = llvm.ptrtoint(i32, utils.memref_ptr(tile))
        llvm.inline_asm(void, [address, begin.registers[()], end.registers[()]], text, "r,r,r", has_side_effects=True)

    emit(tile, begin, end)
    plgpu.commit_smem()


def zero_chosen_rows(tile: Any, chosen: Any, first: Array) -> None:
    """Writes zeros to the rows n of a tile [rows, columns] for which chosen[first + n], in device memory, is not 0.

    The tile has 16 bits a number and up to 128 rows, one for each thread of a warpgroup. Its swizzle moves 16 bytes at
    a time within a row.
    """
    rows, columns = tile.shape[-2:]
    swizzle = swizzle_of(tile)
    part_bytes, parts = TILE_ROWS * swizzle, 2 * columns // swizzle
    places = (part * part_bytes + chunk for part in range(parts) for chunk in range(0, swizzle, 16))
    text = f"""{{
        .reg .pred p, q; .reg .b32 t, r, a, z; .reg .b64 g;
        mov.b32 z, 0;
        mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1};
        setp.lt.s32 p, t, {rows};
        add.s32 r, t, $2; mul.wide.s32 g, r, 4; add.s64 g, g, $1;
        @p ld.global.b32 z, [g];
        setp.ne.s32 q, z, 0; and.pred p, p, q;
        mov.b32 z, 0;
        shr.u32 r, t, 3; mul.lo.u32 r, r, {parts * part_bytes}; and.b32 a, t, {TILE_ROWS - 1};
        mul.lo.u32 a, a, {swizzle}; add.u32 a, a, r; add.u32 a, a, $0;
        {" ".join(f"@p st.shared.v4.b32 [a + {place}], {{z, z, z, z}};" for place in places)}
    }}"""

    @plgpu.inline_mgpu(arg_types=(type_of_tile(tile), plgpu.RefType(), SPLAT))
    def emit(_, tile, chosen, first):
        i32, i64, void = (*map(ir.IntegerType.get_signless, (32, 64)), ir.Type.parse("!llvm.void"))
        operands = [llvm.ptrtoint(i32, utils.memref_ptr(tile)), llvm.ptrtoint(i64, utils.memref_ptr(chosen))]
        operands.append(first.registers[()])
        llvm.inline_asm(void, operands, text, "r,l,r,~{memory}", has_side_effects=True)

    emit(tile, chosen, first)


def store_rows(
    o: Any, tile: Array, first: Array, rows: Array, head: Array, lse: Any = None, of_rows: Array | None = None,
    heads_of_token: int = 1,
) -> None:  # fmt: skip
    """o[first + n, head] = tile[n], and lse[first + n, head] = of_rows[n], for the rows 0 ≤ n < `rows` of a warpgroup.

    Or o[first + n // heads_of_token, head + n % heads_of_token], if that many heads are packed, a power of two.
    `tile` [64, columns] has 16 or 32 bits a number. A thread stores the two columns of every eight that its registers
    hold.
    """
    (_, heads, columns), itemsize = o.shape, tile.dtype.itemsize
    arrays, types = ((), ()) if lse is None else ((lse, of_rows.astype(jnp.float32)), (plgpu.RefType(), PER_ROW))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, SPLAT, SPLAT, SPLAT, *types))
    def emit(_, o, tile, first, rows, head, *of_lse):

        i32, i64, void = (*map(ir.IntegerType.get_signless, (32, 64)), ir.Type.parse("!llvm.void"))
        bits, kind = 16 * itemsize, "r" if itemsize == 2 else "l"
        word = ir.VectorType.get((1,), ir.IntegerType.get_signless(bits))
        first, rows, head = (x.registers[()] for x in (first, rows, head))
        pointers = [llvm.ptrtoint(i64, utils.memref_ptr(x)) for x in (o, *of_lse[:1])]
        numbers = llvm.inline_asm(
            ir.Type.parse("!llvm.struct<(i32, i32)>"), [],
            "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 1; and.b32 $0, $0, 48; bfe.u32 t, t, 2, 3; "
            "or.b32 $0, $0, t; mov.u32 t, %tid.x; and.b32 $1, t, 3; }", "=r,=r",
        )  # fmt: skip
        row, lane = (llvm.extractvalue(i32, numbers, [i]) for i in range(2))
        constant = lambda n, of=i32: arith.constant(of, n)
        wide = lambda x: arith.extsi(i64, x)
        words = tile.registers.reshape(columns // 8, 2)
        for half in range(2):
            n = arith.addi(row, constant(8 * half))
            inside = arith.cmpi(arith.CmpIPredicate.slt, n, rows)
            token, of_token = n, head
            if heads_of_token > 1:
                token = arith.shrui(n, constant(heads_of_token.bit_length() - 1))
                of_token = arith.addi(head, arith.andi(n, constant(heads_of_token - 1)))
            at = arith.addi(arith.muli(wide(arith.addi(first, token)), constant(heads, i64)), wide(of_token))
            address = arith.addi(pointers[0], arith.muli(at, constant(columns * itemsize, i64)))
            address = arith.addi(address, wide(arith.muli(lane, constant(2 * itemsize))))
            for part, pair in enumerate(words[:, half]):
                store = f"st.global.b{bits} [$0 + {8 * itemsize * part}], $1"
                text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p {store}; }}"
                numbers = [address, vector.extract(vector.bitcast(word, pair), [], [0]), arith.extui(i32, inside)]
                llvm.inline_asm(void, numbers, text, f"l,{kind},r", has_side_effects=True)
            if not of_lse:
                continue
            alone = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0)))
            number = vector.extract(of_lse[1].registers.flat[half], [], [0])
            text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1; }"
            address = arith.addi(pointers[1], arith.muli(at, constant(4, i64)))
            llvm.inline_asm(void, [address, number, arith.extui(i32, alone)], text, "l,f,r", has_side_effects=True)

    assert tile.shape[0] == ROWS
    emit(o, tile, first, rows, head, *arrays)
