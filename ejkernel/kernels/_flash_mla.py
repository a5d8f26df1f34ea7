"""flash_mla by flash_attention, on every platform: latents are expanded to the keys and values of all heads.

With c_j the latent of position j, r_j its rotary part, and the projections W of keys and U of values of a head h:

    k_jh = [c_j W_h, r_j]                                   v_jh = c_j U_h

The tangents of both follow by the product rule, and are given to the tangent of flash_attention:

    k̇_jh = [ċ_j W_h + c_j Ẇ_h, ṙ_j]                         v̇_jh = ċ_j U_h + c_j U̇_h

Its backward gives dk and dv, with dk = [dn, dr] as k is divided; sums over heads and positions remain,

    dc_j = Σ_h (dn_jh W_hᵀ + dv_jh U_hᵀ)                    dr_j = Σ_h dr_jh
    dW_h = Σ_j c_jᵀ dn_jh                                   dU_h = Σ_j c_jᵀ dv_jh

which are summed in float32 and rounded once, at the end. A position that no query sees has dn = dv = 0, but its latent
may be NaN, and so would be their product: tangent and backward replace such a latent by 0.

Where keys and values of all heads would take more than MOST_BYTES, they are expanded for one group of heads after the
other: memory grows with the latents then, and not with the heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.export import is_symbolic_dim

from ejkernel.primitives import flash_attention as algorithm
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

from ._head_groups import groups_of, in_groups
from ._latents import onto_latents, onto_projection, projected, statistics_dtype, with_rope
from ._registry import configured_by, emits, kernel_registry, supported_if
from ._target import gpu_target
from ._visibility import visibility_of

SUFFIXES = ("", "_jvp", "_bwd")
# Of the keys and values that are expanded at once.
MOST_BYTES = 1 << 31


class Kernels(NamedTuple):
    """flash_attention on a platform.

    Attributes:
        forward: (*operands, spec, config) → outputs.
        tangent: (primals, outputs, tangents, spec, config) → the tangents of the outputs.
        backward: (primals, outputs, cotangents, wrt, spec, config) → the cotangents of the operands that wrt names.
        space: (name, operands, spec, target) → the configs that may be best, the likeliest first.
        takes_rope: (operands of flash_mla, spec) → whether the forward takes the rotary parts of keys as `k_rope`.
    """

    forward: Callable[..., Outputs]
    tangent: Callable[..., Outputs]
    backward: Callable[..., tuple[Array, ...]]
    space: Callable[..., list[KernelConfig]]
    takes_rope: Callable[..., bool] = lambda x, spec: False


# --- The three implementations ----------------------------------------------------------------------------------------


def forward(
    attend: Callable[..., Outputs], x: Operands, spec: FlashAttentionSpec, config: KernelConfig, rope: bool = False
) -> Outputs:
    """o and lse, where `attend` is the forward of flash_attention, with `rope` one that takes the rotary parts."""

    def of_heads(x):
        x = Operands(**x)
        operands, apart = (_expanded(x), dict(k_rope=x.k_rope)) if rope else (expanded(x), {})
        return attend(*operands, spec=spec, config=config, **apart)._asdict()

    return Outputs(**in_groups(of_heads, x.q.shape[2], _groups(x), x._asdict()))


def tangent(
    attend: Callable[..., Outputs],
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    spec: FlashAttentionSpec,
    config: KernelConfig,
    again: Callable[..., Outputs] | None = None,
) -> Outputs:
    """The tangents of o and lse, where `attend` is the tangent of flash_attention; a tangent of None is zero.

    With `again`, a forward of flash_attention, o and lse are computed again, by the keys and values expanded here.
    """
    visible = _visible(primals, spec)
    primals, tangents = _without_hidden(primals, visible), _without_hidden(tangents, visible)

    def of_heads(primals, outputs, tangents):
        primals, outputs, tangents = Operands(**primals), Outputs(**outputs), Operands(**tangents)
        operands = expanded(primals)
        outputs = outputs if again is None else again(*operands, spec=spec)
        return attend(operands, outputs, _expanded_tangent(primals, tangents), spec=spec, config=config)._asdict()

    given = (x._asdict() for x in (primals, outputs, tangents))
    return Outputs(**in_groups(of_heads, primals.q.shape[2], _groups(primals), *given))


def backward(
    attend: Callable[..., tuple[Array, ...]],
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
    again: Callable[..., Outputs] | None = None,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt, where `attend` is the backward of flash_attention.

    With `again`, a forward of flash_attention, o and lse are computed again, by the keys and values expanded here.
    """
    primals = _without_hidden(primals, _visible(primals, spec))

    def of_heads(primals, outputs, cotangents):
        x, outputs, cotangents = Operands(**primals), Outputs(**outputs), Outputs(**cotangents)
        return _cotangents(attend, x, outputs, cotangents, wrt, spec, config, again)

    given = (x._asdict() for x in (primals, outputs, cotangents))
    found = in_groups(of_heads, primals.q.shape[2], _groups(primals), *given)
    return tuple(found[name].astype(getattr(primals, name).dtype) for name in wrt)


def _cotangents(attend, primals, outputs, cotangents, wrt, spec, config, again) -> dict[str, Array]:
    """As `backward`, of operands all of whose heads are expanded at once; sums over heads are in float32."""
    made_of = {"k": ("kv_latent", "k_rope", "w_kc"), "v": ("kv_latent", "w_vc")}
    asked = [name for name, of in made_of.items() if not set(of).isdisjoint(wrt)]
    asked = (*asked, *(name for name in wrt if name in algorithm.Operands._fields))
    operands = expanded(primals)
    outputs = outputs if again is None else again(*operands, spec=spec)
    gradients = attend(operands, outputs, cotangents, wrt=asked, spec=spec, config=config)
    found, features = dict(zip(asked, gradients, strict=True)), primals.w_kc.shape[3]
    latent, w_kc, w_vc = primals.kv_latent, primals.w_kc, primals.w_vc
    parts = {
        "kv_latent": lambda: onto_latents(found["k"][..., :features], w_kc) + onto_latents(found["v"], w_vc),
        "k_rope": lambda: found["k"][..., features:].sum(2, dtype=statistics_dtype(latent)),
        "w_kc": lambda: onto_projection(latent, found["k"][..., :features], w_kc),
        "w_vc": lambda: onto_projection(latent, found["v"], w_vc),
    }
    return {name: parts[name]() if name in parts else found[name] for name in wrt}


def _groups(x: Operands) -> int:
    """How many groups of heads are expanded one after the other."""
    shapes = x.shapes(x.q.dtype)
    if any(map(is_symbolic_dim, (*shapes.k.shape, *shapes.v.shape))):
        return 1
    size = (shapes.k.size + shapes.v.size) * x.q.dtype.itemsize
    return groups_of(x.q.shape[2], size, MOST_BYTES)


def register(
    module: str,
    attention: Any,
    kernels: Callable[[], Kernels],
    platform: Platform,
    backend: Backend,
    priority: int,
    absorbs: Callable[..., bool] = lambda x, spec: False,
) -> None:
    """Registers flash_mla on a platform that has a package of `attention` kernels, which `kernels()` imports.

    `supports` and the configs are those of flash_attention for the expanded shapes. `absorbs(x, spec)` is whether the o
    and lse that tangent and backward are given may be of attention to the latents. In exp(s − lse) both have to be of
    the same keys, and the expanded ones are rounded: the forward of the expanded keys is then computed again.
    """

    def flash_mla(
        *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
    ) -> Outputs:
        """The results o and lse, by attention over the expanded keys and values."""
        x = Operands(*operands)
        check(flash_mla, x, config)
        of = kernels()
        return forward(of.forward, x, spec, config, of.takes_rope(x, spec))

    def flash_mla_jvp(
        primals: Operands,
        outputs: Outputs,
        tangents: Operands,
        *,
        spec: FlashAttentionSpec = FlashAttentionSpec(),
        config: KernelConfig = KernelConfig(),
    ) -> Outputs:
        """The tangents of o and lse; a tangent of None is zero."""
        check(flash_mla_jvp, primals, config)
        return tangent(kernels().tangent, primals, outputs, tangents, spec, config, again(primals, spec))

    def flash_mla_bwd(
        primals: Operands,
        outputs: Outputs,
        cotangents: Outputs,
        *,
        wrt: tuple[str, ...],
        spec: FlashAttentionSpec = FlashAttentionSpec(),
        config: KernelConfig = KernelConfig(),
    ) -> tuple[Array, ...]:
        """The cotangents of the operands that wrt names; a cotangent of None is zero."""
        check(flash_mla_bwd, primals, config)
        return backward(kernels().backward, primals, outputs, cotangents, wrt, spec, config, again(primals, spec))

    def again(x: Operands, spec: FlashAttentionSpec) -> Callable[..., Outputs] | None:
        if spec.split or not absorbs(x, spec):  # the lse given with a split is that of all keys
            return None
        return partial(kernels().forward, config=_space(kernels, "flash_attention", spec, x, gpu_target())[0])

    def check(implementation: Callable, x: Operands, config: KernelConfig) -> None:
        if wrong := implementation.excess(x, config):
            raise ValueError(f"{implementation.__name__} ({platform}): {wrong}")

    for implementation, suffix in zip((flash_mla, flash_mla_jvp, flash_mla_bwd), SUFFIXES, strict=True):
        name = "flash_attention" + suffix
        _present(implementation, module, getattr(attention, name), partial(_space, kernels, name))
        kernel_registry.register(implementation.__name__, platform, backend, priority)(implementation)


def _present(implementation: Callable, module: str, of: Callable, space: Callable) -> None:
    """Attaches `supports` and configs of `of`, flash_attention's implementation, for the expanded shapes."""
    implementation.__module__, implementation.__qualname__ = module, implementation.__name__
    implementation.excess = lambda x, config: of.excess(x.shapes(x.q.dtype), config)
    configured_by(lambda *call: space(*call)[0], space, of.variants, of.refuses)(implementation)
    implementation.repeats_if_asked = getattr(of, "repeats_if_asked", False)
    emits(*getattr(of, "custom_calls", ()))(implementation)

    def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
        if spec.batch_invariant:
            return "batch_invariant: the order of sums in the products with latents may depend on the batch size"
        return of.supports(spec, operands.shapes(operands.q.dtype), target)

    supported_if(supports)(implementation)


def _space(
    kernels: Callable[[], Kernels], name: str, spec: FlashAttentionSpec, operands: Operands, target: Target
) -> list[KernelConfig]:
    return kernels().space(name, operands.shapes(operands.q.dtype), spec, target)


# --- Keys and values --------------------------------------------------------------------------------------------------


def expanded(x: Operands) -> algorithm.Operands:
    """The operands of flash_attention: the keys [b,t,h,d] and the values [b,t,h,e] of every head.

    Tangent and backward expand them again, and their weights exp(s − lse) are right only if s equals that of the
    forward. So the products are between optimisation barriers: fused with surrounding operations, XLA might sum them in
    another order, which would round some keys differently.
    """
    operands = _expanded(x)
    return operands._replace(k=with_rope(operands.k, x.k_rope))


def _expanded(x: Operands) -> algorithm.Operands:
    """As `expanded`, but keys [b,t,h,x] without their rotary parts."""
    latent, w_kc, w_vc = lax.optimization_barrier((x.kv_latent, x.w_kc, x.w_vc))
    return x.attention(*lax.optimization_barrier(tuple(projected(latent, w, x.q.dtype) for w in (w_kc, w_vc))))


def _expanded_tangent(x: Operands, dx: Operands) -> algorithm.Operands:
    """The tangents of keys and values by the product rule; None for one whose inputs have no tangents."""

    def moved(w, dw):
        terms = [] if dx.kv_latent is None else [projected(dx.kv_latent, w)]
        terms += [] if dw is None else [projected(x.kv_latent, dw)]
        return sum(terms[1:], terms[0]) if terms else None

    dk, dv = moved(x.w_kc, dx.w_kc), moved(x.w_vc, dx.w_vc)
    if dk is not None or dx.k_rope is not None:
        (b, t, _), (h, features) = x.kv_latent.shape, x.w_kc.shape[2:]
        dk = jnp.zeros((b, t, h, features), statistics_dtype(x.q)) if dk is None else dk
        dk = with_rope(dk, jnp.zeros_like(x.k_rope) if dx.k_rope is None else dx.k_rope)
    return dx.attention(*(None if a is None else a.astype(x.q.dtype) for a in (dk, dv)))


# --- Positions that no query sees -------------------------------------------------------------------------------------


def _visible(x: Operands, spec: FlashAttentionSpec) -> Array | None:
    """Whether some query of some head sees a position, bool [b?,t,1]; None if all positions are visible."""
    visibility = visibility_of(x.shapes(x.q.dtype), spec)
    if x.mask is None and x.q_segment_ids is None and not visibility.masks_keys:
        return None
    return ~visibility.transposed().fully_masked().all(1)[..., None]


def _without_hidden(x: Operands, visible: Array | None) -> Operands:
    """The operands, or their tangents, with latents set to 0 at positions that no query sees."""
    if visible is None or x.kv_latent is None:
        return x
    return x._replace(kv_latent=jnp.where(visible, x.kv_latent, jnp.zeros((), x.kv_latent.dtype)))
