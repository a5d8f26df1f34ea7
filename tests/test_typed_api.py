"""The public API declares its types: names visible to a type checker, and types that hold in every call.

Here jaxtyping and beartype check the types, which they never do for users. `jax.eval_shape` runs the calls, so
nothing is compiled.
"""

import ast
import functools
import importlib
import inspect
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import pytest
from beartype import BeartypeConf, beartype
from cases import CASES, call_with, called_alone, each, each_operation, features_of, first_of_each, with_primitives
from jax.sharding import PartitionSpec as P
from jaxtyping import TypeCheckError, jaxtyped
from typechecker import CHECKED

import ejkernel
from ejkernel import callib, checkpoint_policies, lax, modules, ops, quantization, serving
from ejkernel._elsewhere import ELSEWHERE
from ejkernel.kernels import _registry
from ejkernel.modules._composed import COMPOSED
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types.segment_masks import segment_ids_to_mask

# As in type checkers, int is accepted for float.
typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function):
    """The function with its types checked in every call."""
    return jaxtyped(typechecker=typechecker)(function)


# --- Names ------------------------------------------------------------------------------------------------------------


def bound(package) -> set[str]:
    """The names that a package's `__init__.py` binds for type checkers, and those in `__all__`."""
    body = ast.parse(Path(package.__file__).read_text()).body
    imported = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assigned = {node.targets[0].id: node.value for node in body if isinstance(node, ast.Assign)}
    return (imported | assigned.keys()) & set(ast.literal_eval(assigned["__all__"]))


def files(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py") if not path.name.startswith("_")}


def test_every_function_of_lax_is_named():
    missing = files(Path(lax.__file__).parent) - bound(lax)
    assert not missing, f"ejkernel/lax/__init__.py has to import and list in __all__: {sorted(missing)}"


def test_every_operation_is_named_in_modules():
    operations = files(Path(modules.__file__).parent / "operations")
    missing = (operations | {operation.__name__ for operation in OPERATIONS.values()}) - bound(modules)
    assert not missing, f"ejkernel/modules/__init__.py has to import or define, and list in __all__: {sorted(missing)}"
    assert operations == OPERATIONS.keys() | COMPOSED.keys()


def test_the_package_says_that_it_is_typed():
    assert (Path(ejkernel.__file__).parent / "py.typed").exists()


# --- Signatures -------------------------------------------------------------------------------------------------------


def public():
    """The public functions and methods, by name."""
    named = {f"ejkernel.{name}": getattr(ejkernel, name) for name in ejkernel.__all__}
    for module in (lax, modules, ops, _registry, callib, quantization, serving):
        named |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    named |= {
        f"checkpoint_policies.{name}": getattr(checkpoint_policies, name) for name in ("save_kernels", "save_only")
    }
    named |= {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in ELSEWHERE}
    for name, x in named.items():
        if inspect.isclass(x):
            yield from methods(name, x)
        elif callable(x) and not get_origin(x):  # types such as Literal["…"] are callable
            yield name, x


def methods(name, of):
    for attribute, x in vars(of).items():
        x = x.__func__ if isinstance(x, staticmethod | classmethod) else x.fget if isinstance(x, property) else x
        is_own = attribute == "__init__" and not getattr(of, "_is_protocol", False)
        if inspect.isfunction(x) and (is_own or attribute == "__call__" or not attribute.startswith("_")):
            yield f"{name}.{attribute}", x


def test_every_parameter_and_result_has_a_type():
    bare = {}
    for name, function in public():
        signature = inspect.signature(function)
        types = {p.name: p.annotation for p in signature.parameters.values()}
        types |= {} if name.endswith(".__init__") else {"return": signature.return_annotation}
        bare[name] = [p for p, type_ in types.items() if type_ is signature.empty and p not in ("self", "cls")]
    assert len(bare) > 50 and {name: names for name, names in bare.items() if names} == {}


def parts_of(type_) -> tuple:
    """The members of a union, or the type itself."""
    return get_args(type_) if isinstance(type_, UnionType) or get_origin(type_) is Union else (type_,)


# Options that may be any value, each with the reason.
ANY = {
    "callib.ejit": {"options": "those of jax.jit, which JAX declares to be of any type"},
    "ops.autotune": {"args": "those of the function that is tuned", "kwargs": "those of the function that is tuned"},
    "ops.vmap_with_config": dict.fromkeys(("in_axes", "out_axes"), "any tree, as in jax.vmap"),
    "ops.pmap_with_config": dict.fromkeys(("in_axes", "out_axes"), "any tree, as in jax.pmap"),
    "ops.stable_json": {"value": "whatever a config or key holds"},
    "ops.to_json": {"value": "whatever a config or key holds"},
    "ops.sharding_fingerprint": {"x": "an array, a type or a value of a call, of which only the first two have one"},
    "ops.labelled": {"config": "that of any operation, or None"},
    "ops.record_invocation": {"call": "an Invocation of any operation", "named": "operands of any operation"},
    "ops.default_key_builder_with_sharding": {"kernel": "of any operation"},
    "kernels._registry.config_refusal": {"operands": "those of any operation"},
}


def declared():
    """(function, parameter, type) of the public functions."""
    for module in (lax, modules, ops, callib, serving, quantization, _registry):
        of = module.__name__.removeprefix("ejkernel.")
        functions = {n: x for n in module.__all__ if inspect.isfunction(x := getattr(module, n))}
        for name, function in functions.items():
            parameters = inspect.signature(function).parameters.values()
            yield from ((f"{of}.{name}", p.name, p.annotation) for p in parameters)


def test_no_array_is_declared_without_dtype_and_axes():
    assert [(function, name) for function, name, type_ in declared() if jax.Array in parts_of(type_)] == []


def test_options_of_any_type_are_those_that_have_a_reason():
    found = {(function, name) for function, name, type_ in declared() if Any in parts_of(type_)}
    assert found == {(function, name) for function, names in ANY.items() for name in names}


# --- Calls ------------------------------------------------------------------------------------------------------------


def shapes(function, arrays, **options):
    """The types of the results of a checked function for such arrays."""
    return jax.eval_shape(lambda arrays: checked(function)(**arrays, **options), arrays)


FEATURES = [(operation, name) for operation in OPERATIONS for name in features_of(operation)]


@each(called_alone(CASES))
def test_calls_and_results_have_the_types_they_should(case):
    assert jax.tree.leaves(shapes(getattr(lax, case.operation), case.arrays(), **case.options))


@pytest.mark.parametrize(("operation", "feature"), FEATURES)
def test_every_feature_has_the_types_it_should(operation, feature):
    case, dtype = call_with(operation, (feature,))
    assert jax.tree.leaves(shapes(getattr(lax, operation), case.arrays(dtype=dtype), **case.options))


@each(first_of_each(with_primitives(CASES)))
def test_the_modules_api_has_the_types_it_should(case):
    renamed = OPERATIONS[case.operation].renamed
    named = lambda given: {renamed.get(name, name): x for name, x in given.items()}
    call = getattr(modules, case.operation)
    options = dict(named(case.options), platform="xla", cfg=dict(backend="any"))
    assert jax.tree.leaves(shapes(call, named(case.arrays()), **options))


def test_the_seed_of_the_modules_api_is_an_integer():
    arrays = dict.fromkeys("qkv", jnp.zeros((1, 4, 2, 8)))
    assert shapes(modules.flash_attention, arrays, dropout_prob=0.5, dropout_seed=3).shape == (1, 4, 2, 8)
    key = jax.random.key(3)
    refuses(modules.flash_attention, arrays, "dropout_seed", dropout_prob=0.5, dropout_seed=key)


MERGED = dict(o_a=(2, 5, 4, 8), lse_a=(2, 4, 5), o_b=(2, 5, 4, 8), lse_b=(2, 4, 5))


def test_merge_attention_has_the_types_it_should():
    given = {name: jnp.zeros(shape) for name, shape in MERGED.items()}
    assert len(shapes(lax.merge_attention, given)) == 2
    packed = dict(o_a=(5, 4, 8), lse_a=(5, 4), o_b=(5, 4, 8), lse_b=(5, 4))
    assert len(shapes(lax.merge_attention, {name: jnp.zeros(shape) for name, shape in packed.items()})) == 2
    for name, x in given.items():
        refuses(lax.merge_attention, {**given, name: x.astype(jnp.int32)}, name)
        refuses(lax.merge_attention, {**given, name: x[None]}, name)


def ring_of_two(**others):
    """The types of ring_attention as each of two devices calls it."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    specs = P(None, "x"), P()
    call = lambda qkv, others: checked(lax.ring_attention)(**qkv, **others, axis_name="x", return_lse=True)
    local = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(P(None, "x"), P(None, None, "x")))
    return jax.eval_shape(local, dict.fromkeys("qkv", jnp.zeros((1, 8, 2, 8))), others)


def test_ring_attention_has_the_types_it_should():
    """Bias and mask have the rows of the device and all columns."""
    o, lse = ring_of_two(bias=jnp.zeros((2, 4, 8)), mask=jnp.ones(8, bool), sinks=jnp.zeros(2))
    assert o.shape == (1, 8, 2, 8) and lse.shape == (1, 2, 8)
    for name, x in dict(bias=jnp.zeros((3, 8)), mask=jnp.ones(8), sinks=jnp.zeros(3)).items():
        with pytest.raises(TypeCheckError, match=f"typechecking parameter '{name}'"):
            ring_of_two(**{name: x})
    assert all(x.shape == (8,) for x in checked(lax.ring_order)(8, 2, "striped"))
    with pytest.raises(TypeCheckError, match="typechecking parameter 'layout'"):
        checked(lax.ring_order)(8, 2, "spiral")


# --- What they should refuse ------------------------------------------------------------------------------------------


def refuses(function, arrays, name, **options):
    with pytest.raises(TypeCheckError, match=f"typechecking parameter '{name}'"):
        shapes(function, arrays, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_array_of_another_rank_or_dtype_is_refused(case):
    call, arrays = getattr(lax, case.operation), case.arrays()
    for name, x in arrays.items():
        refuses(call, {**arrays, name: x[None, None, None]}, name, **case.options)
        refuses(call, {**arrays, name: jnp.zeros(x.shape, jnp.complex64)}, name, **case.options)


@each_operation
def test_an_option_of_another_type_is_refused(case):
    call = getattr(lax, case.operation)
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind == parameter.KEYWORD_ONLY:
            refuses(call, case.arrays(), name, **{**case.options, name: object()})


@each(first_of_each(called_alone(CASES)))
def test_a_result_of_another_rank_or_dtype_is_refused(case):
    call, arrays = getattr(lax, case.operation), case.arrays()
    for wrong in (lambda x: x[None, None], lambda x: x.astype(jnp.complex64)):
        other = functools.wraps(call)(lambda *args, wrong=wrong, **kwargs: jax.tree.map(wrong, call(*args, **kwargs)))
        with pytest.raises(TypeCheckError, match="return value"):
            shapes(other, arrays, **case.options)


# --- What is checked in every test ------------------------------------------------------------------------------------


@pytest.mark.core
def test_types_are_checked_in_every_call_of_every_test():
    """By the import hook, which `typechecker.py` installs: these calls are computed, then rejected."""
    wrong = {
        "q_segment_ids": lambda: segment_ids_to_mask(jnp.zeros((2, 1, 4), jnp.int32)),
        "window": lambda: lax.flash_attention(*[jnp.zeros((1, 4, 2, 8))] * 3, window=[1, 0]),
    }
    for name, call in wrong.items():
        with pytest.raises(TypeCheckError) as error:
            call()
        assert f"parameter {name}=" in str(error.value.__cause__)


@pytest.mark.core
def test_wrong_calls_are_rejected_by_the_operation():
    with pytest.raises(ValueError, match=r"^flash_attention: q"):
        lax.flash_attention(*[jnp.zeros((2, 8))] * 3)


@pytest.mark.core
def test_every_checked_module_has_its_types_checked():
    for name in CHECKED:
        module = importlib.import_module(name)
        own = [x for x in vars(module).values() if inspect.isfunction(x) and x.__module__ == name]
        own = [x for x in own if x.__annotations__ and not inspect.isasyncgenfunction(x)]
        assert type(module.__loader__).__name__ == "_JaxtypingLoader" and all(hasattr(x, "__wrapped__") for x in own)


def test_checks_turned_off_are_off_for_functions_defined_before(types_unchecked):
    assert lax.flash_attention(*[jnp.zeros((1, 4, 2, 8))] * 3, window=[1, 0]).shape == (1, 4, 2, 8)
