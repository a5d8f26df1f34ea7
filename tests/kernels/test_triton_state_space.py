"""Mamba-2's state space in Triton: the kernels' masks and indices, by the interpreter, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.state_space_cases import CASES, SPEC, Case, check, check_all, formula, like

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton._recurrence import splits  # noqa: E402
from ejkernel.kernels._triton.state_space_v2 import state_space_v2, state_space_v2_bwd, state_space_v2_jvp  # noqa: E402

from . import interpreter  # noqa: E402

BLOCKS = dict(chunk_size=16, block_v=32, block_k=16)
CONFIG = RecurrenceConfig(**BLOCKS, algorithm="chunks")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)


def always(case: Case, dtype) -> bool:
    """The packed sequences, and in bfloat16, whose backward is another, a group of several heads."""
    return bool(case.ends) or (dtype == jnp.bfloat16 and case.name == "groups")


@pytest.mark.parametrize(
    "case, dtype",
    [
        pytest.param(
            case, dtype, id=f"{case.name}-{dtype.dtype.name}", marks=[] if always(case, dtype) else pytest.mark.slow
        )
        for case in (*CASES, Case("many features", B=1, P=80, N=200))
        for dtype in (jnp.float32, jnp.bfloat16)
    ],
)
def test_in_the_interpreter(case, dtype):
    """Forward, backward and tangent; tokens of no sequence hold NaN."""
    check_all(
        lambda *x: state_space_v2(*x, config=CONFIG),
        lambda x, ct, wrt: state_space_v2_bwd(x, None, ct, wrt=wrt, config=CONFIG),
        lambda x, dot: state_space_v2_jvp(x, None, dot, config=CONFIG),
        case.make(20, dtype),
        dtype,
    )


@pytest.mark.parametrize("algorithm, length", [("fused_chunks", 20), ("steps", 3)])
def test_other_ways_of_the_forward(algorithm, length):
    """One program for all chunks of a head, and single tokens."""
    x = Case("groups", B=1).make(length, jnp.float32)
    found = state_space_v2(*x, config=RecurrenceConfig(**BLOCKS, algorithm=algorithm))
    exact, rounded = (formula(x, SPEC, like(found), dtype)[0] for dtype in (jnp.float64, None))
    check((found, {}), (exact, {}), (rounded, {}), jnp.float32)


@pytest.mark.parametrize("decay", [0.1, 100.0])
def test_splits_in_time(decay, monkeypatch):
    """A sequence in parts, each from a state of its own, which has vanished after a chunk where decays are fast; in
    bfloat16, so that the kernels are those of state spaces.
    """
    monkeypatch.setattr(splits, "SHORTEST", 16)
    check_all(
        lambda *x: state_space_v2(*x, config=CONFIG),
        lambda x, ct, wrt: state_space_v2_bwd(x, None, ct, wrt=wrt, config=CONFIG),
        lambda x, dot: state_space_v2_jvp(x, None, dot, config=CONFIG),
        Case("groups", B=1, H=2, G=1, decay=decay).make(64, jnp.bfloat16),
        jnp.bfloat16,
    )


@pytest.mark.parametrize("algorithm", ["chunks", "fused_chunks"])
def test_the_state_is_as_exact_as_float32(algorithm):
    """Values dt · x are not rounded to the bfloat16 of x before they are added to a state that is a result."""
    x = Case("groups", B=1).make(40, jnp.bfloat16)
    found = state_space_v2(*x, config=RecurrenceConfig(**BLOCKS, algorithm=algorithm)).final_state
    exact = np.asarray(formula(x, SPEC, like(state_space_v2(*x, config=CONFIG)), jnp.float64)[0].final_state)
    assert np.linalg.norm(np.asarray(found) - exact) <= 1e-6 * np.linalg.norm(exact)


def test_gradients_of_decays_are_as_exact_as_states_in_two_parts():
    """dA is a sum of terms much larger than itself: rounding to bfloat16 on the way was an error of 1e-2; and that of
    dt, a float32 in models, of 1e-3.
    """
    x = Case("one group", B=1, G=1, H=3, D=False, state=False).make(60, jnp.bfloat16)
    large = 10.0 ** np.random.default_rng(0).uniform(-2, 2, x.x.shape)
    x = x._replace(x=(x.x * large).astype(x.x.dtype), dt=x.dt.astype(jnp.float32))
    cotangents = like(state_space_v2(*x, config=CONFIG))
    found = state_space_v2_bwd(x, None, cotangents, wrt=("A", "dt"), config=CONFIG)
    exact = formula(x, SPEC, cotangents, jnp.float64)[1]
    for name, a in zip(("A", "dt"), found, strict=True):
        wanted = np.asarray(exact[name])
        assert np.linalg.norm(np.asarray(a) - wanted) <= 5e-5 * np.linalg.norm(wanted), name


def test_gradients_of_fast_decays_have_no_error_of_others():
    """Nothing passes decays of exp(−30), whose dg is 0: with errors of the pairs on either side dA was off by 240 %."""
    x = Case("one group", B=1, G=1, H=1, D=False, state=False).make(24, jnp.bfloat16)
    dt = jnp.full((1, 24, 1), 1e-6, jnp.float32).at[:, 8:16].set(30.0)
    x = x._replace(A=jnp.full((1, 1), -1.0), dt=dt)
    cotangents = like(state_space_v2(*x, config=CONFIG))
    config = RecurrenceConfig(chunk_size=32, block_v=32, block_k=16, algorithm="chunks")
    (found,) = state_space_v2_bwd(x, None, cotangents, wrt=("A",), config=config)
    exact = np.asarray(formula(x, SPEC, cotangents, jnp.float64)[1]["A"])
    assert np.linalg.norm(np.asarray(found) - exact) <= 1e-5 * np.linalg.norm(exact)


def test_the_cotangent_of_a_state_is_as_exact_as_float32():
    x = Case("groups", B=1).make(40, jnp.bfloat16)
    cotangents = like(state_space_v2(*x, config=CONFIG))
    found = state_space_v2_bwd(x, None, cotangents, wrt=("C", "initial_state"), config=CONFIG)[1]
    exact = np.asarray(formula(x, SPEC, cotangents, jnp.float64)[1]["initial_state"])
    assert np.linalg.norm(np.asarray(found) - exact) <= 1e-6 * np.linalg.norm(exact)
