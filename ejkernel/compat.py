"""All uses of private JAX, each with its reason: no other file imports `jax._src`.

Tested with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import functools
import math
import os
from pathlib import Path
from typing import Any


def automatic_devices(ctx: Any) -> int:
    """The number of devices over which XLA may partition what this lowering rule emits: 1 where all axes are manual.

    The context of a lowering rule is public, but not the classes of its `axis_context`.
    """
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        free = [size for name, size in context.mesh.shape.items() if name not in context.manual_axes]
        return math.prod(free) if context.manual_axes else context.mesh.size
    return getattr(context, "num_devices", None) or 1


def explicit_mesh(ctx: Any) -> Any:
    """The mesh of the context in which an equation was traced, if it has several devices and is wholly Explicit.

    An operand without a mesh may occur there: an array made before the mesh was set.
    """
    mesh = getattr(ctx.jaxpr_eqn_ctx, "cur_abstract_mesh", None)
    is_explicit = mesh is not None and not mesh.empty and mesh.are_all_axes_explicit
    return mesh if is_explicit and automatic_devices(ctx) == mesh.size > 1 else None


def with_numbered_devices(ctx: Any) -> Any:
    """The context with numbers in place of devices, which is all that `custom_partitioning` needs of them.

    The context has the devices themselves only in a program with a primitive that JAX lists as one that requires them
    (it lists `custom_partitioning_p`, but does not look for it in what a lowering rule adds), and such a program must
    not have shardings of two meshes.
    """
    from jax._src.sharding_impls import ShardingContext

    count = automatic_devices(ctx)
    return ctx.replace(
        module_context=ctx.module_context.replace(axis_context=ShardingContext(count, tuple(range(count))))
    )


def is_partly_manual(ctx: Any) -> bool:
    """Whether an enclosing `shard_map` has made some axes of the mesh manual.

    `custom_partitioning` then does not receive the mesh and fails inside XLA (seen on 0.11.2).
    """
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))


def ask_ptxas_once() -> None:
    """Makes Mosaic GPU remember which PTX versions the assembler of this machine supports.

    Otherwise it starts `ptxas --version` for each conversion of a boolean to a number, 15 times in an attention kernel
    (seen on 0.11.2), which takes more than a tenth of the lowering time.
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
    """The aval of one device's shard: no mesh and no manual axes in its type, so plain code can be traced on it."""
    from jax._src import core

    return core.ShapedArray(aval.shape, aval.dtype)


def without_manual_axes(aval: Any) -> Any:
    """The aval without manual axes in its type: the call has been checked, and plain code does not propagate them."""
    from jax._src import core

    return core.ShapedArray(aval.shape, aval.dtype, sharding=aval.sharding)


def unchecked_manual_axes() -> Any:
    """A context in which types have no manual axes, like those of `without_sharding`.

    Inside a `jax.shard_map` that checks them, Pallas otherwise requires them in the types of outputs (0.10.2 – 0.12).
    """
    from jax._src import config

    return config._check_vma(False)


def is_for_export(ctx: Any) -> bool:
    """Whether `jax.export` is lowering: kernels must then be serialised for readers of other versions, too."""
    return ctx.module_context.lowering_parameters.for_export


@functools.cache
def find_mosaic_runtime() -> None:
    """Tells XLA where the runtime library of Mosaic GPU is, as importing `jax.experimental.mosaic.gpu` does.

    A program with a kernel from a cache is compiled without that import, which takes half a second.
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
