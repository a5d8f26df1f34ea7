"""What the calls of several operations draw."""

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np


@dataclass(frozen=True)
class Sizes:
    """The lengths and features of a search: those that compile fast, or those that fill the tiles of a GPU."""

    lengths: tuple[int, ...] = (1, 2, 5, 7, 8, 16, 17, 31, 33, 40, 65, 130, 0)
    features: tuple[int, ...] = (1, 3, 8, 8, 16, 16, 20, 32, 64)
    attention_features: tuple[int, ...] = (8, 16, 16, 16, 24, 32, 64, 1, 3)
    configs: bool = True
    draws: int = 3  # of values for one program
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16", "bfloat16", "float16")
    absent: tuple[str, ...] = ()  # operands and options


CPU = Sizes()
GPU = Sizes(
    (1, 5, 16, 33, 63, 64, 77, 127, 128, 129, 200, 256, 300), (16, 32, 64, 64, 128), (16, 32, 40, 64, 64, 128), False, 5
)

HOPPER = Sizes(
    (64, 128, 192, 256, 256, 300, 384, 512, 640),
    (64, 128),
    (64, 128, 128, 256),
    False,
    5,
    ("bfloat16", "float16"),
    ("bias", "mask", "softmax_scale", "dropout_key", "dropout_rate"),
)
"""What the Mosaic GPU kernels take."""


def shape_of(call, axes: str) -> tuple[int, ...]:
    """Of axes in letters and numbers."""
    return tuple(int(a) if a.isdigit() else call.sizes[a] for a in axes.split())


def pick(draw, *of):
    return draw(st.sampled_from(of))


def chance(draw, percent: int) -> bool:
    return draw(st.sampled_from(range(100))) >= 100 - percent  # so that hypothesis makes it False where it can


def heads(draw) -> dict[str, int]:
    h, g = pick(draw, (1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (3, 3), (6, 2), (5, 1))
    return {"h": h, "g": g}


def cuts(rng: np.random.Generator, sequences: int, tokens: int, longest: int | None = None) -> np.ndarray:
    """cu_seqlens of sequences that may be empty and may leave tokens at the end to none."""
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
    """[tokens]: those of no sequence."""
    token = np.arange(tokens)
    return (token < x[0]) | (token >= x[-1])


def along(mask: np.ndarray, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of one axis for an array of that shape."""
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
    """The relative error of exp(s) where s is rounded to float32: half a unit of the largest logit that can be."""
    longest = lambda a: np.sqrt((np.where(np.isfinite(a), a, 0).astype(np.float64) ** 2).sum(-1)).max(initial=0)
    scale = x.get("softmax_scale", call.options.get("softmax_scale") or call.sizes["d"] ** -0.5)
    bias = np.where(np.isfinite(x["bias"]), x["bias"], 0).astype(np.float64) if "bias" in x else np.zeros(1)
    largest = abs(float(scale)) * longest(x["q"]) * max(map(longest, keys)) + np.abs(bias).max(initial=0)
    return float(np.finfo(np.promote_types(call.type("q"), np.float32)).eps / 2 * (1 + largest))
