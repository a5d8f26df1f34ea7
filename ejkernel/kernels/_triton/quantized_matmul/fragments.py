"""What the lanes of a warp have of a product by `mma.sync`, and its instructions for codes of a few bits, as PTX.

m16n8k16 multiplies 16 rows, which are columns of the matrix of codes here, with 8 columns, which are rows of x. Lane l
has, with g = l / 4 and t = l mod 4,

    of the first operand    rows g and g + 8, features 2t, 2t + 1, 2t + 8 and 2t + 9
    of the second           column g, the same features
    of the sums             rows g and g + 8, columns 2t and 2t + 1

Which columns and features of the matrix these are is free, as long as x agrees. So lane l has the words of g, whose
codes are that many columns, in rows 4t … 4t + 3 of every 16 features: what a lane reads is contiguous, and two codes
of one column in neighbouring rows are a pair of numbers after one logical instruction.

A pair of codes c is OFFSET + c first, by its bits, and then a pair of weights by one multiply-add, rounded once:

    w = (OFFSET + c) · s + a,    a = −(OFFSET + z) · s

Only a has to be rounded before. What that loses is the same for all columns of a group, so that it is given back by one
product more. OFFSET is 128 in bfloat16. In float16, whose range 1024 · s may leave, and for codes of 8 bits it is taken
away before the multiply-add.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

FEATURES_OF_STEP, ROWS_OF_TILE = 16, 8
# Instructions, and what is written into bits above a code: OFFSET + c in the first format, and OFFSET, 1 and −OFFSET.
NAMES = {"bfloat16": "bf16", "float16": "f16"}
OFFSETS = {"bfloat16": 0x4300, "float16": 0x6400}
ONES = {"bfloat16": 0x3F80, "float16": 0x3C00}
MINUS_OFFSETS = {"bfloat16": 0xC300, "float16": 0xE400}
# Of a code of 8 bits in bfloat16, which has 7 bits behind the first: 2048 + 16h, and −2048 − 128.
OFFSET_OF_HIGH, MINUS_OFFSETS_OF_HALVES = 0x4500, 0xC508


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, as a compile-time constant.

    Attributes:
        M: rows of x.
        R, C: rows of codes, which are contracted, and codes of a row, which are columns.
        bits, group: of the format.
        dtype: of x, scales and zeros.
        parts: of the contracted features.
        tiles: of 8 rows of x in a program, which all have sums in registers.
        words: that a lane reads of a row at once.
        steps: of 16 features, whose words are read at once.
        warps: of a program, each with columns of its own.
        ahead: whether words are read while those before them are multiplied.
        ptx: whether the kernel may have instructions of PTX; where Triton is interpreted it may not.
    """

    M: int
    R: int
    C: int
    bits: int
    group: int
    dtype: str
    parts: int
    tiles: int
    words: int
    steps: int
    warps: int
    ahead: bool
    ptx: bool

    @property
    def per_word(self) -> int:
        """Codes of a word."""
        return 32 // self.bits

    @property
    def columns(self) -> int:
        """Columns of a program."""
        return self.warps * 8 * self.words * self.per_word

    @property
    def programs_of_part(self) -> int:
        """Tiles of columns, times tiles of rows."""
        return -(-self.C // self.columns) * -(-self.M // (ROWS_OF_TILE * self.tiles))

    @property
    def blocks(self) -> int:
        """Blocks of features that are read at once."""
        return -(-self.R // (FEATURES_OF_STEP * self.steps))

    @property
    def direct(self) -> bool:
        """Whether a weight is one multiply-add of OFFSET + c, which takes 7 bits and the range of bfloat16."""
        return self.bits <= 4 and self.dtype == "bfloat16"


@triton.constexpr_function
def float32s(count: int) -> tuple:
    return (tl.float32,) * count


@triton.constexpr_function
def constraints(words: int, sums: int) -> str:
    """Of an instruction that adds to sums, with so many words of 32 bits before them."""
    return ",".join(["=f"] * sums + ["r"] * words + ["f"] * sums)


@triton.constexpr_function
def mma(problem: Problem, d: str, a: str, b: str, c: str) -> str:
    """d = a · b + c; each a list of registers."""
    name = NAMES[problem.dtype]
    registers = ", ".join("{" + ", ".join(x.split()) + "}" for x in (d, a, b, c))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {registers};"


@triton.constexpr_function
def addends_in_ptx(problem: Problem) -> str:
    """$0 = round(a) and $1 = a − round(a) of scales $2 and zeros $3."""
    fma = f"fma.rn.{NAMES[problem.dtype]}x2"
    minus_offset = twice(MINUS_OFFSETS[problem.dtype]) if problem.direct else twice(0x8000)
    return f"""{{
    .reg .b32 minus_s, first, rest, minus_offset, minus_one, minus_zero;
    mov.b32 minus_offset, {minus_offset}; mov.b32 minus_one, {twice(ONES[problem.dtype] | 0x8000)};
    mov.b32 minus_zero, {twice(0x8000)};
    xor.b32 minus_s, $2, {twice(0x8000)};
    {fma} first, $2, minus_offset, minus_zero;
    {fma} $0, $3, minus_s, first;
    {fma} rest, $0, minus_one, first;
    {fma} $1, $3, minus_s, rest;
    }}"""


@triton.constexpr_function
def products_in_ptx(problem: Problem) -> str:
    """The sums, then words of four rows, scales and a of two pairs of rows, pairs of x, and the sums before."""
    count = problem.per_word * 2 * problem.tiles
    words, scales, addend = ([f"${count + i}" for i in range(n, n + 4)] for n in (0, 4, 6))
    rows, before = count + 8, count + 8 + 2 * problem.tiles
    lines = [".reg .b32 half<4>, moved, high, a<4>, one, offset;"]
    lines += [f"mov.b32 one, {twice(ONES[problem.dtype])};"]
    for pair in range(2):
        for half, bytes_of in enumerate(("0x5410", "0x7632")):
            lines.append(f"prmt.b32 half{2 * pair + half}, {words[2 * pair]}, {words[2 * pair + 1]}, {bytes_of};")
    for code in range(problem.per_word):
        half, place = divmod(code, problem.per_word // 2)
        for pair in range(2):
            a = f"a{code % 2 + 2 * pair}"
            lines += code_in_ptx(problem, a, f"half{2 * pair + half}", place * problem.bits)
            lines.append(f"fma.rn.{NAMES[problem.dtype]}x2 {a}, {a}, {scales[pair]}, {addend[pair]};")
        for q in range(problem.tiles) if code % 2 else ():
            at = [(2 * q + second) * problem.per_word + code - 1 + of for of in range(2) for second in range(2)]
            d, c = (" ".join(f"${first + i}" for i in at) for first in (0, before))
            lines.append(mma(problem, d, "a0 a1 a2 a3", f"${rows + 2 * q} ${rows + 2 * q + 1}", c))
    return "{" + "\n".join(lines) + "}"


@triton.constexpr_function
def code_in_ptx(problem: Problem, a: str, half: str, shift: int) -> list[str]:
    """A pair of codes at the bit `shift` of two halves of a word, as OFFSET + c if that is direct, else as c."""
    fma, offset = f"fma.rn.{NAMES[problem.dtype]}x2", twice(OFFSETS[problem.dtype])
    masked_or = lambda to, bits, first: f"lop3.b32 {to}, moved, {twice((1 << bits) - 1)}, {first}, 0xea;"
    lines = [f"shr.u32 moved, {half}, {shift};"]
    if problem.bits == 8 and problem.dtype == "bfloat16":
        lines += [masked_or(a, 4, offset), "shr.u32 moved, moved, 4;", masked_or("high", 4, twice(OFFSET_OF_HIGH))]
        lines += [f"mov.b32 offset, {twice(MINUS_OFFSETS_OF_HALVES)};", f"{fma} high, high, one, offset;"]
        return [*lines, f"{fma} {a}, {a}, one, high;"]
    lines.append(masked_or(a, problem.bits, offset))
    if problem.direct:
        return lines
    return [*lines, f"mov.b32 offset, {twice(MINUS_OFFSETS[problem.dtype])};", f"{fma} {a}, {a}, one, offset;"]


@triton.constexpr_function
def twice(number: int) -> str:
    """16 bits in both halves of a word."""
    return f"{number << 16 | number:#x}"
