"""A pair of configs, for a forward and its backward, is checked like a single one."""

import jax
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import FlashAttention
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import BwdParams, FwdParams, KernelConfig

Q = np.random.default_rng(0).standard_normal((1, 32, 2, 8)).astype(np.float32)
XLA = KernelConfig(block_q=8, block_k=16, platform="xla")
PAIRS = {
    "configs": (XLA, KernelConfig(block_q=16, block_k=8)),
    "mappings": (dict(block_q=8, block_k=16, platform="xla"), dict(block_q=16, block_k=8)),
    "short forms": (FwdParams(8, 16), BwdParams(16, 8)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_pair_is_for_the_forward_and_the_backward(pair, jit):
    loss = lambda q: ejkernel.lax.flash_attention(q, Q, Q, causal=True, config=pair).sum()
    gradient = jax.grad(loss)
    used = {
        equation.primitive.name: equation.params["config"] for equation in equations(jax.make_jaxpr(gradient)(Q).jaxpr)
    }
    blocks = {name: (config.block_q, config.block_k) for name, config in used.items()}
    assert blocks == {"flash_attention": (8, 16), "flash_attention_bwd": (16, 8)}
    right = jax.grad(lambda q: ejkernel.lax.flash_attention(q, Q, Q, causal=True).sum())(Q)
    np.testing.assert_allclose((jax.jit(gradient) if jit else gradient)(Q), right, rtol=1e-5, atol=1e-6)


def equations(jaxpr):
    """The equations of the library's primitives, also inside jitted functions."""
    for equation in jaxpr.eqns:
        if "config" in equation.params:
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from equations(inner.jaxpr)


WRONG_PAIRS = {
    "three": ((XLA, XLA, XLA), "config is a tuple of 3; a pair is"),
    "a backward of no sizes": ((XLA, KernelConfig(block_q=-1)), "config.block_q is -1"),
    "a backward elsewhere": ((XLA, XLA), "flash_attention: the config of the backward names a platform"),
}


@pytest.mark.parametrize("pair, says", WRONG_PAIRS.values(), ids=WRONG_PAIRS)
def test_a_wrong_pair_is_refused(pair, says):
    for call in (
        lambda: ejkernel.lax.flash_attention(Q, Q, Q, config=pair),
        lambda: ejkernel.modules.flash_attention(Q, Q, Q, cfg=pair),
        lambda: FlashAttention()(Q, Q, Q, cfg=pair),
    ):
        with pytest.raises(ValueError, match=says):
            call()


WRONG_SHORT_FORMS = {
    "a backward alone": (BwdParams(64, 64), "config is a BwdParams, which configures the backward of a pair"),
    "a backward for the forward": (
        (BwdParams(), XLA),
        "config is a BwdParams, which configures the backward of a pair",
    ),
    "a forward for the backward": ((XLA, FwdParams()), "config is a FwdParams, which configures the forward alone"),
    "the other way around": ((BwdParams(), FwdParams()), "config is a BwdParams, which configures the backward of a"),
}


@pytest.mark.parametrize("config, says", WRONG_SHORT_FORMS.values(), ids=WRONG_SHORT_FORMS)
def test_a_short_form_stands_where_it_belongs(config, says):
    for call in (
        lambda: ejkernel.lax.flash_attention(Q, Q, Q, config=config),
        lambda: ejkernel.modules.flash_attention(Q, Q, Q, cfg=config),
        lambda: FlashAttention()(Q, Q, Q, cfg=config),
    ):
        with pytest.raises(TypeError, match=f"^flash_attention(_bwd)?: {says}"):
            call()


def test_operations_without_gradient_accept_no_config_pair():
    arrays = OPERATIONS["ragged_page_attention_v3"].example()
    config = dict(platform="xla")
    call = lambda arrays: ejkernel.lax.ragged_page_attention_v3(**arrays, config=(config, config))
    with pytest.raises(ValueError, match="config is a tuple of 2; a pair is for what has a gradient"):
        jax.eval_shape(call, arrays)


ELSEWHERE = {
    "with blocks": KernelConfig(block_q=16, platform="triton"),
    "of a pair": (KernelConfig(platform="triton"), KernelConfig()),
}


@pytest.mark.parametrize("config", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_config_of_another_platform_is_refused(config):
    """Rather than that one of the two decides."""
    for call in (
        lambda: ejkernel.modules.flash_attention(Q, Q, Q, cfg=config, platform="xla"),
        lambda: FlashAttention()(Q, Q, Q, cfg=config, platform="xla"),
    ):
        with pytest.raises(ValueError, match="flash_attention: platform 'xla' is asked for with a config of 'triton'"):
            call()


def test_of_a_mapping_too():
    with pytest.raises(ValueError, match="flash_attention: platform 'xla' is asked for with a config of 'triton'"):
        ejkernel.modules.flash_attention(Q, Q, Q, cfg={"platform": "triton"}, platform="xla")


@pytest.mark.parametrize("config", ({"platform": "xla"}, XLA, dict(block_q=8, block_k=16, platform="xla")), ids=str)
def test_the_same_platform_twice_is_right(config):
    found = ejkernel.modules.flash_attention(Q, Q, Q, cfg=config, platform="xla")
    np.testing.assert_allclose(found, ejkernel.modules.flash_attention(Q, Q, Q), rtol=1e-5, atol=1e-6)
