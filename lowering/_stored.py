"""A cache of lowered kernels in memory and on disk: on one machine a kernel is traced and lowered only once.

Lowering a GPU kernel takes seconds, mostly in Python: Pallas traces it and emits Mosaic's instructions one by one,
Triton compiles it to PTX. The result depends only on what is computed, how, for which device, and on the source and
versions; these are its key. A process that finds the key on disk inserts the stored function into its program and
imports neither Pallas nor Triton.

The files are in `lowered` beside the stored configs, the most recently used ones up to `LIMIT` bytes. A damaged file
causes a warning and is written again.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ejkernel.callib._cache_directory import cache_directory
from ejkernel.compat import find_mosaic_runtime, is_for_export
from ejkernel.ops.core.programs import compile_ahead
from ejkernel.ops.utils.devices import device_target
from ejkernel.ops.utils.fingerprints import versions_fingerprint
from ejkernel.types import Target
from ejkernel.xla_utils.garbage_collection import no_garbage_collection

from ._context import one_device
from ._launches import check_and_shorten

LIMIT = 512 * 2**20
"""The most bytes of all files together."""
_DIGEST = hashlib.sha256().digest_size
# Part of the names of custom calls back into this process, such as those of a debugger or a profiler.
_CALLBACK = b"_python_"
# Part of the name of Mosaic GPU's custom call, whose kernel XLA compiles, in a second or two, one at a time; Triton's
# is compiled when it is lowered.
_MOSAIC = b"mosaic_gpu"
# Options that affect tracing and lowering beside the arguments, and prefixes of such environment variables.
_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_include_full_tracebacks_in_locations")
_VARIABLES = ("EJKERNEL_OPS_STAMP", "EJKERNEL_TRITON_", "TRITON_", "MOSAIC_GPU_DUMP", "JAX_TRITON_")
_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR")


@dataclass(frozen=True)
class Kernel:
    """A call of an implementation; two are equal if their keys and targets are, which determine what `run` does.

    Attributes:
        run: arrays → the list of the results.
        key: what `run` computes and how, as text that is the same in every process.
        target: what it is lowered for.
        results: shape and dtype of each result.
        name: the name of the function that it is lowered to.
    """

    run: Callable[..., Sequence[Any]]
    key: str
    target: Target
    results: tuple[tuple[tuple[int, ...], Any], ...]
    name: str

    def __eq__(self, other: Any) -> bool:
        return type(other) is Kernel and (self.key, self.target) == (other.key, other.target)

    def __hash__(self) -> int:
        return hash((self.key, self.target))

    def __repr__(self) -> str:
        return self.name


def call(kernel: Kernel, arrays: Sequence[Any]) -> list[Any]:
    """The results of a kernel, in a trace that is lowered for its target."""
    return _kernel_p.bind(*arrays, kernel=kernel)


_kernel_p = Primitive("ejkernel_lowered")
_kernel_p.multiple_results = True


@_kernel_p.def_abstract_eval
def _abstract_eval(*avals, kernel):
    del avals
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in kernel.results]


def _lower(ctx, *args, kernel):
    inline = mlir.lower_fun(kernel.run, multiple_results=True)
    # An exported program is read by other versions, and is lowered differently.
    module = None if is_for_export(ctx) else _stored(kernel, ctx.avals_in)
    if module is None:
        with one_device():
            return inline(ctx, *args)
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    find_mosaic_runtime()
    with ctx.module_context.context, ir.Location.unknown():
        stored = ir.Module.parse(module)
    outer = ctx.module_context
    name = mlir.merge_mlir_modules(outer.module, kernel.name, stored, dst_symtab=outer.symbol_table)
    types = [mlir.aval_to_ir_type(outer, aval) for aval in ctx.avals_out]
    return func.CallOp(types, ir.FlatSymbolRefAttr.get(name), list(args)).results


for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_kernel_p, _lower, platform=_platform)


# --- The cache

_in_memory: dict[Path, bytes | None] = {}


def _stored(kernel: Kernel, avals: Sequence[Any]) -> bytes | None:
    """The module whose `main` is the kernel, in bytes; None if the kernel depends on more than its arguments."""
    path = Path(cache_directory()) / "lowered" / _digest(kernel, avals)
    if path not in _in_memory:
        if (module := _read(path)) is None and (module := _made(kernel, avals)) is not None:
            _write(path, module)
        _in_memory[path] = module
    return _in_memory[path]


def _digest(kernel: Kernel, avals: Sequence[Any]) -> str:
    variables = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES) and name not in _PLACES
    )
    parts = (
        kernel.key,
        str(kernel.target),
        [(aval.shape, aval.dtype.name) for aval in avals],
        [(name, getattr(jax.config, name, None)) for name in _OPTIONS],
        variables,
        _source(),
        _versions(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _source() -> str:
    """A hash of the whole library: a kernel may use any of it."""
    digest = hashlib.sha256()
    for folder in (Path(importlib.util.find_spec("ejkernel").origin).parent, Path(__file__).parent):
        files = ((place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(".py"))
        for place, name in sorted(files):
            with open(os.path.join(place, name), "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()


@functools.cache
def _versions() -> str:
    found = [versions_fingerprint()]
    for package in ("jax-triton", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def _made(kernel: Kernel, avals: Sequence[Any]) -> bytes | None:
    def run(*arrays):
        return kernel.run(*arrays)

    run.__name__ = run.__qualname__ = kernel.name
    with one_device(), no_garbage_collection():
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        traced = jax.jit(run, keep_unused=True).trace(*types)
        program = traced.lower(lowering_platforms=(kernel.target.platform,))
        module = program.compiler_ir("stablehlo")
    check_and_shorten(module.operation, kernel.target)
    main = next(op for op in module.body.operations if op.sym_name.value == "main")
    if len(main.type.inputs) != len(types):  # constants have become arguments
        return None
    for attributes in ("arg_attrs", "res_attrs"):  # layouts and names, which only the entry function of a program has
        if attributes in main.attributes:
            del main.attributes[attributes]
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    if _CALLBACK in (code := buffer.getvalue()):
        return None
    if _MOSAIC in code and kernel.target == device_target():
        compile_ahead(program)
    return code


def _read(path: Path) -> bytes | None:
    with suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            with suppress(OSError):
                os.utime(path)  # the least recently used file is removed first
            return zlib.decompress(content[_DIGEST:])
        warnings.warn(f"{path} is damaged; the kernel is lowered again", UserWarning, stacklevel=2)
    return None


def _write(path: Path, module: bytes) -> None:
    """Writes a temporary file and renames it, so that no reader gets half a file; errors of the disk are ignored."""
    packed = zlib.compress(module, 1)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(packed).digest() + packed)
        os.replace(file.name, path)
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Removes the least recently used files of a folder until at most `LIMIT` bytes are left.

    Other processes may do so at the same time; one whose file is gone lowers the kernel again.
    """
    files = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            found = entry.stat()
            files.append((found.st_mtime_ns, found.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= LIMIT:
            return
        with suppress(FileNotFoundError):
            os.remove(path)
        total -= size
