"""What the Hopper kernels are told of packed sequences and segments, against who sees whom by the formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.problem import problem_of
from ejkernel.kernels._pallas.gpu.flash_attention.reach import reach_of, without_blind, without_unseen
from tests.gpu.attention_cases import CASES, CAUSAL, Case
from tests.gpu.oracle import visible

TAKEN = [case for case in CASES if (case.packed or case.segments) and not case.bias and not case.mask]
TAKEN += [Case("packed, causal, from later on", packed=True, first=0.1, S=1.2, spec=CAUSAL)]
SHUFFLED = Case("segments in no order", segments=True, S=0.7)
HELD, STEP = 32, 16


def call(case: Case):
    """A call, and who sees whom in it: bool [B, S, K]."""
    x, spec = case.make(150, jnp.float32)
    if case is SHUFFLED:
        rng = np.random.default_rng(5)
        x = x._replace(q_segment_ids=rng.permuted(x.q_segment_ids, axis=1), kv_segment_ids=x.kv_segment_ids[:, ::-1])
    return x, spec, visible(x, spec)[:, 0]


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("case", [*TAKEN, SHUFFLED], ids=lambda case: case.name)
def test_tiles_visit_what_their_rows_see(case, of_keys):
    x, spec, ok = call(case)
    ok = ok.swapaxes(1, 2) if of_keys else ok
    reach = reach_of(x, spec, problem_of(x, spec), HELD, STEP, of_keys)
    for batch, tile in np.ndindex(len(ok), -(-ok.shape[1] // HELD)):
        begin, end, first_whole, last_whole = np.asarray(reach.bounds)[batch % len(reach.bounds), tile]
        rows = ok[batch, tile * HELD : (tile + 1) * HELD]
        assert 0 <= begin < end <= -(-rows.shape[1] // STEP)
        assert not rows[:, : begin * STEP].any()
        assert not rows[:, end * STEP :].any()
        assert begin <= first_whole <= last_whole <= end
        assert rows[:, first_whole * STEP : last_whole * STEP].all()


@pytest.mark.parametrize("case", [*TAKEN, SHUFFLED], ids=lambda case: case.name)
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_rows_see_what_the_formula_says(case, of_keys):
    x, spec, ok = call(case)
    ok = ok.swapaxes(1, 2) if of_keys else ok
    problem = problem_of(x, spec)
    reach = reach_of(x, spec, problem, HELD, STEP, of_keys)
    column, row = np.arange(-(-ok.shape[2] // STEP) * STEP), np.arange(-(-ok.shape[1] // HELD) * HELD)[:, None]
    if reach.ranges is not None:
        low, high = (np.asarray(x)[:, :, None] for x in reach.ranges)
        found = (column >= low) & (column < high)
    else:
        rows, columns = map(np.asarray, reach.ids)
        low, high = problem.band(of_keys)
        found = rows[:, :, None] == columns[:, None, :]
        found &= (low is None or column >= row + low) & (high is None or column <= row + high)
    found = np.broadcast_to(found, (len(ok), *found.shape[1:]))
    np.testing.assert_array_equal(found[:, : ok.shape[1], : ok.shape[2]], ok)
    assert not found[:, ok.shape[1] :].any() and not found[:, :, ok.shape[2] :].any()


@pytest.mark.parametrize("case", [*TAKEN, SHUFFLED], ids=lambda case: case.name)
def test_what_nobody_sees_is_zero(case):
    x, spec, ok = call(case)
    problem = problem_of(x, spec)
    ones = lambda like: jnp.ones_like(like)
    (k,), (q,) = without_unseen(x, spec, problem, ones(x.k)), without_blind(x, spec, problem, ones(x.q))
    for array, seen in ((k, ok.any(1)), (q, ok.any(2))):
        np.testing.assert_array_equal(np.asarray(array).all((2, 3)), np.broadcast_to(seen, array.shape[:2]))


def test_sequences_of_whole_tiles_see_nothing_of_each_other():
    x, spec = Case("packed", packed=True, B=1).make(4 * HELD, jnp.float32)
    cuts = jnp.asarray([[0, HELD, 3 * HELD, 4 * HELD]], jnp.int32)
    x = x._replace(cu_seqlens_q=cuts, cu_seqlens_k=cuts)
    reach = reach_of(x, spec, problem_of(x, spec), HELD, HELD)
    assert reach.bounds[0].tolist() == [[0, 1, 0, 1], [1, 3, 1, 3], [1, 3, 1, 3], [3, 4, 3, 4]]
