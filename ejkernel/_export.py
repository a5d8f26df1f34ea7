"""Exporting programs that hold kernels of this library."""

from jax import export

from .kernels._registry import kernel_registry


def export_checks() -> list[export.DisabledSafetyCheck]:
    """What `jax.export` has to be told to let pass: the custom calls of kernels that it gives no guarantees for.

        jax.export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"), disabled_checks=ejkernel.export_checks())

    An artifact with such a call runs with the versions of JAX and jax-triton that it was made with, or later ones that
    still take it.

    Where dimensions are symbolic it holds no kernels, which are made for sizes that are known, but what XLA makes of
    the operation; of flash_attention with symbolic lengths all logits are in memory at once. The number of packed
    sequences has to be known.
    """
    entries = (s for name in kernel_registry.list_algorithms() for s in kernel_registry.list_implementations(name))
    names = sorted({call for entry in entries for call in entry.implementation.custom_calls})
    return [export.DisabledSafetyCheck.custom_call(name) for name in names]
