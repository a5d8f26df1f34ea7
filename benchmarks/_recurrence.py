"""Shared by benchmarks of linear recurrences: inputs, the formula as referee, and the rivals.

flash-linear-attention autotunes at its first call.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel import modules
from ejkernel.modules._operation import OPERATIONS
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.types.shapes._recurrence import RecurrenceShape

from . import _referee
from ._contenders import Inputs, arrays_of, call, imported, normal, of_ours, of_torch, torch_on_gpu
from ._driver import Case
from ._harness import Check, Contender
from ._versions import of_earlier

# The largest error of ours, in units of that of the formula in float32, rounded.
_OURS = 3.0
_FLA_MODULES = {"gla": "gla", "lightning_attention": "simple_gla", "recurrent": "retention"}
"""The module of fla.ops by operation. Retention has its own decays."""


def case(shape: RecurrenceShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One layer in one mode."""
    given = inputs(shape, mode, dtype)
    return Case(contenders(shape, mode, given, platforms), cache(partial(check, shape, mode, given)), _OURS)


def names(shape: RecurrenceShape) -> tuple[str, ...]:
    """The names of the operands; a step also has the state."""
    return (*shape.sizes, *["initial_state"] * (shape.seq == 1))


@lru_cache(maxsize=1)
def inputs(shape: RecurrenceShape, mode: str, dtype: Any) -> Inputs:
    """Standard normal arrays; gates are log σ of standard normal numbers."""
    arrays = arrays_of(shape, dtype)
    if "gk" in arrays:
        arrays["gk"] = jax.nn.log_sigmoid(arrays["gk"].astype(jnp.float32)).astype(dtype)
    keys = jax.random.split(jax.random.key(1))
    if mode == "step":
        state = (shape.batch, shape.heads, shape.key_dim, shape.value_dim)
        arrays["initial_state"] = normal(keys[0], state, jnp.float32)
    return Inputs(tuple(arrays.values()), normal(keys[1], shape.sizes["v"], dtype), carried=mode == "step")


def decays(shape: RecurrenceShape) -> Array | None:
    """g_gamma of the heads; None if tokens have gates."""
    head = jnp.arange(shape.heads, dtype=jnp.float32)
    if shape.operation == "recurrent":
        return jnp.log1p(-jnp.exp2(-5 - head))
    if shape.operation == "lightning_attention":
        return -8 / shape.heads * (1 - shape.options["layer_idx"] / shape.options["num_layers"]) * head
    return None


def options(shape: RecurrenceShape, mode: str) -> dict[str, Any]:
    """The options of the operation, with the decays that it does not compute itself."""
    chosen = dict(shape.options, return_state=mode == "step")
    return chosen | ({"g_gamma": decays(shape)} if shape.operation == "recurrent" else {})


def check(shape: RecurrenceShape, mode: str, given: Inputs) -> Check:
    """Judges a call at its full length, in the first sequence and the last head.

    The unit of an error is that of the same in float32, rounded; it is computed in chunks.
    """
    chunks = RecurrenceConfig(64, subchunk_size=16 if shape.operation == "gla" else 64, platform="xla")
    last = {} if (of_heads := decays(shape)) is None else {"g_gamma": np.asarray(of_heads[-1:], np.float64)}
    chosen = {**options(shape, mode), **last}
    f = lambda *x: OPERATIONS[shape.operation].call(**dict(zip(names(shape), x, strict=True)), **chosen, config=chunks)
    state = (shape.heads, shape.key_dim, shape.value_dim)
    is_state = lambda x: shape.seq == 1 and tuple(x.shape[1:]) == state
    part = lambda x: x[:1, -1:] if is_state(x) else x[:1, :, -1:]

    def exact(dtype: Any) -> Sequence[Array]:
        with jax.default_device(jax.devices("cpu")[0]):
            *x, do = (jnp.asarray(np.asarray(part(x)), dtype) for x in (*given.operands, given.cotangent))
            return jax.jit(call(f, mode))(tuple(x), (), do)

    return _referee.check_by_rounding(lambda results: list(map(part, results)), exact, given.cotangent.dtype)


def contenders(shape: RecurrenceShape, mode: str, given: Inputs, platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then flash-linear-attention's kernels."""
    renamed = OPERATIONS[shape.operation].renamed

    def ours(platform: str | None) -> Callable[..., Any]:
        called = [renamed.get(name, name) for name in names(shape)]
        chosen = dict(options(shape, mode), platform=platform)
        return lambda *x: getattr(modules, shape.operation)(**dict(zip(called, x, strict=True)), **chosen)

    theirs = [of_torch(rival, partial(_fla, shape, mode, rival), mode, given) for rival in shape.rivals[:-1]]
    chosen = options(shape, mode)
    others = {name: chosen.pop(name) for name in ("g_gamma",) if name in chosen}
    earlier = of_earlier(shape.operation, names(shape), chosen, mode, replace(given, others=others))
    return [*of_ours(shape.operation, platforms, ours, mode, given), *theirs, earlier]


def _fla(shape: RecurrenceShape, mode: str, rival: str) -> Callable[..., Any]:
    torch, module, name = torch_on_gpu(), _FLA_MODULES[shape.operation], rival.removeprefix("fla ")
    function = getattr(imported(f"fla.ops.{module}"), name)
    called = [{"gk": "g"}.get(n, n) if name == "chunk_gla" else n for n in names(shape)]
    chosen = {"g_gamma": torch.from_dlpack(decays(shape))} if module == "simple_gla" else {}

    def forward(*x: Any) -> Any:
        results = function(**dict(zip(called, x, strict=True)), **chosen, output_final_state=mode == "step")
        return results if mode == "step" else results[0]

    return forward
