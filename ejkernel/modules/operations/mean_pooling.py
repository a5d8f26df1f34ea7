"""mean_pooling as an operation: from the public arguments to the operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...ops.utils.operands import random_like
from ...primitives.mean_pooling import MeanPoolingSpec, Operands
from ...primitives.mean_pooling import mean_pooling as algorithm
from ...types import CuSeqlens
from ...types.mean_pooling import MeanPoolingConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, int32, require_cuts, require_dtype, require_rank, size_or_none

NAME = algorithm.name


def mean_pooling_arguments(
    x: Float[Array, "batch seq_len features"] | Float[Array, "tokens features"],
    cu_seqlens: CuSeqlens | None = None,
    *,
    chunk_size: int | None = None,
) -> Prepared[Float[Array, "batch features"] | Float[Array, "sequences features"]]:
    """The mean of the tokens of each sequence, added up in float32.

        o_n = Σ_{t in sequence n} x_t / length of n,    0 for an empty sequence

    Tokens of no sequence may hold anything, even NaN: neither results nor gradients depend on them. Differentiable in
    x, to any order.

    Args:
        x: [B, S, D] of a float dtype, or packed [T, D] with cu_seqlens.
        cu_seqlens: [N + 1] integers, ascending, may be traced: sequence n is the tokens from entry n to entry n + 1.
        chunk_size: the number of tokens that are added up at a time; it affects only the order of the sum.

    Returns:
        o [B, D], or [N, D] with cu_seqlens, in x's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Sentence-BERT, arXiv 1908.10084.
    """
    x = array(NAME, "x", x)
    require_dtype(NAME, np.floating, "a float type", x=x)
    segments = None
    if cu_seqlens is None:
        require_rank(NAME, 3, "batch, length, features (or 2 with cu_seqlens)", x=x)
    else:
        require_rank(NAME, 2, "tokens, features, since cu_seqlens is given", x=x)
        segments = _segments(array(NAME, "cu_seqlens", cu_seqlens), x)
        x = x[None]
    spec = MeanPoolingSpec(size_or_none(NAME, "chunk_size", chunk_size, x.shape[1]))
    named = align(algorithm.forward, {k: a for k, a in Operands(x, segments)._asdict().items() if a is not None})
    return Prepared(named, spec, lambda out: out["o"][:, 0] if segments is None else out["o"][0])


def _segments(cu_seqlens, x):
    """The first token of each sequence and the one after its last, [1, n, 2]."""
    require_cuts(NAME, cu_seqlens=cu_seqlens)
    ends = int32(cu_seqlens).clip(0, x.shape[0])
    return jnp.stack([ends[:-1], ends[1:]], axis=-1)[None]


class MeanPooling(Operation):
    """The mean of each sequence: `ejkernel.lax.mean_pooling` as a kernel object."""

    algorithm = algorithm
    config_class = MeanPoolingConfig
    prepare_arguments = staticmethod(mean_pooling_arguments)

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with eight packed sequences."""
        array = jax.ShapeDtypeStruct
        return dict(x=array((512, 128), jnp.bfloat16), cu_seqlens=array((9,), jnp.int32))

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random tokens, in sequences that have all of them: cut at random, as those of texts, many are short."""
        values = random_like(dict(operands))
        if "segments" in operands:
            shape, tokens = operands["segments"].shape, operands["x"].shape[1]
            cuts = np.sort(np.random.default_rng(0).integers(0, tokens, shape[1] - 1, endpoint=True))
            ends = np.array([0, *cuts, tokens], np.int32)
            values["segments"] = jnp.broadcast_to(jnp.asarray(np.stack([ends[:-1], ends[1:]], -1)), shape)
        return values
