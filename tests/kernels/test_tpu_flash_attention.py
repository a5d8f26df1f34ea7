"""Numbers of the TPU kernels, in the interpreter that simulates the chip, finds races and fills fresh memory with NaN.

The contract: against float64, a kernel errs at most twice (gradients and tangents: three times) as much as the plain
formula in the kernel's own dtype. Keys that no query sees hold NaN.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu import flash_attention as tpu
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "softmax_scale")


def reference(operands: Operands, spec: FlashAttentionSpec, visible: np.ndarray) -> Outputs:
    """The formula in its inputs' dtype, statistics in at least float32; `visible` [b,h,s,t] stands for all masks."""
    q, k, v, bias = operands.q, operands.k, operands.v, operands.bias
    wide = jnp.promote_types(q.dtype, jnp.float32)
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=wide) * spec.softmax_scale
    if operands.softmax_scale is not None:
        s = s * operands.softmax_scale[:, :, None, None]
    if bias is not None:
        s = s + bias
    if spec.softcap is not None:
        s = spec.softcap * jnp.tanh(s / spec.softcap)
    s = jnp.where(visible, s, -1e30)
    sinks = jnp.full((1, 1, 1, 1), -1e30) if operands.sinks is None else operands.sinks[:, :, None]
    highest = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), sinks.max(-1, keepdims=True)))
    weights = jnp.where(visible, jnp.exp(s - highest), 0)
    total = weights.sum(-1, keepdims=True) + jnp.where(sinks > -1e30, jnp.exp(sinks - highest), 0).sum(
        -1, keepdims=True
    )
    some = jnp.where(total > 0, total, 1)
    o = jnp.einsum("bhst,bthe->bshe", (weights / some).astype(v.dtype), v, preferred_element_type=wide).astype(q.dtype)
    return Outputs(o, jnp.where(total > 0, highest + jnp.log(some), -jnp.inf)[..., 0])


def everything_visible(operands: Operands, spec: FlashAttentionSpec) -> np.ndarray:
    """All masks of a call, multiplied out: bool [b,h,s,t]."""
    (b, s, h, _), t = operands.q.shape, operands.k.shape[1]
    row, column = np.arange(s)[:, None], np.arange(t)[None]
    position, seen = np.broadcast_to(row + t - s, (b, s, 1)), np.ones((b, s, t), bool)
    if operands.cu_seqlens_q is not None:
        q_ends, k_ends = (np.asarray(x)[:, None, 1:] for x in (operands.cu_seqlens_q, operands.cu_seqlens_k))
        q_number, k_number = (row[None] >= q_ends).sum(2), (column.T[None] >= k_ends).sum(2)
        count = q_ends.shape[2]
        seen = (q_number[:, :, None] == k_number[:, None]) & (q_number < count)[:, :, None]
        q_end, k_end = (np.take_along_axis(x[:, 0], np.minimum(q_number, count - 1), 1) for x in (q_ends, k_ends))
        position = (row[None, :, 0] + k_end - q_end)[:, :, None]
    left, right = spec.window
    if spec.causal:
        seen = seen & (column <= position)
    if left is not None:
        seen = seen & (column >= position - left)
    if right is not None:
        seen = seen & (column <= position + right)
    if operands.q_segment_ids is not None:
        q_ids, k_ids = (np.asarray(x) for x in (operands.q_segment_ids, operands.kv_segment_ids))
        seen = seen & (q_ids[:, :, None] == k_ids[:, None]) & (q_ids >= 0)[:, :, None]
    seen = np.broadcast_to(seen[:, None], (b, h, s, t))
    return seen if operands.mask is None else seen & np.asarray(operands.mask)


@dataclass(frozen=True)
class Case:
    """Shapes, options and which optional operands a call has."""

    name: str
    b: int = 1
    s: int = 256
    t: int = 256
    h: int = 2
    g: int = 1
    d: int = 128
    e: int = 128
    dtype: str = "float32"
    spec: FlashAttentionSpec = field(default_factory=FlashAttentionSpec)
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    segments: bool = False
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    sinks: int = 0
    scale: tuple[int, ...] | None = None
    config: KernelConfig = field(default=KernelConfig(block_q=128, block_k=128))
    spread: float = 1.0

    def __str__(self):
        return self.name

    @functools.cached_property
    def operands(self) -> Operands:
        draw = np.random.default_rng(0)
        b, s, t, h, g, d, e = self.b, self.s, self.t, self.h, self.g, self.d, self.e
        normal = lambda *shape, dtype=np.float32: jnp.asarray(draw.normal(size=shape), dtype)
        ends = lambda lengths: jnp.asarray([np.cumsum([0, *lengths])], jnp.int32)
        ids = lambda n: jnp.asarray(np.sort(draw.integers(-1, 3, size=(b, n)), axis=1)[:, ::-1], jnp.int32)
        return Operands(
            q=normal(b, s, h, d, dtype=self.dtype) * jnp.asarray(self.spread, self.dtype),
            k=normal(b, t, g, d, dtype=self.dtype),
            v=normal(b, t, g, e, dtype=self.dtype),
            bias=None if self.bias is None else normal(*self.bias),
            mask=None if self.mask is None else jnp.asarray(draw.random(self.mask) < 0.4),
            q_segment_ids=ids(s) if self.segments else None,
            kv_segment_ids=ids(t) if self.segments else None,
            sinks=normal(1, h, self.sinks) if self.sinks else None,
            softmax_scale=None if self.scale is None else normal(*self.scale) + 1,
            cu_seqlens_q=None if self.lengths is None else ends(self.lengths[0]),
            cu_seqlens_k=None if self.lengths is None else ends(self.lengths[1]),
        )


def spec(d: int = 128, **options) -> FlashAttentionSpec:
    return FlashAttentionSpec(softmax_scale=d**-0.5, **options)


CASES = [
    Case("plain", spec=spec()),
    Case("bfloat16", dtype="bfloat16", b=2, g=2, spec=spec(causal=True)),
    Case("ragged, causal, few queries", s=130, t=300, h=4, g=2, d=72, e=40, spec=spec(72, causal=True)),
    Case("ragged, causal, few keys", s=300, t=130, spec=spec(causal=True, softcap=2.0)),
    Case("window", s=384, t=520, spec=spec(window=(100, 30))),
    Case("bias and mask", b=2, s=200, t=200, bias=(1, 2, 200, 200), mask=(2, 1, 200, 200), spec=spec(softcap=5.0)),
    Case("key bias and key mask", b=2, bias=(2, 1, 1, 256), mask=(1, 2, 1, 256), spec=spec()),
    Case("query bias", bias=(1, 2, 256, 1), spec=spec(causal=True)),
    Case("one bias per head", b=2, h=4, g=2, bias=(2, 4, 1, 1), spec=spec()),
    Case("segments", b=2, s=300, t=400, segments=True, spec=spec()),
    Case("packed", s=384, t=400, lengths=((130, 0, 100, 90), (100, 40, 160, 64)), spec=spec(causal=True)),
    Case("packed window", s=300, t=300, lengths=((150, 120), (140, 160)), spec=spec(window=(20, 0))),
    Case("sinks and scale", b=2, s=200, t=130, h=4, sinks=2, scale=(2, 4), spec=spec(causal=True)),
    Case("large logits", dtype="bfloat16", spread=30.0, spec=spec()),
    Case("one-hot peaks", dtype="bfloat16", spread=300.0, spec=spec()),
]


def outcomes(implementation, operands, tangents, cotangents):
    """o, lse, their tangents, and the gradients of all that is differentiable: of one function, by name."""
    names = [n for n in DIFFERENTIABLE if getattr(operands, n) is not None]
    out, dots, gradients = implementation(operands, tangents, cotangents, tuple(names))
    named = {"o": out.o, "lse": out.lse, "o tangent": dots.o, "lse tangent": dots.lse}
    return named | {f"d{n}": x for n, x in zip(names, gradients, strict=True)}


def by_autodiff(case: Case, visible):
    @functools.partial(jax.jit, static_argnums=3)
    def run(operands, tangents, cotangents, names):
        values, dots = ({n: getattr(x, n) for n in names} for x in (operands, tangents))
        f = lambda values: reference(operands._replace(**values), case.spec, visible)
        out, moved = jax.jvp(f, (values,), (dots,))
        _, pullback = jax.vjp(f, values)
        (gradients,) = pullback(cotangents)
        return out, moved, [gradients[n] for n in names]

    return run


def by_kernels(case: Case):
    @functools.partial(jax.jit, static_argnums=3)
    def run(operands, tangents, cotangents, names):
        options = {"spec": case.spec, "config": case.config}
        out = tpu.flash_attention(*operands, **options)
        moved = tpu.flash_attention_jvp(operands, out, tangents, **options)
        return out, moved, tpu.flash_attention_bwd(operands, out, cotangents, wrt=names, **options)

    def interpreted(operands, tangents, cotangents, names):
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
            return run(operands, tangents, cotangents, names)

    return interpreted


def perturbations(case: Case, seed: int, outputs: bool):
    draw = np.random.default_rng(seed)
    like = lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype)
    o = case.operands
    if outputs:
        (b, s, h, _), e = o.q.shape, o.v.shape[3]
        return Outputs(
            jnp.asarray(draw.normal(size=(b, s, h, e)), o.q.dtype), jnp.asarray(draw.normal(size=(b, h, s)), "float32")
        )
    return Operands(*(like(x) if n in DIFFERENTIABLE and x is not None else None for n, x in o._asdict().items()))


def float64(tree):
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x, np.float64)) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case):
    operands, tangents, cotangents = case.operands, perturbations(case, 1, False), perturbations(case, 2, True)
    visible = everything_visible(operands, case.spec)
    plain = outcomes(by_autodiff(case, visible), operands, tangents, cotangents)
    with jax.enable_x64(True):
        exact = outcomes(by_autodiff(case, visible), *map(float64, (operands, tangents, cotangents)))
        exact = jax.tree.map(np.asarray, exact)

    hidden = ~visible.reshape(*visible.shape[:1], case.g, -1, case.t).any(2).swapaxes(1, 2)
    poison = lambda tree: tree._replace(**{n: jnp.where(hidden[..., None], jnp.nan, getattr(tree, n)) for n in "kv"})
    found = outcomes(by_kernels(case), poison(operands), poison(tangents), cotangents)

    for name, truth in exact.items():
        allowed = 2 if name in ("o", "lse") else 3
        real = np.isfinite(truth)
        np.testing.assert_array_equal(np.isfinite(found[name]), real, err_msg=name)
        ours, theirs = (np.asarray(x[name], np.float64)[real] - truth[real] for x in (found, plain))
        ours, theirs = np.sqrt(np.mean(ours**2)), np.sqrt(np.mean(theirs**2))
        assert ours <= allowed * theirs, f"{name}: {ours:.2e} against {theirs:.2e}"
