"""The backward of grouped_matmul in Mosaic GPU on a Hopper GPU: every config, batches, and groups of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Operand, assert_close
from cases import grouped_matmul as grouped

from ejkernel.kernels._pallas.gpu.grouped_matmul import grouped_matmul_bwd, supports
from ejkernel.kernels._xla.grouped_matmul import grouped_matmul_bwd as in_plain_jax
from ejkernel.primitives.grouped_matmul import Outputs
from tests.kernels import against_xla

from .device import ON_HOPPER, TARGET

pytestmark = ON_HOPPER
ROWS = 1000
SIZES = dict(m=ROWS, k=320, n=448, e=8, f=11)
CASES = (
    grouped.case("uneven", dict(lhs=grouped.LHS, rhs="e k n", group_sizes=Operand("e", grouped.sizes(ROWS))), SIZES),
    grouped.case(
        "share_of_the_experts",
        dict(
            lhs=grouped.LHS,
            rhs="e n k",
            group_sizes=Operand("f", grouped.sizes(ROWS)),
            group_offset=Operand("", grouped.up_to(2)),
            existing_out="m n",
        ),
        SIZES,
        transpose_rhs=True,
    ),
    grouped.case(
        "one_has_all", dict(lhs="m k", rhs="e k n", group_sizes=Operand("e", grouped.one_has_all(ROWS))), SIZES
    ),
)


def check(call, config):
    """The cotangents of a call as `against_xla.prepared` makes it, compared with those of plain JAX."""
    x, spec, tangents = call
    wrt = tuple(name for name, tangent in tangents._asdict().items() if tangent is not None)
    assert supports(spec, x, TARGET) is None
    do = jax.random.normal(jax.random.key(2), (*x.lhs.shape[:2], x.rhs.shape[3]))
    of = lambda backward, **how: backward(x, Outputs(None), Outputs(do), wrt=wrt, spec=spec, **how)
    found, wanted = jax.jit(lambda: of(grouped_matmul_bwd, config=config))(), of(in_plain_jax)
    assert_close(dict(zip(wrt, found, strict=True)), dict(zip(wrt, wanted, strict=True)), 2e-2)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_config(case, dtype):
    call = against_xla.prepared(case, dtype)
    for config in grouped_matmul_bwd.space(call[1], call[0], TARGET):
        check(call, config)


def test_a_batch():
    call = against_xla.batched(CASES[0], jnp.bfloat16)
    x = call[0]._replace(rhs=jnp.concatenate([call[0].rhs] * call[0].lhs.shape[0]))
    check((x, *call[1:]), grouped_matmul_bwd.space(call[1], x, TARGET)[0])


@pytest.mark.parametrize("size", (1, 7, 8, 63, 64, 65, 127, 128, 129, 200))
def test_a_group_between_others(size):
    """Rows of other groups before and after, and NaN in rows of none."""
    x, spec, tangents = against_xla.prepared(CASES[0], jnp.bfloat16)
    sizes = np.array([13, size, 0, 300, 5, 64, 100, 3], np.int32)
    outside = jnp.arange(ROWS)[None, :, None] >= sizes.sum()
    x = x._replace(group_sizes=jnp.asarray(sizes)[None], lhs=jnp.where(outside, jnp.nan, x.lhs))
    check((x, spec, tangents), grouped_matmul_bwd.space(spec, x, TARGET)[0])
