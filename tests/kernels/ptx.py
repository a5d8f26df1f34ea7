"""Executes the few instructions of PTX that kernels write themselves, for the lanes of a warp or more, in NumPy."""

import re

import ml_dtypes
import numpy as np

FORMATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}

OF_WORDS = {
    "xor.b32": np.bitwise_xor,
    "and.b32": np.bitwise_and,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "add.u32": np.add,
    "add.s32": np.add,
    "sub.u32": np.subtract,
    "mul.lo.u32": np.multiply,
    "min.u32": np.minimum,
    "max.u32": np.maximum,
}


def execute(
    text: str, operands: list[np.ndarray], shared: np.ndarray | None = None, device: np.ndarray | None = None
) -> None:
    """Runs a program whose operand $n is operands[n], an array [32] of words or of sums, and is written in place.

    `shared` has the bytes of shared memory, `device` those of device memory. Then there may be more lanes, all threads
    of a block. Barriers wait for nothing, as all lanes execute an instruction together.
    """
    registers: dict[str, np.ndarray] = {"%tid.x": np.arange(len(operands[0]), dtype=np.uint32)}
    body = re.sub(r";(\s*})+", ";", re.sub(r"{(?=\s*\.reg)", "", text.strip()))
    for instruction in filter(None, (line.strip() for line in re.sub(r"\.reg [^;]*;", "", body).split(";"))):
        name, given = instruction.split(None, 1)
        lanes = registers["%tid.x"] >= 0
        if name.startswith("@"):  # only loads
            lanes, (name, given) = registers[name[1:]], given.split(None, 1)
        if name.startswith("mma.sync"):
            _mma(name, *(_names(group) for group in re.findall(r"{(.*?)}", given)), operands, registers)
        elif ".shared." in name or ".global." in name:
            _move(name, given, operands, registers, shared if ".shared." in name else device, lanes)
        elif name in ("bar.sync", "bar.warp.sync"):
            continue
        elif given.startswith("{"):  # mov.b32 {low, high}, x
            low, high, x = _names(given.replace("{", "").replace("}", ""))
            registers[low], registers[high] = (_read(x, operands, registers) >> n & 0xFFFF for n in (0, 16))
        else:
            to, *sources = _names(given)
            _write(to, _computed(name, [_read(x, operands, registers) for x in sources]), operands, registers)


def _names(given: str) -> list[str]:
    return [x.strip() for x in given.split(",")]


def _read(name: str, operands: list, registers: dict) -> np.ndarray:
    if name.startswith("$"):
        return operands[int(name[1:])]
    if name in registers:
        return registers[name]
    number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
    return np.full(len(operands[0]), number, np.uint32)


def _move(name: str, given: str, operands: list, registers: dict, memory: np.ndarray, lanes: np.ndarray) -> None:
    """A load from memory by some lanes, or a store to it by all, of a word or several."""
    at, offset = re.search(r"\[(\w+) \+ (\d+)\]", given).groups()
    words = _names(re.sub(r"\[.*?\]|[{}]", "", given).strip(", "))
    first = np.where(lanes, _read(at, operands, registers).astype(np.int64) + int(offset), 0)
    address = first[:, None] + np.arange(4)
    for n, word in enumerate(words):
        if name.startswith("ld"):
            found = np.ascontiguousarray(memory[address + 4 * n]).view(np.uint32)[:, 0]
            _write(
                word,
                found if lanes.all() else np.where(lanes, found, _read(word, operands, registers)),
                operands,
                registers,
            )
        else:
            memory[address + 4 * n] = _read(word, operands, registers)[:, None].view(np.uint8)


def _write(name: str, x: np.ndarray, operands: list, registers: dict) -> None:
    if name.startswith("$"):
        operands[int(name[1:])][:] = x
    else:
        registers[name] = x


def _computed(name: str, given: list[np.ndarray]) -> np.ndarray:
    """The result of an instruction that each lane executes for itself."""
    if name in OF_WORDS:
        return OF_WORDS[name](*given)
    match name.split("."):
        case ["mov", "b32" | "u32" | "pred"]:
            return given[0].copy()
        case ["max", "u16x2"]:
            return np.maximum(given[0].view(np.uint16), given[1].view(np.uint16)).view(np.uint32)
        case ["shfl", "sync", "bfly", "b32"]:
            return given[0][np.arange(len(given[0])) ^ given[1]]
        case ["mul", "wide", "s32"]:
            return given[0].astype(np.int32).astype(np.int64) * given[1].astype(np.int32)
        case ["setp", "ne", "s32"]:
            return given[0] != given[1]
        case ["setp", "ge", "and", "s32"]:
            return (given[0].astype(np.int32) >= given[1].astype(np.int32)) & given[2]
        case ["add", "s64"]:
            return given[0].astype(np.int64) + given[1].astype(np.int64)
        case ["cvt", "u64", "u32"]:
            return given[0].astype(np.int64)
        case ["mul", "f32"]:
            return _bits(_float(given[0]) * _float(given[1]))
        case ["sub", "f32"]:
            return _bits(_float(given[0]) - _float(given[1]))
        case ["sub", pair]:
            a, b = (_pair(x, pair.removesuffix("x2")) for x in given)
            return _word(a - b)
        case ["cvt", "f32", "f16"]:
            return _bits(given[0].astype(np.uint16).view(np.float16))
        case ["cvt", "rn", "f16x2", "e4m3x2"]:
            pairs = given[0].astype(np.uint16)[:, None].view(ml_dtypes.float8_e4m3fn)
            return _word(pairs.astype(np.float16))
        case ["cvt", "rn", pair, "f32"]:
            high, low = map(_float, given)
            return _word(np.stack([low, high], 1).astype(FORMATS[pair.removesuffix("x2")]))
        case ["mul", pair]:
            a, b = (_pair(x, pair.removesuffix("x2")) for x in given)
            return _word(a * b)
        case ["lop3", "b32"] if given[3][0] == 0xEA:
            return given[0] & given[1] | given[2]
        case ["prmt", "b32"]:
            bytes_of = np.stack([given[n // 4] >> (8 * (n % 4)) & 0xFF for n in range(8)])
            chosen = [bytes_of[int(given[2][0]) >> (4 * n) & 7] << (8 * n) for n in range(4)]
            return np.bitwise_or.reduce(chosen).astype(np.uint32)
        case ["fma", "rn", pair]:
            a, b, c = (_pair(x, pair.removesuffix("x2")).astype(np.float64) for x in given)
            return _word((a * b + c).astype(FORMATS[pair.removesuffix("x2")]))
    raise NotImplementedError(name)


def _pair(words: np.ndarray, kind: str) -> np.ndarray:
    """The numbers [lanes, 2] of words."""
    return words.view(np.uint16).reshape(-1, 2).view(FORMATS[kind])


def _word(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs).view(np.uint16).view(np.uint32).reshape(-1)


def _float(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32)


def _bits(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32).view(np.uint32)


def _mma(name: str, d: list, a: list, b: list, c: list, operands: list, registers: dict) -> None:
    """m16n8k16, with the fragments of the PTX ISA: lane 4g + t has rows g and g + 8, columns 2t and 2t + 1."""
    kind = name.split(".")[-2]
    words = lambda names: [_pair(_read(x, operands, registers), kind).astype(np.float64) for x in names]
    of_a, of_b, g, t = np.zeros((16, 16)), np.zeros((16, 8)), np.arange(32) // 4, np.arange(32) % 4
    for n, pairs in enumerate(words(a)):
        for i in range(2):
            of_a[g + 8 * (n % 2), 2 * t + i + 8 * (n // 2)] = pairs[:, i]
    for n, pairs in enumerate(words(b)):
        for i in range(2):
            of_b[2 * t + i + 8 * n, g] = pairs[:, i]
    product = of_a @ of_b
    for n in range(4):
        at = product[g + 8 * (n // 2), 2 * t + n % 2]
        _write(d[n], at + _read(c[n], operands, registers), operands, registers)
