"""The most that a kernel that fuses RMSNorm with attention could gain: `python -m benchmarks.fused_norm`.

A layer of Llama-3 8B, as XLA fuses it, is compared with the same layer without its two norms: no fusion can gain more
than the difference. Also timed: the norm with the projection of q, k and v, the projection alone, and the norm alone.
Forward, and with the backward if sequences have more than one token. One token is like a step of decoding without
earlier keys, whose attention would take a part of the time too.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel import lax

from ._contenders import normal
from ._program import Program, compiled, milliseconds, parser_of, size
from ._records import result_file, save_record

BAR = 0.05
"""The fraction of a layer's time that fusion would have to gain to be worth a kernel."""
LINE = "{batch} x {tokens}, {mode}: the norms take at most {gain:.1%} of the layer, {verdict} the bar of {bar:.0%}"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer: features of a token, of the feed-forward network and of a head, and numbers of heads."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


def main(argv: Sequence[str] | None = None, layer: Sizes = Sizes()) -> int:
    """Measures, prints and writes the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=size, nargs="*", default=[(1, 8192), (8, 1024), (64, 1)], metavar="BxS")
    of = parser.parse_args(argv)
    rows, file = [], result_file("fused_norm", of.out)
    evidence = f"what fusing RMSNorm with attention could gain in a layer, for a bar of {BAR:.0%}"
    convention = f"median of {of.repeats} rounds; {layer}, SwiGLU, causal, bfloat16; gain: of the layer, an upper bound"
    made = {size: programs(layer, *size) for size in of.sizes}
    cases = {(*size, mode): made[size] for size in made for mode in ("fwd", "fwd_bwd")[: 1 if size[1] == 1 else 2]}
    for (batch, tokens, mode), ready in compiled(cases).items():
        for row in measured(ready, of.repeats):
            rows.append(row := dict(batch=batch, tokens=tokens, mode=mode) | row)
            print("  {program:<22}{mode:<9}{batch:>4} x {tokens:<6}{milliseconds:>9.3f} ms".format(**row))
            if "gain" in row:
                print(LINE.format(**row, bar=BAR, verdict="over" if row["gain"] > BAR else "below"))
        save_record(file, evidence, convention, rows=rows)
    print(f"kept in {file}")
    return 0


def measured(programs: Mapping[str, Program], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each program of a size and mode; the last, of the layer, has the gain."""
    times = milliseconds(programs, repeats)
    for program, time in times.items():
        gain = dict(gain=1 - times["layer without norms"] / time) if program == "layer" else {}
        yield dict(program=program, milliseconds=time) | gain


def programs(of: Sizes, batch: int, tokens: int) -> dict[str, tuple[Callable[..., Array], tuple, Array]]:
    """The functions, each with its operands and the cotangent of its result. Tokens are rows of one matrix."""
    keys = iter(jax.random.split(jax.random.key(0), 10))
    weight = lambda rows, columns: normal(next(keys), (rows, columns), jnp.bfloat16) * rows**-0.5
    features = (of.heads + 2 * of.kv_heads) * of.head_dim
    x, do = (normal(next(keys), (batch * tokens, of.hidden), jnp.bfloat16) for _ in range(2))
    weights = dict(
        qkv=weight(of.hidden, features),
        o=weight(of.heads * of.head_dim, of.hidden),
        gate_up=weight(of.hidden, 2 * of.ffn),
        down=weight(of.ffn, of.hidden),
    )
    norms = 1 + normal(next(keys), (2, of.hidden), jnp.bfloat16) / 8
    projected = normal(next(keys), (batch * tokens, features), jnp.bfloat16)
    layer = layer_of(of, batch, tokens)
    return {
        "norm + qkv": (lambda x, norm, w: rms_norm(x, norm) @ w, (x, norms[0], weights["qkv"]), projected),
        "qkv": (jnp.matmul, (x, weights["qkv"]), projected),
        "norm": (rms_norm, (x, norms[0]), do),
        "layer without norms": (layer, (x, weights), do),
        "layer": (layer, (x, weights, norms), do),
    }


def layer_of(of: Sizes, batch: int, tokens: int) -> Callable[..., Array]:
    """A Llama layer: a function of x [batch·tokens, hidden], its weights, and the weights of its two norms or None."""
    frequencies = 500000.0 ** -jnp.linspace(0, 1, of.head_dim // 2, endpoint=False)
    angles = (jnp.arange(tokens)[:, None] * frequencies)[:, None]  # [tokens, 1, head_dim / 2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def rope(x: Array) -> Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x.dtype)

    def layer(x: Array, weights: dict[str, Array], norms: Array | None = None) -> Array:
        norm = lambda x, n: x if norms is None else rms_norm(x, norms[n])
        qkv = (norm(x, 0) @ weights["qkv"]).reshape(batch, tokens, -1, of.head_dim)
        q, k, v = jnp.split(qkv, (of.heads, of.heads + of.kv_heads), 2)
        o = lax.flash_attention(rope(q), rope(k), v, causal=True)
        x = x + o.reshape(len(x), -1) @ weights["o"]
        gate, up = jnp.split(norm(x, 1) @ weights["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ weights["down"]

    return layer


def rms_norm(x: Array, weight: Array) -> Array:
    """x over the root of the mean of its squares, in float32, times the weight."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


if __name__ == "__main__":
    sys.exit(main())
