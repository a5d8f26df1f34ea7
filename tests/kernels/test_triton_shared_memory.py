"""`EJKERNEL_TRITON_SMEM_LIMIT`: no Triton kernel of any operation uses more shared memory."""

from collections import defaultdict
from dataclasses import fields

import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")

from programs import launches

from ejkernel.kernels._triton import _launch
from ejkernel.modules._primitive_kernel import KERNELS
from ejkernel.types import Platform, Target

from .bound import bound_by, written_in

H200 = Target("cuda", "NVIDIA H200")
LIMIT = "EJKERNEL_TRITON_SMEM_LIMIT"
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32]
each_operation = pytest.mark.parametrize("operation", written_in(Platform.TRITON))


@pytest.fixture
def taken(monkeypatch) -> list[tuple[str, int]]:
    """Name and bytes of shared memory of every kernel that is lowered in a test, which compiles each once."""
    found, library, caches = [], _launch.jax_triton().triton_lib, defaultdict(dict)
    compile_kernel = library.compile_ttir_inplace

    def compiled(*args):
        result = compile_kernel(*args)
        found.append((result.name, result.shared_mem_bytes))
        return result

    monkeypatch.setattr(library, "compile_ttir_inplace", compiled)
    monkeypatch.setattr(library.TritonFunction, "_kernel_cache", property(lambda self: caches[self.fn]))
    return found


@each_operation
def test_every_kernel_is_within_the_limit(operation, monkeypatch, taken):
    monkeypatch.setenv(LIMIT, "8192")
    seen = set()
    for call in bound_by(operation, [jnp.bfloat16]):
        if entry := call.implementation(Platform.TRITON, H200):
            traced = call.traced(entry, call.config(entry, H200))
            kernels = {(call.primitive.name, kernel) for kernel in launches(traced.jaxpr)}
            if kernels - seen:
                traced.lower(lowering_platforms=("cuda",))
                seen |= kernels
    assert taken and not [(name, bytes) for name, bytes in taken if bytes > 8192]


@pytest.mark.slow
@pytest.mark.parametrize("features", [64, 128, 256])
@pytest.mark.parametrize("limit", [32 * 1024, 64 * 1024, 99 * 1024])
@each_operation
def test_every_kernel_of_models_is_within_the_limit(operation, limit, features, monkeypatch, taken):
    monkeypatch.setenv(LIMIT, str(limit))
    over = []
    for call in bound_by(operation, DTYPES, features):
        if entry := call.implementation(Platform.TRITON, H200):
            config = call.config(entry, H200)
            call.traced(entry, config).lower(lowering_platforms=("cuda",))
            over += [(call.primitive.name, config, *kernel) for kernel in taken if kernel[1] > limit]
            taken.clear()
    assert not over


@pytest.mark.parametrize("features", [64, pytest.param(128, marks=pytest.mark.slow), 256])
@each_operation
def test_supported_calls_have_a_config_within_the_limit(operation, features, monkeypatch):
    over = []
    for call in bound_by(operation, DTYPES, features):
        for limit in (32 * 1024, 64 * 1024, 99 * 1024):
            monkeypatch.setenv(LIMIT, str(limit))
            if entry := call.implementation(Platform.TRITON, H200):
                operands = call.primitive.operands(call.operands)
                wrong = entry.implementation.excess(operands, call.config(entry, H200))
                over += [(call.primitive.name, operands, wrong)] if wrong else []
    assert not over


@each_operation
@pytest.mark.parametrize("value", ["abc", "0", "-65536", "1.5", "64K"])
def test_a_value_that_is_no_positive_number_is_refused(operation, value, monkeypatch):
    monkeypatch.setenv(LIMIT, value)
    for call in bound_by(operation, [jnp.bfloat16]):
        with pytest.raises(ValueError, match=f"{LIMIT} is '{value}'; it must be a positive whole number of bytes"):
            call.implementation(Platform.TRITON, H200)


@each_operation
def test_if_the_smallest_tiles_are_too_large_another_implementation_runs(operation, monkeypatch):
    monkeypatch.setenv(LIMIT, "16")
    for call in bound_by(operation, [jnp.bfloat16]):
        assert call.implementation(Platform.TRITON, H200) is None


@each_operation
def test_a_config_above_the_limit_is_refused(operation, monkeypatch):
    """By the check that stored configs also pass, which are then skipped."""
    sizes = dict(block_q=128, block_k=256, block_d=64, chunk_size=128, block_m=128, block_n=256)
    sizes |= dict(block_s=128, keys_per_block=256, num_warps=8, num_stages=3)
    of = KERNELS[operation].config_class
    sizes |= dict(block_d=256) if operation == "mean_pooling" else {}
    large = of(platform="triton", **{field.name: sizes[field.name] for field in fields(of) if field.name in sizes})
    for call in bound_by(operation, [jnp.bfloat16], 128):
        entry = call.implementation(Platform.TRITON, H200)
        if entry is None:
            continue
        kernel = KERNELS[call.primitive.name]
        invocation = kernel.invocation(call.operands, call.spec, call.results)
        kernel.checked_for(large, invocation)
        with monkeypatch.context() as patch:
            patch.setenv(LIMIT, "2048")
            with pytest.raises(ValueError, match=f"takes up to .* {LIMIT} allows 2048"):
                kernel.checked_for(large, invocation)
            with pytest.raises(ValueError, match=f"takes up to .* {LIMIT} allows 2048"):
                call.traced(entry, large)
