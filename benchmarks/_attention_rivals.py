"""Who computes attention beside this library: each contender prepares one call of a case, or says why it cannot."""

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _attention import Inputs, call, inputs
from _harness import Batch, Contender, Prepared, Unavailable, queued
from _process import asked, batch_elsewhere, earlier
from jax import Array

from ejkernel.cli._equations import equations
from ejkernel.kernels._xla.flash_attention import reference
from ejkernel.modules import flash_attention
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import AttentionShape


def contenders(shape: AttentionShape, mode: str, given: Inputs, platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then the rivals."""

    def of_jax(name: str, attention: Callable[[], Callable[..., Array]], ours: bool = False) -> Contender:
        made = cache(lambda: _compiled(*_call(attention(), mode, given)))
        # To compile the backward alone its forward has to run, which is not for several at once.
        return Contender(name, lambda: _prepare(*made()), ours, warm=made if mode != "bwd" else Contender.warm)

    release = cache(lambda: _published(shape, mode, given))
    return [
        *(of_jax(f"ejkernel {name}", partial(_ours, shape, given, name), ours=True) for name in platforms),
        of_jax("plain formula", lambda: _formula(shape, given)),
        of_jax("jax.nn xla", lambda: _jax_nn(shape, "xla")),
        of_jax("jax.nn cudnn", lambda: _jax_nn(shape, "cudnn")),
        of_jax("tokamax mosaic", lambda: _tokamax(shape, "mosaic")),
        of_jax("tokamax triton", lambda: _tokamax(shape, "triton")),
        of_jax("jax attention_mgpu", lambda: _attention_mgpu(shape, mode, given)),
        Contender("torch cudnn", lambda: _torch(shape, mode, given, "CUDNN_ATTENTION")),
        Contender("torch flash", lambda: _torch(shape, mode, given, "FLASH_ATTENTION")),
        Contender("torch jvp_flash", lambda: _jvp_flash_attention(shape, mode, given)),
        Contender("ejkernel of PyPI", release, warm=release),
        earlier("_attention_rivals", shape, mode, given.cotangent.dtype),
    ]


def of_fields(fields: dict[str, Any], mode: str, dtype: str) -> Prepared:
    """Our call of the layer with these fields."""
    shape = AttentionShape(**fields | {"window": tuple(fields["window"])})
    ours, *_ = contenders(shape, mode, inputs(shape, jnp.dtype(dtype)), ["auto"])
    return ours.prepare()


def _call(attention: Callable[..., Array], mode: str, given: Inputs) -> tuple[Callable[..., tuple], tuple]:
    """The jitted call and its arguments; the backward alone takes the residuals of a forward that ran before."""
    x, dx, do = given.operands, given.tangents, given.cotangent
    if mode == "bwd":
        return jax.jit(lambda pull, do: pull(do)), (jax.jit(lambda *x: jax.vjp(attention, *x)[1])(*x), do)
    return jax.jit(call(attention, mode)), (x, dx, do)


def _compiled(function: Callable[..., tuple], arguments: tuple) -> tuple[Callable[..., tuple], tuple, str]:
    """The call as a program, its arguments, and the configs of ours in it."""
    traced = function.trace(*arguments)
    ran = equations(traced.jaxpr, "flash_attention")
    detail = "; ".join(f"{equation.primitive.name}: {equation.params['config']}" for equation in ran)
    return traced.lower().compile(), arguments, detail


def _prepare(program: Callable[..., tuple], arguments: tuple, detail: str) -> Prepared:
    """Runs a program."""
    return Prepared(jax.block_until_ready(program(*arguments)), queued(program, *arguments), detail)


def _ours(shape: AttentionShape, given: Inputs, platform: str) -> Callable[..., Array]:
    return lambda q, k, v: flash_attention(
        q,
        k,
        v,
        causal=shape.causal,
        sliding_window=shape.window,
        logits_soft_cap=shape.softcap,
        softmax_aux=given.sinks,
        platform=None if platform == "auto" else platform,
    )


def _formula(shape: AttentionShape, given: Inputs) -> Callable[..., Array]:
    """What a user would write, with all the logits in memory."""
    spec = FlashAttentionSpec(**shape.options, softmax_scale=shape.head_dim**-0.5)
    sinks = None if given.sinks is None else given.sinks[None]
    return lambda q, k, v: reference(q, k, v, None, None, None, None, sinks, spec=spec).o


def _jax_nn(shape: AttentionShape, implementation: str) -> Callable[..., Array]:
    _refuse(shape, "jax.nn.dot_product_attention", "softcap", "sinks")
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise Unavailable("cuDNN needs an NVIDIA GPU")
    window = None if shape.window == (None, None) else _bounded(shape)
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=shape.causal, local_window_size=window, implementation=implementation
    )


def _tokamax(shape: AttentionShape, implementation: str) -> Callable[..., Array]:
    _refuse(shape, "tokamax", "sinks")
    if jax.default_backend() == "cpu":
        raise Unavailable(f"tokamax {implementation} needs an accelerator")
    try:
        import tokamax
    except ImportError as error:
        raise Unavailable(f"tokamax cannot be imported: {error}") from error
    window = None if shape.window == (None, None) else _bounded(shape)
    return lambda q, k, v: tokamax.dot_product_attention(
        q,
        k,
        v,
        is_causal=shape.causal,
        local_window_size=window,
        logits_soft_cap=shape.softcap,
        implementation=implementation,
    )


def _attention_mgpu(shape: AttentionShape, mode: str, given: Inputs) -> Callable[..., Array]:
    """JAX's own example of a Mosaic GPU kernel, in blocks that fit; it has no scale, which q is multiplied with."""
    _refuse(shape, "attention_mgpu", "softcap", "sinks")
    if shape.window != (None, None) or shape.head_dim != shape.value_dim:
        raise Unavailable("attention_mgpu has no window and no value size of its own")
    if given.cotangent.dtype != jnp.float16:
        raise Unavailable("attention_mgpu keeps its tiles in float16, and takes no other arrays")
    if mode != "fwd" and (shape.causal or mode == "jvp"):
        raise Unavailable("attention_mgpu has a gradient without causality alone")
    try:
        from jax.experimental.pallas.ops.gpu import attention_mgpu
    except ImportError as error:
        raise Unavailable(f"attention_mgpu cannot be imported: {error}") from error
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
    return lambda q, k, v: attention_mgpu.attention(scaled(q), k, v, config)


def _torch(shape: AttentionShape, mode: str, given: Inputs, backend: str) -> Prepared:
    _refuse(shape, "torch SDPA", "softcap", "sinks")
    if shape.window != (None, None):
        raise Unavailable("torch SDPA has no window")
    if mode == "jvp":
        raise Unavailable("torch SDPA has no forward mode")
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError as error:
        raise Unavailable(f"torch cannot be imported: {error}") from error
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise Unavailable("this torch sees no GPU")
    if not on_gpu and backend.startswith("CUDNN"):
        raise Unavailable("cuDNN needs an NVIDIA GPU")
    x = [_turned(torch.from_dlpack(x)).requires_grad_(mode != "fwd") for x in given.operands]
    do = _turned(torch.from_dlpack(given.cotangent))

    def forward():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                *x, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

    def fwd_bwd():
        o = forward()
        return (o, *torch.autograd.grad(o, x, do))

    saved = forward() if mode == "bwd" else None
    once = {
        "fwd": lambda: (forward(),),
        "bwd": lambda: torch.autograd.grad(saved, x, do, retain_graph=True),
        "fwd_bwd": fwd_bwd,
    }[mode]

    return Prepared([_turned(x) for x in once()], _torch_batch(once))


def _jvp_flash_attention(shape: AttentionShape, mode: str, given: Inputs) -> Prepared:
    """In the layout that it wants, [b,h,s,d] without gaps: what it takes to come there is not counted."""
    _refuse(shape, "jvp_flash_attention", "softcap", "sinks")
    if mode != "jvp":
        raise Unavailable("jvp_flash_attention is here for its forward mode")
    if shape.window != (None, None) or shape.heads != shape.kv_heads or shape.head_dim != shape.value_dim:
        raise Unavailable("jvp_flash_attention has no window, no shared heads and no value size of its own")
    try:
        import torch
        from jvp_flash_attention.jvp_attention import JVPAttn
    except ImportError as error:
        raise Unavailable(f"jvp_flash_attention cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise Unavailable("jvp_flash_attention needs a GPU that torch sees")
    x = [_turned(torch.from_dlpack(x)).contiguous() for x in (*given.operands, *given.tangents)]

    def once():
        out = JVPAttn.forward(*x, causal=shape.causal)
        return out[0], out[1][0]

    return Prepared([_turned(x) for x in once()], _torch_batch(once))


def _published(shape: AttentionShape, mode: str, given: Inputs) -> Prepared:
    """The release on PyPI has the package name of this library: it runs in a process of its own (see _release.py)."""
    _refuse(shape, "the release on PyPI, as it is called here,", "softcap", "sinks")
    if mode != "fwd" or shape.head_dim != shape.value_dim or given.cotangent.dtype != jnp.bfloat16:
        raise Unavailable("the release on PyPI is here for its forward in bfloat16, with values as wide as keys")
    window = None if shape.window == (None, None) else _bounded(shape)
    ask = partial(asked, "_release.py", "EJKERNEL_RELEASE")
    with tempfile.TemporaryDirectory() as folder:
        for name, x in zip("qkv", given.operands, strict=True):
            np.save(f"{folder}/{name}.npy", np.asarray(x).view(np.uint16))
        request = {"folder": folder, "causal": shape.causal, "window": window}
        config = ask(request | {"calls": 0})["config"]
        o = np.load(f"{folder}/o.npy").view(jnp.bfloat16)
    return Prepared((o,), batch_elsewhere(ask, request), config)


def _turned(x: Any) -> Any:
    """[b,s,h,d] to [b,h,s,d], and back."""
    return x.transpose(1, 2)


def _torch_batch(once: Callable[[], Any]) -> Batch:
    import torch

    def batch(calls: int) -> None:
        for _ in range(calls):
            once()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return batch


def _bounded(shape: AttentionShape) -> tuple[int, int]:
    """The window without None: both rivals want numbers."""
    left, right = (shape.seq_k if bound is None else bound for bound in shape.window)
    return left, right


def _refuse(shape: AttentionShape, rival: str, *missing: str) -> None:
    for option in missing:
        if getattr(shape, option):
            raise Unavailable(f"{rival} has no {option}")
