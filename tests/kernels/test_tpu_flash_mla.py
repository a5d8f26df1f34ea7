"""flash_mla on TPU: results in the interpreter that simulates the chip, and compilation by libtpu."""

import jax
import pytest
from cases import CASES

import ejkernel
from ejkernel.types import KernelConfig

from . import against_xla
from .latents import deepseek, poisoned
from .tpu_compiler import TARGETS, compiled
from .tpu_interpreter import interpreted

CONFIG = KernelConfig(block_q=128, block_k=128)
OURS = [case for case in CASES if case.operation == "flash_mla" and "dropout" not in case.name]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if "segments" in c.name else pytest.mark.slow) for c in OURS]
)
def test_in_the_interpreter(case):
    """Forward, backward and tangent, with NaN in fully masked latents."""
    case = case.resized(dict(b=2, h=2))
    against_xla.check(case, poisoned(against_xla.prepared(case)), "pallas", "tpu", CONFIG, run=interpreted)


@pytest.mark.parametrize("generation", [pytest.param(g, marks=() if g == "v6e" else pytest.mark.slow) for g in TARGETS])
def test_compiles(generation):
    """The gradient in all five at the sizes of DeepSeek-V3 is a forward and a backward kernel."""
    pytest.importorskip("libtpu")
    x, _ = deepseek()
    names = ("q", "kv_latent", "k_rope", "w_kc", "w_vc")
    arrays = dict(zip(names, (*x[:3], *(jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in x[3:5])), strict=True))
    loss = lambda x: ejkernel.lax.flash_mla(**x, causal=True).astype("float32").sum()
    assert compiled(jax.grad(loss), generation, arrays).as_text().count('custom_call_target="tpu_custom_call"') == 2
