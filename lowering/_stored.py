"""Kernels as they are lowered, kept in memory and on disk: a kernel is traced and lowered once on a machine.

To lower a GPU kernel takes seconds, most of them Python: Pallas traces it and emits Mosaic's instructions one by one,
Triton compiles it to PTX. What comes of it is a function of what is computed, how, for which device, by which source
and versions; that is its key. A process that finds the key on disk puts the stored function into its program and
imports neither Pallas nor Triton.

The files stand in `lowered` beside the stored configs, the last used `LIMIT` bytes of them. One that is damaged costs a
warning and is made again.
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

from ejkernel.compat import find_mosaic_runtime, is_for_export
from ejkernel.ops.core.programs import check_kernels_may_be_made
from ejkernel.ops.utils.fingerprints import versions_fingerprint
from ejkernel.ops.utils.shared_file import cache_directory
from ejkernel.types import Target

from ._context import no_garbage_collection, one_device

LIMIT = 512 * 2**20
"""Bytes that the files have together at most."""
_DIGEST = hashlib.sha256().digest_size
# In the names of calls into this very process, such as that of a debugger or a profiler.
_CALLBACK = b"_python_"
# What decides, beside its arguments, what is traced and lowered; and the beginnings of such variables.
_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_include_full_tracebacks_in_locations")
_VARIABLES = ("EJKERNEL_OPS_STAMP", "EJKERNEL_TRITON_", "TRITON_", "MOSAIC_GPU_DUMP", "JAX_TRITON_")
_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR")


@dataclass(frozen=True)
class Kernel:
    """A call of an implementation, of whose `run` the other fields say all that it does.

    Attributes:
        run: arrays → the list of the results.
        key: what `run` computes and how, as text that is the same in every process.
        target: what it is lowered for.
        results: shape and dtype of each result.
        name: of the function that it becomes.
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
    # An exported program is read by other versions, and what it is lowered to differs.
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


# --- Where they are kept

_in_memory: dict[Path, bytes | None] = {}


def _stored(kernel: Kernel, avals: Sequence[Any]) -> bytes | None:
    """The module whose `main` is the kernel, in bytes; None for one that is not a function of its arguments alone."""
    path = Path(cache_directory()).expanduser() / "lowered" / _digest(kernel, avals)
    if path not in _in_memory:
        if (module := _read(path)) is None:
            check_kernels_may_be_made()
            if (module := _made(kernel, avals)) is not None:
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
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
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
        module = traced.lower(lowering_platforms=(kernel.target.platform,)).compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if op.sym_name.value == "main")
    if len(main.type.inputs) != len(types):  # constants have become arguments
        return None
    for attributes in ("arg_attrs", "res_attrs"):  # layouts and names, which only the entry of a program has
        if attributes in main.attributes:
            del main.attributes[attributes]
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return None if _CALLBACK in buffer.getvalue() else buffer.getvalue()


def _read(path: Path) -> bytes | None:
    with suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            with suppress(OSError):
                os.utime(path)  # what is used is the last to be removed
            return zlib.decompress(content[_DIGEST:])
        warnings.warn(f"{path} is damaged; the kernel is lowered again", UserWarning, stacklevel=2)
    return None


def _write(path: Path, module: bytes) -> None:
    """Writes beside and renames, so that no reader sees half a file; a disk that is full or not ours costs nothing."""
    packed = zlib.compress(module, 1)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(packed).digest() + packed)
        os.replace(file.name, path)
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Removes what was not used for the longest time, until the files of a folder have `LIMIT` bytes at most.

    Other processes may do so at the same time; one that looks for a file that is gone lowers the kernel again.
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
