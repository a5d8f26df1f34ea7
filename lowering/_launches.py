"""The launches of Triton's kernels in a lowered program, without what is in them for debuggers alone.

jaxlib finds the kernel of a launch by the whole message of its custom call, each time that it is launched: the longer
the message, the longer the host takes. More than half of it is Triton's IR, which nothing reads, and the lines of the
source. These are kept if TRITON_DISABLE_LINE_INFO is 0, for profilers that show them.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

TARGET = "triton_kernel_call_ffi"
# Fields of messages of jaxlib, by number: TritonAnyKernelCall.kernel_call, TritonKernelCall.kernel, and of TritonKernel
# the assembly and the IR.
_CALL, _KERNEL, _ASSEMBLY, _IR = 1, 1, 4, 5
# Types of the fields of protocol buffers: numbers, bytes or messages, and the sizes of the others.
_VARINT, _BYTES, _SIZES = 0, 2, {1: 8, 5: 4}
# In PTX, and not in what AMD's GPUs run.
_IS_PTX = b"\n.target sm_"
# What PTX has for debuggers: comments, the lines of instructions, and the sections behind the kernel.
_FOR_DEBUGGERS = re.compile(
    rb"[ \t]*//.*|^\s*\.(?:loc|file)\b.*\n|^\s*\.section\s+\.debug_\w+\s*\{[^{}]*\}", re.MULTILINE
)


def shorten(operation: Any) -> None:
    """Shortens the messages of all launches in an operation of MLIR."""
    from jaxlib.mlir import ir

    for region in operation.regions:
        for block in region:
            for inner in block:
                shorten(inner.operation)
    attributes = operation.attributes
    if "call_target_name" not in attributes or ir.StringAttr(attributes["call_target_name"]).value != TARGET:
        return
    with operation.context, operation.location:
        config = {named.name: named.attr for named in ir.DictAttr(attributes["mhlo.backend_config"])}
        message = zlib.decompress(ir.StringAttr(config["opaque"]).value_bytes)
        config["opaque"] = ir.StringAttr.get(zlib.compress(shortened(message), 9))
        attributes["mhlo.backend_config"] = ir.DictAttr.get(config)


def shortened(message: bytes) -> bytes:
    """A TritonAnyKernelCall with the same launch; the same bytes if it has several kernels."""

    def kernel(number: int, value: bytes) -> bytes:
        if number == _ASSEMBLY and _IS_PTX in value and os.environ.get("TRITON_DISABLE_LINE_INFO") != "0":
            return _FOR_DEBUGGERS.sub(b"", value)
        return b"" if number == _IR else value

    def call(number: int, value: bytes) -> bytes:
        return _replaced(value, kernel) if number == _KERNEL else value

    return _replaced(message, lambda number, value: _replaced(value, call) if number == _CALL else value)


def _replaced(message: bytes, replacement: Callable[[int, bytes], bytes]) -> bytes:
    """A message with `replacement(number, value)` in the place of the value of each field that is bytes."""
    parts = []
    for head, number, value in _fields(message):
        parts.append(head)
        if value is not None:
            new = replacement(number, value)
            parts += [_varint(len(new)), new]
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[tuple[bytes, int, bytes | None]]:
    """The key, number and value of each field that is bytes; the whole field, its number and None for another one."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _BYTES:
            head = message[begin:at]
            size, at = _read_varint(message, at)
            yield head, number, message[at : at + size]
            at += size
        else:
            at = _read_varint(message, at)[1] if kind == _VARINT else at + _SIZES[kind]
            yield message[begin:at], number, None


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits in a byte, the lowest first; and the place behind it."""
    number = shift = 0
    while True:
        byte = message[at]
        number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return number, at


def _varint(number: int) -> bytes:
    """The bytes that `_read_varint` reads."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))
