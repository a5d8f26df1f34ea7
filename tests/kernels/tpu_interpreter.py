"""Runs Pallas kernels for TPU on a CPU, in the interpreter that simulates the chip, finds races and poisons memory."""

import contextlib
import io
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.state import types as state
from jax.experimental.pallas import tpu as pltpu


def interpreted(f):
    """f, jitted, in the interpreter; raises AssertionError for a race, which the interpreter only prints."""

    def run(*args):
        told = io.StringIO()
        simulated = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        views = mock.patch.object(interpret_pallas_call, "get", _get)
        direct = mock.patch.object(callback, "io_callback_impl", _called)
        with pltpu.force_tpu_interpret_mode(simulated), contextlib.redirect_stdout(told), views, direct:
            results = jax.block_until_ready(jax.jit(f)(*args))
        assert "RACE" not in told.getvalue(), told.getvalue()
        return results

    return run


def _called(*args, callback, **options):
    """A callback of the interpreter, as JAX calls it but with NumPy's arrays, which it makes of those of JAX again."""
    del options
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


# --- What the interpreter does not know of yet (jax 0.11): loads through a reference that is seen in another shape or
# in words. All that is under the view is read, of which the view then takes its part.


def _get(token, device, core, space, buffer, transforms, *args, plain=interpret_pallas_call.get, **kwargs):
    views = [n for n, x in enumerate(transforms) if isinstance(x, state.BitcastTransform | state.ReshapeTransform)]
    direct, through = (transforms[: views[0]], transforms[views[0] :]) if views else (transforms, ())
    token, found = plain(token, device, core, space, buffer, direct, *args, **kwargs)
    for transform in through:
        found = _seen_through(found, transform)
    return token, found


_get.__wrapped__ = interpret_pallas_call.get.__wrapped__  # used by copies, which have no such views


def _seen_through(x: np.ndarray, transform) -> np.ndarray:
    if isinstance(transform, state.ReshapeTransform):
        return x.reshape(transform.shape)
    if isinstance(transform, state.BitcastTransform):
        dtype = np.dtype(transform.dtype)
        packing = dtype.itemsize // x.dtype.itemsize
        rows = x.reshape(*x.shape[:-2], x.shape[-2] // packing, packing, x.shape[-1])
        return np.ascontiguousarray(np.moveaxis(rows, -2, -1)).view(dtype)[..., 0]
    return x[interpret_pallas_call.interpret_utils.to_range([jax.tree.map(int, transform)])]
