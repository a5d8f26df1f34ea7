"""A subclass of a built-in operation is the same operation, and may only prepare its arguments in another way."""

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import FlashAttention
from ejkernel.modules._operation import OPERATIONS
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.ops import ConfigSelectorChain, Executor
from ejkernel.types import KernelConfig

Q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 4)), jnp.float32)


def test_a_subclass_leaves_the_operation_as_it_is():
    before = OPERATIONS["flash_attention"], KERNELS["flash_attention"]

    class Plain(FlashAttention):
        pass

    assert (OPERATIONS["flash_attention"], KERNELS["flash_attention"]) == before == (FlashAttention, before[1])
    np.testing.assert_array_equal(Plain()(Q, Q, Q, causal=True), FlashAttention()(Q, Q, Q, causal=True))


def test_a_subclass_may_prepare_its_arguments():
    class Causal(FlashAttention):
        @classmethod
        def convert(cls, arguments):
            return super().convert(arguments) | {"causal": True}

    wanted = ejkernel.lax.flash_attention(Q, Q, Q, causal=True)
    for call in (Causal(), lambda *x: Executor(ConfigSelectorChain(autotune=False))(Causal(), *x)):
        np.testing.assert_allclose(call(Q, Q, Q), wanted, rtol=1e-6)


OVERRIDES = {
    "run": lambda self, *args, cfg, **kwargs: args[0],
    "run_xla": lambda self, *args, cfg, **kwargs: args[0],
    "run_cuda": lambda self, *args, cfg, **kwargs: args[0],
    "custom_vjp": lambda self, primals, cfg, kwargs, cotangents: primals,
    "heuristic_cfg": lambda self, inv: KernelConfig(block_q=8),
    "config_space": lambda self, inv: [KernelConfig(block_q=8)],
    "key_builder": lambda self, inv: "key",
    "flops": classmethod(lambda cls, named, results, spec: 1.0),
    "version": 2,
}


@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("mixed_in", [False, True], ids=["own", "mixed in"])
def test_what_no_call_would_ask_for_cannot_be_overridden(name, mixed_in):
    body = {name: OVERRIDES[name]}
    says = f"Mine: flash_attention does not honour {name} of a subclass; .* subclass of ejkernel.ops.Kernel"
    with pytest.raises(TypeError, match=says):
        type("Mine", (type("Mixin", (), body), FlashAttention), {}) if mixed_in else type(
            "Mine", (FlashAttention,), body
        )
    assert OPERATIONS["flash_attention"] is FlashAttention
