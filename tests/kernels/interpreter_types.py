"""What Triton's interpreter does with types and shapes at every operation, as Triton does it and much faster.

A tensor's type and shape are made for each tensor, and compared element by element, which takes more than half of the
time of a test. Here they are made once for each shape and dtype.
"""

import dataclasses
import math

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_block_types: dict[tuple, dict] = {}
_of_tensors: dict[tuple, tuple] = {}
_computation_types: dict[tuple, tl.dtype] = {}


def _block_type(self, element_type, shape, plain=core.block_type.__init__):
    sizes = _sizes(shape)
    if (key := (sizes, element_type.name)) not in _block_types:
        plain(self, element_type, list(sizes))
        _block_types[key] = {**vars(self), "sizes": sizes}
    vars(self).update(_block_types[key])


def _sizes(shape) -> tuple[int, ...]:
    return tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = getattr(type, "sizes", ())
    if sizes not in _of_tensors:
        _of_tensors[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
    self.shape, self.numel = _of_tensors[sizes]


def _equal(self, other, plain=core.dtype.__eq__):
    return self is other or plain(self, other)


def _equal_blocks(self, other):
    same = isinstance(other, core.block_type) and self.sizes == other.sizes
    return same and self.element_ty == other.element_ty


def _broadcast(self, x, y, plain=TritonSemantic.broadcast_impl_value):
    """Both with the shape that they have together."""
    sizes = [getattr(a.type, "sizes", ()) for a in (x, y)]
    if sizes[0] == sizes[1]:
        return x, y
    if self.builder is not interpreter.interpreter_builder:  # kernels are compiled in the same process
        return plain(self, x, y)
    together = np.broadcast_shapes(*sizes)
    return tuple(a if of == together else _expanded(a, together) for a, of in zip((x, y), sizes, strict=True))


def _expanded(x, shape):
    handle = interpreter.TensorHandle(np.broadcast_to(x.handle.data, shape), x.dtype)
    return tl.tensor(handle, tl.block_type(x.dtype, shape))


def _computation_type(self, x, x_is_scalar, y, y_is_scalar, div_or_mod, plain=TritonSemantic.computation_type_impl):
    key = x.name, x_is_scalar, y.name, y_is_scalar, div_or_mod
    if key not in _computation_types:
        _computation_types[key] = plain(self, x, x_is_scalar, y, y_is_scalar, div_or_mod)
    return _computation_types[key]


core.block_type.__init__ = _block_type
core.block_type.__eq__ = _equal_blocks
core.dtype.__eq__ = _equal
core.tensor.__init__ = _tensor
TritonSemantic.broadcast_impl_value = _broadcast
TritonSemantic.computation_type_impl = _computation_type

# Without `debug`, which is off, sums in int64 that tell an overflow are computed and not looked at.
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
