"""The Hopper kernels' description of packed sequences and segments, compared with visibility by the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.mask_info import (
    mask_info_of,
    zero_fully_masked_queries,
    zero_hidden_keys,
)
from ejkernel.kernels._pallas.gpu.flash_attention.problem import after_first, problem_of
from ejkernel.kernels._visibility import BlockRanges, visibility_of
from tests.gpu.attention_cases import CASES, CAUSAL, Case
from tests.gpu.oracle import visible
from tests.programs import equations

TAKEN = [case for case in CASES if (case.packed or case.segments) and not case.bias and not case.mask]
TAKEN += [Case("packed, causal, from later on", packed=True, first=0.1, S=1.2, spec=CAUSAL)]
BLOCK_ROWS, BLOCK_COLUMNS = 32, 16


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_visible_keys_are_those_of_the_formula(case, of_keys):
    x, spec = case.make(150, jnp.float32)
    visibility, ok = visibility_of(x, spec), visible(x, spec)[:, 0]
    visibility, ok = (visibility.transposed(), ok.swapaxes(1, 2)) if of_keys else (visibility, ok)
    mask_info = mask_info_of(visibility, BLOCK_ROWS, BLOCK_COLUMNS)
    column = np.arange(-(-ok.shape[2] // BLOCK_COLUMNS) * BLOCK_COLUMNS)
    row = np.arange(-(-ok.shape[1] // BLOCK_ROWS) * BLOCK_ROWS)[:, None]
    if mask_info.intervals is not None:
        first, stop = (np.asarray(x)[:, :, None] for x in mask_info.intervals)
        found = (column >= first) & (column < stop)
    else:
        rows, columns = map(np.asarray, mask_info.segment_ids)
        low, high = problem_of(x, spec).band(of_keys)
        found = rows[:, :, None] == columns[:, None, :]
        found &= (low is None or column >= row + low) & (high is None or column <= row + high)
    found = np.broadcast_to(found, (len(ok), *found.shape[1:]))
    np.testing.assert_array_equal(found[:, : ok.shape[1], : ok.shape[2]], ok)
    assert not found[:, ok.shape[1] :].any() and not found[:, :, ok.shape[2] :].any()
    begin, end = np.asarray(mask_info.block_ranges)[..., 0], np.asarray(mask_info.block_ranges)[..., 1]
    assert (begin < end).all()  # fully masked rows are written as well


@pytest.mark.parametrize("case", [case for case in TAKEN if not case.segments], ids=lambda case: case.name)
def test_hidden_keys_and_fully_masked_queries_are_zeroed(case):
    """Which they are with segments, a kernel finds out: tests/gpu/test_mosaic_fully_masked.py."""
    x, spec = case.make(150, jnp.float32)
    visibility, ok = visibility_of(x, spec), visible(x, spec)[:, 0]
    (k,), (q,) = (
        zero_hidden_keys(visibility, jnp.ones_like(x.k)),
        zero_fully_masked_queries(visibility, jnp.ones_like(x.q)),
    )
    for array, used in ((k, ok.any(1)), (q, ok.any(2))):
        np.testing.assert_array_equal(np.asarray(array).all((2, 3)), np.broadcast_to(used, array.shape[:2]))


WINDOWS = [case for case in CASES if case.spec.window[0] is not None and not case.packed and not case.segments][:1]


@pytest.mark.parametrize("case", [*TAKEN[:2], *WINDOWS], ids=lambda case: case.name)
def test_every_block_is_computed_once_in_its_order(case):
    """After the first one; the masked blocks on both sides of the full ones by the code of one loop."""
    problem = problem_of(*case.make(150, jnp.float32))

    def compute(step, log, masked):
        computed, found = log
        return computed + 1, found.at[computed].set(jnp.stack([step, jnp.int32(masked)]))

    found_of = lambda *bounds: after_first(BlockRanges(*bounds), compute, (0, jnp.zeros((9, 2), int)), problem)
    assert len(equations(jax.make_jaxpr(found_of)(0, 0, 1, 1), "scatter")) == 2, "copies: a masked one, and a full one"
    found_of = jax.jit(found_of)
    for begin, full_begin, full_end, end in np.ndindex(*(7,) * 4):
        if begin < end and begin <= full_begin <= full_end <= end:
            computed, found = found_of(begin, end, full_begin, full_end)
            of_step = {step: not full_begin <= end - 1 - step < full_end for step in range(1, end - begin)}
            assert found[:computed].tolist() == [[step, masked] for step, masked in of_step.items()]
