"""quantized_matmul beside the product with the same weights in the dtype of x."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.modules import quantized_matmul
from ejkernel.quantization import dequantize
from ejkernel.types.shapes.quantized_matmul import QuantizedMatmulShape

from . import _referee
from ._contenders import Inputs, arrays_of, of_jax, of_ours
from ._driver import Case
from ._harness import Check

_COLUMNS = 1024  # that are judged


def case(shape: QuantizedMatmulShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One layer in one mode."""
    given = _inputs(shape, dtype)
    ours = of_ours("quantized_matmul", platforms, partial(_ours, shape), mode, given)
    with_dense = Inputs(given.operands, others={"dense": _dense(shape, given, shape.columns).astype(dtype)})
    rival = of_jax("dense weights", lambda: _product, mode, with_dense)
    return Case([*ours, rival], cache(partial(_check, shape, given)))


@lru_cache(maxsize=1)
def _inputs(shape: QuantizedMatmulShape, dtype: Any) -> Inputs:
    arrays = arrays_of(shape, dtype)
    return Inputs((arrays.pop("x"),), others=arrays)


def _ours(shape: QuantizedMatmulShape, platform: str | None) -> Callable[..., Array]:
    return partial(quantized_matmul, **shape.options, platform=platform)


def _product(x: Array, dense: Array) -> Array:
    return jnp.matmul(x, dense, preferred_element_type=jnp.float32).astype(x.dtype)


def _dense(shape: QuantizedMatmulShape, given: Inputs, columns: int) -> Array:
    """The first columns of the weights in float32."""
    arrays = given.others
    words, groups = columns * shape.bits // 32, columns // shape.group_size
    return dequantize(
        arrays["w"][:, :words], arrays["scales"][:, :groups], arrays["zeros"][:, :groups], **shape.options
    )


def _check(shape: QuantizedMatmulShape, given: Inputs) -> Check:
    """Judges the first columns. The unit is the error of the product with weights in the dtype of x."""
    columns = min(shape.columns, _COLUMNS)
    (x,), dense = given.operands, _dense(shape, given, columns)

    def formula(dtype: Any) -> list[np.ndarray]:
        of_dtype = lambda a: np.asarray(jnp.asarray(a, dtype), np.float64)
        return [np.asarray(jnp.asarray(of_dtype(x) @ of_dtype(dense), dtype), np.float64)]

    return _referee.check(lambda results: [results[0][:, :columns]], formula, x.dtype)
