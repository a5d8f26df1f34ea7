"""The launch of Triton kernels from JAX, which all of them use.

Arrays of JAX are dense and their shapes are known when a program is traced, so kernels take pointers and compile-time
constants alone: shapes and strides are part of a constant, and an operand that is absent is None.
"""

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_rules

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._target import gpu_target
from ejkernel.types import Backend, KernelConfig, OperationConfig, Platform, Target
from ejkernel.types.target import DEFAULT_CUDA_CAPABILITY
from ejkernel.xla_utils.slices import aligned

# A multiply-add is one instruction, rounded once: the kernels are written for it. From 3.10 on Triton has to be told.
BACKEND_OPTIONS = {"enable_fp_fusion": True}
# The version of PTX, as Triton counts it: the oldest that knows the compute capability, and at least that of CUDA 12.8.
# Triton alone would write the newest that its own assembler reads, which that of JAX, where PTX goes, may not.
PTX_VERSION, PTX_VERSIONS = 87, {103: 88, 110: 90, 121: 88}
CUSTOM_CALLS = ("triton_kernel_call_ffi",)
"""What a launch is lowered to."""
# Bytes of shared memory that a program may use, by compute capability; the least for others. On AMD it is LDS.
SMALL_SHARED_MEMORY, LDS = 99 * 1024, 64 * 1024
SHARED_MEMORY = {80: 163 * 1024, 87: 163 * 1024, **dict.fromkeys((90, 100, 103, 110), 227 * 1024)}
SHARED_MEMORY |= dict.fromkeys((86, 89, 120, 121), SMALL_SHARED_MEMORY)
LIMIT_VARIABLE = "EJKERNEL_TRITON_SMEM_LIMIT"
MOST_FEATURES = 256


def trio(
    package: str,
    algorithm: str,
    spec: type,
    operands: type,
    outputs: type,
    config: type[OperationConfig] = KernelConfig,
) -> KernelTrio:
    """The `KernelTrio` of a package of Triton kernels."""
    return KernelTrio(
        package, algorithm, spec, operands, outputs, Platform.TRITON, Backend.GPU, priority=100, config=config,
        custom_calls=CUSTOM_CALLS, refuses=refuses, excess=excess,
    )  # fmt: skip


def launch(
    kernel: Callable, *operands: Any, out_type: Any, grid: int, config: OperationConfig, **constants: Any
) -> Any:
    """Runs `grid` programs of `kernel(*operands, *outputs, **constants)` and returns the outputs in `out_type`'s tree.

    `operands` are arrays or None; an output that is not wanted is given by name as None in `constants`.

    Raises:
        ValueError: the config is one that `refuses` has something against.
    """
    if wrong := refuses(kernel.__name__, config):
        raise ValueError(f"{kernel.__name__}: {wrong}")
    module = jax_triton()
    _fit_rule_of_unused_outputs(module.triton_lib.triton_kernel_call_p)
    results = module.triton_call(
        *aligned(operands),
        kernel=kernel,
        grid=(grid,),
        name=kernel.__name__,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        compute_capability=compute_capability(),
        backend_options=backend_options(gpu_target().platform, compute_capability()),
        out_type=out_type,
        **constants,
    )
    return aligned(results)


def backend_options(platform: str, capability: int | None) -> dict[str, Any]:
    """The options of Triton's compiler for a compute capability, the same for every kernel."""
    if platform != "cuda":
        return BACKEND_OPTIONS
    return BACKEND_OPTIONS | {"ptx_version": PTX_VERSIONS.get(capability, PTX_VERSION)}


def refuses(name: str, config: OperationConfig) -> str | None:
    """Why no kernel can run with a config, or None: tensor cores need blocks of a power of two of at least 16."""
    del name
    for block in (x.name for x in fields(config) if x.name.startswith("block_") or x.name == "chunk_size"):
        if (size := getattr(config, block)) < 16 or size & (size - 1):
            return f"config.{block} is {size}; Triton needs a power of two of at least 16"
    if config.num_warps not in (1, 2, 4, 8, 16, 32):
        return f"config.num_warps is {config.num_warps}; Triton needs a power of two of at most 32"
    return None


def refusal(target: Target) -> str | None:
    """Why no Triton kernel can be launched on the target, from this environment, or None."""
    if target.platform not in ("cuda", "rocm"):
        return f"Triton runs on cuda and rocm, not on {target.platform}"
    if target.platform == "rocm" and target.device_kind is None:
        return "jax-triton compiles for rocm only on a machine with an AMD GPU"
    if target.platform == "cuda" and (target.compute_capability or 0) < 80:
        return f"Triton's kernels need compute capability 8.0, not {target.capability}"
    try:
        module = jax_triton()
    except Exception as error:  # versions of jax, Triton and jax-triton that do not fit end in any error
        return f"jax-triton cannot be used ({type(error).__name__}: {error})"
    if not _has_backend(module.triton_lib, target.platform):
        return f"jax-triton {module.__version__} has no backend for {target.platform} with this Triton"
    if module.triton_lib.triton_kernel_call_lib is None:
        return "jaxlib has no Triton; a plugin such as jax-cuda13-plugin brings it"
    return None


def jax_triton() -> Any:
    """The module; an ImportError where it is not installed or too old.

    While it is imported, jax-triton 0.4 looks up a tensor-map type that Triton 3.6 does not have, and nothing here
    uses; without it, it treats the whole CUDA backend as missing. So the name is added to Triton before the import. It
    also reads from a descriptor whether it is for images, which Triton 3.6 does not say, and which is added too. Triton
    3.7 and later have both, and nothing is changed.
    """
    module = importlib.import_module("jax_triton")
    if tuple(map(int, module.__version__.split(".")[:2])) < (0, 4):
        raise ImportError(f"jax-triton {module.__version__} cannot leave operands out; 0.4 can")
    library = module.triton_lib
    if not _has_backend(library, "cuda"):
        with contextlib.suppress(ImportError):  # a Triton that was built without CUDA
            from triton.backends.nvidia import compiler, driver

            library._TMA_DTYPE_DEVICE_TO_HOST = driver.TMA_DTYPE_DEVICE_TO_HOST
            library.TensorDescMeta.__required_keys__ -= {"is_im2col"}
            library.cb = compiler
    return module


def _has_backend(library: ModuleType, platform: str) -> bool:
    """Whether jax-triton found Triton's compiler for a platform; it installs stubs where it did not."""
    return isinstance(getattr(library, {"cuda": "cb", "rocm": "hb"}[platform]), ModuleType)


def _fit_rule_of_unused_outputs(primitive: Any) -> None:
    """Since 0.12 JAX tells the rules that drop unused code which inputs are live. That of jax-triton 0.4.1 does not
    take it, so that a launch at the top of a jitted function would fail.
    """
    rule = dce_rules[primitive]
    if jax.__version_info__ >= (0, 12) and len(inspect.signature(rule).parameters) == 2:
        dce_rules[primitive] = lambda used_outputs, live_inputs, equation: rule(used_outputs, equation)


def described(x: jax.Array, block: tuple[int, ...]) -> Any:
    """An operand that a kernel reads in blocks through a TMA descriptor; 0 beyond the ends of the array."""
    return jax_triton().TensorDescriptor.from_array(aligned(x), block)


def shared_memory_limit(target: Target) -> int:
    """Bytes that a program may use on the target; `EJKERNEL_TRITON_SMEM_LIMIT` overrides."""
    if (limit := limit_of_environment()) is not None:
        return limit
    if target.platform == "rocm":
        return LDS
    return SHARED_MEMORY.get(target.compute_capability, SMALL_SHARED_MEMORY)


def limit_of_environment() -> int | None:
    """The limit of bytes per program set by `EJKERNEL_TRITON_SMEM_LIMIT`, or None.

    Raises:
        ValueError: it is no positive number.
    """
    if not (text := os.environ.get(LIMIT_VARIABLE, "")):
        return None
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if limit <= 0:
        raise ValueError(f"{LIMIT_VARIABLE} is {text!r}; it must be a positive whole number of bytes")
    return limit


def dtype_refusal(name: str, x: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels do not take an operand of this dtype, or None."""
    if x.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"{name} is {x.dtype}; Triton's kernels take bfloat16, float16 and float32"
    return None


def dtype_of_cache(dtype: Any, target: Target) -> Any:
    """The dtype in which kernels get numbers of a cache: uint8 for e4m3 where Triton has no conversion of it."""
    is_e4m3 = np.dtype(dtype).name == "float8_e4m3fn"
    converts = target.platform == "cuda" and (target.compute_capability or 0) >= 89
    return np.dtype("uint8") if is_e4m3 and not converts else dtype


def cache_dtype_refusal(pages: jax.Array | jax.ShapeDtypeStruct, target: Target) -> str | None:
    """Why a target does not convert numbers of a cache, or None."""
    if dtype_of_cache(pages.dtype, target) != pages.dtype:
        return f"float8_e4m3fn needs compute capability 8.9; {target} has {target.capability}"
    return None


def of_cache(x: jax.Array) -> jax.Array:
    """Numbers of a cache in the dtype in which kernels get them."""
    dtype = dtype_of_cache(x.dtype, gpu_target())
    return x if dtype == x.dtype else jax.lax.bitcast_convert_type(x, dtype)


def features_refusal(**features: int) -> str | None:
    """Why the kernels do not take operands with so many features, or None."""
    for name, size in features.items():
        if size > MOST_FEATURES or size % 8:
            return f"{name} has {size} features; Triton's kernels take multiples of 8 up to {MOST_FEATURES}"
    return None


def memory_refusal(needed: int, target: Target) -> str | None:
    """Why kernels whose smallest tiles take so many bytes of shared memory cannot run on a target, or None."""
    if needed <= (limit := shared_memory_limit(target)):
        return None
    who = str(target) if limit_of_environment() is None else LIMIT_VARIABLE
    return f"the smallest tiles take {needed} bytes of shared memory, {who} allows {limit}"


def excess(package: str, name: str, operands: Any, config: OperationConfig) -> str | None:
    """Why a config exceeds the limit that the environment sets on shared memory, for these operands, or None.

    Configs of the heuristics respect the limit. One given by a user is refused, a stored one is skipped.
    """
    if (limit := limit_of_environment()) is None:
        return None
    needed = importlib.import_module(f"{package}.configs").shared_memory(name, operands, config)
    if needed <= limit:
        return None
    return f"the config takes up to {needed} bytes of shared memory, {LIMIT_VARIABLE} allows {limit}"


def has_descriptors() -> bool:
    """Whether the device has TMA, and this jaxlib can make descriptors for it."""
    if is_rocm() or compute_capability() < 90:
        return False
    return hasattr(jax_triton().triton_lib.triton_kernel_call_lib, "create_tma_descriptor_parameter")


def is_rocm() -> bool:
    """Whether the program being traced is for an AMD GPU."""
    return gpu_target().platform == "rocm"


def has_ptx() -> bool:
    """Whether a kernel may have instructions of PTX; where Triton is interpreted none may."""
    return not is_rocm()


def multiprocessors() -> int:
    """The number of multiprocessors of the CUDA device that the program being traced is for."""
    return gpu_target().core_count


def compute_capability() -> int:
    """That of the CUDA device the program being traced is for; on ROCm, which ignores it, a default."""
    return gpu_target().compute_capability or DEFAULT_CUDA_CAPABILITY
