"""A `KernelConfig` given to an operation with a class of configs of its own."""

from dataclasses import fields, replace
from functools import partial

import jax
import pytest

import ejkernel
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._operation import OPERATIONS, types_of_call
from ejkernel.modules.operations import configs
from ejkernel.types import FwdParams, KernelConfig, checked_config

TAKING = [name for name, operation in OPERATIONS.items() if operation.config_class.from_kernel_config]


@pytest.mark.parametrize("operation", TAKING)
def test_it_becomes_one_of_the_own_class(operation):
    """Every field of the class is taken from one of a `KernelConfig`, and the fields of that are checked first."""
    of = OPERATIONS[operation].config_class
    sizes = dict(block_q=16, block_k=32, block_d=64, num_warps=8, num_stages=3)
    given, taken = KernelConfig(**sizes, platform="xla", algorithm="steps"), partial(checked_config, operation, of=of)
    if "algorithm" not in of.from_kernel_config:
        with pytest.raises(ValueError, match=f"{operation}: config.algorithm is 'steps'; it must be None"):
            taken(given)
        given = replace(given, algorithm=None)
    expected = {own: getattr(given, name) for own, name in of.from_kernel_config.items()}
    assert taken(given) == of(**expected, platform="xla")
    assert expected.keys() | {"platform", "backend"} == {field.name for field in fields(of)}
    with pytest.raises(ValueError, match=f"{operation}: config.block_q is 0; it must be a positive int"):
        taken(replace(given, block_q=0))
    with pytest.raises(TypeError, match=f"{operation}: config is a FwdParams; it must be a {of.__name__}"):
        taken(FwdParams())


@pytest.mark.parametrize("operation", [*TAKING, "page_attention"])
def test_an_implementation_takes_it_where_its_operation_does(operation):
    named, spec = types_of_call(operation, **OPERATIONS[operation].example())
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}
    found = kernel_registry.find(operation, "xla").implementation
    call = lambda x: found(*x, spec=spec, config=KernelConfig(block_q=16, block_k=16))
    x = OPERATIONS[operation].algorithm.operands(**shapes)
    if operation in TAKING:
        assert jax.tree.leaves(jax.eval_shape(call, x))
        return
    with pytest.raises(TypeError, match=r"\(xla\): config is a KernelConfig; it must be a PageAttentionConfig"):
        jax.eval_shape(call, x)


@pytest.mark.parametrize(
    "operation, name", [("grouped_matmul", "GroupedMatmulConfig"), ("mean_pooling", "MeanPoolingConfig")]
)
def test_a_class_of_the_same_name_is_told_apart(operation, name):
    """The configs of 0.0.78 are for calls in the form of 0.0.78; the lax API does not take them."""
    config = getattr(configs, name)()
    says = f"config is a {name} of {configs.__name__}; it must be a {name} of ejkernel.types.{operation} or a mapping"
    with pytest.raises(TypeError, match=says):
        getattr(ejkernel.lax, operation)(**OPERATIONS[operation].example(), config=config)
