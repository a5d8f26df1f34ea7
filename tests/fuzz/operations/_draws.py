"""Random arguments that the calls of several operations share."""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np


@dataclass(frozen=True)
class Sizes:
    """The sizes for a search: those that compile fast, or those that the kernels for a GPU take.

    Attributes:
        platform: the platform whose kernels are requested, or None.
        kinds: kinds of calls of attention.
        lengths: lengths of sequences; `keys` those of keys if they differ.
        paired: lengths with a bias or a mask if they differ, which has a number for each query and key then.
        features: features of a head or a row.
        attention_features: features of a head of attention.
        rope: rotary features of a head beside others.
        windows: numbers of keys in a window; `window_ends` those on each side.
        blocks: sizes of blocks of a block mask, in queries and in keys.
        steps: tokens in a step of serving, with `sequences` and `paged_features` of a head.
        pages: slots of a page; `columns` those of a block table.
        latent_features: features of a latent in a cache, and of its rotary part.
        configs: whether configs are given.
        draws: numbers of random values for one program.
        dtypes: dtypes of the float operands.
    """

    platform: str | None = None
    kinds: tuple[str, ...] = (*["dense"] * 4, "segments", "packed")
    lengths: tuple[int, ...] = (1, 2, 5, 7, 8, 16, 17, 31, 33, 40, 65, 130, 0)
    keys: tuple[int, ...] = ()
    paired: tuple[int, ...] = ()
    features: tuple[int, ...] = (1, 3, 8, 8, 16, 16, 20, 32, 64)
    attention_features: tuple[int, ...] = (8, 16, 16, 16, 24, 32, 64, 1, 3)
    rope: tuple[int, ...] = (4, 1, 8)
    windows: tuple[int, ...] = (1, 2, 5, 20, 64, 200, 2**31)
    window_ends: tuple[int | None, ...] = (None, 0, 1, 3, 10, 40, 1000, 2**31, 2**40)
    blocks: tuple[tuple[int, ...], tuple[int, ...]] = ((1, 3, 8, 16, 64, 300), (2, 5, 8, 16, 64, 300))
    steps: tuple[int, ...] = (1, 3, 8, 12, 20)
    sequences: tuple[int, ...] = (1, 2, 3, 5)
    paged_features: tuple[int, ...] = (8, 16, 32)
    pages: tuple[int, ...] = (8, 16, 4, 1)
    columns: tuple[int, ...] = (1, 2, 5)
    latent_features: tuple[tuple[int, int], ...] = tuple((c, d) for c in (8, 16, 32) for d in (4, 8))
    configs: bool = True
    draws: int = 3
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16", "bfloat16", "float16")


CPU = Sizes()
GPU = Sizes(
    platform="triton",
    lengths=(1, 5, 16, 33, 63, 64, 77, 127, 128, 129, 200, 256, 300),
    features=(16, 32, 64, 64, 128),
    attention_features=(16, 32, 40, 64, 64, 128),
    rope=(8, 16, 4, 32, 8),
    blocks=((16, 32, 8, 64, 128, 48, 300), (16, 32, 5, 64, 128, 48, 300)),
    steps=(1, 3, 8, 20, 70),
    paged_features=(8, 16, 32, 64, 128),
    pages=(8, 16, 32, 4, 1),
    configs=False,
    draws=15,
)
"""What the Triton kernels take, and some that they refuse."""

HOPPER = Sizes(
    platform="pallas",
    lengths=(256, 300, 64, 192, 256, 300, 384, 512, 640),
    keys=(256, 300, 384, 128, 512, 640, 384),
    paired=(1024, 1280, 1032, 1104),
    features=(64, 128),
    attention_features=(128, 64, 128, 80, 192, 256, 128),
    rope=(16, 32, 64, 8, 4, 16, 32, 64, 16),
    windows=(256, 300, 64, 384, 500, 2**31),
    window_ends=(None, 0, 1, 40, 256, 300, 1000, 2**31, 2**40),
    blocks=((128, 64, 256, 384, 640, 128), (128, 256, 64, 384, 640, 128)),
    steps=(72, 100, 128, 150),
    sequences=(1, 2, 1, 1, 3, 1),
    columns=(1, 2, 3),
    paged_features=(64, 128, 192, 256, 128),
    pages=(16, 32, 64, 8, 32, 64, 16),
    configs=False,
    draws=15,
    dtypes=("bfloat16", "float16"),
)
"""What the Mosaic GPU kernels take, and some that they refuse."""

SIZES = {of.platform: of for of in (CPU, GPU, HOPPER)}


def shape_of(call, axes: str) -> tuple[int, ...]:
    """The shape of axes in letters and numbers."""
    return tuple(int(a) if a.isdigit() else call.sizes[a] for a in axes.split())


def pick(draw, *of):
    return draw(st.sampled_from(of))


def chance(draw, percent: int) -> bool:
    return draw(st.sampled_from(range(100))) >= 100 - percent  # so that hypothesis makes it False where it can


def seldom(draw) -> bool:
    """True in one draw of 20; hypothesis prefers the first and the last of the values that it samples from."""
    return draw(st.sampled_from(range(20))) == 10


def heads(draw) -> dict[str, int]:
    h, g = pick(draw, (1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (3, 3), (6, 2), (5, 1))
    return {"h": h, "g": g}


def cuts(rng: np.random.Generator, sequences: int, tokens: int, longest: int | None = None) -> np.ndarray:
    """cu_seqlens of sequences that may be empty and may leave tokens at the end without a sequence."""
    ends = np.sort(rng.integers(0, tokens + 1, sequences))
    if sequences > 1 and rng.random() < 0.5:
        ends[rng.integers(sequences - 1)] = ends[-1] if rng.random() < 0.2 else 0
        ends.sort()
    if rng.random() < 0.5:
        ends[-1] = tokens
    first = ends[0] if rng.random() < 0.2 else 0  # tokens before it are of no sequence, too
    lengths = np.diff(ends, prepend=first)
    lengths = lengths if longest is None else np.minimum(lengths, longest)
    return first + np.append(0, np.cumsum(lengths)).astype(np.int32)


def tokens_past(x: np.ndarray, tokens: int) -> np.ndarray:
    """[tokens]: the tokens of no sequence."""
    token = np.arange(tokens)
    return (token < x[0]) | (token >= x[-1])


def along(mask: np.ndarray, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of one axis, broadcast to an array of that shape."""
    return np.broadcast_to(mask.reshape(tuple(-1 if i == axis else 1 for i in range(len(shape)))), shape)


def scale(rng, shape) -> np.ndarray:
    return rng.choice([-1, 1, 1, 1, 1], shape) * rng.uniform(0.2, 0.6, shape)


def draw_scale(draw, operands: dict, options: dict) -> None:
    kind = pick(draw, *["default"] * 5, "static", "traced")
    if kind == "static":
        options["softmax_scale"] = pick(draw, 0.25, 1.0, -0.5, 0.0, 1)
    if kind == "traced":
        operands["softmax_scale"] = ""


def logits_rounded(call, x, keys: list[np.ndarray]) -> float:
    """The relative error of exp(s) if s is rounded to float32: half a unit of the largest possible logit."""
    longest = lambda a: np.sqrt((np.where(np.isfinite(a), a, 0).astype(np.float64) ** 2).sum(-1)).max(initial=0)
    scale = x.get("softmax_scale", call.options.get("softmax_scale") or call.sizes["d"] ** -0.5)
    bias = np.where(np.isfinite(x["bias"]), x["bias"], 0).astype(np.float64) if "bias" in x else np.zeros(1)
    largest = abs(float(scale)) * longest(x["q"]) * max(map(longest, keys)) + np.abs(bias).max(initial=0)
    return float(np.finfo(np.promote_types(call.type("q"), np.float32)).eps / 2 * (1 + largest))
