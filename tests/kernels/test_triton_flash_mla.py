"""flash_mla in Triton: forward, gradients and tangents by the interpreter, and which kernels are chosen."""

import jax
import pytest
from cases import CASES

from ejkernel.kernels._dispatch import select
from ejkernel.kernels._registry import kernel_registry
from ejkernel.types import KernelConfig, Platform, Target

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402

from . import against_xla, interpreter  # noqa: E402
from .latents import deepseek, poisoned  # noqa: E402

CONFIG = KernelConfig(block_q=16, block_k=16)
OURS = [case for case in CASES if case.operation == "flash_mla"]
AMPERE = Target("cuda", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if "segments" in c.name else pytest.mark.slow) for c in OURS]
)
def test_in_the_interpreter(case, monkeypatch):
    """Forward, backward and tangent; latents that nobody sees hold NaN."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    case = case.resized(dict(b=2, h=2))
    against_xla.check(case, poisoned(against_xla.prepared(case)), "triton", "gpu", CONFIG)


def test_the_library_picks_it():
    x, spec = deepseek()
    for suffix in ("", "_jvp", "_bwd"):
        assert select("flash_mla" + suffix, spec, x, AMPERE).platform == Platform.TRITON


@pytest.mark.parametrize("suffix", ("", "_jvp", "_bwd"))
def test_calls_and_configs_are_those_of_flash_attention(suffix):
    x, spec = deepseek()
    of, attention = (  # the last of them: those before it take few queries
        [e.implementation for e in kernel_registry.list_implementations(n + suffix) if e.platform == "triton"][-1]
        for n in ("flash_mla", "flash_attention")
    )
    expanded = x.shapes(x.q.dtype)
    assert expanded.k.shape == (1, 512, 4, 192) and expanded.v.shape == (1, 512, 4, 128)
    assert of.space(spec, x, AMPERE) == attention.space(spec, expanded, AMPERE)
    assert of.heuristic(spec, x, AMPERE) == attention.heuristic(spec, expanded, AMPERE)
    wide = x._replace(w_vc=jax.ShapeDtypeStruct((1, 512, 4, 264), x.q.dtype))
    assert "v has 264 features" in of.supports(spec, wide, AMPERE)
    invariant = deepseek(batch_invariant=True)
    assert "batch size" in of.supports(invariant[1], x, AMPERE)


def test_a_config_beyond_the_limit_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv(_launch.LIMIT_VARIABLE, "1000")
    x, spec = deepseek()
    with pytest.raises(ValueError, match=r"flash_mla \(triton\): the config takes up to .* bytes of shared memory"):
        jax.eval_shape(lambda x: kernel_registry.find("flash_mla", "triton").implementation(*x, spec=spec), x)
