"""Shared by the tests of flash_attention in Mosaic GPU: named calls, lowered for a Hopper GPU without one."""

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas.gpu.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
    supports,
    supports_bwd,
    supports_jvp,
)
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import ATTENTION_SHAPES, Target

HOPPER = Target("cuda", "NVIDIA H200")
CUSTOM_CALL = "mosaic_gpu_v2"


def call(shape) -> tuple[Operands, FlashAttentionSpec]:
    sizes = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in shape.sizes.items() if name in "qkv"}
    sinks = jax.ShapeDtypeStruct((1, shape.heads, shape.sinks), jnp.float32) if shape.sinks else None
    return Operands(**sizes, sinks=sinks), FlashAttentionSpec(**shape.options, softmax_scale=shape.head_dim**-0.5)


def lowered(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def run(operation, spec, config):
    """The operation as a function of the operands (and tangents), the outputs and a cotangent of o."""

    def forward(x, outputs, do):
        return flash_attention(*x, spec=spec, config=config)

    def backward(x, outputs, do):
        wrt = ("q", "k", "v", *(name for name in ("bias", "sinks", "softmax_scale") if getattr(x, name) is not None))
        return flash_attention_bwd(x, outputs, Outputs(do, None), wrt=wrt, spec=spec, config=config)

    def tangent(x, outputs, do):
        return flash_attention_jvp(x, outputs, x, spec=spec, config=config)

    return {"flash_attention": forward, "flash_attention_jvp": tangent, "flash_attention_bwd": backward}[operation]


def arguments(x: Operands):
    batch, queries, heads, _ = x.q.shape
    o = jax.ShapeDtypeStruct((batch, queries, heads, x.v.shape[3]), x.q.dtype)
    return x, Outputs(o, jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)), o


def kernels(operation: str, x: Operands) -> int:
    """One, and with segments those that find the hidden keys, and in the backward the fully masked queries too."""
    finds = x.q_segment_ids is not None and x.mask is None
    return 1 + finds * {"flash_attention": 1, "flash_attention_jvp": 1, "flash_attention_bwd": 2}[operation]


CALLS = {name: call(shape) for name, shape in ATTENTION_SHAPES.items()}
PREDICATES = {"flash_attention": supports, "flash_attention_jvp": supports_jvp, "flash_attention_bwd": supports_bwd}
q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
IDS, CUTS = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32), jax.ShapeDtypeStruct((1, 5), jnp.int32)
SIGHTS = {
    "segments": dict(q_segment_ids=IDS, kv_segment_ids=IDS),
    "packed": dict(cu_seqlens_q=CUTS, cu_seqlens_k=CUTS),
}
