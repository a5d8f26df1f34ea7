"""What benchmarks of the linear recurrence share: the work of a call, the formula as referee, inputs, and the rivals.

FLOPs of the forward: 4·B·S·H·K·V, the state written once and read once at each token; forward and backward 3.5 times
that (the state again, its cotangent, and the gradients of q, k and v). What a contender computes beyond it is its own.
A step, one token from a state to the next, has no such work: its bytes count, the state read once and written once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, Prepared, Unavailable, queued
from _process import earlier
from jax import Array

from ejkernel import modules
from ejkernel.cli._equations import equations
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types import KernelConfig, RecurrenceShape

WORK = {"fwd": 1.0, "fwd_bwd": 3.5}
CONVENTION = "forward 4·B·S·H·K·V FLOPs; fwd_bwd 3.5 ×; step: 8·B·H·K·V bytes, of the bandwidth of a copy"


def modes(shape: RecurrenceShape) -> tuple[str, ...]:
    """How a shape is measured: a single token is a step of decoding."""
    return ("step",) if shape.seq == 1 else tuple(WORK)


def work(shape: RecurrenceShape, mode: str) -> float:
    """FLOPs of a call, or bytes of a step, by the convention above."""
    state = shape.batch * shape.heads * shape.key_dim * shape.value_dim
    return 8 * state if mode == "step" else WORK[mode] * 4 * state * shape.seq


@dataclass(frozen=True)
class Inputs:
    """Random arrays of one case: q, k, v, the gate and the state by name, and the cotangent of o."""

    operands: dict[str, Array]
    cotangent: Array


def inputs(shape: RecurrenceShape, mode: str, dtype: Any) -> Inputs:
    """Standard normal arrays; gates are log σ of such."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda size: jax.random.normal(next(keys), size, jnp.float32)
    arrays = {name: normal(size) for name, size in shape.sizes.items()}
    if "gk" in arrays:
        arrays["gk"] = jax.nn.log_sigmoid(arrays["gk"])
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    cotangent = normal((*shape.sizes["q"][:3], shape.value_dim)).astype(dtype)
    if mode == "step":
        arrays["initial_state"] = normal((shape.batch, shape.heads, shape.key_dim, shape.value_dim))
    return Inputs(arrays, cotangent)


def call(f: Callable[..., Any], mode: str) -> Callable[..., list]:
    """From f(operands) to a function of (operands, cotangent): the results of a mode, gradients by their names."""

    def fwd_bwd(x, do):
        o, pull = jax.vjp(f, x)
        gradients = pull(do)[0]
        return [o, *(gradients[name] for name in sorted(x))]

    return {"fwd": lambda x, do: [f(x)], "fwd_bwd": fwd_bwd, "step": lambda x, do: list(f(x))}[mode]


def decays(shape: RecurrenceShape) -> Array | None:
    """g_gamma of the heads, None where tokens have gates."""
    head = jnp.arange(shape.heads, dtype=jnp.float32)
    if shape.operation == "recurrent":
        return jnp.log1p(-jnp.exp2(-5 - head))
    if shape.operation == "lightning_attention":
        return -8 / shape.heads * (1 - shape.options["layer_idx"] / shape.options["num_layers"]) * head
    return None


def options(shape: RecurrenceShape, mode: str) -> dict[str, Any]:
    """Those of the operation, with decays that it does not compute itself."""
    chosen = dict(shape.options, return_state=mode == "step")
    return chosen | ({"g_gamma": decays(shape)} if shape.operation == "recurrent" else {})


# --- The referee


def gate(shape: RecurrenceShape, mode: str, given: Inputs) -> Callable[[Sequence[Any]], float]:
    """Judges a call at its full length, in the first sequence and the last head.

    The error of a result is its relative distance to the formula in float64, computed in chunks; the unit, that of the
    exact result rounded to the dtype of the inputs; the worst of all results counts.
    """
    chunks = KernelConfig(64, 16 if shape.operation == "gla" else 64, platform="xla")
    last = {} if (of_heads := decays(shape)) is None else {"g_gamma": np.asarray(of_heads[-1:], np.float64)}

    def f(x):
        return OPERATIONS[shape.operation].call(**x, **{**options(shape, mode), **last}, config=chunks)

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        operands = {n: _part(x, n == "initial_state") for n, x in given.operands.items()}
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (operands, _part(given.cotangent)))
        exact = [np.asarray(x) for x in jax.jit(call(f, mode))(*wide)]
    units = [_distance(np.asarray(jnp.asarray(x, given.cotangent.dtype), np.float64), x) for x in exact]

    def error(results: Sequence[Any]) -> float:
        parts = [_part(x, mode == "step" and i == 1) for i, x in enumerate(results)]
        found = [_distance(x, y) for x, y in zip(parts, exact, strict=True)]
        return float(np.max(np.divide(found, units)))  # NaN where one is

    return error


def _part(x: Any, is_state: bool = False) -> np.ndarray:
    """The first sequence and last head of an array of JAX or of torch, as float64 numbers of the host."""
    x = x[:1, -1:] if is_state else x[:1, :, -1:]
    return x.detach().double().cpu().numpy() if hasattr(x, "detach") else np.asarray(x).astype(np.float64)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


# --- The contenders


def contenders(shape: RecurrenceShape, mode: str, given: Inputs, platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then flash-linear-attention's kernels."""
    theirs = RIVALS[shape.operation, "step" if mode == "step" else "chunks"]
    return [
        *(_ours(shape, mode, given, name) for name in platforms),
        *(Contender(f"fla {name}", partial(_fla, shape, mode, given, module, name)) for module, name in theirs),
        earlier("_recurrence", shape, mode, given.cotangent.dtype),
    ]


def of_fields(fields: dict[str, Any], mode: str, dtype: str) -> Prepared:
    """Our call of the layer with these fields."""
    shape = RecurrenceShape(**fields)
    return _ours(shape, mode, inputs(shape, mode, jnp.dtype(dtype)), "auto").prepare()


def _ours(shape: RecurrenceShape, mode: str, given: Inputs, platform: str) -> Contender:
    function = getattr(modules, shape.operation)
    renamed = OPERATIONS[shape.operation].renamed
    chosen = dict(options(shape, mode), platform=None if platform == "auto" else platform)
    f = lambda x: function(**{renamed.get(name, name): a for name, a in x.items()}, **chosen)
    run, arguments = jax.jit(call(f, mode)), (given.operands, given.cotangent)

    def prepare() -> Prepared:
        ran = equations(run.trace(*arguments).jaxpr, shape.operation)
        detail = "; ".join(f"{equation.primitive.name}: {equation.params['config']}" for equation in ran)
        return Prepared(jax.block_until_ready(run(*arguments)), queued(run, *arguments), detail)

    return Contender(f"ejkernel {platform}", prepare, ours=True, warm=prepare)


RIVALS = {
    ("gla", "chunks"): [("gla", "chunk_gla")],
    ("gla", "step"): [("gla", "fused_recurrent_gla")],
    ("lightning_attention", "chunks"): [("simple_gla", "chunk_simple_gla")],
    ("lightning_attention", "step"): [("simple_gla", "fused_recurrent_simple_gla")],
    ("recurrent", "chunks"): [("retention", "chunk_retention")],
    ("recurrent", "step"): [("retention", "fused_recurrent_retention")],
}
"""Of an operation: modules of fla.ops and their functions. Retention brings its decays with it."""


def _fla(shape: RecurrenceShape, mode: str, given: Inputs, module: str, name: str) -> Prepared:
    if jax.default_backend() != "gpu":
        raise Unavailable("flash-linear-attention needs a GPU")
    try:
        import torch

        function = getattr(__import__(f"fla.ops.{module}", fromlist=[name]), name)
    except ImportError as error:
        raise Unavailable(f"flash-linear-attention cannot be imported: {error}") from error
    if not torch.cuda.is_available():
        raise Unavailable("this torch sees no GPU")
    x = {name: torch.from_dlpack(a).requires_grad_(mode == "fwd_bwd") for name, a in given.operands.items()}
    called = {"gk": "g"} if name == "chunk_gla" else {}
    operands = {called.get(name, name): a for name, a in x.items()}
    do = torch.from_dlpack(given.cotangent)
    chosen = {"g_gamma": torch.from_dlpack(decays(shape))} if module == "simple_gla" else {}
    forward = lambda: function(**operands, **chosen, output_final_state=mode == "step")

    def fwd_bwd():
        o = forward()[0]
        return [o, *torch.autograd.grad(o, [x[name] for name in sorted(given.operands)], do)]

    once = {"fwd": lambda: [forward()[0]], "fwd_bwd": fwd_bwd, "step": lambda: list(forward())}[mode]

    def batch(calls: int) -> None:
        for _ in range(calls):
            once()
        torch.cuda.synchronize()

    once()  # tries configs, some of which add to what those before them have left
    return Prepared(once(), batch)
