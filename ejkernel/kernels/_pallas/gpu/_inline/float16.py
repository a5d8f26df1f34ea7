"""Rows of bfloat16 in shared memory made float16, times powers of two that bring them into its range."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .conversion import CHUNK_BYTES, ROW_BYTES
from .registers import THREADS
from .rows import type_of_tile

THREADS_OF_ROW = ROW_BYTES // CHUNK_BYTES
# That a warpgroup has at once.
ROWS_AT_ONCE = THREADS // THREADS_OF_ROW


def rows_to_float16(parts: Sequence[Any], factors: Any, first: int) -> None:
    """Makes 16 rows of tiles float16, in place, each times a power of two, and stores what undoes it in factors[row].

    The parts [·, 64] of a row, which has bfloat16, have rows of 128 bytes with any swizzle; `factors` [·] float32 is in
    shared memory too. The greatest finite number of a row becomes 2¹⁴ to 2¹⁵, so that no other is rounded by more than
    2⁻³⁹ of it; ∞ and NaN stay what they are. Products may read the parts after `plgpu.commit_smem`.
    """
    text = rows_to_float16_in_ptx(len(parts), first)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *map(type_of_tile, parts)))
    def emit(_, *given):
        i32, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        addresses = [llvm.ptrtoint(i32, utils.memref_ptr(x)) for x in given]
        llvm.inline_asm(void, addresses, text, ",".join(("r",) * len(given)) + ",~{memory}", has_side_effects=True)

    emit(factors, *parts)


def rows_to_float16_in_ptx(parts: int, first: int) -> str:
    """The assembly; its operands: the address of the factors, and those of the parts.

    Eight threads have a row, 16 bytes of each part. 0x80, added to the bits of |x|, raises its exponent by one, and
    that of ∞ or NaN to 0 of 8 bits. With e the greatest of a row, it is multiplied by 2^(142 − e), whose own exponent
    is 269 − e.
    """
    words = [f"w{n}" for n in range(4 * parts)]
    chunks = [words[4 * n : 4 * n + 4] for n in range(parts)]
    greatest = (
        f"and.b32 y, {word}, 0x7FFF7FFF; add.u32 y, y, 0x00800080; and.b32 y, y, 0x7FFF7FFF; max.u16x2 m, m, y;"
        for word in words
    )
    of_row = (f"shfl.sync.bfly.b32 y, m, {lanes}, 0x1F, 0xFFFFFFFF; max.u16x2 m, m, y;" for lanes in (1, 2, 4))
    rounded = (
        f"shl.b32 y, {word}, 16; and.b32 z, {word}, 0xFFFF0000; mul.f32 y, y, f; mul.f32 z, z, f;"
        f"cvt.rn.f16x2.f32 {word}, z, y;"
        for word in words
    )
    lines = "\n".join(
        (
            *(f"ld.shared.v4.b32 {{{', '.join(chunk)}}}, [a{n} + 0];" for n, chunk in enumerate(chunks)),
            "mov.b32 m, 0;",
            *greatest,
            *of_row,
            "and.b32 y, m, 0xFFFF; shr.u32 z, m, 16; max.u32 m, y, z; shr.u32 m, m, 7;",
            "sub.u32 m, 269, m; min.u32 m, m, 253; shl.b32 f, m, 23; sub.u32 m, 254, m; shl.b32 m, m, 23;",
            *rounded,
            *(f"st.shared.v4.b32 [a{n} + 0], {{{', '.join(chunk)}}};" for n, chunk in enumerate(chunks)),
            "st.shared.b32 [r + 0], m;",
        )
    )
    starts = " ".join(f"add.u32 a{n}, x, ${1 + n};" for n in range(parts))
    return f"""{{
        .reg .b32 t, r, x, y, z, f, m, {", ".join(f"a{n}" for n in range(parts))}, {", ".join(words)};
        mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1};
        mul.lo.u32 x, t, {CHUNK_BYTES}; add.u32 x, x, {first * ROW_BYTES}; {starts}
        shr.u32 r, t, {THREADS_OF_ROW.bit_length() - 1}; add.u32 r, r, {first}; shl.b32 r, r, 2; add.u32 r, r, $0;
        {lines}
    }}"""
