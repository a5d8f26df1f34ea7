"""What benchmarks of the linear recurrence share: the work of a call, the formula as referee, inputs, and the rivals.

FLOPs of the forward: 4·B·S·H·K·V, the state written once and read once at each token; forward and backward 3.5 times
that (the state again, its cotangent, and the gradients of q, k and v). What a contender computes beyond it is its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, Prepared, Unavailable, queued
from jax import Array

from ejkernel import modules
from ejkernel.cli._equations import equations
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import KernelConfig, RecurrenceShape

WORK = {"fwd": 1.0, "fwd_bwd": 3.5}
CONVENTION = "forward 4·B·S·H·K·V; fwd_bwd 3.5 ×"


def operations(shape: RecurrenceShape, mode: str) -> float:
    """FLOPs of a call by the convention above."""
    return WORK[mode] * 4 * shape.batch * shape.seq * shape.heads * shape.key_dim * shape.value_dim


@dataclass(frozen=True)
class Inputs:
    """Random arrays of one case: q, k, v and the gate by name, and the cotangent of o."""

    operands: dict[str, Array]
    cotangent: Array


def inputs(shape: RecurrenceShape, dtype: Any) -> Inputs:
    """Standard normal arrays; gates are log σ of such."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda size: jax.random.normal(next(keys), size, jnp.float32)
    arrays = {name: normal(size) for name, size in shape.sizes.items()}
    if "gk" in arrays:
        arrays["gk"] = jax.nn.log_sigmoid(arrays["gk"])
    cotangent = normal((*shape.sizes["q"][:3], shape.value_dim)).astype(dtype)
    return Inputs({name: x.astype(dtype) for name, x in arrays.items()}, cotangent)


def call(f: Callable[..., Array], mode: str) -> Callable[..., list]:
    """From f(operands) to a function of (operands, cotangent): the results of a mode."""

    def fwd_bwd(x, do):
        o, pull = jax.vjp(f, x)
        return [o, *pull(do)[0].values()]

    return {"fwd": lambda x, do: [f(x)], "fwd_bwd": fwd_bwd}[mode]


# --- The referee


def gate(shape: RecurrenceShape, mode: str, given: Inputs) -> Callable[[Sequence[Any]], float]:
    """Judges a call at its full length, in the first sequence and the last head.

    The error of a result is its relative distance to the formula in float64, computed in chunks; the unit, that of the
    exact result rounded to the dtype of the inputs; the worst of all results counts.
    """
    part = lambda x: np.asarray(x[:1, :, -1:])
    chunks = KernelConfig(64, 16 if shape.operation == "gla" else 64, platform="xla")

    def f(x):
        options = {**shape.options, **_decays_of_the_last_head(shape)}
        return OPERATIONS[shape.operation].call(**x, **options, config=chunks)

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0] if jax.default_backend() == "tpu" else None):
        wide = jax.tree.map(lambda x: jnp.asarray(part(x), jnp.float64), (given.operands, given.cotangent))
        exact = [np.asarray(x) for x in jax.jit(call(f, mode))(*wide)]
    units = [_distance(np.asarray(jnp.asarray(x, given.cotangent.dtype), np.float64), x) for x in exact]

    def error(results: Sequence[Any]) -> float:
        found = [_distance(_numbers(x[:1, :, -1:]), y) for x, y in zip(results, exact, strict=True)]
        return float(np.max(np.divide(found, units)))  # NaN where one is

    return error


def _decays_of_the_last_head(shape: RecurrenceShape) -> dict[str, Array]:
    return {} if shape.operation != "lightning_attention" else {"g_gamma": slopes(shape)[-1:]}


def slopes(shape: RecurrenceShape) -> Array:
    """g_gamma of the layer of the shape."""
    return -8 / shape.heads * (1 - shape.options["layer_idx"] / shape.options["num_layers"]) * jnp.arange(shape.heads)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def _numbers(x: Any) -> np.ndarray:
    """An array of JAX or of torch as float64 numbers of the host."""
    return x.detach().double().cpu().numpy() if hasattr(x, "detach") else np.asarray(x).astype(np.float64)


# --- The contenders


def contenders(shape: RecurrenceShape, mode: str, given: Inputs, platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then flash-linear-attention's kernel."""
    ours = lambda platform: lambda: _ours(shape, mode, given, platform)
    rival = Contender("flash-linear-attention", lambda: _fla(shape, mode, given))
    return [*(Contender(f"ejkernel {name}", ours(name), ours=True) for name in platforms), rival]


def _ours(shape: RecurrenceShape, mode: str, given: Inputs, platform: str) -> Prepared:
    face = getattr(modules, shape.operation)
    renamed = OPERATIONS[shape.operation].renamed
    options = dict(shape.options, platform=None if platform == "auto" else platform)
    f = lambda x: face(**{renamed.get(name, name): a for name, a in x.items()}, **options)
    function, arguments = jax.jit(call(f, mode)), (given.operands, given.cotangent)
    ran = equations(function.trace(*arguments).jaxpr, shape.operation)
    detail = "; ".join(f"{equation.primitive.name}: {equation.params['config']}" for equation in ran)
    return Prepared(jax.block_until_ready(function(*arguments)), queued(function, *arguments), detail)


def _fla(shape: RecurrenceShape, mode: str, given: Inputs) -> Prepared:
    if jax.default_backend() != "gpu":
        raise Unavailable("flash-linear-attention needs a GPU")
    try:
        import torch
        from fla.ops.gla import chunk_gla
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        raise Unavailable(f"flash-linear-attention cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise Unavailable("this torch sees no GPU")
    x = {name: torch.from_dlpack(a).requires_grad_(mode != "fwd") for name, a in given.operands.items()}
    do = torch.from_dlpack(given.cotangent)
    if shape.operation == "gla":
        forward = lambda: chunk_gla(*x.values())[0]
    else:
        decays = torch.from_dlpack(slopes(shape))
        forward = lambda: chunk_simple_gla(*x.values(), g_gamma=decays)[0]

    def fwd_bwd():
        o = forward()
        return [o, *torch.autograd.grad(o, list(x.values()), do)]

    once = {"fwd": lambda: [forward()], "fwd_bwd": fwd_bwd}[mode]

    def batch(calls: int) -> None:
        for _ in range(calls):
            once()
        torch.cuda.synchronize()

    return Prepared(once(), batch)
