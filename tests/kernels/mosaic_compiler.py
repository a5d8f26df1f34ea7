"""Compiles kernels of Mosaic GPU for a Hopper GPU without having one, and reads the report of NVIDIA's assembler.

The compiler of JAX's CUDA plugin asks the driver for the device, and then needs none. So a process of its own runs with
a library in the driver's place that answers for a device of compute capability 9.0:

    python -m tests.kernels.mosaic_compiler flash_attention gemma2-9b-local

prints, as JSON, for the forward, the tangent and the backward of a named call what its kernels spill, in bytes, and the
remarks on serialized products. With "anyway" after it, also where the library passes over these kernels because of how
the plugin assembles them. With "int8" after it, of pages of int8 and a scale for each slot; with "e4m3", of those of
float8_e4m3fn without scales.
"""

import ctypes
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ejkernel.types import Platform, Target

HOPPER = Target("cuda", "NVIDIA H200", 90, 132)
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# Attributes of the device by number: the compute capability, multiprocessors, threads of a warp.
DRIVER = """
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 10 ? 32 : 1024;
  return 0;
}
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int number) { *device = 0; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuModuleLoadData(void** module, const void* image) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) { return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
"""
PAGES = {"int8": "int8", "e4m3": "float8_e4m3fn"}
SERIALIZED = re.compile(r"\((C\d+)\)[^\n]* serialized ")


def missing() -> str | None:
    """What a machine lacks for it, or None."""
    if plugin() is None:
        return "jax-cuda13-pjrt, which has the compiler, is not installed"
    if assembler() is None or shutil.which("cc") is None:
        return "there is no ptxas, or no compiler of C"
    return None


def plugin() -> Path | None:
    """The library of JAX's CUDA plugin."""
    for name in PLUGINS:
        spec = importlib.util.find_spec(name) if importlib.util.find_spec(name.partition(".")[0]) else None
        if spec is not None:
            return next(Path(spec.origin).parent.glob("*.so"), None)
    return None


def assembler() -> Path | None:
    """The folder of ptxas: Triton's, or one on the path."""
    triton = importlib.util.find_spec("triton")
    own = None if triton is None else Path(triton.origin).parent / "backends/nvidia/bin"
    found = str(own / "ptxas") if own and (own / "ptxas").exists() else shutil.which("ptxas")
    return None if found is None else Path(found).parent


def reports(folder: Path, operation: str, shape: str, *more: str) -> dict[str, list[tuple[int, list[str]]]]:
    """(bytes of spilled registers, remarks on serialized products) of each kernel in Mosaic GPU of a named call.

    They have their heuristic configs; kernels in Triton are left out. "…, deterministic" has that option.
    """
    driver = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", driver], input=DRIVER, text=True, check=True)
    env = os.environ | {
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PATH": f"{assembler()}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    command = [sys.executable, "-m", __name__, operation, shape, *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# --- The process


def compiled(module: bytes) -> tuple[int, list[str]]:
    """Compiles a module of Mosaic GPU, and reads what its compiler prints."""
    compile_ = ctypes.CDLL(str(plugin())).MosaicGpuCompile
    compile_.argtypes, compile_.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    with tempfile.TemporaryFile() as file:
        saved = [os.dup(stream) for stream in (1, 2)]
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        compile_(module, len(module))
        for stream, before in zip((1, 2), saved, strict=True):
            os.dup2(before, stream)
        file.seek(0)
        said = file.read().decode(errors="replace")
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", said)]
    if not spilled:
        raise RuntimeError(f"not compiled: {said[-1000:]}")
    return max(spilled), sorted(set(SERIALIZED.findall(said)))


def modules(operation) -> Iterator[bytes]:
    """The modules of Mosaic GPU in a lowered program, and in the operations within it."""
    from jax.extend.mlir import ir

    attributes = operation.attributes
    if "call_target_name" in attributes and "mosaic_gpu" in str(attributes["call_target_name"]):
        name = "mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"
        yield ir.StringAttr(ir.DictAttr(attributes[name])["module"]).value_bytes
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from modules(inner.operation)


def calls(operation: str, shape: str) -> Iterator[tuple[str, Any]]:
    """The calls that the gradient of a layer makes, by name, and the backward once more with `deterministic`."""
    from ejkernel.cli.tune import calls_of_shape
    from ejkernel.types.shapes import shapes_of

    for call in calls_of_shape(operation, shapes_of(operation)[shape], "bfloat16"):
        call = dataclasses.replace(call, target=HOPPER)
        yield call.kernel.name, call
        spec = call.kwargs["spec"]
        if call.kernel.name.endswith("_bwd") and hasattr(spec, "deterministic"):
            kwargs = call.kwargs | {"spec": dataclasses.replace(spec, deterministic=True)}
            yield f"{call.kernel.name}, deterministic", dataclasses.replace(call, kwargs=kwargs)


def with_pages(call: Any, dtype: str) -> Any:
    """A call over pages with these in a dtype of eight bits, int8 with a scale for each of their slots and heads."""
    import jax

    names = dict(zip(call.kwargs["operands"], call.args, strict=True))
    given = "kv_pages" if "kv_pages" in names else "pages"
    pages = names[given]
    of_latents = jax.ShapeDtypeStruct((*pages.shape[:3], 1), "float32")
    of_heads = jax.ShapeDtypeStruct(pages.shape[:4], "float32")
    scales = dict(k_scale=of_latents) if given == "pages" else dict(k_scale=of_heads, v_scale=of_heads)
    names |= {given: jax.ShapeDtypeStruct(pages.shape, dtype)} | (scales if dtype == "int8" else {})
    return dataclasses.replace(call, args=tuple(names.values()), kwargs=call.kwargs | dict(operands=tuple(names)))


def main(operation: str, shape: str, more: str = "") -> None:
    """Prints the reports of a named call."""
    import jax

    from ejkernel.kernels._pallas.gpu import _supports
    from ejkernel.kernels._target import lowering_for

    if more == "anyway":
        _supports.serializes = lambda: None
    found = {}
    with lowering_for(HOPPER):
        for name, call in calls(operation, shape):
            call = with_pages(call, PAGES[more]) if more in PAGES else call
            config = call.kernel.heuristic_cfg(call)
            if config.platform != Platform.PALLAS:
                continue
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.args]
            run = lambda *x, call=call, config=config: call.kernel.bind(x, call.kwargs, config, HOPPER)
            program = jax.jit(run).trace(*types).lower(lowering_platforms=("cuda",))
            found[name] = list(map(compiled, modules(program.compiler_ir().operation)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
