"""Calls of blocksparse_attention: those of flash_attention with a block mask, for the oracle as a mask of pairs."""

from dataclasses import dataclass, field
from math import ceil

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla._blocks import within_blocks
from ejkernel.primitives import flash_attention as flash
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import FlashAttentionSpec

from .attention_cases import CAUSAL, Case, poisoned, poisoned_cotangents

WINDOW = FlashAttentionSpec(causal=True, window=(20, None))


@dataclass(frozen=True)
class SparseCase:
    """A call of flash_attention with a block mask that varies along the named axes, of which a fraction is kept.

    The first row and the last column of blocks are empty if there are several and `has_empty`.
    """

    flash: Case
    axes: str = ""
    size: tuple[int, int] = (16, 16)
    share: float = 0.5
    has_empty: bool = field(default=True, kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.flash.name}, blocks of {self.size[0]}x{self.size[1]} {self.axes}".rstrip()

    def make(self, length: int, dtype, seed: int = 0) -> tuple[Operands, BlocksparseAttentionSpec]:
        """Operands with random contents, the same for the same seed, and the spec."""
        x, spec = self.flash.make(length, dtype, seed)
        of = lambda axis, size: size if axis in self.axes else 1
        rows, columns = ceil(x.q.shape[1] / self.size[0]), ceil(x.k.shape[1] / self.size[1])
        kept = np.random.default_rng(seed).random((of("b", x.q.shape[0]), of("h", x.q.shape[2]), rows, columns))
        kept = kept < self.share
        if self.has_empty:
            kept[..., : min(1, rows - 1), :] = kept[..., columns - min(1, columns - 1) :] = False
        return sparse(x, jnp.asarray(kept)), sparse_spec(spec, self.size)


def sparse(x: flash.Operands, block_mask) -> Operands:
    return Operands(**x._asdict(), block_mask=block_mask)


def sparse_spec(spec: FlashAttentionSpec, size: tuple[int, int]) -> BlocksparseAttentionSpec:
    return BlocksparseAttentionSpec(
        **{name: getattr(spec, name) for name in spec.__dataclass_fields__}, block_size=size
    )


def poisoned_in_blocks(x: Operands, spec: BlocksparseAttentionSpec, of: Operands | None = None) -> Operands:
    """`poisoned`, with NaN in all entries that no kept block reads."""
    of = None if of is None else of.attention
    return sparse(poisoned(within_blocks(x, spec), spec, x.attention if of is None else of), x.block_mask)


def poisoned_cotangents_in_blocks(cotangents, x: Operands, spec: BlocksparseAttentionSpec):
    return poisoned_cotangents(cotangents, within_blocks(x, spec), spec)


SPARSE_CASES = [
    SparseCase(Case("plain")),
    SparseCase(Case("plain"), "bh", (32, 16)),
    SparseCase(Case("uneven", S=0.83, K=1.27, D=24, V=40), "h", (16, 32)),
    SparseCase(Case("causal", spec=CAUSAL), "b"),
    SparseCase(Case("causal, more keys", S=0.6, K=1.1, spec=CAUSAL), "h", (32, 32)),
    SparseCase(Case("causal, more queries", S=1.1, K=0.6, spec=CAUSAL), "", (16, 32)),
    SparseCase(Case("window", spec=WINDOW), "h"),
    SparseCase(Case("window of both sides", S=0.5, K=1.2, spec=FlashAttentionSpec(window=(17, 9))), "bh", (32, 16)),
    SparseCase(Case("window to the past", spec=FlashAttentionSpec(window=(None, -3)))),
    SparseCase(Case("softcap", spec=FlashAttentionSpec(softcap=2.0)), "h"),
    SparseCase(Case("grouped heads", H=4, G=2, spec=CAUSAL)),
    SparseCase(Case("grouped heads", H=4, G=2, spec=CAUSAL), "bh", (16, 32)),
    SparseCase(Case("one key head", H=3, G=1, D=16, V=48, B=1), "h"),
    SparseCase(Case("bias", bias="bhst", spec=CAUSAL), "h"),
    SparseCase(Case("bias of keys", bias="bt", S=0.7)),
    SparseCase(Case("bias of rows and heads, softcap", bias="hs", segments=True, spec=FlashAttentionSpec(softcap=2.0))),
    SparseCase(Case("packed, bias", bias="st", packed=True, B=1, S=1.2, K=1.3, spec=CAUSAL), "h"),
    SparseCase(Case("mask", mask="bhst"), "h"),
    SparseCase(Case("mask of keys, causal", mask="bt", H=4, G=2, spec=CAUSAL), "b"),
    SparseCase(Case("segments", segments=True, K=1.2), "h"),
    SparseCase(Case("segments, causal, mask", segments=True, mask="bst", H=4, G=2, spec=CAUSAL), "", (32, 16)),
    SparseCase(Case("sinks", sinks=2, spec=CAUSAL), "bh"),
    SparseCase(Case("scale of heads and batches", scale="bh", H=4, G=2, spec=FlashAttentionSpec(softcap=3.0)), "h"),
    SparseCase(Case("dropout", H=4, G=2, spec=FlashAttentionSpec(dropout_rate=0.3)), "h"),
    SparseCase(Case("packed", packed=True, B=1, S=1.3, K=1.3, H=4, G=2), "h"),
    SparseCase(Case("packed, from later on", packed=True, first=0.1, S=1.3, K=1.4, B=1, H=4, G=2), "", (32, 32)),
    SparseCase(Case("packed, causal", packed=True, B=2, S=1.3, K=1.5, spec=CAUSAL), "b", (16, 32)),
    SparseCase(Case("packed, window, sinks", packed=True, S=1.3, sinks=1, spec=FlashAttentionSpec(window=(9, 4)))),
    SparseCase(Case("nothing kept"), share=0.0),
    SparseCase(Case("all kept", spec=CAUSAL), share=1.1, has_empty=False),
    SparseCase(Case("one block", spec=CAUSAL), size=(1000, 999), share=1.1),
]
