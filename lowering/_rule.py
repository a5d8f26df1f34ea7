"""The lowering rule of all primitives: primitive × platform → implementation → MLIR, under a label.

The config of the equation names the implementation if it was chosen for the target that is lowered for. Otherwise, as
when one program is lowered for several platforms, the registry chooses the implementation, and its heuristics the
config. The implementation is traced with the shapes of one device.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.interpreters import mlir

from ejkernel.compat import (
    automatic_devices,
    explicit_mesh,
    is_partly_manual,
    with_numbered_devices,
    without_manual_axes,
    without_sharding,
)
from ejkernel.errors import UnsupportedError, describe
from ejkernel.kernels._dispatch import candidates, select
from ejkernel.kernels._registry import KernelSpec
from ejkernel.kernels._target import lowering_for
from ejkernel.ops import labelled
from ejkernel.ops.utils.devices import target_of
from ejkernel.primitives._factory import KernelPrimitive
from ejkernel.types import Backend, Platform, Target
from ejkernel.xla_utils.symbolic import is_symbolic, with_known_sizes

from . import _stored
from ._context import one_device
from ._failures import Progress, named_when_compiled
from ._partition import automatic, explicit


def register(primitive: KernelPrimitive, jax_platform: str) -> None:
    """Registers the rule of `primitive` for one platform of JAX."""
    mlir.register_lowering(primitive.primitive, partial(_lower, primitive, jax_platform), platform=jax_platform)


def body_of(
    primitive: KernelPrimitive,
    names: Sequence[str],
    results: Sequence[str],
    spec: Any,
    config: Any,
    target: Target,
    platform: Platform | str,
    progress: Progress,
) -> Callable[..., list[Any]]:
    """The function on one device, which chooses and labels the implementation for the shapes that it is traced with."""

    def body(*arrays):
        named = dict(zip(names, arrays, strict=True))
        entry = implementation(primitive, named, spec, config, target, platform)
        used = config_for(primitive, named, spec, config, entry, target)
        types = {name: jax.typeof(x) for name, x in named.items()}
        list_candidates = lambda: candidates(primitive.name, spec, primitive.operands(types), target)

        def run(*arrays):
            named = dict(zip(names, arrays, strict=True))
            named = _opaque(primitive, named) if target.backend == Backend.CPU else named
            positional, extra = primitive.arguments(named, results)
            label = labelled(primitive.name, entry.platform, used)
            with progress.tracing(entry, list_candidates), lowering_for(target), label, _widths(entry, target):
                return list(entry.implementation(*positional, **extra, spec=spec, config=used))

        if not _is_stored(entry, target):
            return run(*arrays)
        key = repr((primitive.name, entry.platform, tuple(names), tuple(results), spec, used, target))
        shapes = tuple(primitive.result_shapes(named, results, spec).values())
        return _stored.call(_stored.Kernel(run, key, target, shapes, primitive.name), arrays)

    return body


def _opaque(primitive: KernelPrimitive, named: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The operands, of which XLA knows no values while it compiles; not those that are written in place.

    Where XLA for CPUs knows that all elements of a factor are equal, as those of `jnp.ones`, the products in its YNN
    fusions are wrong (seen on jax 0.11.2 and 0.12.0). On jax 0.10.2 it would copy what is written in place.
    """
    read = {name: x for name, x in named.items() if name not in primitive.in_place}
    return {**named, **jax.lax.optimization_barrier(read)}


def _widths(entry: KernelSpec, target: Target) -> AbstractContextManager:
    """The context in which a kernel is traced: the Pallas kernels of TPUs without `jax_enable_x64`.

    They compute with 32 bits at most, and with it Pallas would trace the indices of their blocks as 64-bit integers.
    """
    is_mosaic = _is_of_library(entry) and target.backend == Backend.TPU and entry.platform != Platform.XLA
    return jax.enable_x64(False) if is_mosaic else nullcontext()


def _is_of_library(entry: KernelSpec) -> bool:
    return entry.implementation.__module__.startswith("ejkernel.")


def _is_stored(entry: KernelSpec, target: Target) -> bool:
    """Whether the lowered kernel is cached on disk: those of this library for GPUs, which are slow to lower."""
    return _is_of_library(entry) and target.backend == Backend.GPU and entry.platform != Platform.XLA


def implementation(
    primitive: KernelPrimitive, named: Mapping[str, Any], spec: Any, config: Any, target: Target, platform: str
) -> KernelSpec:
    """The implementation of the requested platform, else that of the config if that was chosen for this target."""
    operands = primitive.operands(named)
    if platform == "auto" and config.backend == target.backend:
        for entry, reason in candidates(primitive.name, spec, operands, target, config.platform):
            if reason is None:
                return entry
    return select(primitive.name, spec, operands, target, platform)


def config_for(
    primitive: KernelPrimitive, named: Mapping[str, Any], spec: Any, config: Any, entry: KernelSpec, target: Target
) -> Any:
    """The config of the equation if it fits this implementation, else that of the heuristics."""
    if config.backend in (Backend.ANY, target.backend) and config.platform in ("auto", entry.platform):
        return replace(config, platform=entry.platform, backend=target.backend)
    chosen = entry.implementation.heuristic(spec, with_known_sizes(primitive.operands(named)), target)
    return replace(chosen, platform=entry.platform, backend=target.backend)


def _lower(primitive, jax_platform, ctx, *args, operands, results, spec, config, chooser):
    named = dict(zip(operands, ctx.avals_in, strict=True))
    target = target_of(jax_platform)
    progress = Progress(primitive.name, target)
    body = body_of(primitive, operands, results, spec, config, target, chooser.platform, progress)
    mesh = primitive.split(named)[1] or explicit_mesh(ctx)
    if mesh or is_partly_manual(ctx):
        _refuse_symbolic(primitive, named, _INSIDE_SHARD_MAP)
    # XLA cannot compile a `shard_map` that takes only arrays without elements, as these are constants.
    if mesh and not any(0 in aval.shape for aval in ctx.avals_in):
        run = explicit(primitive, body, named, results, spec, mesh)
        avals = [without_manual_axes(aval) for aval in ctx.avals_in]
    else:
        run, avals = body, [without_sharding(aval) for aval in ctx.avals_in]
        if not mesh and automatic_devices(ctx) > 1:
            local = dict(zip(operands, avals, strict=True))
            if target.platform == "tpu":
                _refuse_tpu_kernel(primitive, local, spec, config, target, chooser.platform)
            elif not is_partly_manual(ctx):
                _refuse_symbolic(primitive, named, "over Auto axes, where XLA needs known sizes")
                named_body = named_when_compiled(body, progress)
                run, ctx = automatic(primitive, named_body, local, results, spec), with_numbered_devices(ctx)
    with progress.failures_named(), one_device():
        return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=avals), *args)


def _refuse_tpu_kernel(primitive, named, spec, config, target, platform) -> None:
    """Raises for a Pallas kernel on TPU with Auto axes; implementations in XLA are not affected.

    XLA cannot partition Mosaic kernels (jax#38196), and `custom_partitioning` does not exist on TPU.
    """
    if implementation(primitive, named, spec, config, target, platform).platform != Platform.XLA:
        raise UnsupportedError(
            f"{primitive.name}: a TPU kernel cannot be partitioned automatically; use a mesh with Explicit axes "
            "(the default of jax.make_mesh, with jax.set_mesh), or call it inside jax.shard_map"
        )


# Symbolic dimensions fail or crash inside shard_map, also in plain JAX: `jnp.ones(x.shape)`, or a `scan` (on 0.11.2).
_INSIDE_SHARD_MAP = (
    "inside jax.shard_map or over Explicit axes, where JAX cannot give them numbers when it loads what was exported"
)


def _refuse_symbolic(primitive, named, where: str) -> None:
    if any(map(is_symbolic, named.values())):
        raise UnsupportedError(
            f"{primitive.name}: sizes are symbolic {where}; export it for sizes that are known {describe(**named)}"
        )
