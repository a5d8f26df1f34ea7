"""What a kernel of grouped_matmul knows when it is compiled."""

from dataclasses import dataclass

import jax.numpy as jnp
import triton

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.grouped_matmul import Operands


@dataclass(frozen=True)
class Problem:
    """The shapes of one product, as a compile-time constant.

    Attributes:
        B, M, K, N, E, F: batch, rows, contracted features, columns, groups that are here, and groups in all.
        transposed: the matrices lie in memory as [N, K].
        sizes_vary, offset_varies, rhs_varies: whether the operand has a batch axis.
        scale_strides: the steps of rhs_scale along batch, group, and columns of rhs; 0 where it is broadcast.
        scaled_features: rhs_scale belongs to the contracted features, not to the columns.
        promotes_accumulators: the product of each tile is added to the accumulator in float32 outside the tensor cores,
            whose own sums are less exact.
        narrow: the matrices are of 8 bits.
        described: tiles are read through TMA descriptors, not pointers.
        swap_ab: tiles of many rows compute the transpose of the result, oᵀ = rhsᵀ·lhsᵀ. wgmma takes its A operand from
            registers, so that a tile of 8 bits that was widened there is not stored to shared memory again. (Matrices
            in memory as [N, K] would be loaded two bytes at a time, which was slower.)
    """

    B: int
    M: int
    K: int
    N: int
    E: int
    F: int
    transposed: bool
    sizes_vary: bool
    offset_varies: bool
    rhs_varies: bool
    scale_strides: tuple[int, int, int]
    scaled_features: bool
    promotes_accumulators: bool
    narrow: bool
    described: bool
    swap_ab: bool

    @property
    def F_PAD(self) -> int:
        return max(16, triton.next_power_of_2(self.F))

    @property
    def shared(self) -> int:
        """Batches that share one set of matrices."""
        return 1 if self.rhs_varies else self.B

    @property
    def scale_along_tiles(self) -> bool:
        """rhs_scale has a number for each column."""
        return self.scale_strides[2] != 0


def problem_of(x: Operands, dtype, transposed: bool, scaled_features: bool = False) -> Problem:
    """The product x.lhs · x.rhs, the latter logically [b?, e, k, n], in a dtype."""
    (B, M, K), (_, E, _, N) = x.lhs.shape, x.rhs.shape
    varies = lambda a: a is not None and a.shape[0] > 1
    narrow, described = x.rhs.dtype != x.lhs.dtype, can_describe(x.lhs, x.rhs)
    return Problem(
        B=B,
        M=M,
        K=K,
        N=N,
        E=E,
        F=x.group_sizes.shape[1],
        transposed=transposed,
        sizes_vary=varies(x.group_sizes),
        offset_varies=varies(x.group_offset),
        rhs_varies=varies(x.rhs),
        scale_strides=_strides(x.rhs_scale),
        scaled_features=scaled_features,
        promotes_accumulators=_holds_more_bits(dtype, x.lhs.dtype),
        narrow=narrow,
        described=described,
        swap_ab=narrow
        and described
        and not transposed
        and x.lhs.dtype != jnp.float32
        and _launch.compute_capability() < 100,
    )


def _holds_more_bits(dtype, of) -> bool:
    """Whether a result of that dtype would show what tensor cores lose: of float32 in products and sums, of float16,
    the products of which are exact, in sums."""
    return (dtype == jnp.float32 and of != jnp.bfloat16) or (dtype == jnp.float16 and of == jnp.float32)


def can_describe(*arrays) -> bool:
    """TMA, from Hopper on, wants rows that begin at multiples of 16 bytes, along whichever axis they lie."""
    aligned = all(size * a.dtype.itemsize % 16 == 0 for a in arrays for size in a.shape[-2:])
    return aligned and _launch.has_descriptors()


def in_memory(rhs, transposed: bool):
    """rhs [b?, e, k, n] as it lies in memory; XLA cancels the transposition with that which made the view."""
    return rhs.swapaxes(2, 3) if transposed else rhs


def _strides(scale) -> tuple[int, int, int]:
    if scale is None:
        return (0, 0, 0)
    b, e, n = scale.shape
    return (e * n if b > 1 else 0, n if e > 1 else 0, 1 if n > 1 else 0)
