"""flash_attention with a bias or a mask beside cuDNN with the same: `python -m benchmarks.attention_bias`.

The biases are T5's learned one, with the heads of T5-3B and T5-large and with its gradient, and ALiBi's, causal; the
masks keep half of the pairs, one for each sequence or one for all. Forward, and with the backward. Every contender is
compared with the formula in float64 before it is timed. The bar is to be no slower than cuDNN, called by JAX or torch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.modules import flash_attention
from ejkernel.types import AttentionShape

from . import _referee
from ._attention import heads_first, inputs
from ._contenders import Inputs, call, imported, of_jax, of_ours, of_torch, torch_on_gpu
from ._driver import Case, measured
from ._harness import Check, Contender, Row, Unavailable, means, warmed
from ._program import parser_of
from ._records import result_file, save_record

HEADS = {"t5-3b": (32, 128), "t5-large": (16, 64), "alibi": (32, 128), "mask": (32, 128), "shared-mask": (32, 128)}
"""The heads and features of each case."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the record; 1 if an implementation of ours failed or was wrong."""
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--cases", nargs="*", choices=HEADS, default=list(HEADS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--platforms", nargs="*", default=["auto", "pallas"], help="of ours")
    of = parser.parse_args(argv)
    made = [made_of(name, of.batch, of.tokens) for name in of.cases]
    modes = ("fwd", "fwd_bwd")
    cases = [(shape, mode, case(shape, mode, given, of.platforms)) for shape, given in made for mode in modes]
    warmed([task for *_, case in cases for task in (case.judge, *(c.warm for c in case.contenders))])
    rows, file = [], result_file("attention_bias", of.out)
    convention = "forward 4·B·H·S²·D, halved when causal; fwd_bwd 3.5 ×, with the gradient of T5's bias"
    for shape, mode, of_mode in cases:
        rows += measured(shape, mode, jnp.dtype("bfloat16"), of_mode, of.repeats)
        evidence = "flash_attention with a bias or a mask beside cuDNN, for a bar of 1.0 ×"
        save_record(file, evidence, convention, rows=[asdict(row) for row in rows])
    print("", *means(rows), *beside_cudnn(rows), f"kept in {file}", sep="\n")
    return int(any(row.ours and row.status in ("failed", "wrong") for row in rows))


def made_of(name: str, batch: int, tokens: int) -> tuple[AttentionShape, Inputs]:
    """The call and its arrays; the bias is a differentiated operand if its gradient is measured."""
    heads, features = HEADS[name]
    shape = AttentionShape(name, heads, heads, features, features, batch, tokens, tokens, causal=name == "alibi")
    given, key = inputs(shape, jnp.dtype("bfloat16")), jax.random.key(2)
    if name.startswith("t5"):
        bias = jax.random.normal(key, (1, heads, tokens, tokens), jnp.bfloat16)
        return shape, replace(given, operands=(*given.operands, bias))
    if name == "alibi":
        slopes = 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
        distance = jnp.arange(tokens) - jnp.arange(tokens)[:, None]
        return shape, replace(given, others={"bias": (slopes[:, None, None] * distance).astype(jnp.bfloat16)[None]})
    mask = jax.random.bernoulli(key, 0.5, (batch if name == "mask" else 1, 1, tokens, tokens))
    return shape, replace(given, others={"mask": mask})


def case(shape: AttentionShape, mode: str, given: Inputs, platforms: Sequence[str]) -> Case:
    """Ours on each platform, then the rivals."""
    torch = lambda backend: of_torch(
        f"torch {backend.split('_')[0].lower()}", lambda: _torch(shape, backend, given), mode, given
    )
    contenders: list[Contender] = [
        *of_ours("flash_attention", platforms, partial(_ours, shape), mode, given),
        of_jax("jax.nn cudnn", lambda: _cudnn(shape), mode, given),
        torch("CUDNN_ATTENTION"),
        torch("EFFICIENT_ATTENTION"),
    ]
    return Case(contenders, cache(partial(check, shape, mode, given)))


def _ours(shape: AttentionShape, platform: str | None) -> Callable[..., Array]:
    return partial(flash_attention, causal=shape.causal, platform=platform)


def _cudnn(shape: AttentionShape) -> Callable[..., Array]:
    if jax.default_backend() != "gpu":
        raise Unavailable("cuDNN needs an NVIDIA GPU")
    return partial(jax.nn.dot_product_attention, is_causal=shape.causal, implementation="cudnn")


def _torch(shape: AttentionShape, backend: str, given: Inputs) -> Callable[..., Any]:
    """torch takes causality or a mask, not both: the bias has −∞ for later keys."""
    attention, torch = imported("torch.nn.attention"), torch_on_gpu()
    others = dict(given.others)
    if shape.causal:
        others["bias"] = jnp.where(jnp.tri(shape.seq_q, dtype=bool), others["bias"], -jnp.inf)
    fixed = None
    for name, x in others.items():
        x = torch.from_dlpack(jax.block_until_ready(x.astype(jnp.uint8) if name == "mask" else x))
        fixed = x.bool() if name == "mask" else x

    def forward(q: Any, k: Any, v: Any, learned: Any = None) -> Any:
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            mask = fixed if learned is None else learned
            o = torch.nn.functional.scaled_dot_product_attention(*map(heads_first, (q, k, v)), attn_mask=mask)
        return heads_first(o)

    return forward


def check(shape: AttentionShape, mode: str, given: Inputs) -> Check:
    """Judges the first head of all sequences, and of the bias."""
    part = lambda n, x: x[:, 0] if n == 3 else x[:, :, 0]  # [b,h,s,t] of a bias, the fourth operand; else [b,s,h,d]
    operands = tuple(part(n, x) for n, x in enumerate(given.operands))
    others = {name: x[:, 0] for name, x in given.others.items()}
    parts = lambda results: [part(n - 1, x) for n, x in enumerate(results)]

    def attention(q: Array, k: Array, v: Array, bias: Array | None = None, mask: Array | None = None) -> Array:
        wide = jnp.promote_types(q.dtype, jnp.float32)
        s = jnp.einsum("bsd,btd->bst", q, k, preferred_element_type=wide) * shape.head_dim**-0.5
        s = s if bias is None else s + bias.astype(wide)
        visible = jnp.tri(shape.seq_q, dtype=bool) if shape.causal else mask
        p = jax.nn.softmax(s if visible is None else jnp.where(visible, s, -jnp.inf), -1).astype(q.dtype)
        return jnp.einsum("bst,btd->bsd", p, v, preferred_element_type=wide).astype(q.dtype)

    def formula(dtype: Any) -> tuple:
        cast = lambda x: x if x.dtype == bool else jnp.asarray(x, dtype)
        x, do, fixed = jax.tree.map(cast, (operands, part(-1, given.cotangent), others))
        return jax.jit(lambda x, do, fixed: call(partial(attention, **fixed), mode)(x, (), do))(x, do, fixed)

    return _referee.check(parts, formula, jnp.dtype("bfloat16"))


def beside_cudnn(rows: Sequence[Row]) -> Iterator[str]:
    """How many times as long as the best of ours the best of cuDNN takes, in each case and mode."""
    for of, mode in dict.fromkeys((row.case, row.mode) for row in rows):
        timed = [row for row in rows if (row.case, row.mode) == (of, mode) and row.milliseconds]
        ours = min((row.milliseconds for row in timed if row.ours), default=None)
        cudnn = min((row.milliseconds for row in timed if "cudnn" in row.contender), default=None)
        yield f"{of}, {mode}: " + (f"{cudnn / ours:.3f} × cuDNN" if ours and cudnn else "no time of both")


if __name__ == "__main__":
    sys.exit(main())
