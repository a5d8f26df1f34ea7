"""Contenders in JAX and in torch, on the same arrays, in every mode."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.cli._equations import equations

from ._harness import Contender, Prepared, Unavailable, carrying, queued

Function = Callable[..., Any]


@dataclass(frozen=True)
class Inputs:
    """The arrays of one call.

    Attributes:
        operands: the differentiated operands, which are passed by position.
        cotangent: the cotangent of the result.
        tangents: the tangents of the operands, for jvp.
        others: arrays without derivatives by name, which are passed as keywords.
        carried: whether the last result is the last operand of the next call, and may be in its place.
    """

    operands: tuple[Array, ...]
    cotangent: Array | None = None
    tangents: tuple[Array, ...] = ()
    others: Mapping[str, Array] = field(default_factory=dict)
    carried: bool = False


def arrays_of(shape: Any, dtype: Any, seed: int = 0) -> dict[str, Array]:
    """The arrays of a call by name: standard normal, except those with values in `shape.indices`."""
    indices, keys = shape.indices(), iter(jax.random.split(jax.random.key(seed), len(shape.sizes)))

    def values(name: str, size: tuple[int, ...]) -> Array:
        key = next(keys)
        return jnp.asarray(indices[name]) if name in indices else normal(key, size, shape.dtypes.get(name, dtype))

    return {name: values(name, size) for name, size in shape.sizes.items()}


def normal(key: Array, size: Sequence[int], dtype: Any) -> Array:
    """Standard normal numbers, sampled in float32."""
    return jax.random.normal(key, size, jnp.float32).astype(dtype)


def call(function: Function, mode: str) -> Callable[..., tuple]:
    """A function of (operands, tangents, cotangent) that gives the results of `function(*operands)` in a mode."""

    def bwd(x: tuple, dx: tuple, do: Array) -> tuple:
        return jax.vjp(function, *x)[1](do)

    def fwd_bwd(x: tuple, dx: tuple, do: Array) -> tuple:
        o, pull = jax.vjp(function, *x)
        return (o, *pull(do))

    return {
        "fwd": lambda x, dx, do: (function(*x),),
        "step": lambda x, dx, do: tuple(function(*x)),
        "bwd": bwd,
        "fwd_bwd": fwd_bwd,
        "jvp": lambda x, dx, do: jax.jvp(function, x, dx),
    }[mode]


def of_jax(
    name: str, function: Callable[[], Function], mode: str, given: Inputs, operation: str = "", ours: bool = False
) -> Contender:
    """The contender `function()(*operands, **others)` in a mode; configs of `operation` are recorded.

    Compiling the backward alone runs the forward, so that it is not done for several contenders at once.
    """
    made = cache(lambda: _compiled(*_program(function(), mode, given), operation))

    def prepare() -> Prepared:
        program, arguments, detail = made()
        if given.carried:
            results = program(*_copied(arguments))
            return Prepared(_copied(results), carrying(program, results[-1], *arguments[1:]), detail)
        return Prepared(jax.block_until_ready(program(*arguments)), queued(program, *arguments), detail)

    return Contender(name, prepare, ours, warm=made if mode != "bwd" else Contender.warm)


def of_ours(
    operation: str, platforms: Sequence[str], function: Callable[[str | None], Function], mode: str, given: Inputs
) -> list[Contender]:
    """`function(platform)` on each of the platforms, None for "auto", the choice of the library."""

    def contender(platform: str) -> Contender:
        chosen = None if platform == "auto" else platform
        return of_jax(f"ejkernel {platform}", lambda: function(chosen), mode, given, operation, ours=True)

    return list(map(contender, platforms))


def _program(function: Function, mode: str, given: Inputs) -> tuple[Function, tuple]:
    """The jitted call and its arguments; the backward alone takes the residuals of a forward that ran before.

    All arrays are arguments: the compiler could fold computations with constants.
    """
    x, others = given.operands, dict(given.others)
    with_others = lambda others: lambda *x: function(*x, **others)
    if given.carried:
        run = lambda state, x, others: call(with_others(others), mode)((*x, state), (), None)
        return jax.jit(run, donate_argnums=0), (x[-1], x[:-1], others)
    if mode == "bwd":
        pull = jax.jit(lambda x, others: jax.vjp(with_others(others), *x)[1])(x, others)
        return jax.jit(lambda pull, do: pull(do)), (pull, given.cotangent)
    run = jax.jit(lambda x, dx, do, others: call(with_others(others), mode)(x, dx, do))
    return run, (x, given.tangents, given.cotangent, others)


def _copied(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def _compiled(function: Function, arguments: tuple, operation: str) -> tuple[Function, tuple, str]:
    """The call as a program, its arguments, and the configs of ours in it."""
    traced = function.trace(*arguments)
    ran = equations(traced.jaxpr, operation) if operation else []
    detail = "; ".join(f"{equation.primitive.name}: {equation.params['config']}" for equation in ran)
    return traced.lower().compile(), arguments, detail


def of_torch(name: str, function: Callable[[], Function], mode: str, given: Inputs) -> Contender:
    """The contender `function()(*operands)` of torch in a mode, on the memory of the JAX arrays."""
    return Contender(name, lambda: _torch(function(), mode, given))


def _torch(function: Function, mode: str, given: Inputs) -> Prepared:
    torch = torch_on_gpu()
    if mode == "jvp":
        raise Unavailable("it has no forward mode")
    x = [torch.from_dlpack(x).requires_grad_(mode in ("bwd", "fwd_bwd")) for x in given.operands]
    do = None if given.cotangent is None else torch.from_dlpack(given.cotangent)

    def fwd_bwd() -> tuple:
        o = function(*x)
        return (o, *torch.autograd.grad(o, x, do))

    saved = function(*x) if mode == "bwd" else None
    once = {
        "fwd": lambda: (function(*x),),
        "step": lambda: tuple(function(*x)),
        "bwd": lambda: torch.autograd.grad(saved, x, do, retain_graph=True),
        "fwd_bwd": fwd_bwd,
    }[mode]
    once()  # tries configs, where a rival does, some of which add to what those before them have left
    return Prepared(once(), torch_batch(once))


def torch_batch(once: Callable[[], Any]) -> Callable[[int], None]:
    """A batch: queues calls of torch and waits once."""
    import torch

    def batch(calls: int) -> None:
        for _ in range(calls):
            once()
        torch.cuda.synchronize()

    return batch


def torch_on_gpu() -> Any:
    """The module torch; raises `Unavailable` without a GPU."""
    torch = imported("torch")
    if jax.default_backend() != "gpu" or not torch.cuda.is_available():
        raise Unavailable("torch and JAX do not share a GPU here")
    return torch


def imported(name: str) -> Any:
    """A module; raises `Unavailable` if it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from error
