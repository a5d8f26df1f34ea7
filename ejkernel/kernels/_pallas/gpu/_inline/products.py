"""Products of the tensor cores, `wgmma`, each in one statement of inline assembly.

`plgpu.wgmma` makes a statement for every 32 bytes of a row that are summed over, each with all registers of the
accumulator, which MLIR, LLVM and ptxas then carry from one to the next. Here a fence, all instructions of a product and
the commit of their group are one statement.

A product is asynchronous: nothing but another product and `awaited` may be computed of its accumulator, which is a
value in the layout `in_flight`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from .registers import BITS, WGMMA, fragment
from .rows import TILE_ROWS, swizzle_of, type_of_tile

# Bytes of a row that an instruction sums over.
SUMMED_BYTES = 32
# How a descriptor names the bytes of a swizzle; and of an address in shared memory it has all bits but the last four.
SWIZZLES, ADDRESS_BITS, LAST_BITS = {128: 1, 64: 2, 32: 3}, 18, 4


class Term(NamedTuple):
    """a·b, which a product adds to some columns of its accumulator, or to all.

    a: [64, n], a tile in shared memory or an array; b: [n, columns], a tile in shared memory. `transposed_a`,
    `transposed_b`: shared memory has aᵀ, bᵀ; numbers of eight bits have to be summed along its rows. `stationary_a`: a
    loop has registers for all descriptors of a, which are computed before it.
    """

    a: Any
    b: Any
    transposed_a: bool = False
    transposed_b: bool = False
    columns: slice | None = None
    stationary_a: bool = False


def in_flight(dtype: Any) -> Any:
    """The layout of the accumulator of a product that may be under way: its registers of 32 bits are single values."""
    return plgpu.Layout._WGMMA_ACC_32BIT if np.dtype(dtype).itemsize == 4 else WGMMA


def product(acc: Array, terms: Sequence[Term]) -> Array:
    """Begins acc + Σ a·b, as one group of `wgmma`; acc may be under way, or have any other layout."""
    layout = in_flight(acc.dtype)
    operands = [(term.a, term.b) for term in terms]
    types = [tuple(map(_type_of, pair)) for pair in operands]

    @plgpu.inline_mgpu(arg_types=(layout, types), return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout))
    def emit(_, acc, operands):
        sums, inputs = _words(acc), []

        def name(value: ir.Value) -> str:
            inputs.append(value)
            return f"${2 * len(sums) + len(inputs) - 1}"

        lines = []
        for term, pair in zip(terms, operands, strict=True):
            begin, end = (0, acc.shape[1]) if term.columns is None else (term.columns.start, term.columns.stop)
            of_term = ", ".join(f"${n}" for n in range(*(len(sums) * at // acc.shape[1] for at in (begin, end))))
            lines += _instructions(term, pair, end - begin, _dtype_name(acc.mlir_dtype), of_term, name)
        declared = "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 0, 0; wgmma.fence.sync.aligned;"
        text = "\n".join((declared, *lines, "wgmma.commit_group.sync.aligned; }"))
        return _of_words(acc, _updated(sums, inputs, text))

    return emit(plgpu.layout_cast(acc, layout), operands)


def awaited(pending: int, *accumulators: Array) -> list[Array]:
    """The results of products, after all but the last `pending` products are complete."""
    layouts = tuple(in_flight(acc.dtype) for acc in accumulators)
    results = [plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, WGMMA) for acc in accumulators]

    @plgpu.inline_mgpu(arg_types=layouts, return_type=results)
    def emit(_, *accumulators):
        # The wait returns the registers, so that nothing is computed of them before.
        words = [word for acc in accumulators for word in _words(acc)]
        after = _updated(words, [], f"wgmma.wait_group.sync.aligned {pending};")
        return [_of_words(acc, after).to_layout(WGMMA.to_mgpu()) for acc in accumulators]

    return emit(*(plgpu.layout_cast(acc, layout) for acc, layout in zip(accumulators, layouts, strict=True)))


def _type_of(operand: Any) -> Any:
    """The layout of an array as the first operand, or the type of a tile in shared memory."""
    if hasattr(operand, "transforms"):
        return type_of_tile(operand)
    return WGMMA if operand.dtype.itemsize == 2 else plgpu.Layout.WGMMA_8BIT


# ---- The instructions of a term


def _instructions(
    term: Term, operands: tuple[Any, ir.Value], columns: int, dtype: str, sums: str, name: Callable[[ir.Value], str]
) -> Iterator[str]:
    """The assembly that adds a term to `sums`, the registers of its columns; `name` is how it names an operand."""
    a, b = operands
    of_a = _Tile(a, swizzle_of(term.a), along_rows=not term.transposed_a) if isinstance(a, ir.Value) else None
    of_b = _Tile(b, swizzle_of(term.b), along_rows=term.transposed_b)
    n = SUMMED_BYTES // of_b.itemsize
    count = of_b.summed // n
    moves_a = [""] * count
    if of_a is None:
        words = [name(word) for word in _words(a)]
        first = ["{" + ", ".join(words[4 * i : 4 * i + 4]) + "}" for i in range(count)]
    elif term.stationary_a:
        first = [name(descriptor) for descriptor in of_a.descriptors(count)]
    else:
        descriptor = name(of_a.descriptor(opaque=True))
        moves_a, first = [f"add.s64 a, {descriptor}, {of_a.offset(i)};" for i in range(count)], ["a"] * count
    # Numbers of 16 bits may be summed along the columns of a tile, which the last immediates say.
    along_rows = [tile.along_rows for tile in (of_a, of_b) if tile is not None]
    transposes = "".join(f", {int(not along)}" for along in along_rows) if of_b.itemsize == 2 else ""
    kind = _dtype_name(ir.MemRefType(b.type).element_type)
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k{n}.{dtype}.{kind}.{kind}"
    descriptor = name(of_b.descriptor())
    for i, (move_a, of_term) in enumerate(zip(moves_a, first, strict=True)):
        move_b = f"add.s64 b, {descriptor}, {of_b.offset(i)};"
        yield f"{move_a} {move_b} {instruction} {{{sums}}}, {of_term}, b, p, 1, 1{transposes};"


class _Tile(NamedTuple):
    """A tile in shared memory [tiles of rows, tiles of columns, 8, columns of a swizzle] as an operand.

    along_rows: products sum along its rows, whose numbers are adjacent; else along its columns.
    """

    memory: ir.Value
    swizzle: int
    along_rows: bool

    @property
    def itemsize(self) -> int:
        return utils.bytewidth(ir.MemRefType(self.memory.type).element_type)

    @property
    def summed(self) -> int:
        """How many numbers products sum over."""
        rows, columns, *tile = ir.MemRefType(self.memory.type).shape
        return columns * tile[1] if self.along_rows else rows * tile[0]

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes from a tile to the next one of rows, and of columns."""
        strides, _ = ir.MemRefType(self.memory.type).get_strides_and_offset()
        return strides[0] * self.itemsize, strides[1] * self.itemsize

    def descriptor(self, opaque: bool = False) -> ir.Value:
        """The matrix descriptor of PTX: address, leading and stride byte offsets, and swizzle.

        For a tile that stays the same over a loop, ptxas keeps the lower half of a descriptor in a register and makes
        the upper half, which is constant, anew for each offset: three instructions instead of one. An `opaque` upper
        half has a part that ptxas does not know to be 0: the index along a grid axis of size 1.
        """
        i64 = ir.IntegerType.get_signless(64)
        constant = lambda n: arith.constant(i64, n)
        rows, columns = self.strides
        lower = (0 if self.along_rows else columns) >> LAST_BITS << 16
        upper = rows >> LAST_BITS | SWIZZLES[self.swizzle] << 30
        address = llvm.ptrtoint(i64, utils.memref_ptr(self.memory))
        address = arith.shrui(arith.andi(address, constant((1 << ADDRESS_BITS) - 1)), constant(LAST_BITS))
        if opaque:
            text = f"{{ .reg .b32 x; mov.u32 x, %ctaid.z; or.b32 x, x, {upper}; mov.b64 $0, {{{lower}, x}}; }}"
            return arith.ori(address, llvm.inline_asm(i64, [], text, "=l"))
        rest = lower | upper << 32
        return arith.ori(address, constant(rest - (rest >> 63 << 64)))  # signed, as MLIR takes it

    def descriptors(self, count: int) -> list[ir.Value]:
        """The descriptors of the first instructions."""
        i64, first = ir.IntegerType.get_signless(64), self.descriptor()
        return [arith.addi(first, arith.constant(i64, self.offset(i))) for i in range(count)]

    def offset(self, i: int) -> int:
        """How far the descriptor of the i-th instruction is from that of the first."""
        rows, columns = self.strides
        tile, within = divmod(i * SUMMED_BYTES, self.swizzle)
        # Along columns an instruction sums over two tiles of 8 rows, of 16 bits a number.
        of_columns = i * SUMMED_BYTES // self.itemsize // TILE_ROWS * rows
        return (tile * columns + within if self.along_rows else of_columns) >> LAST_BITS


def _dtype_name(dtype: ir.Type) -> str:
    """As PTX names it."""
    return "e4m3" if isinstance(dtype, ir.Float8E4M3FNType) else str(dtype)


# ---- The registers of statements


def _words(array: Any) -> list[ir.Value]:
    """The registers of 32 bits of an array: float32, or integers of as many bits of narrower numbers."""
    if isinstance(array.mlir_dtype, ir.F32Type):
        return list(array.registers.flat)
    single = ir.VectorType.get((1,), ir.IntegerType.get_signless(BITS))
    return [vector.extract(vector.bitcast(single, x), [], [0]) for x in array.registers.flat]


def _of_words(like: Any, words: Iterator[ir.Value]) -> Any:
    """The accumulator with these registers."""
    registers = np.empty(like.registers.shape, object)
    for at, register in np.ndenumerate(like.registers):
        word = next(words)
        if word.type != register.type:
            word = vector.bitcast(register.type, vector.broadcast(ir.VectorType.get((1,), word.type), word))
        registers[at] = word
    return fragment(like, registers)


def _updated(words: Sequence[ir.Value], inputs: Sequence[ir.Value], text: str) -> Iterator[ir.Value]:
    """What inline assembly has made of the registers `words`, in place."""
    kinds = [_constraint(word) for word in words]
    constraints = ",".join((*(f"={kind}" for kind in kinds), *map(str, range(len(words))), *map(_constraint, inputs)))
    results = ir.Type.parse(f"!llvm.struct<({', '.join(str(word.type) for word in words)})>")
    found = llvm.inline_asm(results, [*words, *inputs], text, constraints, has_side_effects=True)
    return (llvm.extractvalue(word.type, found, [n]) for n, word in enumerate(words))


def _constraint(value: ir.Value) -> str:
    """Of an operand of inline assembly: an integer of 32 or 64 bits, or float32."""
    if not isinstance(value.type, ir.IntegerType):
        return "f"
    return "r" if ir.IntegerType(value.type).width == BITS else "l"
