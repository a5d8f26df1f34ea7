"""Kernel objects of built-in operations return their configs in the same way as those of user kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import equations

from ejkernel import EjkernelRuntimeError, lax, modules
from ejkernel.modules import FlashAttention, _primitive_kernel
from ejkernel.modules._operation import OPERATIONS
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Invocation, autotune_recorded
from ejkernel.types import Target


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = ((1, 40, 4, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def invocation(arrays):
    return Invocation(FlashAttention(), arrays, dict(causal=True, logits_soft_cap=5.0))


@pytest.mark.core
@pytest.mark.parametrize("of", (lambda x: x, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)), ids=("values", "types"))
def test_configs_are_those_of_the_forward(arrays, of):
    inv = invocation(tuple(map(of, arrays)))
    space = inv.kernel.config_space(inv)
    assert inv.kernel.heuristic_cfg(inv) in space
    wanted = lax.flash_attention(*arrays, causal=True, softcap=5.0)
    for config in space:
        np.testing.assert_allclose(
            lax.flash_attention(*arrays, causal=True, softcap=5.0, config=config), wanted, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_answers_for_its_configs(operation):
    """As an invocation is recorded: the kernel object, with the argument names of the modules API."""
    kernel = OPERATIONS[operation]()
    example = {kernel.renamed.get(name, name): x for name, x in kernel.example().items()}
    inv = Invocation(kernel, (), example)
    assert {type(config) for config in (kernel.heuristic_cfg(inv), *kernel.config_space(inv))} == {kernel.config_class}
    call = kernel.canonical(inv)
    assert (call.kernel.name, call.kernel.op_id) == (operation, kernel.op_id)


def test_a_recorded_call_is_measured_under_the_key_that_calls_ask_for(arrays, monkeypatch):
    """Recorded as the guide shows: the kernel object and an invocation of it."""
    measured = []
    fastest = KERNELS["flash_attention"].heuristic_cfg
    selector = ConfigSelectorChain(cache=ConfigCache())
    monkeypatch.setattr(
        selector, "measure", lambda kernel, inv, **_: measured.append(kernel.key_builder(inv)) or fastest(inv)
    )
    inv = invocation(arrays)
    calls = {"call": (inv.kernel, inv.args, inv.kwargs)}
    found = autotune_recorded({"flash_attention": calls}, Executor(selector))
    assert list(found) == [("flash_attention", "call")]
    seen = []
    chain = ConfigSelectorChain(cache=ConfigCache(), on_event=lambda event, operation, key, config: seen.append(key))
    Executor(chain)(FlashAttention(), *arrays, causal=True, logits_soft_cap=5.0)
    assert measured == seen[:1]


def test_a_recorded_call_that_cannot_be_measured_takes_no_other_along(arrays, monkeypatch):
    selector = ConfigSelectorChain(cache=ConfigCache())
    monkeypatch.setattr(selector, "measure", lambda kernel, inv: selector.cache.put(kernel.key_builder(inv), "tuned"))
    inv = invocation(arrays)
    wrong, right = ((inv.kernel, args, inv.kwargs) for args in (inv.args[:1], inv.args))
    with pytest.raises(EjkernelRuntimeError, match=r"^1 of 2 recorded calls cannot be measured\n  flash_attention: "):
        autotune_recorded({"flash_attention": {"wrong": wrong, "right": right}}, Executor(selector))
    assert len(selector.cache) == 1


def test_a_gradient_needs_no_tangent_of_the_platform(monkeypatch):
    """blocksparse_attention in Mosaic GPU has no tangent; a gradient traces the tangent and transposes it away."""
    monkeypatch.setattr(_primitive_kernel, "local_target", lambda: Target("cuda", "NVIDIA H200"))
    x = jax.ShapeDtypeStruct((1, 512, 4, 128), jnp.float16)
    options = dict(block_mask=jnp.ones((1, 4, 4), bool), block_size=(128, 128), platform="pallas")
    loss = lambda *qkv: modules.blocksparse_attention(*qkv, **options).astype(jnp.float32).sum()
    (backward,) = equations(jax.make_jaxpr(jax.grad(loss))(x, x, x), "blocksparse_attention_bwd")
    assert (backward.params["config"].platform, backward.params["config"].backend) == ("pallas", "gpu")
