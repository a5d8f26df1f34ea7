"""Rows of eight bits in device memory converted to tiles of sixteen bits in shared memory, by way of registers.

Where shared memory has no place for both, a warpgroup holds its next rows in registers: where some words have been
converted, those of the next rows are loaded at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from .conversion import CHUNK, address_of_target, places_of, stored
from .registers import ROWS, SPLAT, THREADS, WGMMA
from .rows import type_of_tile

# Steps of which all loads are issued before the next: ptxas, which would leave them to the end, moves no access to
# memory over this barrier.
AT_ONCE, IN_ORDER = 6, "bar.warp.sync -1;"


class InPages(NamedTuple):
    """Rows from each of some slots on, so many each, a multiple of 16."""

    slots: tuple[Any, ...]
    rows: int

    has_gaps = False  # which are no rows, and whose words are 0

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.slots

    @property
    def types(self) -> tuple[Any, ...]:
        return (SPLAT,) * len(self.slots)

    def entries(self, steps: Sequence["Step"], names: Sequence[str]) -> tuple[str, list[str]]:
        """What comes before all steps, and for each the slot e of a thread's row, and whether it is loaded, `held`."""
        found = []
        for step in steps:
            slot, row = divmod(step.row, self.rows)
            found.append(f"add.s32 e, {names[slot]}, r{step.target}; add.s32 e, e, {row}; mov.pred held, needed;")
        return "", found


class InList(NamedTuple):
    """Rows whose slots are entries of lists [·, entries], of one list from some entry on; none if negative."""

    lists: Any
    row: Any
    first: Any

    has_gaps = True

    @property
    def operands(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def types(self) -> tuple[Any, ...]:
        return plgpu.RefType(), SPLAT, SPLAT

    def entries(self, steps: Sequence["Step"], names: Sequence[str]) -> tuple[str, list[str]]:
        """As of pages. The entries of all steps are loaded before any."""
        lists, row, first = names
        before = [f"mul.wide.s32 g, {row}, {4 * self.lists.shape[1]}; add.s64 g, g, {lists};"]
        before += [
            f".reg .b32 e{step.target}x{step.row}; add.s32 e, {first}, r{step.target}; mul.wide.s32 l, e, 4;"
            f"add.s64 l, l, g; mov.b32 e{step.target}x{step.row}, 0xFFFFFFFF;"
            f"@needed ld.global.nc.b32 e{step.target}x{step.row}, [l + {4 * step.row}];"
            for step in steps
            if step.begins
        ]
        found = [f"e{step.target}x{step.row}" for step in steps]
        return " ".join(before), [f"mov.b32 e, {name}; setp.ge.and.s32 held, {name}, 0, needed;" for name in found]


def load_rows(source: Any, rows: InPages | InList, count: int, columns: Sequence[int], is_needed: Array) -> Array:
    """Words of so many rows of eight bits for `convert_rows`, which a warpgroup loads to registers, if needed.

    The source is [·, columns]; those of the targets of `convert_rows` are `columns`.
    """
    words = 2 * len(_steps(columns, count))
    text = loads_in_ptx(columns, count, rows)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, *rows.types), return_type=_type_of_words(words))
    def emit(_, *given):
        operands, constraints = _operands(given)
        return _words(text, words, operands, constraints)

    return emit(source, is_needed.astype(jnp.int32), *rows.operands)


def convert_rows(targets: Sequence[Any], words: Array, source: Any, rows: InPages | InList, is_needed: Array) -> Array:
    """targets[…][n] = the columns of row n of the words in their dtype, exactly; returns the words of the next rows.

    The targets [·, columns] in shared memory have bfloat16 or float16, and the swizzle of 128 bytes in tiles of 8 rows.
    The source has float8_e4m3fn or int8; the next rows are loaded if they are needed. Products may read the targets
    after `plgpu.commit_smem`.
    """
    (count, _), columns = targets[0].shape, [target.shape[1] for target in targets]
    text = conversion_of_rows_in_ptx(columns, count, rows, source.dtype, targets[0].dtype)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType(), SPLAT, *rows.types, *map(type_of_tile, targets)),
        return_type=plgpu.ShapeDtypeStruct(words.shape, words.dtype, WGMMA),
    )
    def emit(_, words, *given):
        i32 = ir.IntegerType.get_signless(32)
        others, tiles = given[: -len(columns)], given[-len(columns) :]
        loaded = [vector.extract(pair, [], [n]) for pair in words.registers.flat for n in range(2)]
        operands, constraints = _operands(others)
        addresses = [llvm.ptrtoint(i32, utils.memref_ptr(tile)) for tile in tiles]
        tied = ",".join(map(str, range(len(loaded))))
        constraints = f"{tied},{constraints}" + ",r" * len(tiles) + ",~{memory}"
        return _words(text, len(loaded), [*loaded, *operands, *addresses], constraints)

    return emit(words, source, is_needed.astype(jnp.int32), *rows.operands, *targets)


def prefetch_rows(source: Any, rows: InPages, is_needed: Array) -> None:
    """Has rows of pages copied to the L2 cache, if they are needed."""
    row_bytes = source.shape[1]
    lines = " ".join(
        f"mul.wide.s32 g, ${2 + n}, {row_bytes}; add.s64 g, g, $0;"
        f"@p cp.async.bulk.prefetch.L2.global [g], {rows.rows * row_bytes};"
        for n in range(len(rows.slots))
    )
    text = f"""{{
        .reg .pred p; .reg .b32 t; .reg .b64 g; mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1};
        setp.eq.u32 p, t, 0; setp.ne.and.s32 p, $1, 0, p; {lines}
    }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, *rows.types))
    def emit(_, *given):
        operands, constraints = _operands(given)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)

    emit(source, is_needed.astype(jnp.int32), *rows.operands)


# ---- The assembly


class Step(NamedTuple):
    """Eight numbers of each thread: their target, the row of the first thread, whether they are the first of a row,
    their byte in a row of the source, and the bytes from the thread's address in the target to them.
    """

    target: int
    row: int
    begins: bool
    column: int
    to: int


def loads_in_ptx(columns: Sequence[int], count: int, rows: InPages | InList) -> str:
    """That of `load_rows`. Its operands: the words, the source, whether they are needed, those of the rows."""
    steps = _steps(columns, count)
    source, is_needed, *others = (f"${2 * len(steps) + n}" for n in range(2 + len(rows.operands)))
    before, loads = _loads(steps, columns, rows, source, is_needed, others)
    return f"{{ {_thread(columns, ['0'] * len(columns))} {before} {' '.join(loads)} }}"


def conversion_of_rows_in_ptx(columns: Sequence[int], count: int, rows: InPages | InList, dtype: Any, to: Any) -> str:
    """That of `convert_rows`. Its operands: the words, as they come and go, which have as many numbers again; the
    source; whether the next are needed; those of the next rows; the targets.

    A thread has eight columns of every so many rows, as in `conversion_in_ptx`.
    """
    steps, given = _steps(columns, count), len(rows.operands)
    source, is_needed, *others = (f"${4 * len(steps) + n}" for n in range(2 + given + len(columns)))
    before, loads = _loads(steps, columns, rows, source, is_needed, others[:given])
    dtypes = np.dtype(dtype).name, np.dtype(to).name
    lines = "\n".join(
        f"{stored((f'${2 * n}', f'${2 * n + 1}'), f'd{step.target} + {step.to}', *dtypes)} {load}"
        f"{IN_ORDER if n % AT_ONCE == AT_ONCE - 1 else ''}"
        for n, (step, load) in enumerate(zip(steps, loads, strict=True))
    )
    return f"{{ {_thread(columns, others[given:])} {before} {lines} }}"


def _steps(columns: Sequence[int], count: int) -> list[Step]:
    """Those of a tile of so many rows, by targets and rows."""
    found = []
    for target, width in enumerate(columns):
        for place in places_of(count, width, 0):
            column = place.source + sum(columns[:target])
            found.append(Step(target, place.row, place.source == 0, column, place.target))
    return found


def _thread(columns: Sequence[int], targets: Sequence[str]) -> str:
    """Of thread t and each target its address d, row r, and byte b of a row of the source."""
    names = ", ".join(f"{x}{n}" for n in range(len(columns)) for x in "drb")
    lines = [f".reg .b32 t, r, c, x, {names}; mov.u32 t, %tid.x; and.b32 t, t, {THREADS - 1};"]
    for n, (width, target) in enumerate(zip(columns, targets, strict=True)):
        lines.append(f"{address_of_target(f'd{n}', target, width)} mov.b32 r{n}, r; mul.lo.u32 b{n}, c, {CHUNK};")
    return "\n".join(lines)


def _loads(
    steps: Sequence[Step], columns: Sequence[int], rows: InPages | InList, source: str, is_needed: str,
    names: Sequence[str],
) -> tuple[str, list[str]]:  # fmt: skip
    """What comes before all steps, and the load of each."""
    before, entries = rows.entries(steps, names)
    starts = " ".join(f"cvt.u64.u32 w{n}, b{n}; add.s64 w{n}, w{n}, {source};" for n in range(len(columns)))
    of_targets, loads = ", ".join(f"w{n}" for n in range(len(columns))), []
    for n, (step, entry) in enumerate(zip(steps, entries, strict=True)):
        address = f"mul.wide.s32 g, e, {sum(columns)}; add.s64 g, g, w{step.target};"
        first, second = f"${2 * n}", f"${2 * n + 1}"
        zeros = f"mov.b32 {first}, 0; mov.b32 {second}, 0;" if rows.has_gaps else ""
        loads.append(
            f"{f'{entry} {address}' if step.begins else ''} {zeros}"
            f"@held ld.global.L1::no_allocate.v2.b32 {{{first}, {second}}}, [g + {step.column}];"
        )
    registers = f".reg .pred needed, held; .reg .b32 e; .reg .b64 g, l, {of_targets};"
    return f"{registers} setp.ne.s32 needed, {is_needed}, 0; {starts} {before}", loads


# ---- What the assembly is given, and returns


def _type_of_words(count: int) -> Any:
    return plgpu.ShapeDtypeStruct((ROWS, count * THREADS // ROWS), jnp.int32, WGMMA)


def _operands(given: Sequence[Any]) -> tuple[list[Any], str]:
    """Numbers in registers and pointers to device memory, and their constraints."""
    i64 = ir.IntegerType.get_signless(64)
    is_number = [isinstance(x, fragmented_array.FragmentedArray) for x in given]
    operands = [
        x.registers[()] if number else llvm.ptrtoint(i64, utils.memref_ptr(x))
        for x, number in zip(given, is_number, strict=True)
    ]
    return operands, ",".join("r" if number else "l" for number in is_number)


def _words(text: str, count: int, operands: Sequence[Any], constraints: str) -> Any:
    """What the assembly returns, so many words of each thread, as an array in the layout of products."""
    i32 = ir.IntegerType.get_signless(32)
    found = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>"), operands, text,
        ",".join(["=&r"] * count) + f",{constraints}", has_side_effects=True,
    )  # fmt: skip
    words, layout = [llvm.extractvalue(i32, found, [n]) for n in range(count)], WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape((ROWS, count * THREADS // ROWS)), object)
    for n in range(registers.size):
        registers.flat[n] = vector.from_elements(ir.VectorType.get((2,), i32), words[2 * n : 2 * n + 2])
    return fragmented_array.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
