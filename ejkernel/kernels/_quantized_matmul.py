"""What the kernels of quantized_matmul share: of which products the forward, the tangent and the backward consist.

A kernel computes `product(x, over_rows)`: rows [b, m, …] times the matrix of the codes, [b · m, columns] in the dtype
of x, where the rows of codes are contracted, or else the codes of a row. The tangent in x and the cotangent of x are
such products with the same matrix. Those of scales and zeros are left to XLA.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives.quantized_matmul import Operands, Outputs, QuantizedMatmulSpec
from ejkernel.types import Target

from ._xla import quantized_matmul as xla

Product = Callable[[Array, bool], Array]


def forward(x: Operands, spec: QuantizedMatmulSpec, product: Product) -> Outputs:
    """o [b, m, n, g, j]."""
    columns = (x.w.shape[2], 1, 1) if spec.transpose else (1, x.w.shape[3], spec.group_size)
    return Outputs(product(x.x, not spec.transpose).reshape(*x.x.shape[:2], *columns))


def tangent(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    spec: QuantizedMatmulSpec,
    product: Product,
    target: Target,
) -> Outputs:
    """The tangent of o."""
    terms, rest = [], tangents
    # In float16 one of two terms may be beyond 65504 where their sum is not: XLA computes both, and rounds the sum.
    of_codes = tangents.scales is not None or tangents.zeros is not None
    if tangents.x is not None and not (of_codes and primals.x.dtype == jnp.float16):
        terms.append(forward(primals._replace(x=tangents.x), spec, product).o)
        rest = tangents._replace(x=None)
    if of_codes:
        config = xla.heuristic(spec, primals, target)
        terms.append(xla.quantized_matmul_jvp(primals, outputs, rest, spec=spec, config=config).o)
    return Outputs(sum(terms))


def cotangents(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    wrt: tuple[str, ...],
    spec: QuantizedMatmulSpec,
    product: Product,
    target: Target,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt."""
    others, found = tuple(name for name in wrt if name != "x"), {}
    if "x" in wrt:
        found["x"] = product(cotangents.o, spec.transpose).reshape(primals.x.shape)
    if others:
        config = xla.heuristic(spec, primals, target)
        of_others = xla.quantized_matmul_bwd(primals, outputs, cotangents, wrt=others, spec=spec, config=config)
        found |= dict(zip(others, of_others, strict=True))
    return tuple(found[name] for name in wrt)
