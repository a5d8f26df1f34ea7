"""Every touch of private JAX, each with its reason: nothing else imports `jax._src`.

All seen on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import functools
import math
import os
from pathlib import Path
from typing import Any


def automatic_devices(ctx: Any) -> int:
    """Over how many devices XLA may partition what this lowering rule emits: 1 where all axes are manual.

    The context of a lowering rule is public, the classes of its `axis_context` are not.
    """
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        free = [size for name, size in context.mesh.shape.items() if name not in context.manual_axes]
        return math.prod(free) if context.manual_axes else context.mesh.size
    return getattr(context, "num_devices", None) or 1


def explicit_mesh(ctx: Any) -> Any:
    """The mesh of the context in which an equation was traced, if it is of more than one device and wholly Explicit.

    An operand of no mesh may meet it there: an array that was made before the mesh was set.
    """
    mesh = getattr(ctx.jaxpr_eqn_ctx, "cur_abstract_mesh", None)
    is_explicit = mesh is not None and not mesh.empty and mesh.are_all_axes_explicit
    return mesh if is_explicit and automatic_devices(ctx) == mesh.size > 1 else None


def with_numbered_devices(ctx: Any) -> Any:
    """The context with numbers in the place of devices, all that `custom_partitioning` wants of them.

    Devices themselves are in the context only of a program with a primitive that JAX lists as one that requires them
    (it lists `custom_partitioning_p`, but does not look for it in what a lowering rule adds), and such a program must
    not have shardings of two meshes.
    """
    from jax._src.sharding_impls import ShardingContext

    count = automatic_devices(ctx)
    return ctx.replace(
        module_context=ctx.module_context.replace(axis_context=ShardingContext(count, tuple(range(count))))
    )


def is_partly_manual(ctx: Any) -> bool:
    """Whether a `shard_map` around has made some axes of the mesh manual.

    `custom_partitioning` is then not told of the mesh and fails inside XLA (seen on 0.11.2).
    """
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))


def ask_ptxas_once() -> None:
    """Lets Mosaic GPU remember which PTX the assembler of this machine takes.

    It starts `ptxas --version` for each conversion of a boolean to a number, 15 times in a kernel of attention (seen on
    0.11.2), which costs more than a tenth of the time to lower it.
    """
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return
    extension = getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
    asked = getattr(extension, "_get_ptxas_isa_version", None)
    if asked is not None and not hasattr(asked, "cache_info"):
        extension._get_ptxas_isa_version = functools.cache(asked)


def without_sharding(aval: Any) -> Any:
    """The aval of one device's part: no mesh and no manual axes in its type, so that plain code traces on it."""
    from jax._src import core

    return core.ShapedArray(aval.shape, aval.dtype)


def without_manual_axes(aval: Any) -> Any:
    """The aval without manual axes in its type: what is lowered was checked, and plain code does not carry them on."""
    from jax._src import core

    return core.ShapedArray(aval.shape, aval.dtype, sharding=aval.sharding)


def unchecked_manual_axes() -> Any:
    """A context in which types name no manual axes, as those of `without_sharding` do not.

    Inside a `jax.shard_map` that checks them Pallas wants its outputs to name them otherwise (0.10.2 – 0.12).
    """
    from jax._src import config

    return config._check_vma(False)


def is_for_export(ctx: Any) -> bool:
    """Whether `jax.export` is lowering: kernels are then written for readers of other versions, too."""
    return ctx.module_context.lowering_parameters.for_export


@functools.cache
def find_mosaic_runtime() -> None:
    """Tells XLA where the runtime of Mosaic GPU lies, as importing `jax.experimental.mosaic.gpu` does.

    A program that holds a kernel from a cache is compiled without that import, which takes half a second.
    """
    from jax._src import lib

    os.environ.setdefault("MOSAIC_GPU_CUDA_ROOT", lib.cuda_path or "/usr/local/cuda")
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return
    runtime = Path(mosaic_gpu._mosaic_gpu_ext.__file__).parent / "libmosaic_gpu_runtime.so"
    if runtime.exists():
        os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
