"""Exporting programs that contain kernels of this library."""

from jax import export

from .kernels._registry import kernel_registry


def export_checks() -> list[export.DisabledSafetyCheck]:
    """Checks that `jax.export` must disable: the custom calls of kernels, for which it guarantees no compatibility.

        jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"), disabled_checks=ejkernel.export_checks())

    An artifact with such a call runs with the versions of JAX and jax-triton that made it, or later ones that still
    support it, without this package. On a Hopper GPU the process that reads it has to import
    `jax.experimental.mosaic.gpu`, by which XLA finds the runtime library of Mosaic GPU; otherwise XLA says "Failed to
    lookup host symbol".

    With symbolic dimensions it contains no kernels, which need static sizes, but XLA's implementation of the operation;
    that of flash_attention with symbolic lengths has all logits in memory at once. The number of packed sequences must
    be static.
    """
    entries = (s for name in kernel_registry.list_algorithms() for s in kernel_registry.list_implementations(name))
    names = sorted({call for entry in entries for call in entry.implementation.custom_calls})
    return [export.DisabledSafetyCheck.custom_call(name) for name in names]
