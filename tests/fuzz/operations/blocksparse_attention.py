"""Calls of blocksparse_attention: those of flash_attention, and which blocks are kept."""

from ..formulas.blocksparse_attention import entries, formula
from . import flash_attention as flash
from ._draws import pick
from .flash_attention import magnitude, results, sensitivity

__all__ = ["formula", "magnitude", "results", "sensitivity"]

SHARE = 3
SPLIT = flash.SPLIT
DTYPES = flash.DTYPES
SEGMENTS = ("q_segment_ids", "kv_segment_ids")
ABSENT = ("bias", "mask", *SEGMENTS, "jvp", "deterministic", "batch_invariant", "sinks")
REFUSED = {"pallas": (*flash.REFUSED["pallas"], *ABSENT)}
ON = {
    "pallas": dict(
        kinds=(*["dense"] * 20, "packed", "segments", *["dense"] * 4),
        lengths=(256, 384, 512, 300, 640),
        keys=(),
        paired=(),
        windows=(257, 385, 300, 513, 2**31),  # the next key is the first of a block
        window_ends=(None, 256, 0, 40, 384, 2**31, None),
        blocks=((128, 256, 640, 384, 640, 256), (128, 128, 256, 128, 128, 640, 128)),
        dtypes=(*["bfloat16"] * 8, "float16", "bfloat16"),
    )
}


def programs(draw, sizes):
    operands, size, options, dtypes = flash.programs(draw, sizes)
    block = tuple(pick(draw, *of) for of in sizes.blocks)
    size |= {of: -(-size[length] // n) for of, length, n in zip("xy", "st", block, strict=True)}
    batch = pick(draw, "1", "b") if "b" in size else "1"
    axes = [batch, pick(draw, "h", "1"), "x y"]
    operands["block_mask"] = " ".join(axes[pick(draw, 0, 1, 2) :])
    return operands, size, options | {"block_size": block}, dtypes


def values(call, name, rng, shape):
    if name != "block_mask":
        return flash.values(call, name, rng, shape)
    kept = rng.random(shape) < rng.choice([0.1, 0.5, 0.9])
    return kept & (rng.random(shape[-2:-1]) < 0.8)[:, None]


def masked(call, x):
    """The operands of flash_attention that stand for these, the mask in full."""
    of_blocks = entries(x["block_mask"], call.options["block_size"], call.sizes["s"], call.sizes["t"])
    return dict(x, mask=of_blocks & x.get("mask", True))


def facts(call, x):
    return flash.facts(call, masked(call, x))


def hidden(call, x):
    return flash.hidden(call, masked(call, x))


def unheard(call, x):
    return flash.unheard(call, masked(call, x))
