"""The contenders of attention: each prepares one call, or says why it cannot."""

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels._xla.flash_attention import reference
from ejkernel.modules import flash_attention
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import AttentionShape

from . import _vllm
from ._attention import heads_first, without_others
from ._contenders import Inputs, imported, of_jax, of_ours, of_torch, torch_batch, torch_on_gpu
from ._harness import Contender, Prepared, Unavailable
from ._process import asked
from ._versions import elsewhere, left, of_earlier


def contenders(shape: AttentionShape, mode: str, given: Inputs, platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then the rivals."""
    of_jax_ = lambda name, function: of_jax(name, function, mode, given)
    release = cache(lambda: _published(shape, mode, given))
    return [
        *of_ours("flash_attention", platforms, partial(_ours, shape), mode, given),
        of_jax_("ejkernel deterministic", lambda: _deterministic(shape, mode)),
        of_jax_("plain formula", lambda: _formula(shape)),
        of_jax_("jax.nn xla", lambda: _jax_nn(shape, "xla")),
        of_jax_("jax.nn cudnn", lambda: _jax_nn(shape, "cudnn")),
        of_jax_("tokamax mosaic", lambda: _tokamax(shape, "mosaic")),
        of_jax_("tokamax triton", lambda: _tokamax(shape, "triton")),
        of_jax_("jax attention_mgpu", lambda: _attention_mgpu(shape, mode, given)),
        of_torch("torch cudnn", lambda: _torch(shape, "CUDNN_ATTENTION"), mode, given),
        of_torch("torch flash", lambda: _torch(shape, "FLASH_ATTENTION"), mode, given),
        Contender("torch jvp_flash", lambda: _jvp_flash_attention(shape, mode, given)),
        of_torch("FlashAttention-3", lambda: _flash_attention_3(shape, mode, given), mode, given),
        Contender("ejkernel of PyPI", release, warm=release),
        of_earlier("flash_attention", ("q", "k", "v"), shape.options, mode, given),
    ]


def _ours(shape: AttentionShape, platform: str | None, deterministic: bool = False) -> Callable[..., Array]:
    return lambda q, k, v, sinks=None: flash_attention(
        q,
        k,
        v,
        causal=shape.causal,
        sliding_window=shape.window,
        logits_soft_cap=shape.softcap,
        softmax_aux=sinks,
        deterministic=deterministic,
        platform=platform,
    )


def _deterministic(shape: AttentionShape, mode: str) -> Callable[..., Array]:
    if mode != "fwd_bwd":
        raise Unavailable("sums in any order are those of the backward alone")
    return _ours(shape, None, deterministic=True)


def _formula(shape: AttentionShape) -> Callable[..., Array]:
    """The formula as a user would write it, with all logits in memory."""
    spec = FlashAttentionSpec(**shape.options, softmax_scale=shape.head_dim**-0.5)
    of_batch = lambda sinks: None if sinks is None else sinks[None]
    return lambda q, k, v, sinks=None: reference(q, k, v, *[None] * 4, of_batch(sinks), spec=spec).o


def _jax_nn(shape: AttentionShape, implementation: str) -> Callable[..., Array]:
    _refuse(shape, "jax.nn.dot_product_attention", "softcap", "sinks")
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise Unavailable("cuDNN needs an NVIDIA GPU")
    window = None if shape.window == (None, None) else _bounded(shape)
    return lambda q, k, v, **others: jax.nn.dot_product_attention(
        q, k, v, is_causal=shape.causal, local_window_size=window, implementation=implementation
    )


def _tokamax(shape: AttentionShape, implementation: str) -> Callable[..., Array]:
    _refuse(shape, "tokamax", "sinks")
    if jax.default_backend() == "cpu":
        raise Unavailable(f"tokamax {implementation} needs an accelerator")
    tokamax = imported("tokamax")
    window = None if shape.window == (None, None) else _bounded(shape)
    return lambda q, k, v, **others: tokamax.dot_product_attention(
        q,
        k,
        v,
        is_causal=shape.causal,
        local_window_size=window,
        logits_soft_cap=shape.softcap,
        implementation=implementation,
    )


def _attention_mgpu(shape: AttentionShape, mode: str, given: Inputs) -> Callable[..., Array]:
    """JAX's example of a Mosaic GPU kernel, with block sizes that fit; it has no scale, so q is multiplied by it."""
    _refuse(shape, "attention_mgpu", "softcap", "sinks")
    if shape.window != (None, None) or shape.head_dim != shape.value_dim:
        raise Unavailable("attention_mgpu has no window and no value size of its own")
    if given.cotangent.dtype != jnp.float16:
        raise Unavailable("attention_mgpu keeps its tiles in float16, and takes no other arrays")
    if mode != "fwd" and (shape.causal or mode == "jvp"):
        raise Unavailable("attention_mgpu has a gradient without causality alone")
    attention_mgpu = imported("jax.experimental.pallas.ops.gpu.attention_mgpu")
    block = 128 if shape.head_dim <= 128 else 64
    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=block,
        max_concurrent_steps=2,
        causal=shape.causal,
        compute_wgs_bwd=2,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    scaled = lambda q: (q * (shape.head_dim**-0.5)).astype(q.dtype)
    return without_others(lambda q, k, v: attention_mgpu.attention(scaled(q), k, v, config))


def _torch(shape: AttentionShape, backend: str) -> Callable[..., Any]:
    _refuse(shape, "torch SDPA", "softcap", "sinks")
    if shape.window != (None, None):
        raise Unavailable("torch SDPA has no window")
    attention, torch = imported("torch.nn.attention"), torch_on_gpu()

    def forward(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            o = torch.nn.functional.scaled_dot_product_attention(
                *map(heads_first, (q, k, v)), is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )
        return heads_first(o)

    return forward


def _flash_attention_3(shape: AttentionShape, mode: str, given: Inputs) -> Callable[..., Any]:
    if mode != "fwd":
        raise Unavailable("FlashAttention-3 of vLLM's wheel is here for its forward")
    if shape.sinks > 1:
        raise Unavailable("FlashAttention-3 has one sink for each head")
    torch = torch_on_gpu()
    attend = _vllm.flash_attention_3()
    ends = lambda length: torch.arange(0, (shape.batch + 1) * length, length, dtype=torch.int32, device="cuda")
    cu = dict(cu_q=ends(shape.seq_q), cu_k=ends(shape.seq_k), max_q=shape.seq_q, max_k=shape.seq_k)
    left, right = shape.window
    options = dict(scale=shape.head_dim**-0.5, causal=shape.causal, softcap=shape.softcap or 0.0)
    options["window"] = -1 if left is None else left, -1 if right is None else right
    if shape.sinks:
        options["sinks"] = torch.from_dlpack(given.others["sinks"][:, 0].astype(jnp.bfloat16))

    def forward(q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            o = attend(*(x.flatten(0, 1) for x in (q, k, v)), **cu, **options)
        return o.unflatten(0, (shape.batch, shape.seq_q))

    return forward


def _jvp_flash_attention(shape: AttentionShape, mode: str, given: Inputs) -> Prepared:
    """In its layout, contiguous [b,h,s,d]: the time of the transposition is not counted."""
    _refuse(shape, "jvp_flash_attention", "softcap", "sinks")
    if mode != "jvp":
        raise Unavailable("jvp_flash_attention is here for its forward mode")
    if shape.window != (None, None) or shape.heads != shape.kv_heads or shape.head_dim != shape.value_dim:
        raise Unavailable("jvp_flash_attention has no window, no shared heads and no value size of its own")
    torch, jvp = torch_on_gpu(), imported("jvp_flash_attention.jvp_attention").JVPAttn
    x = [heads_first(torch.from_dlpack(x)).contiguous() for x in (*given.operands, *given.tangents)]

    def once() -> tuple:
        out = jvp.forward(*x, causal=shape.causal)
        return out[0], out[1][0]

    return Prepared([heads_first(x) for x in once()], torch_batch(once))


def _published(shape: AttentionShape, mode: str, given: Inputs) -> Prepared:
    """The release on PyPI, in another process as its package has the same name (see _release.py)."""
    _refuse(shape, "the release on PyPI, as it is called here,", "softcap", "sinks")
    if mode != "fwd" or shape.head_dim != shape.value_dim or given.cotangent.dtype != jnp.bfloat16:
        raise Unavailable("the release on PyPI is here for its forward in bfloat16, with values as wide as keys")
    window = None if shape.window == (None, None) else _bounded(shape)
    ask = partial(asked, "_release", "EJKERNEL_RELEASE")
    with tempfile.TemporaryDirectory() as folder:
        left(folder, dict(zip("qkv", given.operands, strict=True)))
        request = {"folder": folder, "causal": shape.causal, "window": window}
        config = ask(request | {"calls": 0})["config"]
        o = np.load(f"{folder}/o.npy").view(jnp.bfloat16)
    return Prepared((o,), elsewhere(ask, request), config)


def _bounded(shape: AttentionShape) -> tuple[int, int]:
    """The window without None, as both rivals need numbers."""
    left, right = (shape.seq_k if bound is None else bound for bound in shape.window)
    return left, right


def _refuse(shape: AttentionShape, rival: str, *missing: str) -> None:
    for option in missing:
        if getattr(shape, option):
            raise Unavailable(f"{rival} has no {option}")
