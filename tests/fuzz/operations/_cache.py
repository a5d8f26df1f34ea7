"""Shared by the calls of operations over a cache: random options, and visibility."""

import numpy as np

from ._draws import chance, pick

INDICES = ("context_lens", "block_tables", "query_start_loc", "num_seqs", "sequence_start", "sequence_end")


def draw_options(draw, operands: dict, options: dict, dtypes: dict, most_splits: int | None = None) -> None:
    """Random options of all these operations: logits, types of indices, and whether lse is returned."""
    for name in INDICES:
        if name in operands:
            dtypes[name] = pick(draw, *["int32"] * 4, "int64", "uint32", "int16")
    if chance(draw, 30):
        operands["sinks"] = pick(draw, "h", "h 2")
    if chance(draw, 30):
        options["window"] = pick(draw, 1, 2, 7, 100, (3, None), (None, 0), (4, 4))
    if chance(draw, 20):
        options["softcap"] = pick(draw, 2.0, 30.0)
    if chance(draw, 20):
        options["softmax_scale"] = pick(draw, 0.5, 1, -0.3)
    if chance(draw, 50):
        options["return_lse"] = True
    if most_splits is not None and chance(draw, 25):
        options["num_splits"] = pick(draw, 1, 2, 3, most_splits)


def draw_quantised(draw, operands: dict, options: dict, dtypes: dict, pools: tuple[str, ...]) -> None:
    """Random pages of another dtype, with scales."""
    if chance(draw, 25):
        dtypes |= dict.fromkeys(pools, pick(draw, "int8", "float8_e4m3fn"))
    for name in ("k_scale", "v_scale"):
        if chance(draw, 25):
            operands[name] = pick(draw, "", "g", "p z g")
    if chance(draw, 10):
        options["batch_invariant"] = True


def page_values(call, name, rng, shape):
    """Contexts, tables, scales and pages of a call; None for what is ordinary numbers."""
    size = call.sizes
    if name == "context_lens":
        return rng.integers(0, size["j"] * size["z"] + 1, shape).astype(np.int32)
    if name == "block_tables":
        strange = rng.choice([-1, size["p"], 2**15 - 1], shape)
        return np.where(rng.random(shape) < 0.05, strange, rng.integers(0, size["p"], shape)).astype(np.int32)
    if name in ("k_scale", "v_scale"):
        return rng.uniform(0.5, 1.5, shape)
    return rng.integers(-8, 8, shape).astype(np.float64) if call.dtypes.get(name) in ("int8", "float8_e4m3fn") else None


def longest_in_step(size) -> int:
    """How many tokens a sequence has in a step at most: few as in decodes, or in a larger step twice the average. Its
    context may be shorter.
    """
    return 6 if size["t"] <= 20 else 2 * size["t"] // size["n"]


def pages_of(call, x) -> np.ndarray:
    """[N, J]: the pages of each sequence, clamped to the pool."""
    return np.clip(x["block_tables"].astype(np.int64), 0, call.sizes["p"] - 1)


def left_of(call) -> int | None:
    """The number of keys before its own that a query sees."""
    window = call.options.get("window")
    return window - 1 if isinstance(window, int) else (window or (None,))[0]


def hidden_slots(call, pages: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """[P, page]: the slots that no query sees, of queries with these pages [T, J] and visible keys [T, J·page]."""
    size, seen = call.sizes["z"], np.zeros(call.sizes["p"] * call.sizes["z"], bool)
    slots = (pages[:, :, None] * size + np.arange(size)).reshape(visible.shape)
    seen[slots[visible]] = True
    return ~seen.reshape(-1, size)


def hidden_pages(call, x, hidden: np.ndarray, pools: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The unread slots of pools and of their scales."""
    of_slots = [name for name in ("k_scale", "v_scale") if name in x and x[name].ndim == 3]
    wide = lambda name: hidden.reshape(*hidden.shape, *(1,) * (x[name].ndim - 2))
    return {name: np.broadcast_to(wide(name), x[name].shape) for name in (*pools, *of_slots)}
