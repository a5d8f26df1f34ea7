"""Whatever a program does with meshes, the numbers stay: arrays of no mesh, parts of unequal size."""

import jax
import pytest
from cases import CASES, assert_close, each, first_of_each, gradient, oracle, tangent
from jax.sharding import AxisType, NamedSharding
from programs import collectives
from sharded import BATCH, both, call_of, each_type, mesh_of, rest

each_transform = pytest.mark.parametrize("transform", (None, gradient, tangent), ids=("eval", "grad", "jvp"))
each_operation = each(CASES, rest=(pytest.mark.slow,))


# --- Arrays that were made before the mesh ----------------------------------------------------------------------------


@each_operation
@each_type
@each_transform
def test_arrays_from_before_the_mesh(case, types, transform):
    """They are whole on every device, which computes all by itself."""
    f, args = call_of(case, transform)
    with jax.set_mesh(mesh_of(types)):
        compiled = jax.jit(f, keep_unused=True).lower(*args).compile()
        found = compiled(*args)
    assert_close(found, oracle(case, transform)(*args))
    assert not collectives(compiled.as_text())


@each(first_of_each(CASES))
@each_type
def test_arrays_from_before_the_mesh_without_jit(case, types):
    f, args = call_of(case, gradient)
    with jax.set_mesh(mesh_of(types)):
        found = f(*args)
    assert_close(found, oracle(case, gradient)(*args))


# --- Parts of unequal size --------------------------------------------------------------------------------------------


def odd(case):
    """The case with sizes of which no even number is a factor."""
    repeat = case.sizes.get("h", 1) // case.sizes.get("g", 1)
    sizes = dict(b=5, g=3, h=3 * repeat, d=7, n=7)
    split = case.trio.forward.layout.split
    return case.resized({letter: sizes[letter] for letter in split if case.sizes.get(letter, 1) > 1})


@each_operation
@each_transform
def test_auto_parts_of_unequal_size(case, transform):
    """XLA pads them, and a kernel must not see the padding."""
    case, mesh = odd(case), mesh_of(AxisType.Auto, shape=(2, 4))
    for split in (BATCH, rest(case), both(case)):
        place = {name: NamedSharding(mesh, spec) for name, spec in case.specs(split).items()}
        call = lambda arrays, place=place: case.call(
            {name: jax.lax.with_sharding_constraint(x, place[name]) for name, x in arrays.items()}
        )
        f, args = call_of(case, transform, call)
        assert_close(jax.jit(f)(*args), oracle(case, transform)(*args), what=f"{split}: ")
