"""Tiles of eight bits in shared memory converted to sixteen, for products that take no others beside sixteen."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .registers import SPLAT, THREADS
from .rows import TILE_COLUMNS, TILE_ROWS, type_of_tile

# Of a row of a tile swizzled by 128 bytes, and what a thread stores at once: eight numbers of sixteen bits.
ROW_BYTES, CHUNK_BYTES, CHUNK = 128, 16, 8
# What a thread loads before it converts.
AT_ONCE = 2


def convert_tile(target: Any, source: Any, scales: Any = None) -> None:
    """target = source in its dtype, exactly, or each row times its scale [rows] float32; all in shared memory.

    The source [rows, columns] has eight bits a number, float8_e4m3fn or int8, and whole rows one after the other. The
    target has bfloat16 or, without scales, float16, and the swizzle of 128 bytes in tiles of 8 rows. A warpgroup
    converts; products may read the target after `plgpu.commit_smem`.
    """
    text = conversion_in_ptx(*source.shape, source.dtype, target.dtype, scaled=scales is not None)
    given = (target, source, *([] if scales is None else [scales]))

    @plgpu.inline_mgpu(arg_types=(type_of_tile(target), *(plgpu.RefType(),) * len(given[1:])))
    def emit(_, *given):
        i32, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        addresses = [llvm.ptrtoint(i32, utils.memref_ptr(x)) for x in given]
        llvm.inline_asm(void, addresses, text, ",".join(("r",) * len(given)) + ",~{memory}", has_side_effects=True)

    emit(*given)


def conversion_in_ptx(rows: int, columns: int, source: Any, target: Any, scaled: bool = False) -> str:
    """The assembly that converts a tile at the address $1 to one at $0, with scales at $2.

    A thread has eight columns of every so many rows. Of its addresses only constants differ from one step to the next:
    a step is of whole tiles of 8 rows × 64 columns, so that the swizzle, which moves 16 bytes at a time within a row by
    its number in the tile, is the same in all. Neighbouring threads read neighbouring bytes, 128 of them, or as many of
    two rows, and write to all banks.
    """
    places, in_flight = places_of(rows, columns, columns), range(2 * AT_ONCE)
    words, factors = (", ".join(f"{name}{n}" for name in names for n in in_flight) for names in ("ab", "f"))
    of_scales = "shl.b32 x, r, 2; add.u32 m, x, $2;" if scaled else ""
    return f"""{{
        .reg .b32 t, r, c, s, d, m, x, {words}; .reg .f32 {factors};
        mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1};
        {address_of_target("d", "$0", columns)}
        mul.lo.u32 s, r, {columns}; shl.b32 x, c, {_shift(CHUNK)}; add.u32 s, s, x; add.u32 s, s, $1; {of_scales}
        {_steps(places, np.dtype(source).name, np.dtype(target).name, scaled)}
    }}"""


def address_of_target(name: str, tile: str, columns: int) -> str:
    """Row r and chunk c of the first step of thread t, and the address where it stores that chunk in a tile."""
    threads_of_row, tile_bytes = _columns_of_step(columns) // CHUNK, TILE_ROWS * ROW_BYTES
    return f"""
        shr.u32 r, t, {_shift(threads_of_row)}; and.b32 c, t, {threads_of_row - 1};
        and.b32 x, r, {TILE_ROWS - 1}; shl.b32 {name}, x, {_shift(ROW_BYTES)};
        xor.b32 x, x, c; and.b32 x, x, {CHUNK - 1};
        shl.b32 x, x, {_shift(CHUNK_BYTES)}; add.u32 {name}, {name}, x; add.u32 {name}, {name}, {tile};
        shr.u32 x, r, {_shift(TILE_ROWS)}; mul.lo.u32 x, x, {_bytes_of_tiles(columns)}; add.u32 {name}, {name}, x;
        shr.u32 x, c, {_shift(CHUNK)}; mul.lo.u32 x, x, {tile_bytes}; add.u32 {name}, {name}, x;"""


def places_of(rows: int, columns: int, source_bytes: int) -> list["Place"]:
    """The steps in which a warpgroup converts a tile, whose rows in the source are so many bytes apart."""
    wide, tile_bytes = _columns_of_step(columns), TILE_ROWS * ROW_BYTES
    return [
        Place(
            row,
            row * source_bytes + column,
            row // TILE_ROWS * _bytes_of_tiles(columns) + column // TILE_COLUMNS * tile_bytes,
        )
        for row in range(0, rows, THREADS * CHUNK // wide)
        for column in range(0, columns, wide)
    ]


def _columns_of_step(columns: int) -> int:
    return 2 * TILE_COLUMNS if columns % (2 * TILE_COLUMNS) == 0 else TILE_COLUMNS


def _bytes_of_tiles(columns: int) -> int:
    """Of the tiles of 8 rows that are beside each other."""
    return columns // TILE_COLUMNS * TILE_ROWS * ROW_BYTES


def _shift(n: int) -> int:
    return n.bit_length() - 1


class Place(NamedTuple):
    """How far the row of a step, and its bytes in the source and the target, are from those of the first step."""

    row: int
    source: int
    target: int


def _steps(places: Sequence[Place], dtype: str, to: str, scaled: bool) -> str:
    """Loads, conversions and stores, of eight numbers at a distance each from the addresses s and d.

    ptxas does not move a load before a store that may be to the same address, so several loads are before the
    conversions and stores of those before them.
    """
    numbered = [(n % (2 * AT_ONCE), place) for n, place in enumerate(places)]
    groups = [numbered[first : first + AT_ONCE] for first in range(0, len(places), AT_ONCE)]
    loads = [[_loaded(n, place, scaled) for n, place in group] for group in groups]
    stores = [
        [
            stored((f"a{n}", f"b{n}"), f"d + {place.target}", dtype, to, f"f{n}" if scaled else None)
            for n, place in group
        ]
        for group in groups
    ]
    interleaved = zip([*loads, []], [[], *stores], strict=True)
    return "\n".join(line for loaded, stored in interleaved for line in (*loaded, *stored))


def _loaded(n: int, place: Place, scaled: bool) -> str:
    """Loads two words of four numbers, and the scale of their row."""
    scale = f" ld.shared.f32 f{n}, [m + {4 * place.row}];" if scaled else ""
    return f"ld.shared.v2.b32 {{a{n}, b{n}}}, [s + {place.source}];{scale}"


def stored(words: tuple[str, str], address: str, dtype: str, to: str, scale: str | None = None) -> str:
    """Converts two words of four numbers, times a scale, and stores the pairs."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[to]
    results = ("y0", "y1"), ("y2", "y3")
    converted = (_converted(x, pairs, dtype, kind, scale) for x, pairs in zip(words, results, strict=True))
    lines = "\n".join(line for of_word in converted for line in of_word)
    return f"{{ .reg .b32 y0, y1, y2, y3; {lines} st.shared.v4.b32 [{address}], {{y0, y1, y2, y3}}; }}"


def _converted(x: str, pairs: tuple[str, str], dtype: str, kind: str, scale: str | None) -> Iterator[str]:
    """Of a word of four numbers the pairs, times the scale."""
    if scale or (dtype, kind) == ("float8_e4m3fn", "bf16x2"):
        return _by_float32(x, pairs, dtype, kind, scale)
    return _of_integers(x, pairs, kind) if dtype == "int8" else _of_e4m3(x, pairs)


def _of_e4m3(x: str, pairs: tuple[str, str]) -> Iterator[str]:
    """The pairs in float16."""
    yield f"{{ .reg .b16 p, q; mov.b32 {{p, q}}, {x};"
    yield f"cvt.rn.f16x2.e4m3x2 {pairs[0]}, p; cvt.rn.f16x2.e4m3x2 {pairs[1]}, q; }}"


def _by_float32(x: str, pairs: tuple[str, str], dtype: str, kind: str, scale: str | None) -> Iterator[str]:
    """Each number by way of float32.

    An integer x is that from 2²³ + 128 to x + 2²³ + 128, whose bits are 0x4B000000 + 128 + x.
    """
    times = " ".join(f"mul.f32 {number}, {number}, {scale};" for number in "uv") if scale else ""
    yield from (f"xor.b32 {x}, {x}, 0x80808080;",) if dtype == "int8" else _of_e4m3(x, pairs)
    for n, pair in enumerate(pairs):
        yield "{ .reg .b16 p, q; .reg .b32 h; .reg .f32 u, v;"
        if dtype == "int8":
            yield "mov.b32 h, 0x4B000000;"
            for number, byte in zip("uv", (2 * n, 2 * n + 1), strict=True):
                yield f"prmt.b32 {number}, {x}, h, {0x7540 + byte}; sub.f32 {number}, {number}, 0f4B000080;"
        else:
            yield f"mov.b32 {{p, q}}, {pair}; cvt.f32.f16 u, p; cvt.f32.f16 v, q;"
        yield f"{times} cvt.rn.{kind}.f32 {pair}, v, u; }}"


def _of_integers(x: str, pairs: tuple[str, str], kind: str) -> Iterator[str]:
    """Integers as the mantissas of numbers, from which a constant is subtracted.

    In float16, 1024 + n has the bits 0x6400 + n for 0 ≤ n < 1024: n = x + 128. In bfloat16, 128 + n has 0x4300 + n for
    0 ≤ n < 128: n has the lower seven bits of x, and 256 is subtracted if x is negative, otherwise 128.
    """
    bytes_of_pairs = ("0x4140", "0x4342")  # each byte below one of the other operand
    if kind == "f16x2":
        yield f"xor.b32 {x}, {x}, 0x80808080;"
    for pair, chosen in zip(pairs, bytes_of_pairs, strict=True):
        if kind == "f16x2":
            yield "{ .reg .b32 z; mov.b32 z, 0x64806480;"
            yield f"prmt.b32 {pair}, {x}, 0x64646464, {chosen}; sub.f16x2 {pair}, {pair}, z; }}"
        else:  # (x & mask) | 0x4300 of both numbers, each one instruction
            yield f"{{ .reg .b32 z, m, n, h; prmt.b32 {pair}, {x}, 0, {chosen};"
            yield "mov.b32 m, 0x00800080; mov.b32 n, 0x007F007F; mov.b32 h, 0x43004300;"
            yield f"lop3.b32 z, {pair}, m, h, 0xEA; lop3.b32 {pair}, {pair}, n, h, 0xEA;"
            yield f"sub.bf16x2 {pair}, {pair}, z; }}"


# ---- The scales of rows of a tile that is gathered from pages


def scale_of_row(scales: Any, slots: Sequence[Array], head: Array, rows: int) -> Array:
    """scales[slots[r // rows] + r % rows, head] float32 in device memory; each thread of a warpgroup has that of a row.

    r is the number of the thread, or what is left of it by the rows of all slots; `rows` is a power of two. The load is
    asynchronous until its result is used.
    """
    in_turn = " ".join(f"setp.ge.u32 p, r, {n * rows}; selp.b32 s, ${n + 3}, s, p;" for n in range(1, len(slots)))
    text = f"""{{
        .reg .pred p; .reg .b32 r, s; .reg .b64 a;
        mov.u32 r, %tid.x; and.b32 r, r, {rows * len(slots) - 1};
        mov.b32 s, $3; {in_turn}
        and.b32 r, r, {rows - 1}; add.u32 s, s, r; mad.lo.u32 s, s, {scales.shape[1]}, $2;
        mul.wide.u32 a, s, 4; add.s64 a, a, $1; ld.global.nc.f32 $0, [a];
    }}"""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(SPLAT,) * (1 + len(slots))),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, SPLAT),
    )
    def emit(_, scales, *numbers):
        pointer = llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(scales))
        operands = [pointer, *(x.registers[()] for x in numbers)]
        constraints = "=f,l" + ",r" * len(numbers)
        found = llvm.inline_asm(ir.F32Type.get(), operands, text, constraints, has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(found, ())

    return emit(scales, head, *slots)


def scale_of_entry(scales: Any, lists: Any, row: Array, first: Array, rows: int) -> Array:
    """scales[lists[row, first + r], 0] float32 in device memory, or 0 for entries below 0; each thread has that of a r.

    r is the number of the thread, or what is left of it by `rows`, a power of two.
    """
    text = f"""{{
        .reg .pred p; .reg .b32 r; .reg .b64 a, l;
        mov.u32 r, %tid.x; and.b32 r, r, {rows - 1}; add.s32 r, r, $4; mul.wide.s32 l, r, 4;
        mul.wide.s32 a, $3, {4 * lists.shape[1]}; add.s64 a, a, l; add.s64 a, a, $2; ld.global.nc.b32 r, [a];
        setp.ge.s32 p, r, 0; mul.wide.s32 a, r, 4; add.s64 a, a, $1; mov.f32 $0, 0f00000000;
        @p ld.global.nc.f32 $0, [a];
    }}"""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), SPLAT, SPLAT),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, SPLAT),
    )
    def emit(_, scales, lists, *numbers):
        i64 = ir.IntegerType.get_signless(64)
        pointers = [llvm.ptrtoint(i64, utils.memref_ptr(x)) for x in (scales, lists)]
        operands = [*pointers, *(x.registers[()] for x in numbers)]
        found = llvm.inline_asm(ir.F32Type.get(), operands, text, "=&f,l,l,r,r", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(found, ())

    return emit(scales, lists, row, first)


def store_of_row(target: Any, value: Array, valid: tuple[Array, Array] | None = None) -> None:
    """target[r] = what the thread of each row r has of a value, or 0 outside of valid[0] ≤ r < valid[1], in shared
    memory.
    """
    hidden = "" if valid is None else "setp.lt.s32 p, r, $2; setp.ge.or.s32 p, r, $3, p; selp.f32 x, 0f00000000, x, p;"
    text = f"""{{
        .reg .pred p; .reg .b32 r; .reg .f32 x; mov.u32 r, %tid.x; and.b32 r, r, {target.shape[0] - 1};
        mov.f32 x, $1; {hidden}
        shl.b32 r, r, 2; add.u32 r, r, $0; st.shared.f32 [r], x;
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, *(SPLAT,) * len(valid or ())))
    def emit(_, target, *numbers):
        address = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(target))
        operands = [address, *(x.registers[()] for x in numbers)]
        constraints = "r,f" + ",r" * len(valid or ()) + ",~{memory}"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    emit(target, value, *(valid or ()))
