"""What the kernels of state_space_v1 share on all platforms."""

from jax import Array


def as_operand(gradient: Array, of: Array) -> Array:
    """A gradient in the shape and dtype of an operand, which may be the same for all of the batch."""
    if gradient.shape != of.shape:
        gradient = gradient.sum(0, keepdims=True)
    return gradient.astype(of.dtype)
