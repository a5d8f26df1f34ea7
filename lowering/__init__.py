"""The MLIR lowerings of kernel primitives for every platform; `register` is called for each primitive."""

from ejkernel.primitives._factory import KernelPrimitive

from . import cpu, cuda, rocm, tpu
from ._derivative import register_derivative


def register(primitive: KernelPrimitive) -> None:
    """Lowers a primitive, on every platform, to an implementation of its name in the registry.

    A linear one, i.e. a tangent or backward, gets the derivative of its XLA implementation, for second order.
    """
    for rules in (cpu, cuda, rocm, tpu):
        rules.register(primitive)
    if primitive.linear is not None:
        register_derivative(primitive)
