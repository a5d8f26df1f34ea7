"""flash_attention over packed sequences beside its rivals: `python -m benchmarks.packed_attention`.

The sequences of a case are packed into one array, as in training on documents, or in an encoder without padding. Ours
takes their ends as `cu_seqlens`, or the number of each token's sequence as segment ids. Forward, and with the backward;
every contender is compared with the formula in float64 before it is timed.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.lax import flash_attention
from ejkernel.types.shapes import Shape

from . import _referee, _vllm
from ._attention import inputs
from ._contenders import Inputs, imported, of_jax, of_ours, of_torch, torch_on_gpu
from ._driver import Case, measured
from ._harness import Check, Contender, Unavailable, means, warmed
from ._program import parser_of
from ._records import result_file, save_record


def drawn(sequences: int, tokens: int) -> tuple[int, ...]:
    """Lengths of an exponential distribution, at least 1."""
    shares = np.random.default_rng(0).exponential(size=sequences)
    ends = np.round(np.cumsum(shares / shares.sum()) * (tokens - sequences)).astype(int)
    return tuple((np.diff(ends, prepend=0) + 1).tolist())


@dataclass(frozen=True)
class Packed(Shape):
    """A layer over packed sequences: heads, key/value heads, features, the lengths, and whether it is causal."""

    heads: int
    kv_heads: int
    features: int
    lengths: tuple[int, ...]
    causal: bool = True

    convention: ClassVar[str] = "forward 4·H·D for each visible pair; fwd_bwd 3.5 ×"
    modes: ClassVar[tuple[str, ...]] = ("fwd", "fwd_bwd")

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k and v, [tokens, heads, features]."""
        heads = dict(q=self.heads, k=self.kv_heads, v=self.kv_heads)
        return {name: (sum(self.lengths), n, self.features) for name, n in heads.items()}

    @property
    def ends(self) -> np.ndarray:
        """Where the sequences begin, and the end of the last, int32."""
        return np.cumsum([0, *self.lengths]).astype(np.int32)

    @property
    def ids(self) -> np.ndarray:
        """The number of each token's sequence, int32."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    def work(self, mode: str) -> float:
        """FLOPs."""
        pairs = sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        return {"fwd": 1.0, "fwd_bwd": 3.5}[mode] * 4 * self.heads * self.features * pairs

    def __str__(self) -> str:
        heads = f"h{self.heads}/{self.kv_heads} d{self.features} {'causal' if self.causal else 'full'}"
        return f"{self.name}: {len(self.lengths)} of {min(self.lengths)} to {max(self.lengths)} {heads}"


CASES = {
    case.name: case
    for case in (
        Packed("llama3-8b-8x2048", 32, 8, 128, (2048,) * 8),
        Packed("llama3-8b-uneven", 32, 8, 128, (32, 9248, 512, 2048, 1024, 3072, 256, 192)),
        Packed("llama3-8b-16-of-16k", 32, 8, 128, drawn(16, 16384)),
        Packed("llama3-8b-64-of-16k", 32, 8, 128, drawn(64, 16384)),
        Packed("llama3-8b-128-of-32k", 32, 8, 128, drawn(128, 32768)),
        Packed("qwen3-next-16-of-16k", 16, 2, 256, drawn(16, 16384)),
        Packed("gpt-oss-16-of-16k", 64, 8, 64, drawn(16, 16384)),
        Packed("bert-large-128-of-16k", 16, 16, 64, drawn(128, 16384), causal=False),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the record; 1 if an implementation of ours failed or was wrong."""
    parser = parser_of(__doc__, repeats=9)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--modes", nargs="*", choices=Packed.modes, default=list(Packed.modes))
    of = parser.parse_args(argv)
    cases = [(CASES[name], mode, case(CASES[name], mode)) for name in of.cases for mode in of.modes]
    warmed([task for *_, case in cases for task in (case.judge, *(c.warm for c in case.contenders))])
    rows, file = [], result_file("packed_attention", of.out)
    for shape, mode, of_mode in cases:
        rows += measured(shape, mode, jnp.dtype("bfloat16"), of_mode, of.repeats)
        evidence = "flash_attention over packed sequences beside FlashAttention-3 and torch"
        save_record(file, evidence, Packed.convention, rows=[asdict(row) for row in rows])
    print("", *means(rows), f"kept in {file}", sep="\n")
    return int(any(row.ours and row.status in ("failed", "wrong") for row in rows))


def case(shape: Packed, mode: str) -> Case:
    """Ours by the ends of sequences and by segment ids, then the rivals."""
    given = replace(inputs(shape, jnp.dtype("bfloat16")), others=tables(shape))
    contenders: list[Contender] = [
        *of_ours("flash_attention", ["auto"], partial(_ours, shape), mode, given),
        of_jax("ejkernel segment ids", lambda: _segments(shape), mode, given, "flash_attention", ours=True),
        of_torch("FlashAttention-3", lambda: _flash_attention_3(shape, mode), mode, given),
        of_torch("torch varlen", lambda: _torch(shape), mode, given),
    ]
    return Case(contenders, cache(partial(check, shape, mode, given)))


def tables(shape: Packed) -> dict[str, Array]:
    """The ends of sequences and the number of each token's, arguments of a program as they are in training."""
    return dict(ends=jnp.asarray(shape.ends), ids=jnp.asarray(shape.ids)[None])


def _ours(shape: Packed, platform: str | None) -> Callable[..., Array]:
    attend = partial(flash_attention, causal=shape.causal, config=None if platform is None else dict(platform=platform))
    return lambda *x, ends, ids: attend(*x, cu_seqlens_q=ends, cu_seqlens_k=ends)


def _segments(shape: Packed) -> Callable[..., Array]:
    attend = partial(flash_attention, causal=shape.causal)
    return lambda *x, ends, ids: attend(*(a[None] for a in x), q_segment_ids=ids, kv_segment_ids=ids)[0]


def _flash_attention_3(shape: Packed, mode: str) -> Callable[..., Any]:
    if mode != "fwd":
        raise Unavailable("FlashAttention-3 of vLLM's wheel is here for its forward")
    torch, attend = torch_on_gpu(), _vllm.flash_attention_3()
    ends, most = torch.from_numpy(shape.ends).cuda(), max(shape.lengths)
    sizes = dict(cu_q=ends, cu_k=ends, max_q=most, max_k=most)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            return attend(q, k, v, **sizes, scale=shape.features**-0.5, causal=shape.causal)

    return forward


def _torch(shape: Packed) -> Callable[..., Any]:
    torch, attend = torch_on_gpu(), imported("torch.nn.attention.varlen").varlen_attn
    ends, most = torch.from_numpy(shape.ends).cuda(), max(shape.lengths)
    by_window = "window_size" in inspect.signature(attend).parameters
    band = dict(window_size=(-1, 0 if shape.causal else -1)) if by_window else dict(is_causal=shape.causal)
    group = shape.heads // shape.kv_heads
    if "enable_gqa" in inspect.signature(attend).parameters:
        band, group = band | dict(enable_gqa=group > 1), 1
    repeated = lambda x: x if group == 1 else x.repeat_interleave(group, 1)
    return lambda q, k, v: attend(q, repeated(k), repeated(v), ends, ends, most, most, **band)


def check(shape: Packed, mode: str, given: Inputs) -> Check:
    """Judges the first key/value head with all of its queries."""
    ids, columns = jnp.asarray(shape.ids), jnp.arange(sum(shape.lengths))

    def visible(i: Array) -> Array:
        return (ids == ids[i]) & ((columns <= i) if shape.causal else True)

    formula = lambda q, k, v: _referee.attention(q, k[:, 0], v[:, 0], visible, scale=shape.features**-0.5)
    of_one = Inputs(tuple(x[None] for x in given.operands), given.cotangent[None], ())
    judge = _referee.check_of_a_head(mode, of_one, shape.kv_heads, formula)
    return lambda results: judge([x[None] for x in results])


if __name__ == "__main__":
    sys.exit(main())
