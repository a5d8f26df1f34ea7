"""The time of a TPU kernel, estimated from the program that the TPU compiler made of it.

A TPU core issues one bundle of instructions a cycle in an order that the compiler has fixed, and stalls only for copies
from or to HBM. So the final program, which the compiler can write to a file, determines the cost of a kernel: its
scalar instructions (counters, addresses, branches) are executed here, which gives how often each of its bundles is
issued; vector instructions are only counted. A pipelined kernel copies while it computes, hence

    seconds = max(bundles issued / clock, bytes copied / bandwidth)
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Copies are sized in granules.
_GRANULE_BYTES = 32


@dataclass(frozen=True)
class Issued:
    """The work of a kernel.

    Issued bundles, bytes copied from and to HBM, instructions by functional unit, and how many of these a bundle holds.
    """

    bundles: int
    copied: int
    instructions: dict[str, int]
    capacity: dict[str, int]


def execute(program: str, utilization: str, tables: Sequence[np.ndarray], delay: int) -> Issued:
    """Executes a final program, given as text.

    `utilization` is the compiler's text of instructions by unit, `tables` are its first operands, which it copies to
    scalar memory, and `delay` is the number of bundles that are issued after a branch before it is taken.
    """
    code = _read(program, delay)
    runs, copied = _run(code, tables)
    capacity, used = _read_utilization(utilization)
    issued = np.zeros(len(code.bundles), np.int64)
    for (first, last), count in zip(code.blocks, runs, strict=True):
        issued[first:last] += count
    totals = issued @ used[: len(issued)]
    return Issued(
        int(issued.sum()),
        copied * _GRANULE_BYTES,
        dict(zip(capacity, totals.tolist(), strict=True)),
        capacity,
    )


def _read_utilization(text: str) -> tuple[dict[str, int], np.ndarray]:
    """The capacity of a bundle by unit, and the instructions by unit of each bundle."""
    _, names, sizes, _, *rows = text.strip().splitlines()
    names = [name.strip() for name in names.split(",")]
    return dict(zip(names, map(int, sizes.split()), strict=True)), np.array([row.split() for row in rows], np.int64)


# --- Reading


@dataclass(frozen=True)
class _Code:
    """Bundles as lists of instructions, and basic blocks.

    A block has its [first, last) bundles, and its branch, if any, as (block, condition).
    """

    bundles: list[list[str]]
    blocks: list[tuple[int, int]]
    branches: list[tuple[int, str] | None]


def _read(text: str, delay: int) -> _Code:
    bundles, regions = [], {}
    for line in re.sub(r"/\*(?!\s*(?:Start|End)\b).*?\*/", "", text, flags=re.DOTALL).splitlines():
        if match := re.match(r"\s*(?:0x)?[0-9a-f]+\s*(?:[A-Z]{2})?:[ >]*\{(.*)\}(.*)", line):
            for number in re.findall(r"Start(?:/End empty)? region (\d+)", match[2]):
                regions[int(number)] = len(bundles)
            bundles.append([part.strip() for part in match[1].split(";;") if part.strip()])
    jumps = {}
    for at, bundle in enumerate(bundles):
        for instruction in bundle:
            if match := re.search(r"sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)", instruction):
                jumps[at + delay + 1] = regions[int(match[2])], match[1] or ""
    starts = sorted({0, len(bundles), *jumps, *(target for target, _ in jumps.values())})
    blocks = list(itertools.pairwise(starts))
    number = {first: n for n, (first, _) in enumerate(blocks)}
    branches = [jumps.get(last) for _, last in blocks]
    return _Code(bundles, blocks, [branch and (number[branch[0]], branch[1]) for branch in branches])


# --- Executing: the scalar instructions are translated to one function of Python

_COMPARISONS = (("ne", "!="), ("eq", "=="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
_BINARY = {
    "sadd.s32": "int32({} + {})", "ssub.s32": "int32({} - {})", "smul.u32": "int32({} * {})", "sand.u32": "{} & {}",
    "sor.u32": "{} | {}", "sxor.u32": "{} ^ {}", "sshll.u32": "int32({} << ({} & 31))",
    "sshra.s32": "{} >> ({} & 31)", "sshrl.u32": "int32(({} & 0xFFFFFFFF) >> ({} & 31))",
    "smax.s32": "max({}, {})", "smin.s32": "min({}, {})",
    "smax.u32": "int32(max({} & 0xFFFFFFFF, {} & 0xFFFFFFFF))",
    "smin.u32": "int32(min({} & 0xFFFFFFFF, {} & 0xFFFFFFFF))",
    "por": "{} or {}", "pand": "{} and {}", "pnand": "not ({} and {})", "pnor": "not ({} or {})",
    "scalar_lea": "int32({} + {})",
    **{f"scmp.{name}.s32": f"{{}} {sign} {{}}" for name, sign in _COMPARISONS},
    **{f"scmp.{name}.u32": f"({{}} & 0xFFFFFFFF) {sign} ({{}} & 0xFFFFFFFF)" for name, sign in _COMPARISONS},
}  # fmt: skip
_NEUTRAL = ("shalt.err", "sfence", "sbr.rel", "dma.done.wait")
_OPERAND = re.compile(r"!?%[sp]\d+_[sp]\d+|#allocation\w+|\$0x[0-9a-f]+|(?<![\w.$])-?\d+")


def _run(code: _Code, tables: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """The number of executions of each block, and of copied granules."""
    translate = _Translator(code)
    lines = [
        "def run(memory, load, word, runs):",
        "    copied = block = 0",
        f"    {' = '.join(sorted(translate.names))} = 0",
    ]
    lines += [f"    while block < {len(code.blocks)}:", "        runs[block] += 1"]
    for n, branch in enumerate(code.branches):
        lines += [f"        {'if' if n == 0 else 'elif'} block == {n}:"]
        lines += [f"            {line}" for line in translate.blocks[n]]
        target, condition = branch or (n + 1, "")
        choice = f"{target} if {translate.operand(condition)} else {n + 1}" if condition else target
        lines += [f"            block = {choice}"]
    lines += ["    return copied"]
    scope: dict[str, Any] = {"int32": _int32}
    exec("\n".join(lines), scope)
    memory, runs = {}, [0] * len(code.blocks)

    def load(operand: int, address: int) -> None:
        operand = operand if operand < 16 else operand >> 4  # an address in VMEM may be shifted to bytes
        if operand < len(tables):  # others are numbers for vector instructions
            memory.update(enumerate(_words(tables[operand]), address))

    def word(operand: int) -> int:
        return _words(tables[operand])[0] if operand < len(tables) else 0

    return runs, scope["run"](memory, load, word, runs)


def _int32(x: int) -> int:
    return (x + 2**31 & 0xFFFFFFFF) - 2**31


def _words(table: np.ndarray) -> list[int]:
    """A table in the layout of scalar memory: rows of 128 words, whose bytes hold the rows of small integers."""
    packed = 4 // table.dtype.itemsize
    rows = table.reshape(-1, table.shape[-1]).astype(np.int64) & (2 ** (8 * table.dtype.itemsize) - 1)
    rows = np.pad(rows, [(0, -rows.shape[0] % packed), (0, -rows.shape[1] % 128)])
    rows = rows.reshape(-1, packed, rows.shape[1])
    words = sum(rows[:, n] << 8 * table.dtype.itemsize * n for n in range(packed))
    return [_int32(word) for word in words.ravel().tolist()]


class _Translator:
    """Translates each block to lines of Python.

    Each value has its own name. An operand of a phi is also assigned to the phi's next value: a phi is the operand that
    was computed last.
    """

    def __init__(self, code: _Code) -> None:
        self.names, self.phis, self.spaces = set(), {}, {}
        for instruction in itertools.chain(*code.bundles):
            if match := re.match(r"%(\w+) = sphi (.*)", instruction):
                for operand in _OPERAND.findall(match[2]):
                    self.phis.setdefault(operand[1:], []).append(match[1])
        self.blocks = [self._block(code.bundles[first:last]) for first, last in code.blocks]

    def operand(self, text: str) -> str:
        """A name or a number in Python; 0 for a value that was never assigned."""
        if text[0] == "!":
            return f"(not {self.operand(text[1:])})"
        if text[0] == "%":
            self.names.add(text[1:])
            return text[1:]
        if text[0] == "#":
            return str(self.spaces.setdefault(text, len(self.spaces) + 1) << 20)
        return str(int(text[1:], 16) if text[0] == "$" else _int32(int(text)))

    def _block(self, bundles: list[list[str]]) -> list[str]:
        """The lines of a block; the phis of a bundle are assigned before its other instructions."""
        ordered = itertools.chain(*(sorted(bundle, key=lambda text: " = sphi " not in text) for bundle in bundles))
        return [line for instruction in ordered if (line := self._line(instruction))] or ["pass"]

    def _line(self, instruction: str) -> str:
        match = re.match(r"%(\w+) = ([spid][a-z_]+(?:\.[a-z_0-9]+)*)(.*)", instruction)
        if not match:
            return ""
        result, opcode, rest = match.groups()
        opcode = re.sub(r"\.(totalorder|vmem|hbm|sflag|smem)$", "", opcode)
        if opcode == "inlined_call_operand":  # for an address, which operand it is of; a lone word comes itself
            number = re.search(r"index: (\d+)", rest)[1]
            return self._assign(result, f"word({number})" if "<no memory space>" in rest else number)
        predicate = re.search(r"\((!?%p\w+)(?:, *(%\w+))?\)", rest)
        operands = [self.operand(x) for x in _OPERAND.findall(rest.replace(predicate[0], "") if predicate else rest)]
        line = self._effect(result, opcode, operands)
        if not line or not predicate:
            return line
        condition = self.operand(predicate[1])
        if predicate[2]:
            return self._assign(result, f"{operands[0]} if {condition} else {self.operand(predicate[2])}")
        return f"if {condition}: {line}"

    def _effect(self, result: str, opcode: str, operands: list[str]) -> str:
        if opcode in _BINARY:
            return self._assign(result, _BINARY[opcode].format(*operands))
        if opcode in ("smov.u32", "pmov", "int_to_ptr"):
            return self._assign(result, operands[-1])
        if opcode == "pneg":
            return self._assign(result, f"not {operands[0]}")
        if opcode == "scalar_select":
            return self._assign(result, "{1} if {0} else {2}".format(*operands))
        if opcode == "spop":  # from a vector, by which the cores of a chip see that they have met
            return self._assign(result, "0")
        if opcode == "sphi":
            return self._assign(result, f"next_{result}")
        if opcode == "sld":
            return self._assign(result, f"memory.get({' + '.join(operands)}, 0)")
        if opcode == "sst":
            return f"memory[{' + '.join(operands[:-1])}] = {operands[-1]}"
        if opcode in ("dma.vmem_to_smem", "dma.hbm_to_smem"):
            return f"load({operands[0]}, {operands[2]})"
        if opcode in ("dma.hbm_to_vmem", "dma.vmem_to_hbm"):
            return f"copied += {operands[1]}"
        if opcode in _NEUTRAL:
            return ""
        raise NotImplementedError(f"{opcode} {operands}")

    def _assign(self, result: str, value: str) -> str:
        following = [f"next_{phi}" for phi in self.phis.get(result, ())]
        self.names.update((result, *following))
        return " = ".join((result, *following, value))
