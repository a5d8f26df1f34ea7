"""Every config that flash_attention in Triton may run with compiles for every GPU, without one.

NVIDIA's assembler reports for each kernel whether it spills registers, and whether it serialises matrix products. A
program fits into the shared memory of its GPU.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp
from ejkernel.kernels._triton.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.primitives.flash_attention import flash_attention as algorithm
from ejkernel.types import ATTENTION_SHAPES, Target

from . import compiler

KINDS = {
    "sm_80": Target("cuda", "NVIDIA A100"),
    "sm_90": Target("cuda", "NVIDIA H200"),
    "sm_100": Target("cuda", "NVIDIA B200"),
    "sm_120": Target("cuda", "NVIDIA GeForce RTX 5090"),
    "gfx942": Target("rocm", "gfx942"),
    "gfx90a": Target("rocm", "gfx90a"),
}
OPERATIONS = ("flash_attention", "flash_attention_bwd", "flash_attention_jvp")


@dataclass(frozen=True)
class Call:
    """Sizes, options and optional operands of a call."""

    D: int = 128
    V: int = 128
    H: int = 4
    G: int = 4
    S: int = 1024
    K: int = 1024
    dtype: str = "bfloat16"
    sinks: int = 0
    has: tuple[str, ...] = ()
    options: dict = field(default_factory=lambda: {"causal": True}, hash=False)

    @property
    def spec(self) -> FlashAttentionSpec:
        dropout_rate = 0.1 if "dropout" in self.has else 0.0
        return FlashAttentionSpec(**self.options, softmax_scale=self.D**-0.5, dropout_rate=dropout_rate)

    @property
    def operands(self) -> Operands:
        array = jax.ShapeDtypeStruct
        B, S, K, H, D = 2, self.S, self.K, self.H, self.D
        q = array((B, S, H, D), self.dtype)
        k, v = (array((B, K, self.G, size), self.dtype) for size in (D, self.V))
        optional = {
            "bias": array((1, H, S, K), "float32"),
            "mask": array((B, 1, S, K), "bool"),
            "bias_of_keys": array((B, 1, 1, K), "float32"),
            "mask_of_keys": array((B, 1, 1, K), "bool"),
            "q_segment_ids": array((B, S), "int32"),
            "kv_segment_ids": array((B, K), "int32"),
            "softmax_scale": array((1, H), "float32"),
            "cu_seqlens_q": array((1, 6), "int32"),
            "cu_seqlens_k": array((1, 6), "int32"),
            "dropout": array((B, H, 8), "uint32"),
        }
        x = Operands(q, k, v, **{name.removesuffix("_of_keys"): optional[name] for name in self.has})
        return x._replace(sinks=array((1, H, self.sinks), "float32")) if self.sinks else x


SEGMENTS, PACKED = ("q_segment_ids", "kv_segment_ids"), ("cu_seqlens_q", "cu_seqlens_k")
WIDTHS = {"64": (64, 64), "128": (128, 128), "192": (192, 128), "256": (256, 256)}
FEATURES = {
    "uneven": Call(S=1000, K=1010),
    "bias": Call(has=("bias",)),
    "mask": Call(has=("mask",)),
    "bias_of_keys": Call(has=("bias_of_keys",)),
    "mask_of_keys": Call(has=("mask_of_keys",)),
    "segments": Call(has=SEGMENTS),
    "packed": Call(has=PACKED),
    "dropout": Call(has=("dropout",)),
    "traced_scale": Call(has=("softmax_scale",)),
    "all": Call(
        S=1000, K=1010, G=2, sinks=1, has=("bias", "mask", *SEGMENTS, "softmax_scale", "dropout"),
        options={"window": (100, 20), "softcap": 30.0},
    ),
    "split": Call(sinks=1, has=("bias", *SEGMENTS), options={"causal": True, "softcap": 30.0, "split": True}),
    "float32": Call(dtype="float32"),
    "float32_split": Call(dtype="float32", sinks=1, has=("bias", *SEGMENTS), options={"causal": True, "split": True}),
    "float32_all": Call(
        S=1000, K=1010, G=2, sinks=1, dtype="float32", has=("bias", "mask", *SEGMENTS, "softmax_scale", "dropout"),
        options={"window": (100, 20), "softcap": 30.0},
    ),
}  # fmt: skip
CALLS = {
    shape.name: Call(shape.head_dim, shape.value_dim, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k,
                     sinks=shape.sinks, options=shape.options)
    for shape in ATTENTION_SHAPES.values()
} | {
    f"{name}-{width}": replace(call, D=D, V=V)
    for name, call in FEATURES.items() for width, (D, V) in WIDTHS.items()
} | {
    f"d{D}": Call(D, D, S=1000) for D in (16, 40, 80, 96, 160, 192)
}  # fmt: skip
# Tests that take a core of CI half a minute; the others are slow tests.
# Those of `test_triton_spills` compile for the others, and `test_triton_registry_compile` compiles all operations.
ALWAYS = (
    ("sm_90", "gpt-oss"),
    ("sm_90", "all-128"),
    ("sm_90", "split-128"),
    ("sm_120", "llama3-8b"),
    ("gfx942", "llama3-8b"),
)


def implementation(operation: str, call: Call, config):
    """The operation on zeros, in all directions, to be traced."""
    x, spec = call.operands, call.spec
    moving = x._replace(**{name: None for name in x._fields if name not in algorithm.differentiable})
    outputs = Outputs(jax.ShapeDtypeStruct((*x.q.shape[:3], call.V), x.q.dtype),
                      jax.ShapeDtypeStruct((x.q.shape[0], call.H, call.S), jnp.float32))  # fmt: skip
    x, moving, outputs = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (x, moving, outputs))
    if operation == "flash_attention":
        return flash_attention(*x, spec=spec, config=config)
    if operation == "flash_attention_jvp":
        return flash_attention_jvp(x, outputs, moving, spec=spec, config=config)
    wrt = tuple(name for name in algorithm.differentiable if getattr(x, name) is not None)
    if x.cu_seqlens_q is not None:
        wrt = tuple(name for name in wrt if name != "bias")
    return flash_attention_bwd(x, outputs, outputs, wrt=wrt, spec=spec, config=config)


def marks(target: str, call: str):
    return [] if (target, call) in ALWAYS else pytest.mark.slow


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "target, name",
    [pytest.param(t, name, id=f"{t}-{name}", marks=marks(t, name)) for t in KINDS for name in CALLS],
)
def test_compiles(target, name, operation, monkeypatch):
    """Every config in the space fits, and on sm_90 nothing spills and no matrix product waits for another."""
    call, kind = CALLS[name], KINDS[target]
    configs = space(operation, call.operands, call.spec, kind)
    if (target, name) in ALWAYS:
        configs = configs[:1]
    trouble = []
    for config in configs:
        launches = compiler.launches(monkeypatch, _launch, partial(implementation, operation, call, config))
        for launch in launches:
            binary = compiler.binary(launch, compiler.TARGETS[target])
            if binary.shared > shared_memory_limit(kind):
                trouble.append(f"{launch}: {binary.shared} bytes of shared memory")
            if target == "sm_90" and (binary.spilled or binary.serialized):
                trouble.append(f"{launch}: {binary}")
            if target.startswith("sm_") and not 8.7 <= float(binary.ptx_version) <= 9.0:
                trouble.append(f"{launch}: PTX {binary.ptx_version}, which not every assembler of JAX reads")
    assert not trouble, "\n".join(trouble)
