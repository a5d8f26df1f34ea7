"""Executes the few instructions of PTX that kernels write themselves, for the 32 lanes of a warp, in NumPy."""

import re

import ml_dtypes
import numpy as np

FORMATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def execute(text: str, operands: list[np.ndarray]) -> None:
    """Runs a program whose operand $n is operands[n], an array [32] of words or of sums, and is written in place."""
    registers: dict[str, np.ndarray] = {}
    body = re.sub(r"\.reg [^;]*;", "", text.strip()[1:-1] if text.strip().startswith("{") else text)
    for instruction in filter(None, (line.strip() for line in body.split(";"))):
        name, given = instruction.split(None, 1)
        if name.startswith("mma.sync"):
            _mma(name, *(_names(group) for group in re.findall(r"{(.*?)}", given)), operands, registers)
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
    return np.full(32, int(name, 0), np.uint32)


def _write(name: str, x: np.ndarray, operands: list, registers: dict) -> None:
    if name.startswith("$"):
        operands[int(name[1:])][:] = x
    else:
        registers[name] = x


def _computed(name: str, given: list[np.ndarray]) -> np.ndarray:
    """The result of an instruction that each lane executes for itself."""
    match name.split("."):
        case ["mov", "b32"]:
            return given[0].copy()
        case ["xor", "b32"]:
            return given[0] ^ given[1]
        case ["shr", "u32"]:
            return given[0] >> given[1]
        case ["shl", "b32"]:
            return given[0] << given[1]
        case ["and", "b32"]:
            return given[0] & given[1]
        case ["add", "u32"]:
            return given[0] + given[1]
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
    """The numbers [32, 2] of words."""
    return words.view(np.uint16).reshape(32, 2).view(FORMATS[kind])


def _word(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs).view(np.uint16).view(np.uint32).reshape(32)


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
