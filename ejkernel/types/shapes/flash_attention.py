"""Calls of flash_attention taken from real models.

A batch holds about 16k tokens, as in training. `shape.at(batch, length)` is the same layer at another size.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..visible import visible_pairs
from ._shape import Shape


@dataclass(frozen=True)
class AttentionShape(Shape):
    """One call of attention: the sizes of its arrays and the options that change its cost.

    Attributes:
        name: the model and, if its layers differ, the kind of layer.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: features of a query and a key.
        value_dim: features of a value.
        batch: sequences.
        seq_q: queries of a sequence.
        seq_k: keys of a sequence.
        causal: query i sees keys j ≤ i + seq_k − seq_q.
        window: (left, right) bounds around i + seq_k − seq_q, both inclusive, None where unbounded.
        softcap: logits become softcap·tanh(logits / softcap).
        sinks: sink logits of each head.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    batch: int
    seq_q: int
    seq_k: int
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    sinks: int = 0

    convention: ClassVar[str] = (
        "forward 4·B·H·Sq·Sk·D, halved when causal, windows exactly; bwd 2.5 ×, fwd_bwd 3.5 ×, jvp 2.5 ×"
    )
    rivals: ClassVar[tuple[str, ...]] = (
        "ejkernel deterministic",
        "plain formula",
        "jax.nn xla",
        "jax.nn cudnn",
        "tokamax mosaic",
        "tokamax triton",
        "jax attention_mgpu",
        "torch cudnn",
        "torch flash",
        "torch jvp_flash",
        "FlashAttention-3",
        "ejkernel of PyPI",
        "ejkernel before",
    )
    modes: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd_bwd", "jvp")

    def at(self, batch: int, seq: int) -> "AttentionShape":
        """The same layer on `batch` sequences of `seq` tokens."""
        return replace(self, batch=batch, seq_q=seq, seq_k=seq)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k, v and, if there are any, sinks."""
        keys = (self.batch, self.seq_k, self.kv_heads)
        sizes = {"q": (self.batch, self.seq_q, self.heads, self.head_dim)}
        sizes |= {"k": (*keys, self.head_dim), "v": (*keys, self.value_dim)}
        return sizes | ({"sinks": (self.heads, self.sinks)} if self.sinks else {})

    @property
    def dtypes(self) -> dict[str, str]:
        """Sinks are float32."""
        return {"sinks": "float32"}

    @property
    def options(self) -> dict[str, Any]:
        """The options of `ejkernel.lax.flash_attention`."""
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    @property
    def pairs(self) -> int:
        """The number of visible pairs of a query and a key, in one head of one sequence."""
        return visible_pairs(self.seq_q, self.seq_k, self.causal, self.window)

    def work(self, mode: str) -> float:
        """FLOPs: 2·(D + V) for each visible pair of a query and a key, in the forward.

        The backward counts 2.5 times that (five products against two, one of them recomputed), forward and backward 3.5
        times, a tangent 2.5 times, whatever else an implementation computes.
        """
        square = self.seq_q * self.seq_k
        if self.window == (None, None) and self.seq_q == self.seq_k:
            pairs = square / 2 if self.causal else square
        else:
            pairs = self.pairs
        factor = {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5, "jvp": 2.5}[mode]
        return factor * self.batch * self.heads * pairs * 2 * (self.head_dim + self.value_dim)

    @property
    def title(self) -> str:
        """The name in the tables of documents."""
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.head_dim != self.value_dim)
        heads = f"{self.heads}" + f"/{self.kv_heads}" * (self.heads != self.kv_heads)
        said = [f"{heads} heads, {dims}", f"{self.batch} × {self.seq_q}"]
        said += [f"window {self.window[0] + 1}"] if self.window[0] is not None else []
        said += [f"softcap {self.softcap:g}"] if self.softcap else []
        said += ["sinks"] * bool(self.sinks)
        return ", ".join(said + ["not causal"] * (not self.causal))

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.heads != self.kv_heads else f"{self.heads}"
        dims = f"{self.head_dim}/{self.value_dim}" if self.head_dim != self.value_dim else f"{self.head_dim}"
        seq = f"{self.seq_q}/{self.seq_k}" if self.seq_q != self.seq_k else f"{self.seq_q}"
        said = [f"{self.name}: b{self.batch} s{seq} h{heads} d{dims}", "causal" if self.causal else "full"]
        if self.window != (None, None):
            said.append("window " + ",".join("∞" if bound is None else str(bound) for bound in self.window))
        if self.softcap:
            said.append(f"softcap {self.softcap:g}")
        if self.sinks:
            said.append(f"sinks {self.sinks}")
        return " ".join(said)


def _layer(name, heads, kv_heads, head_dim, *, value_dim=None, batch=4, seq=4096, **options) -> AttentionShape:
    return AttentionShape(name, heads, kv_heads, head_dim, value_dim or head_dim, batch, seq, seq, **options)


# The sizes are those of `config.json` in each model's repository on huggingface.co (num_attention_heads,
# num_key_value_heads, head_dim). A sliding window of w there is w keys that end with the query's own: (w − 1, 0).
_MODELS = (
    # meta-llama/Meta-Llama-3-8B and -70B
    _layer("llama3-8b", 32, 8, 128),
    _layer("llama3-70b", 64, 8, 128, batch=2, seq=8192),
    # mistralai/Mixtral-8x7B-v0.1, whose sliding_window is null; Mistral-7B-v0.1 has the same heads and one of 4096
    _layer("mixtral-8x7b", 32, 8, 128, batch=2, seq=8192),
    _layer("mistral-7b", 32, 8, 128, batch=1, seq=16384, window=(4095, 0)),
    # google/gemma-2-9b: attn_logit_softcapping 50, every second layer with a sliding window
    _layer("gemma2-9b", 16, 8, 256, batch=2, seq=8192, softcap=50.0),
    _layer("gemma2-9b-local", 16, 8, 256, batch=2, seq=8192, softcap=50.0, window=(4095, 0)),
    # google/gemma-2-27b, its layers with a sliding window
    _layer("gemma2-27b-local", 32, 16, 128, batch=2, seq=8192, softcap=50.0, window=(4095, 0)),
    # google/gemma-3-12b-pt and -27b-pt: five local layers to a global one
    _layer("gemma3-12b-local", 16, 8, 256, batch=2, seq=8192, window=(1023, 0)),
    _layer("gemma3-27b-local", 32, 16, 128, batch=2, seq=8192, window=(1023, 0)),
    # Qwen/Qwen3-30B-A3B; Qwen/Qwen3-Next-80B-A3B-Instruct, its full-attention layers
    _layer("qwen3-30b-a3b", 32, 4, 128),
    _layer("qwen3-next-80b", 16, 2, 256, batch=1, seq=16384),
    # deepseek-ai/DeepSeek-V3: qk_nope_head_dim 128 + qk_rope_head_dim 64, v_head_dim 128, latents expanded for training
    _layer("deepseek-v3", 128, 128, 192, value_dim=128, batch=1),
    _layer("deepseek-v3-16k", 128, 128, 192, value_dim=128, batch=1, seq=16384),
    # openai/gpt-oss-20b and -120b: a sink for each head, every second layer with a sliding window
    _layer("gpt-oss", 64, 8, 64, sinks=1),
    _layer("gpt-oss-local", 64, 8, 64, sinks=1, window=(127, 0)),
    # google/vit-large-patch16-224 (14·14 patches and a class token); google-bert/bert-large-uncased
    _layer("vit-large", 16, 16, 64, batch=64, seq=197, causal=False),
    _layer("bert-large", 16, 16, 64, batch=32, seq=512, causal=False),
    # Head dims between the powers of two: google/siglip-so400m-patch14-384 (729 patches), microsoft/phi-2 and
    # Phi-3-mini-4k-instruct, google/vit-huge-patch14-224-in21k; the rest of no model
    _layer("siglip-so400m-full", 16, 16, 72, batch=32, seq=729, causal=False),
    _layer("phi2", 32, 32, 80, batch=2),
    _layer("vit-huge-full", 16, 16, 80, batch=16, seq=1024, causal=False),
    _layer("phi3-mini", 32, 32, 96, batch=2),
    _layer("h32-d96-v64", 32, 32, 96, value_dim=64, batch=2),
    *(_layer(f"h32-d{d}", 32, 32, d, batch=2) for d in (72, 112, 160, 192)),
    *(_layer(f"h32-d{d}-full", 32, 32, d, batch=2, causal=False) for d in (72, 80, 96, 112, 160, 192)),
    _layer("h16-d72", 16, 16, 72),
    _layer("h16-d104-full", 16, 16, 104, causal=False),
    *(_layer(f"h16-d{d}" + "-full" * (not c), 16, 16, d, causal=c) for d in (160, 192) for c in (True, False)),
    _layer("h16-d256-1k-full", 16, 16, 256, seq=1024, batch=16, causal=False),
    # No model: the squares that published tables of attention kernels have in common
    *(
        _layer(f"h16-d{dim}" + "-full" * (not causal), 16, 16, dim, causal=causal)
        for dim in (64, 128, 256)
        for causal in (True, False)
    ),
)

SHAPES: dict[str, AttentionShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
