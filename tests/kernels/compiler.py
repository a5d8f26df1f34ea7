"""Compiles Triton kernels for GPUs without having them, and reads the report of their assembler."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from ejkernel.kernels._triton._launch import backend_options

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
}
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}
TYPES |= {"int8": "i8", "uint8": "u8", "int32": "i32", "uint32": "u32", "bool": "i1"}


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments, as given to `_launch.launch`."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        shown = {name: value for name, value in self.constants if isinstance(value, int | tuple)}
        return f"{self.kernel.__name__} warps={self.num_warps} stages={self.num_stages} {shown}"


@dataclass(frozen=True)
class Binary:
    """A compiled launch; four fields are by NVIDIA's assembler only.

    Attributes:
        shared: bytes of shared memory.
        registers: registers of a thread.
        spilled: bytes of spilled registers, stores or loads, whichever are more.
        serialized: whether matrix products wait for one another.
        ptx_version: the version of the PTX, as 8.7; "" for an AMD GPU.
        widest_copy: bytes of the widest asynchronous copy of a thread, which have to divide its addresses.
        ttgir: the program with the layouts of its tensors.
    """

    shared: int
    registers: int
    spilled: int
    serialized: bool
    ptx_version: str
    widest_copy: int
    ttgir: str


def launches(monkeypatch, module: Any, call: Callable[[], Any]) -> list[Launch]:
    """The launches of a call, traced with shapes only; `module` is that of `launch`."""
    found = []

    def launch(kernel, *operands, out_type, grid, config, input_output_aliases=None, zeroed_outputs=(), **constants):
        placed = (input_output_aliases or {}).values()
        outputs = [leaf for n, leaf in enumerate(jax.tree.leaves(out_type)) if n not in placed]
        arrays = iter([*operands, *outputs])
        given = {p.name: constants[p.name] if p.name in constants else next(arrays) for p in kernel.params}
        types = {name: "constexpr" if name in constants or x is None else _type_of(x) for name, x in given.items()}
        fixed = {name: given[name] for name, kind in types.items() if kind == "constexpr"}
        found.append(Launch(kernel, tuple(types.items()), tuple(fixed.items()), config.num_warps, config.num_stages))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

    with monkeypatch.context() as patch:
        patch.setattr(module, "launch", launch)
        jax.eval_shape(call)
    return found


def _type_of(x: Any) -> str:
    """The type of a pointer to an array, or of a TMA descriptor."""
    if not hasattr(x, "block_shape"):
        return "*" + TYPES[jnp.dtype(x.dtype).name]
    return f"tensordesc<{TYPES[jnp.dtype(x.base.dtype).name]}[{', '.join(map(str, x.block_shape))}]>"


def binary(launch: Launch, target: GPUTarget) -> Binary:
    """Compiles a launch with pointers aligned to 16 bytes, like those of JAX."""
    types = dict(launch.types)
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(launch.kernel, types, dict(launch.constants), aligned)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    options |= backend_options("cuda" if target.backend == "cuda" else "rocm", target.arch)
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = True, True
        options = make_backend(target).parse_options(options).__dict__
        compiled = triton.compile(source, target, options)
    said, ptx = log.getvalue(), compiled.asm.get("ptx", "")
    numbers = lambda pattern: sum(map(int, re.findall(pattern, said)))
    return Binary(
        compiled.metadata.shared,
        numbers(r"Used (\d+) registers"),
        max(numbers(r"(\d+) bytes spill stores"), numbers(r"(\d+) bytes spill loads")),
        "serializ" in said.lower(),
        "".join(re.findall(r"^\.version (\S+)", ptx, re.MULTILINE)),
        max((int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global .*, (0x\w+)", ptx)), default=0),
        compiled.asm["ttgir"],
    )
