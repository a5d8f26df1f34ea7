"""Runs Pallas kernels for TPU on a CPU, in the interpreter that simulates the chip, finds races and poisons memory."""

import contextlib
import io

import jax
from jax.experimental.pallas import tpu as pltpu


def interpreted(f):
    """f, jitted, in the interpreter; an AssertionError where it finds a race, which it only prints."""

    def run(*args):
        told = io.StringIO()
        simulated = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        with pltpu.force_tpu_interpret_mode(simulated), contextlib.redirect_stdout(told):
            results = jax.block_until_ready(jax.jit(f)(*args))
        assert "RACE" not in told.getvalue(), told.getvalue()
        return results

    return run
