"""Rows gathered from device memory into swizzled tiles of shared memory, by asynchronous copies of 16 bytes.

TMA of Hopper copies boxes, whose rows follow one another. Rows that lie anywhere are copied by `cp.async`, which TMA's
barriers do not count: an mbarrier here counts the threads whose copies are complete.
"""

from typing import Any

from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from .registers import SPLAT, THREADS
from .rows import TILE_COLUMNS, TILE_ROWS

CHUNK_BYTES, TILE_BYTES = 16, TILE_ROWS * 128
# Rows that the threads of a warpgroup copy at once: each has a chunk of 16 bytes of the 128 of a swizzled row.
AT_ONCE = THREADS // TILE_ROWS


def init_barriers(memory: Any) -> None:
    """Lets one thread of the thread block set up mbarriers, [count, 2] int32, each for the threads of a warpgroup.

    The others see it after a barrier of the thread block.
    """
    count, _ = memory.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def emit(_, memory):
        inits = " ".join(f"@p mbarrier.init.shared::cta.b64 [$0 + {8 * n}], {THREADS};" for n in range(count))
        text = f"{{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; {inits} }}"
        _assembly(text, "r", _shared_address(memory))

    emit(memory)


def await_rows(memory: Any, stage: int, parity: Array) -> None:
    """Waits until the rows of a stage are there: for those of its 1st, 3rd, … use with parity 0, of others with 1.

    Other threads have written them: `commit_smem` comes before a product that reads them.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT))
    def emit(_, memory, parity):
        text = f"""{{
            .reg .pred p;
            LOOK: mbarrier.try_wait.parity.shared::cta.b64 p, [$0 + {8 * stage}], $1;
            @p bra DONE;
            bra LOOK;
            DONE:
        }}"""
        _assembly(text, "r,r,~{memory}", _shared_address(memory), parity.registers[()])

    emit(memory, parity)


def gather_rows(
    source: Any, lists: Any, row: Array, first: Array, targets: tuple[Any, ...], memory: Any, stage: Array,
    empty: Array, warpgroups: int,
) -> None:  # fmt: skip
    """targets[…][n] = columns of source[lists[row, first + n]], or zeros where that is negative, by a warpgroup.

    The targets [rows, columns] share out the columns of `source` [·, columns], of 16 bits a number. The list is read,
    then the named barrier `empty` of so many warpgroups waited for; the mbarrier of `stage` counts the copies.
    """
    row_bytes, list_bytes = 2 * source.shape[1], 4 * lists.shape[1]
    rows, parts = targets[0].shape[0], [target.shape[1] // TILE_COLUMNS for target in targets]
    transforms = plgpu.TilingTransform((TILE_ROWS, TILE_COLUMNS)), plgpu.SwizzleTransform(128)
    text = _gather(rows // AT_ONCE, parts, row_bytes, list_bytes, warpgroups)
    tiles = (plgpu.RefType(transforms),) * len(targets)

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, *(SPLAT,) * 4, *tiles))
    def emit(_, source, lists, memory, row, first, stage, empty, *targets):
        i64 = ir.IntegerType.get_signless(64)
        pointers = [llvm.ptrtoint(i64, utils.memref_ptr(x)) for x in (source, lists)]
        numbers = [x.registers[()] for x in (row, first, stage, empty)]
        addresses = map(_shared_address, (memory, *targets))
        _assembly(text, "l,l" + ",r" * (5 + len(targets)) + ",~{memory}", *pointers, *numbers, *addresses)

    emit(source, lists, memory, row, first, stage, empty, *targets)


def _gather(steps: int, parts: list[int], row_bytes: int, list_bytes: int, warpgroups: int) -> str:
    """PTX; its operands: source, lists, row, first, stage, the named barrier, the mbarriers, and the targets.

    A thread copies chunk c of the same row r modulo 8 of every tile of 8 rows × 128 bytes, to chunk c xor r.
    """
    load = "\n".join(f"ld.global.nc.b32 s{i}, [a + {4 * AT_ONCE * i}];" for i in range(steps))
    rows = "\n".join(
        f"setp.lt.s32 p, s{i}, 0; selp.b32 n{i}, 0, {CHUNK_BYTES}, p; max.s32 s{i}, s{i}, 0; "
        f"mul.wide.s32 a{i}, s{i}, {row_bytes}; add.s64 a{i}, a{i}, a;"
        for i in range(steps)
    )
    starts = "\n".join(
        f"mul.lo.u32 x, h, {count * TILE_BYTES}; add.u32 x, x, w; add.u32 t{n}, x, ${7 + n};"
        for n, count in enumerate(parts)
    )
    places = [(n, part) for n, count in enumerate(parts) for part in range(count)]
    copies = "\n".join(
        f"cp.async.cg.shared.global.L2::128B [t{n} + {(i * AT_ONCE // TILE_ROWS * parts[n] + part) * TILE_BYTES}], "
        f"[a{i} + {128 * column}], {CHUNK_BYTES}, n{i};"
        for i in range(steps)
        for column, (n, part) in enumerate(places)
    )
    return f"""{{
        .reg .pred p; .reg .b32 t, r, c, h, w, x, s<{steps}>, n<{steps}>, t<{len(parts)}>; .reg .b64 a, l, a<{steps}>;
        mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1}; shr.u32 h, t, 3; and.b32 c, t, 7;
        mul.wide.s32 a, $2, {list_bytes}; add.s64 a, a, $1; add.s32 x, h, $3; mul.wide.s32 l, x, 4; add.s64 a, a, l;
        {load}
        bar.sync $5, {warpgroups * THREADS};
        shl.b32 x, c, 4; cvt.u64.u32 a, x; add.s64 a, a, $0;
        {rows}
        and.b32 r, h, 7; shr.u32 h, h, 3; xor.b32 x, c, r; shl.b32 x, x, 4; shl.b32 w, r, 7; add.u32 w, w, x;
        {starts}
        {copies}
        shl.b32 x, $4, 3; add.u32 x, x, $6;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [x];
    }}"""


def _shared_address(memory: Any) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(memory))


def _assembly(text: str, constraints: str, *operands: Any) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)
