"""What the calls of both operations over a cache of TurboQuant draw, and what the bytes of pools stand for."""

import numpy as np

from ._draws import pick

POOLS = {
    "key_indices_pages": "p z g i",
    "key_signs_pages": "p z g w",
    "key_norms_pages": "p z g 2",
    "value_indices_pages": "p z g i",
    "value_norms_pages": "p z g",
}
MATRICES = dict(rotation_matrix="d d", qjl_projection="e d", key_codebook="k", value_codebook="u")
DTYPES = dict.fromkeys(("sinks", *MATRICES), "float32")
NORMS = ("key_norms_pages", "value_norms_pages")


def draw_matrices(draw, size: dict, dtypes: dict) -> None:
    """Features, rows of the projection, entries of codebooks, and the dtype of norms."""
    size["d"], size["e"] = pick(draw, 2, 8, 16, 32), pick(draw, 8, 16, 64)
    size |= dict(i=size["d"] // 2, w=size["e"] // 8, k=pick(draw, 1, 2, 4, 8, 16), u=pick(draw, 2, 4, 8, 16, 3))
    dtypes |= {name: pick(draw, "float32", "float32", "call", "bfloat16") for name in NORMS}


def values(call, name, rng, shape):
    """Those of pools and matrices; None for others."""
    if name in NORMS:
        return rng.uniform(0.2, 1.5, shape)
    if name in POOLS:
        return rng.integers(0, 256, shape).astype(np.uint8)
    if name == "rotation_matrix":
        return np.linalg.qr(rng.standard_normal(shape))[0]
    if name == "qjl_projection":
        return rng.standard_normal(shape) / shape[0] ** 0.5
    return rng.standard_normal(shape) / call.sizes["d"] ** 0.5 if name in MATRICES else None


def facts_of_bytes(call, x) -> dict[str, np.ndarray]:
    """Which entry [P, page, G, D, entries] each index is, and the signs [P, page, G, e]."""
    found = {}
    for name, letter in (("key", "k"), ("value", "u")):
        packed = x[f"{name}_indices_pages"].astype(np.int64)
        index = np.stack([packed % 16, packed // 16], -1).reshape(*packed.shape[:-1], -1)
        entry = np.arange(call.sizes[letter])
        found[f"{name}_entries"] = np.minimum(index, entry[-1])[..., None] == entry
    positive = np.unpackbits(x["key_signs_pages"], axis=-1, bitorder="little")
    return found | {"signs": np.where(positive, 1, -1)}


def largest(call, x) -> list[np.ndarray]:
    """Keys as they are in the pools at most, for the largest logit that there can be."""
    book, norms = np.abs(x["key_codebook"]).max(), x["key_norms_pages"].astype(np.float64)
    rows, features = call.sizes["e"], call.sizes["d"]
    of_signs = np.sqrt(np.pi / 2 / rows) * norms[..., 1] * np.linalg.norm(x["qjl_projection"], 2) * np.sqrt(rows)
    return [(norms[..., 0] * (book * np.sqrt(features) + of_signs))[..., None]]
