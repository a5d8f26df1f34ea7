"""The MLIR lowerings of the primitives of kernels, per platform: `register` is called with each that is defined."""

from ejkernel.primitives._factory import KernelPrimitive

from . import cpu, cuda, rocm, tpu
from ._derivative import register_derivative


def register(primitive: KernelPrimitive) -> None:
    """Lowers a primitive, for whatever platform, to an implementation of its name in the registry.

    One that is linear gets the derivative of its XLA implementation, which second order takes.
    """
    for platform in (cpu, cuda, rocm, tpu):
        platform.register(primitive)
    if primitive.linear is not None:
        register_derivative(primitive)
