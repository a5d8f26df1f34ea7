"""The launches of Triton's kernels in a lowered program: what they need, without what is in them for debuggers alone.

jaxlib finds the kernel of a launch by the whole message of its custom call, each time that it is launched: the longer
the message, the longer the host takes. More than half of it is Triton's IR, which nothing reads, and the lines of the
source. These are kept if TRITON_DISABLE_LINE_INFO is 0, for profilers that show them.
"""

import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from ejkernel.kernels._triton._launch import (
    CUSTOM_CALLS,
    LIMIT_VARIABLE,
    SHARED_MEMORY,
    limit_of_environment,
    shared_memory_limit,
)
from ejkernel.types import Target

# Fields of messages of jaxlib, by number: TritonAnyKernelCall.kernel_call, TritonKernelCall.kernel, and of TritonKernel
# the name, the bytes of shared memory, the assembly and the IR.
_CALL, _KERNEL, _NAME, _SHARED, _ASSEMBLY, _IR = 1, 1, 1, 3, 4, 5
# Types of the fields of protocol buffers: numbers, bytes or messages, and the sizes of the others.
_VARINT, _BYTES, _SIZES = 0, 2, {1: 8, 5: 4}
# In PTX, and not in what AMD's GPUs run.
_IS_PTX = b"\n.target sm_"
# What PTX has for debuggers: comments, the lines of instructions, and the sections behind the kernel.
_FOR_DEBUGGERS = re.compile(
    rb"[ \t]*//.*|^\s*\.(?:loc|file)\b.*\n|^\s*\.section\s+\.debug_\w+\s*\{[^{}]*\}", re.MULTILINE
)


def check_and_shorten(operation: Any, target: Target) -> None:
    """Shortens the messages of all launches in an operation of MLIR, which is lowered for a target.

    Raises:
        ValueError: a kernel takes more shared memory than the target has.
    """
    from jaxlib.mlir import ir

    for region in operation.regions:
        for block in region:
            for inner in block:
                check_and_shorten(inner.operation, target)
    attributes = operation.attributes
    if "call_target_name" not in attributes or ir.StringAttr(attributes["call_target_name"]).value not in CUSTOM_CALLS:
        return
    with operation.context, operation.location:
        config = {named.name: named.attr for named in ir.DictAttr(attributes["mhlo.backend_config"])}
        message = zlib.decompress(ir.StringAttr(config["opaque"]).value_bytes)
        if wrong := refusal(message, target):
            raise ValueError(wrong)
        config["opaque"] = ir.StringAttr.get(zlib.compress(shortened(message), 9))
        attributes["mhlo.backend_config"] = ir.DictAttr.get(config)


def refusal(message: bytes, target: Target) -> str | None:
    """Why a target cannot run the launch of a TritonAnyKernelCall, or None, as on a GPU whose memory is not known."""
    if target.compute_capability not in SHARED_MEMORY and limit_of_environment() is None:
        return None
    kernel = _values(_values(_values(message).get(_CALL, b"")).get(_KERNEL, b""))
    if (needed := kernel.get(_SHARED, 0)) <= (limit := shared_memory_limit(target)):
        return None
    who = LIMIT_VARIABLE if limit_of_environment() is not None else str(target)
    return (
        f"{kernel[_NAME].decode()} takes {needed} bytes of shared memory and {who} allows {limit}; smaller blocks or "
        "fewer stages in the config take less"
    )


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
        if isinstance(value, bytes):
            new = replacement(number, value)
            parts += [_varint(len(new)), new]
    return b"".join(parts)


def _values(message: bytes) -> dict[int, bytes | int | None]:
    """The last value of each field by its number."""
    return {number: value for _, number, value in _fields(message)}


def _fields(message: bytes) -> Iterator[tuple[bytes, int, bytes | int | None]]:
    """The key, number and value of each field that is bytes.

    Of another field the whole of it, and its value if it is a number of any length, else None.
    """
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
            continue
        value, at = _read_varint(message, at) if kind == _VARINT else (None, at + _SIZES[kind])
        yield message[begin:at], number, value


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
