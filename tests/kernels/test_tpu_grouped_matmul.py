"""grouped_matmul on TPU: numbers, in the interpreter that simulates the chip, finds races and poisons fresh memory."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Operand

from ejkernel.kernels._pallas.tpu._work_list import count_of, item_at, most_work_items, work_list
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

from . import against_xla
from .tpu_interpreter import interpreted

CONFIG = GroupedMatmulConfig(block_m=8, block_n=128, block_k=128)
QUICK = ("uneven", "none")  # the others take the interpreter half a minute each
OURS = [case for case in CASES if case.operation == "grouped_matmul"]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if c.name in QUICK else pytest.mark.slow) for c in OURS]
)
def test_in_the_interpreter(case):
    """Forward, backward and tangent; the groups cross blocks, and rows of no group hold NaN."""
    case = case.resized(dict(k=256, n=130))
    against_xla.check(case, against_xla.prepared(case), "pallas", "tpu", CONFIG, run=interpreted)


@pytest.mark.slow
def test_a_batch_that_shares_the_matrices():
    against_xla.check(OURS[0], against_xla.batched(OURS[0]), "pallas", "tpu", CONFIG, run=interpreted)


@pytest.mark.slow
def test_matrices_of_empty_groups_may_be_nan():
    case = replace(OURS[0], operands=OURS[0].operands | dict(rhs_scale=Operand("e n")))
    against_xla.check(case, against_xla.poisoned(against_xla.prepared(case)), "pallas", "tpu", CONFIG, run=interpreted)


def test_empty_groups_behind_the_last_row_have_a_tile_that_is_there():
    """Three tiles of eight rows, all of the first two groups: the gradient of the other matrices reads none beyond."""
    starts, ends = jnp.array([0, 5, 24, 24], jnp.int32), jnp.array([5, 24, 24, 24], jnp.int32)
    batch = jnp.zeros(4, jnp.int32)
    items = work_list(batch, starts, ends, 8, most_work_items(24, 8, 4), at_least=1)
    item = item_at(np.asarray(items), np.arange(count_of(items)))
    assert item.tile.tolist() == [0, 0, 1, 2, 2, 2, 2] and item.segment.tolist() == [0, 1, 1, 1, 2, 3, 3]
