"""Calls of flash_attention, one for each feature, and the comparison of their results with the oracle."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs

from .oracle import attention, known, places, visible

PLAIN, CAUSAL = FlashAttentionSpec(), FlashAttentionSpec(causal=True)
NEIGHBOURS = 8
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "softmax_scale")


@dataclass(frozen=True)
class Case:
    """A call: its sizes, options, and optional operands.

    S and K are in units of a length that a test chooses. `bias` and `mask` name the axes along which they vary;
    `bias_dtype` is the dtype of the bias, None for that of q, and `hidden` the fraction of its numbers that are −∞.
    With `empty`, bias and mask hide all keys from every seventh query, and the first 70 keys from every query.
    """

    name: str
    S: float = 1.0
    K: float = 1.0
    B: int = 2
    H: int = 2
    G: int = 2
    D: int = 32
    V: int = 32
    spec: FlashAttentionSpec = PLAIN
    bias: str | None = None
    mask: str | None = None
    bias_dtype: Any = jnp.float32
    hidden: float = 0.0
    empty: bool = False
    segments: bool = False
    sinks: int = 0
    scale: str | None = None
    packed: bool = False
    first: float = 0.0  # where the first of the packed sequences begins, as a part of the tokens
    family: str = "normal"

    def make(self, length: int, dtype, seed: int = 0) -> tuple[Operands, FlashAttentionSpec]:
        """Operands with random contents, the same for the same seed, and the spec."""
        rng = np.random.default_rng(seed)
        S, K = round(self.S * length), max(1, round(self.K * length))
        sizes = {"b": self.B, "h": self.H, "s": S, "t": K}

        def shape(axes: str, of: str = "bhst") -> tuple[int, ...]:
            return tuple(sizes[axis] if axis in axes else 1 for axis in of)

        def normal(*shape, dtype=jnp.float32):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        q = normal(self.B, S, self.H, self.D, dtype=dtype)
        k = normal(self.B, K, self.G, self.D, dtype=dtype)
        v = normal(self.B, K, self.G, self.V, dtype=dtype)
        if self.family == "large":
            q = q * 30
        if self.family == "peaked":
            q = 8 * k[:, rng.integers(0, K, S)]
        if self.family == "uniform":
            q = q / 1000
        if self.family == "rising":
            k = k * jnp.linspace(4, 0.1, K, dtype=dtype)[:, None, None]
        if self.family == "negative":
            q, k = -jnp.abs(q), jnp.abs(k)
        if self.family == "decaying":
            v = v * jnp.maximum(jnp.linspace(1, -0.5, K, dtype=dtype), 0)[:, None, None] ** 4
        spec = replace(self.spec, softmax_scale=self.spec.softmax_scale * self.D**-0.5)
        x = Operands(q, k, v)
        if self.bias is not None:
            bias = normal(*shape(self.bias))
            bias = jnp.where(self._hidden(rng, bias.shape), -jnp.inf, bias) if self.hidden or self.empty else bias
            x = x._replace(bias=bias.astype(self.bias_dtype or dtype))
        if self.mask is not None:
            shown = rng.random(shape(self.mask)) < 0.6
            x = x._replace(mask=jnp.asarray(shown & ~self._hidden(rng, shown.shape) if self.empty else shown))
        if self.segments:
            q_ids, kv_ids = (np.sort(rng.integers(-1, 4, (self.B, n)), 1) for n in (S, K))
            x = x._replace(q_segment_ids=jnp.asarray(q_ids, jnp.int32), kv_segment_ids=jnp.asarray(kv_ids, jnp.int32))
        if self.sinks:
            x = x._replace(sinks=normal(1, self.H, self.sinks))
        if self.scale is not None:
            x = x._replace(softmax_scale=1 + 0.5 * normal(*shape(self.scale, "bh")))
        if self.packed:
            x = x._replace(cu_seqlens_q=_cuts(S, 0, self.first, rng), cu_seqlens_k=_cuts(K, 1, self.first, rng))
        if spec.dropout_rate:
            of_all = lambda *words: jnp.broadcast_to(jnp.asarray(words, jnp.uint32), (self.B, self.H, len(words)))
            place = jnp.stack(jnp.meshgrid(jnp.arange(self.B), jnp.arange(self.H), indexing="ij"), -1)
            # Of every second query from the third on, and of every third key from the fifth on, of a whole.
            words = of_all(2**31 + 7, 13), place.astype(jnp.uint32), of_all(2, 2, 4, 3)
            x = x._replace(dropout=jnp.concatenate(words, -1))
        return x, spec

    def _hidden(self, rng, shape: tuple[int, ...]):
        """The pairs that a bias or a mask hides: bool."""
        hidden = rng.random(shape) < self.hidden
        if self.empty:
            hidden[:, :, ::7] = True
            hidden[..., :70] = True
        return hidden


def _cuts(tokens: int, shift: int, first: float, rng):
    """cu_seqlens of very different lengths, one of them 0, with tokens after the last and perhaps before the first."""
    parts = np.sort(rng.random(3)) * 0.95
    cuts = np.array([first, parts[0], parts[0], *parts[1:], 0.95]) * tokens
    cuts = np.round(cuts) + np.array([0, shift, shift, 0, shift, 0])
    return jnp.asarray(np.minimum(np.maximum.accumulate(cuts), tokens)[None], jnp.int32)


CASES = [
    Case("plain"),
    Case("uneven", S=0.83, K=1.27, D=24, V=40),
    Case("causal", spec=CAUSAL),
    Case("causal, more keys", S=0.6, K=1.1, spec=CAUSAL),
    Case("causal, more queries", S=1.1, K=0.6, spec=CAUSAL),
    Case("window", spec=FlashAttentionSpec(causal=True, window=(20, None))),
    Case("window of both sides", S=0.5, K=1.2, spec=FlashAttentionSpec(window=(17, 9))),
    Case("window to the past", spec=FlashAttentionSpec(window=(None, -3))),
    Case("softcap", spec=FlashAttentionSpec(softcap=2.0)),
    Case("grouped heads", H=4, G=2, spec=CAUSAL),
    Case("one key head", H=3, G=1, D=16, V=48, B=1),
    Case("bias", bias="bhst", spec=CAUSAL),
    Case("bias of keys", bias="bt", S=0.7),
    Case("bias of rows and heads", bias="hs"),
    Case("bias of pairs, capped", bias="st", H=4, G=2, spec=FlashAttentionSpec(softcap=2.0, window=(13, 2))),
    Case("mask", mask="bhst"),
    Case("mask of keys, causal", mask="bt", H=4, G=2, spec=CAUSAL),
    Case("segments", segments=True, K=1.2),
    Case("segments, mask", segments=True, mask="bst"),
    Case("bias of hardly a key", K=0.004, bias="hst"),
    Case("bias of rows, of hardly a key", K=0.004, bias="s"),
    Case("segments, causal, bias", segments=True, bias="hst", spec=CAUSAL),
    Case("sinks", sinks=1, spec=CAUSAL),
    Case("sinks, more queries", sinks=3, S=1.1, K=0.6, spec=CAUSAL),
    Case("scale of heads", scale="h", H=4, G=2),
    Case("scale of heads and batches", scale="bh", spec=FlashAttentionSpec(causal=True, softcap=3.0)),
    Case("negative scale", spec=FlashAttentionSpec(softmax_scale=-1.0)),
    Case("dropout", H=4, G=2, spec=FlashAttentionSpec(dropout_rate=0.3)),
    Case("dropout, causal", spec=FlashAttentionSpec(dropout_rate=0.5, causal=True)),
    Case("packed", packed=True, B=1, S=1.3, K=1.3, H=4, G=2),
    Case("packed, from later on", packed=True, first=0.1, S=1.3, K=1.4, B=1, H=4, G=2),
    Case("packed, causal", packed=True, B=2, S=1.3, K=1.5, spec=CAUSAL),
    Case("packed, window, sinks", packed=True, S=1.3, sinks=1, spec=FlashAttentionSpec(window=(9, 4))),
    Case("packed, dropout", packed=True, spec=FlashAttentionSpec(dropout_rate=0.2)),
    Case("large logits", family="large", spec=CAUSAL),
    Case("large logits, many keys", family="large", K=4.0),
    Case("peaks", family="peaked"),
    Case("uniform", family="uniform", K=4.0),
    Case("rising", family="rising", K=4.0),
]


def poisoned(x: Operands, spec: FlashAttentionSpec, of: Operands | None = None) -> Operands:
    """Operands, or the tangents `of` them, with NaN in all unread entries: fully masked keys and queries, and a bias
    where it is masked.
    """
    of = x if of is None else of
    ok = np.asarray(visible(x, spec))
    ok = np.broadcast_to(ok, (x.q.shape[0], x.q.shape[2], *ok.shape[2:]))
    groups = x.k.shape[2], x.q.shape[2] // x.k.shape[2]
    keys = ok.any(2).reshape(ok.shape[0], *groups, ok.shape[3]).any(2).swapaxes(1, 2)[..., None]
    used = dict(q=ok.any(3).swapaxes(1, 2)[..., None], k=keys, v=keys)
    if x.bias is not None:
        shared = tuple(axis for axis, size in enumerate(x.bias.shape) if size == 1)
        used["bias"] = ok.any(shared, keepdims=True)
    poison = lambda name, a: a if a is None or name not in used else jnp.where(used[name], a, jnp.nan)
    return Operands(**{name: poison(name, a) for name, a in of._asdict().items()})


def poisoned_cotangents(cotangents: Outputs, x: Operands, spec: FlashAttentionSpec) -> Outputs:
    """Cotangents with NaN for fully masked queries: of o, which is 0 there, and of an lse of −∞."""
    ok = np.asarray(visible(x, spec)).any(3)
    ok = np.broadcast_to(ok, (x.q.shape[0], x.q.shape[2], ok.shape[2]))
    finite = ok if x.sinks is None else np.ones_like(ok)
    if x.cu_seqlens_q is not None:
        finite = finite & (places(x.cu_seqlens_q, x.q.shape)[0] < x.cu_seqlens_q.shape[1] - 1)[:, None]
    o = jnp.where(ok.swapaxes(1, 2)[..., None], cotangents.o, jnp.nan)
    return Outputs(o, jnp.where(finite, cotangents.lse, jnp.nan))


def differentiable(x: Operands) -> tuple[str, ...]:
    """The names of the operands that have gradients."""
    return tuple(name for name in DIFFERENTIABLE if getattr(x, name) is not None)


def like(arrays, seed: int):
    """Random arrays of the same shapes and dtypes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), arrays)


def derivatives(x: Operands, spec: FlashAttentionSpec, cotangents: Outputs, tangents: dict, dtype):
    """The formula's outputs, gradients by name, and tangents, all computed in `dtype`."""
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(dtype == jnp.float64):
        moving = {name: getattr(x, name) for name in differentiable(x)}
        moving, cotangents, tangents = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a), dtype), (moving, cotangents, {name: tangents[name] for name in moving})
        )
        return jax.tree.map(np.asarray, _derivatives(moving, cotangents, tangents, known(x, spec), spec))


# It runs only a few times, so that optimisation does not pay.
@partial(jax.jit, static_argnames="spec", compiler_options={"xla_backend_optimization_level": 0})
def _derivatives(moving, cotangents, tangents, facts, spec: FlashAttentionSpec):
    formula = lambda moving: attention(Operands(**moving), spec, facts)
    outputs, pull = jax.vjp(formula, moving)
    dlse = jnp.where(outputs.lse == -jnp.inf, 0, cotangents.lse)  # −∞ cannot be differentiated at
    return outputs, *pull(Outputs(cotangents.o, dlse)), jax.jvp(formula, (moving,), (tangents,))[1]


def check_all(results, oracle, reference):
    """The outputs, gradients and tangents of a call: err(result) ≤ factor · err(reference), both against the oracle.

    Errors are norms, as in tests/transforms/test_dtypes.py; no result is nearer than the rounded exact one.
    """
    oracle, reference = named(oracle), named(reference)
    over = all_excess(named(results), oracle, {name: error(reference[name], oracle[name]) for name in oracle})
    assert not over, over


def check_near(results, x: Operands, spec: FlashAttentionSpec, cotangents: Outputs, tangents: dict, dtype):
    """`check_all`, where the formula errs as much as at the worst of a few neighbours of the call.

    At one call it may happen to be all but exact, where that is of few numbers. A neighbour is the same call with the
    last bits of its numbers drawn again, and so all roundings.
    """
    results, oracle, errors = named(results), None, {}
    for number in range(NEIGHBOURS):
        call = neighbour((x, cotangents, tangents), number)
        exact, rounded = (named(derivatives(call[0], spec, *call[1:], kind)) for kind in (jnp.float64, dtype))
        oracle = exact if oracle is None else oracle
        errors = {name: max(errors.get(name, 0.0), error(rounded[name], exact[name])) for name in results}
        over = all_excess(results, oracle, errors)
        if not over:
            return
    raise AssertionError(over)


def neighbour(arrays, number: int):
    """The arrays with each float moved by up to one unit in its last place; neighbour 0 is the call itself."""
    rng = np.random.default_rng(number)

    def moved(x):
        if number == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        steps = float(jnp.finfo(x.dtype).eps) * rng.integers(-1, 2, x.shape)
        return jnp.asarray((np.asarray(x).astype(np.float64) * (1 + steps)).astype(x.dtype))

    return jax.tree.map(moved, arrays)


def named(results) -> dict:
    """The results of `Kernels` or `derivatives` by name."""
    outputs, gradients, tangents = results
    found = dict(zip(Outputs._fields, outputs, strict=True))
    found |= {f"d{name}": gradient for name, gradient in gradients.items()}
    return found | {f"{name}_dot": tangent for name, tangent in zip(Outputs._fields, tangents, strict=True)}


def all_excess(results: dict, oracle: dict, errors: dict) -> str:
    """What is wrong with arrays by name: outputs may err twice as much as the formula, derivatives three times."""
    factors = {name: 2 if name in Outputs._fields else 3 for name in results}
    over = (excess(name, x, oracle[name], errors[name], factors[name]) for name, x in results.items())
    return "; ".join(filter(None, over))


def check(name: str, result, oracle, reference, factor: float):
    """One array of `check_all`."""
    over = excess(name, result, oracle, error(reference, oracle), factor)
    assert not over, over


def excess(name: str, result, oracle, unit: float, factor: float) -> str:
    """What is wrong with an array whose error may be `factor` times `unit`; nothing if it is right."""
    result = np.asarray(result)
    if not np.array_equal(np.isfinite(result), np.isfinite(oracle)):
        return f"{name}: not finite where the oracle is, or the other way round"
    found, allowed = error(result, oracle), max(unit, error(oracle.astype(result.dtype), oracle))
    if found <= factor * allowed:
        return ""
    return f"{name}: error {found:.3e} over {factor} × {allowed:.3e} of the reference"


def error(result, oracle) -> float:
    """The norm of the error of a result, where the oracle is finite."""
    finite = np.isfinite(oracle)
    return float(np.linalg.norm(np.asarray(result)[finite].astype(np.float64) - oracle[finite]))
