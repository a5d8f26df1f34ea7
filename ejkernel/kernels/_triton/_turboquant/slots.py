"""What stands in the slots of a cache quantised by TurboQuant: norms, words of indices, and bytes of signs."""

import triton
import triton.language as tl


@triton.jit
def load_norms(key_norms, slots):
    """‖k‖ and ‖r‖ of the keys in these slots; both norms are read at once, if that is four bytes, as copies are."""
    if key_norms.dtype.element_ty.primitive_bitwidth == 16:
        both = tl.load(key_norms.to(tl.pointer_type(tl.int32), bitcast=True) + slots)
        norm, residual = both.to(tl.int16), (both >> 16).to(tl.int16)
        dtype: tl.constexpr = key_norms.dtype.element_ty
        return norm.to(dtype, bitcast=True).to(tl.float32), residual.to(dtype, bitcast=True).to(tl.float32)
    else:
        return tl.load(key_norms + 2 * slots), tl.load(key_norms + 2 * slots + 1)


@triton.jit
def load_tile(x, slots, width: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """`width` words or bytes of each slot, and 0 after them, along the axis COLUMNS of a tile, as its product needs."""
    column = tl.expand_dims(tl.arange(0, WIDTH), 1 - COLUMNS)
    at = x + tl.expand_dims(slots, COLUMNS) * width + column
    if width == WIDTH:
        return tl.load(at)
    else:
        return tl.load(at, mask=column < width, other=0)
