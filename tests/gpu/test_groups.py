"""grouped_matmul and mean_pooling on a GPU: each kernel with each of its configs, by TMA if the device has it."""

import jax.numpy as jnp
import pytest
from cases import Operand, assert_close
from cases import grouped_matmul as grouped
from cases import mean_pooling as pooling

from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules import grouped_matmul
from ejkernel.ops.utils.devices import local_target
from tests.kernels import against_xla

pytestmark = pytest.mark.gpu

ROWS = 1000
SIZES = dict(m=ROWS, k=264, n=392, e=8, f=11)
WHOLE = dict(SIZES, k=272, n=400)  # rows of 8 bits also begin where TMA can read them
PRODUCTS = (
    grouped.case("uneven", dict(lhs=grouped.LHS, rhs="e k n", group_sizes=Operand("e", grouped.sizes(ROWS))), SIZES),
    grouped.case(
        "share_of_the_experts",
        dict(
            lhs=grouped.LHS,
            rhs="e n k",
            group_sizes=Operand("f", grouped.sizes(ROWS)),
            group_offset=Operand("", grouped.up_to(2)),
            existing_out="m n",
            rhs_scale=Operand("e n", grouped.positive),
        ),
        SIZES,
        transpose_rhs=True,
    ),
    grouped.case(
        "int8",
        dict(
            lhs=grouped.LHS,
            rhs=Operand("e k n", grouped.small_integers),
            group_sizes=Operand("e", grouped.sizes(ROWS)),
            rhs_scale=Operand("e", grouped.positive),
        ),
        SIZES,
    ),
    *(
        grouped.case(
            name,
            dict(
                lhs=grouped.LHS,
                rhs=Operand(axes, grouped.small_integers),
                group_sizes=Operand("e", grouped.sizes(ROWS)),
                rhs_scale=Operand("e n", grouped.positive),
            ),
            WHOLE,
            transpose_rhs=axes == "e n k",
        )
        for name, axes in (("int8_by_tma", "e k n"), ("int8_transposed_by_tma", "e n k"))
    ),
    grouped.case(
        "int8_few_rows",
        dict(
            lhs=grouped.LHS,
            rhs=Operand("e k n", grouped.small_integers),
            group_sizes=Operand("e", grouped.sizes(40)),
            rhs_scale=Operand("e n", grouped.positive),
        ),
        dict(SIZES, m=40, k=256, n=384),
    ),
    grouped.case(
        "few_rows_odd_features",
        dict(lhs=grouped.LHS, rhs="e k n", group_sizes=Operand("e", grouped.sizes(40))),
        dict(SIZES, m=40, k=77, n=131),
    ),
)
POOLS = (
    pooling.case("dense", dict(b=3, s=3000, d=200), dict(x="b s d"), "b d"),
    pooling.case(
        "packed",
        dict(s=5000, d=264, n=20, m=21),
        dict(x=Operand("s d", pooling.with_padding), cu_seqlens=Operand("m", pooling.lengths(5000))),
        "n d",
    ),
)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", (*PRODUCTS, *POOLS), ids=str)
def test_every_config(case, dtype):
    call = against_xla.prepared(case, jnp.dtype(dtype))
    implementation = kernel_registry.find(case.operation, "triton", "gpu").implementation
    assert implementation.supports(call[1], call[0], local_target()) is None
    for config in implementation.space(call[1], call[0], local_target()):
        against_xla.check(case, call, "triton", "gpu", config, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", (jnp.float8_e4m3fn, jnp.float8_e5m2), ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("rows", (40, 300, ROWS))
def test_float8_weights(rows, dtype):
    """The kernels convert weights of 8 bits to the dtype of the rows, for any tiles."""
    case = grouped.case("float8", dict(PRODUCTS[0].operands, group_sizes=Operand("e", grouped.sizes(rows))), WHOLE)
    arrays = case.resized(dict(m=rows)).arrays(dtype=jnp.bfloat16)
    narrow = arrays["rhs"].astype(dtype)
    found = grouped_matmul(**arrays | dict(rhs=narrow), platform="triton")
    assert_close(found, grouped_matmul(**arrays | dict(rhs=narrow.astype(jnp.bfloat16)), platform="xla"), 1e-5)


@pytest.mark.parametrize("case", (PRODUCTS[0], POOLS[1]), ids=str)
def test_a_batch(case):
    call = against_xla.batched(case)
    config = kernel_registry.find(case.operation, "triton", "gpu").implementation.heuristic(
        call[1], call[0], local_target()
    )
    against_xla.check(case, call, "triton", "gpu", config)
