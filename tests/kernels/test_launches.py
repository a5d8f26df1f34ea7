"""The messages that launch Triton's kernels are short, and launch the same kernels."""

import subprocess
import zlib
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from ejkernel.lowering import _launches, _rule, _stored

import ejkernel
from ejkernel.errors import EjkernelRuntimeError
from ejkernel.types import KernelConfig, Target
from tests.kernels.mosaic_compiler import assembler

CONFIG = KernelConfig(platform="triton", block_q=64, block_k=64)
CALL, KERNEL, NAME, ASSEMBLY, IR = 1, 1, 1, 4, 5


@pytest.fixture
def messages(tmp_path, monkeypatch):
    """A function that lowers a call: its messages before and after they are shortened."""
    found, shortened = [], _launches.shortened

    def spy(message):
        found.append((message, shortened(message)))
        return found[-1][1]

    def of_a_call():
        x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
        call = lambda x: ejkernel.lax.flash_attention(x, x, x, config=CONFIG, causal=True)
        text = jax.jit(call).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("triton_kernel_call_ffi") == len(found) == 1
        return found[0]

    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_launches, "shortened", spy)
    jax.clear_caches()
    _stored._in_memory.clear()
    return of_a_call


def fields(message: bytes, *path: int) -> dict[int, list[bytes]]:
    """The fields of a message, or of one within it, by number; those that are no bytes as they are written."""
    found = {}
    for head, number, value in _launches._fields(message):
        found.setdefault(number, []).append(value if isinstance(value, bytes) else head)
    return fields(found[path[0]][0], *path[1:]) if path else found


def instructions(assembly: bytes, folder) -> list[str]:
    """What the assembler makes of PTX for Hopper."""
    (source := folder / "kernel.ptx").write_bytes(assembly)
    binary = folder / "kernel.cubin"
    subprocess.run([assembler() / "ptxas", "-arch=sm_90a", source, "-o", binary], check=True)
    shown = subprocess.run([assembler() / "cuobjdump", "-sass", binary], check=True, capture_output=True, text=True)
    return [line for line in shown.stdout.splitlines() if "/*" in line]


def test_a_short_message_launches_the_same_kernel(messages, tmp_path):
    long, short = messages()
    kernel, of_short = (fields(message, CALL, KERNEL) for message in (long, short))
    assert of_short.pop(IR) == [b""] and b"tt.func" in kernel.pop(IR)[0]
    (assembly,), (of_short_assembly,) = kernel.pop(ASSEMBLY), of_short.pop(ASSEMBLY)
    assert b".loc" in assembly and b".debug_info" in assembly
    assert not any(part in of_short_assembly for part in (b".loc", b".file", b".debug", b"//"))
    assert kernel == of_short and kernel[NAME] == [b"forward_kernel"]
    for path in ((CALL,), ()):
        one, other = (fields(message, *path) for message in (long, short))
        assert one.pop(1) != other.pop(1) and one == other
    assert len(zlib.compress(short)) < 0.5 * len(zlib.compress(long))
    if assembler() is None or not (assembler() / "cuobjdump").exists():
        pytest.skip("there is no assembler of NVIDIA")
    assert instructions(of_short_assembly, tmp_path) == instructions(assembly, tmp_path) != []


def test_lines_of_the_source_are_kept_on_request(messages, monkeypatch):
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    long, short = messages()
    kernel, of_short = (fields(message, CALL, KERNEL) for message in (long, short))
    assert of_short[ASSEMBLY] == kernel[ASSEMBLY] and of_short[IR] == [b""]


A10, UNKNOWN = Target("cuda", "NVIDIA A10", 86, 72), Target("cuda", "a GPU to come", 88, 72)


@pytest.mark.parametrize("gpu, stages, fits", [(A10, 1, True), (A10, 2, True), (A10, 4, False), (UNKNOWN, 4, True)])
def test_what_takes_more_shared_memory_than_the_gpu_has_is_refused_before_xla_compiles(monkeypatch, gpu, stages, fits):
    monkeypatch.setattr(_rule, "target_of", lambda platform: gpu)
    x = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    config = KernelConfig(platform="triton", backend="gpu", block_q=128, block_k=128, num_stages=stages, num_warps=8)
    traced = jax.jit(lambda x: ejkernel.lax.flash_attention(x, x, x, config=config)).trace(x)
    said = r"forward_kernel takes \d+ bytes of shared memory and cuda \(NVIDIA A10\) allows 101376; smaller blocks"
    with nullcontext() if fits else pytest.raises(EjkernelRuntimeError, match=said):
        traced.lower(lowering_platforms=("cuda",))


def field(number: int, value: bytes) -> bytes:
    return _launches._varint(number << 3 | 2) + _launches._varint(len(value)) + value


def test_what_is_no_launch_of_a_kernel_in_ptx_stays_as_it_is():
    several = field(2, field(1, field(CALL, field(KERNEL, field(IR, b"module {}")))) + b"\x18\x07") + field(4, b"name")
    assert _launches.shortened(several) == several, "one of several kernels, which is chosen when it runs"
    for_amd = field(CALL, field(KERNEL, field(NAME, b"kernel") + field(ASSEMBLY, b"\x7fELF // .loc 1\n")) + b"\x10\x40")
    assert _launches.shortened(for_amd) == for_amd


@pytest.mark.parametrize("number", (0, 1, 127, 128, 300, 2**32, 2**63))
def test_numbers_of_all_sizes(number):
    message = (
        b"\x08" + _launches._varint(number) + b"\x11" + bytes(8) + b"\x1d" + bytes(4) + field(300, bytes(number % 1000))
    )
    assert _launches._read_varint(message, 1)[0] == number
    assert _launches._replaced(message, lambda number, value: value) == message
    assert [n for _, n, _ in _launches._fields(message)] == [1, 2, 3, 300]
