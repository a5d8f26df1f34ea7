"""Under `jax.jit` an operation gives the same bits as outside, and is traced once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, Operand, called_alone, each, each_by_kind

from ejkernel import lax


@each(CASES, rest=(pytest.mark.slow,))
def test_jit(case):
    arrays, traced = case.arrays(), []

    @jax.jit
    def compiled(arrays):
        traced.append(1)
        return case.call(arrays)

    jax.tree.map(np.testing.assert_array_equal, compiled(arrays), case.call(arrays))
    compiled(case.arrays(seed=1))
    assert len(traced) == 1


@each_by_kind(called_alone(CASES), rest=(pytest.mark.slow,))
def test_a_call_on_arrays_is_one_program(case, caplog):
    """Also outside of `jax.jit`, as those of functions in `jax.nn` are."""
    arrays = case.arrays()
    jax.clear_caches()
    with jax.log_compiles():
        case.call(arrays)
    compiled = [record.message for record in caplog.records if record.message.startswith("Compiling")]
    assert len(compiled) == 1 and compiled[0].startswith(f"Compiling jit({case.operation})"), compiled


@each_by_kind(called_alone(CASES), rest=(pytest.mark.slow,))
def test_floats_that_xla_knows(case):
    """Arrays of equal elements, which XLA knows while it compiles, give the bits of those that it is given."""
    arrays = case.arrays()
    equal = lambda x: jnp.full(x.shape, np.asarray(x).flat[0]) if is_float(x) and x.size else x
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    known = jax.jit(lambda: case.call({name: equal(x) for name, x in arrays.items()}))()
    given = jax.jit(case.call)({name: equal(x) for name, x in arrays.items()})
    jax.tree.map(np.testing.assert_array_equal, known, given)


def test_a_known_factor_of_the_fusions_of_products():
    """Sizes at which XLA for CPUs fuses all of attention; with v of equal elements its results were of any size."""
    q, k = (jax.random.normal(jax.random.key(i), (8, 64, heads, 32)) for i, heads in enumerate((8, 2)))
    o = jax.jit(lambda q, k: lax.flash_attention(q, k, jnp.full_like(k, 0.5)))(q, k)
    np.testing.assert_allclose(o, 0.5, rtol=1e-6)


@each_by_kind(CASES, first_over=())
def test_shapes_without_arrays(case):
    """`jax.eval_shape` gives the types of the results that arrays have."""
    arrays = case.arrays()
    told, given = ([(x.shape, x.dtype) for x in f(arrays)] for f in (partial(jax.eval_shape, case.call), case.call))
    assert told == given
    assert [shape for shape, _ in told] == [Operand(axes).shape(case.sizes) for axes in case.results]
