"""The modules' face on a mesh: which array has which spec, and what is wrong with specs that fit no array."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel

pytestmark = pytest.mark.core


def call(x, in_specs, **arrays):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return ejkernel.modules.mean_pooling(x, **arrays, mesh=mesh, in_specs=in_specs, out_specs=P("x"))


@pytest.mark.parametrize("in_specs", ((P("x"),), [P("x")], {"x": P("x")}), ids=("tuple", "list", "mapping"))
@pytest.mark.parametrize("made", (np.asarray, jax.numpy.asarray))
def test_arrays_are_split(made, in_specs):
    """Those of numpy too."""
    x = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    np.testing.assert_allclose(call(made(x), in_specs), x.mean(1))


@pytest.mark.parametrize(
    "in_specs, error, says",
    (
        ((P("x"), P()), ValueError, "in_specs has 2 specs for 1 arrays: x (x: f32[4,3,2])"),
        ({"y": P("x")}, ValueError, "in_specs names y, which is no array of this call"),
        (P("x"), TypeError, f"in_specs is {P('x')!r}; it must be a mapping by name or a tuple"),
    ),
    ids=("too many", "unknown", "no tuple"),
)
def test_specs_of_no_array(in_specs, error, says):
    with pytest.raises(error) as raised:
        call(np.zeros((4, 3, 2), np.float32), in_specs)
    assert str(raised.value) == f"mean_pooling: {says}"
