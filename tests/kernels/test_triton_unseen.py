"""Padding is zero before a Triton kernel of flash_attention multiplies it: keys and queries that see nothing."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.attention_cases import CASES, Case
from tests.gpu.oracle import visible

pytest.importorskip("triton")
from ejkernel.kernels._triton.flash_attention.problem import problem_of
from ejkernel.kernels._triton.flash_attention.unseen import zero_blind_queries, zero_unseen_keys

LENGTH = 40
HIDING = [case for case in CASES if case.mask is not None or case.segments]
HIDING += [Case("packed, from later on, mask", packed=True, first=0.1, mask="bst")]
OF_KEYS = [replace(case, name=f"{case.name}, mask of keys", mask="bt") for case in CASES if case not in HIDING]


@pytest.mark.parametrize("case", HIDING + OF_KEYS, ids=lambda case: case.name)
def test_zeros_where_nothing_is_seen(case):
    """Queries that see no key; and keys that no query sees, but for those which the band or the lengths hide."""
    x, spec = case.make(LENGTH, jnp.float32)
    problem, ok = problem_of(x, spec), np.asarray(visible(x, spec))
    (queries,) = zero_blind_queries(x, problem, jnp.ones((problem.B, problem.S, problem.H, 1)))
    seen = np.broadcast_to(ok.any(3), (problem.B, problem.H, problem.S)).swapaxes(1, 2)
    np.testing.assert_array_equal(np.asarray(queries)[..., 0] == 1, seen)

    (keys,) = zero_unseen_keys(x, problem, jnp.ones((problem.B, problem.K, problem.G, 1)))
    of_groups = lambda any_query: (
        np.broadcast_to(any_query, (problem.B, problem.H, any_query.shape[2]))
        .reshape(problem.B, problem.G, problem.group, -1)
        .any(2)
        .swapaxes(1, 2)
    )
    kept = np.asarray(keys)[..., 0] == 1
    assert kept[of_groups(ok.any(2))].all()
    if case.mask is not None:
        shown = np.broadcast_to(np.asarray(x.mask).any(2), (*x.mask.shape[:2], problem.K))
        assert not kept[~of_groups(shown)].any()
