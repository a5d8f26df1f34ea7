"""The models that can be served: the demo's, which is trained here, and Llama 3.2 1B with random weights."""

import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import lax
from ..serving import LLAMA_1B, Decoder, Limits, joined, place, random_weights
from ..serving.model import Weights, weight_shapes
from . import _corpus
from ._model import Model, Operations
from ._progress import progress
from ._training import train

_BATCH, _LENGTH = 4, 128
_OPERATIONS = Operations(lax.flash_attention, lax.gla, lax.grouped_matmul)


def _of_demo() -> Decoder:
    sizes = asdict(Model(vocabulary=_corpus.VOCABULARY))
    return Decoder(**{name: value for name, value in sizes.items() if name not in ("mixer", "experts")})


@dataclass(frozen=True)
class Served:
    """A model that can be served: its size, its default limits, and the lengths of requests in a replay.

    `prompts` and `outputs` are the smallest and largest numbers of tokens of a prompt and of its continuation.
    """

    decoder: Decoder
    limits: Limits
    prompts: tuple[int, int]
    outputs: tuple[int, int]


MODELS = {
    "demo": Served(_of_demo(), Limits(1024, sequences=32, length=512, buckets=(32, 128)), (16, 192), (16, 192)),
    "llama-1b": Served(
        LLAMA_1B, Limits(20_480, sequences=256, length=2048, buckets=(64, 256, 1024)), (100, 1024), (100, 1024)
    ),
}


def weights_of(decoder: Decoder, file: Path, steps: int, seed: int, dtype: Any, mesh: Mesh | None) -> Weights:
    """The weights in a file; if there is no such file, the model is trained and its weights saved there.

    Raises:
        ValueError: the file is damaged, or holds weights of another model.
        OSError: the file cannot be read or written.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        _save(file, _trained(steps, seed))
    weights = _joined({name: jnp.asarray(x, dtype) for name, x in _kept(file).items()})
    if jax.tree.map(jnp.shape, weights) != weight_shapes(decoder):
        raise ValueError(f"{file} has not the weights of this model")
    return weights if mesh is None else place(weights, mesh)


def _kept(file: Path) -> dict[str, np.ndarray]:
    """The arrays in a file of NumPy's format npz."""
    if not zipfile.is_zipfile(file):  # np.load would take it for another format
        raise ValueError(f"{file} is no file of weights, or a damaged one")
    try:
        with np.load(file) as kept:
            return {name: kept[name] for name in kept.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def drawn_weights(decoder: Decoder, seed: int, dtype: Any, mesh: Mesh | None) -> Weights:
    """Random weights, for measurements: the text that they generate is noise."""
    return random_weights(decoder, jax.random.key(seed), dtype, mesh)


def prompts_of(lengths: Sequence[int], decoder: Decoder, seed: int) -> list[list[int]]:
    """Prompts of these lengths: excerpts of the demo's held-out text, or random tokens of a larger vocabulary."""
    if decoder.vocabulary == _corpus.VOCABULARY:
        text = _corpus.load()[1]
        return [_corpus.windows(text, 1, 1, n, seed + i)[0, 0, :n].tolist() for i, n in enumerate(lengths)]
    rng = np.random.default_rng(seed)
    return [rng.integers(decoder.vocabulary, size=n).tolist() for n in lengths]


def _trained(steps: int, seed: int) -> Weights:
    """The weights of the demo's model, trained as in the demo with twice as many excerpts a step."""
    model, text = Model(vocabulary=_corpus.VOCABULARY), _corpus.load()[0]
    excerpts = _corpus.windows(text, steps, _BATCH, _LENGTH, seed)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    show = progress("training", steps, every=50)
    return train(model, _OPERATIONS, excerpts, jax.random.key(seed), dtype, show).parameters


def _joined(arrays: dict[str, Any]) -> Weights | None:
    """The engine's weights, of arrays whose names are paths such as ['layers'][0]['query']; None of other names."""
    weights, layers = {}, defaultdict(dict)
    try:
        for name, x in arrays.items():
            *layer, last = re.findall(r"\w+", name)
            (layers[int(layer[1])] if layer else weights)[last] = x
        return joined(weights | {"layers": [layers[i] for i in range(len(layers))]})
    except (LookupError, ValueError, TypeError):  # other names, or other shapes
        return None


def _save(file: Path, weights: Weights) -> None:
    """Writes a temporary file in the same directory and renames it, so that no partly written file is ever read."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
    arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    beside = file.with_name(f".{file.name}.tmp")
    with open(beside, "wb") as opened:
        np.savez(opened, **arrays)
    beside.replace(file)
