"""native_sparse_decode_attention in Triton: by the interpreter, beside the formula in float64."""

import pytest

from ejkernel.types import KernelConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.native_sparse_decode_attention import kernels  # noqa: E402

from . import interpreter, sparse_decoding  # noqa: E402

CONFIG = KernelConfig(block_q=32, block_k=16)
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}
CALLS = sparse_decoding.CALLS | {
    "keys that are not whole blocks": dict(t=150, window=37),
    "blocks of 12": dict(size=12, window=30),
    "means in float32": dict(of_means="float32", window=12),
    "means in float16": dict(of_means="float16", window=12),
    "more blocks than the kernel of their choice takes": dict(n=1025),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results(call, dtype, monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = sparse_decoding.operands(dtype, **call)
    o, blocks = kernels.native_sparse_decode_attention(*x, spec=spec, config=CONFIG)
    sparse_decoding.check(o, blocks, x, spec, TOLERANCE[dtype])
