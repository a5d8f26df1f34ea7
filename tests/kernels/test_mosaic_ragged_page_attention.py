"""ragged_page_attention in Mosaic GPU, without a GPU: it lowers, and its tiles, blocks and pages are a step's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

import ejkernel
from ejkernel import lax, modules
from ejkernel.kernels._pallas.gpu.ragged_page_attention import BLOCKS, supports
from ejkernel.kernels._pallas.gpu.ragged_page_attention.forward import plan_of
from ejkernel.kernels._pallas.gpu.ragged_page_attention.work import WorkTile, most_tiles, work_tiles
from ejkernel.kernels._target import lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands
from ejkernel.types import Target

from . import interpreter
from .paged import close, ragged_defined, wide

HOPPER = Target("cuda", "NVIDIA H200")


def shapes(tokens=640, h=8, g=2, d=128, page=64, sequences=3, columns=20, dtype=jnp.bfloat16, pages=None, **others):
    """Operands of the primitive, [b = 1, …]."""
    of = jax.ShapeDtypeStruct
    integers = dict(
        context_lens=(1, sequences), block_tables=(1, sequences, columns), query_start_loc=(1, sequences + 1),
        num_seqs=(1, 1),
    )  # fmt: skip
    return Operands(
        q=of((1, tokens, h, d), dtype), kv_pages=of((1, 64, page, g, 2, d), pages or dtype),
        **{name: of(shape, jnp.int32) for name, shape in integers.items()}, **others,
    )  # fmt: skip


def custom_calls(function, *arguments) -> dict[str, int]:
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return {name: text.count(f"custom_call @{name}") for name in ("mosaic_gpu_v2", "triton_kernel_call")}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "d, page, options",
    [
        (64, 16, dict(window=300)),
        (128, 64, {}),
        (256, 128, dict(softcap=20.0)),
        (96, 16, {}),
        *(
            pytest.param(d, page, options, marks=SLOW)
            for d in (*BLOCKS, 16, 48, 80, 144, 224)
            for page in (16, 64, 128, 256)
            for options in ({}, dict(window=300, softcap=20.0))
        ),
    ],
    ids=str,
)
def test_lowers(d, page, options):
    from ejkernel.kernels._pallas.gpu.ragged_page_attention.forward import prefill

    spec, sinks = CacheSpec(softmax_scale=0.1, **options), jax.ShapeDtypeStruct((1, 8, 1), jnp.float32)
    for x in (shapes(d=d, page=page), shapes(d=d, page=page, dtype=jnp.float16, sinks=sinks)):
        with lowering_for(HOPPER):
            assert supports(spec, x, HOPPER) is None
            assert custom_calls(lambda x: prefill(x, spec, 16), x)["mosaic_gpu_v2"] == 1


def a_call(tokens=640, **sizes):
    x = shapes(tokens, **sizes)
    pages = jax.ShapeDtypeStruct((*x.kv_pages.shape[1:3], 2 * x.kv_pages.shape[3], x.kv_pages.shape[5]), x.q.dtype)
    tables = {n: jax.ShapeDtypeStruct(getattr(x, n).shape[1:], jnp.int32) for n in x._fields[2:6]}
    return dict(q=jax.ShapeDtypeStruct(x.q.shape[1:], x.q.dtype), kv_pages=pages, **tables)


def test_a_step_is_a_prefill_and_a_decode():
    """Mosaic's launch, and those of Triton for the rest: its work tiles, and a decode, whose splits are merged."""
    x = a_call(sequences=70)
    found = custom_calls(lambda x: lax.ragged_page_attention(**x), x)
    assert found["mosaic_gpu_v2"] == 1 and found["triton_kernel_call"] in (2, 3)
    new = jax.ShapeDtypeStruct((640, 2, 128), jnp.bfloat16)
    assert custom_calls(lambda x: lax.ragged_page_attention_v3(**x), x | dict(k=new, v=new)) == found


@pytest.mark.parametrize("platform", ("pallas", "triton"))
def test_arrays_written_in_place_are_not_sliced(platform):
    """XLA would fuse the two, and the launch would write its operand, which is dropped, rather than the slice."""
    x = a_call(sequences=70)
    step = lambda x: modules.ragged_page_attention(**x, platform=platform)
    with lowering_for(HOPPER):
        scanned = jax.jit(lambda x: jax.lax.scan(lambda carry, _: (carry, step(x)), (), length=2)[1])
        text, users = scanned.trace(x).lower(lowering_platforms=("cuda",)).as_text(), []
    for function in text.split("func.func")[1:]:
        for name, aliases in re.findall(r"(%\w+):\d+ = .*output_operand_aliases = \[(.+?>)\]", function):
            for n in re.findall(r"output_tuple_indices = \[(\d+)\]", aliases):
                users += [line for line in function.splitlines() if re.search(rf"{name}#{n}\b", line)]
    assert users and all("optimization_barrier" in line or "custom_call" in line for line in users)


def test_few_tokens_are_decoded():
    x = a_call(48)
    assert custom_calls(lambda x: lax.ragged_page_attention(**x), x)["mosaic_gpu_v2"] == 0
    assert "48 tokens in the step" in str(ejkernel.explain("ragged_page_attention", **x, target=HOPPER))


@pytest.mark.parametrize(
    "reason, spec, x",
    [
        ("capability", {}, None),
        ("pages of 24 slots", {}, dict(page=24)),
        ("pages of 48 slots", {}, dict(page=48)),
        ("pages of 8 slots", {}, dict(page=8)),
        ("a head dim of 72", {}, dict(d=72)),
        ("q is float32", {}, dict(dtype=jnp.float32)),
        ("k_scale of slots", {}, dict(k_scale=jax.ShapeDtypeStruct((1, 64, 64, 2), jnp.float32))),
        ("softmax_scale is -0.1", dict(softmax_scale=-0.1), {}),
        ("softcap is 200", dict(softcap=200.0), {}),
        ("48 tokens in the step", {}, dict(tokens=48)),
        ("sequences of 28 tokens", {}, dict(tokens=70, sequences=10)),
    ],
    ids=lambda x: x.replace(" ", "_") if isinstance(x, str) else "",
)
def test_calls_left_to_other_implementations_give_a_reason(reason, spec, x):
    target = HOPPER if x is not None else Target("cuda", "NVIDIA A100-SXM4-80GB")
    assert reason in supports(CacheSpec(**spec), shapes(**(x or {})), target)


# Tokens and keys of sequences, the last of which is not counted.
LENGTHS, CONTEXTS = (1, 150, 0, 20, 300, 40), (90, 400, 7, 20, 700, 33)


def test_tiles_hold_every_token_once(monkeypatch):
    """Those of sequences with enough tokens, and those of no sequence; the longest come first."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    starts = np.cumsum([3, *LENGTHS])
    tokens, block_q, least, left = int(starts[-1]) + 9, 128, 17, 100
    steps = [(CONTEXTS, starts, len(LENGTHS) - 1), (CONTEXTS[::-1], np.minimum(starts, 200), len(LENGTHS))]
    arrays = [jnp.asarray(np.stack(a), jnp.int32) for a in zip(*steps, strict=True)]
    table, total, _ = work_tiles(*arrays[:2], arrays[2][:, None], tokens, block_q, least, left, 512)
    assert len(table) == most_tiles(2, len(LENGTHS), tokens, block_q)
    found, sizes = {}, []
    for entry in np.asarray(table)[: int(total[0])]:
        of = WorkTile(*map(int, entry))
        assert 1 <= of.tokens <= block_q
        sizes.append(of.position + of.tokens)
        for i in range(of.tokens):
            assert of.token + i not in found
            found[of.token + i] = of.position + i, of.sequence, of.first_key, of.stop
    wanted = {}
    for b, (contexts, starts, count) in enumerate(steps):
        begin, end = starts[0], starts[count]
        for n in range(count):
            length = starts[n + 1] - starts[n]
            cached = contexts[n] - length
            for i in range(length if length >= least else 0):
                of_sequence = b * len(LENGTHS) + n, max(0, cached - left), min(contexts[n], 512)
                wanted[b * tokens + starts[n] + i] = cached + i, *of_sequence
        for token in (*range(begin), *range(end, tokens)):
            wanted[b * tokens + token] = None
    assert found.keys() == wanted.keys()
    assert all(found[t][0] < 0 if w is None else found[t] == w for t, w in wanted.items())
    assert sorted(sizes, reverse=True)[0] == sizes[0]


def a_step(page, d, h=4, g=2, window=None, drafts=None):
    """Arguments with NaN in unread entries, where tables have no valid pages; with so many drafts that are seen."""
    rng, n, columns = np.random.default_rng(0), len(LENGTHS), -(-max(CONTEXTS) // page) + 1
    lengths, contexts = np.asarray(LENGTHS), np.asarray(CONTEXTS)
    tables, key = rng.permutation(n * columns).reshape(n, columns), np.arange(columns * page)
    first = np.maximum(contexts - lengths - (window or 1000) + 1, 0)
    stop = contexts if drafts is None else contexts - np.maximum(lengths - drafts, 0)
    used = (key >= first[:, None]) & (key < stop[:, None])
    of_pages = np.zeros((n * columns, page), bool)
    of_pages[tables] = used.reshape(n, columns, page)
    pages = np.where(of_pages[..., None, None], rng.standard_normal((n * columns, page, 2 * g, d), np.float32), np.nan)
    place = np.concatenate([*map(np.arange, LENGTHS), np.arange(9)])[:, None]
    mask = (
        {} if drafts is None else dict(draft_mask=jnp.asarray(np.arange(drafts + 1) <= np.minimum(place, drafts - 1)))
    )
    tables = np.where(used.reshape(n, columns, page).any(2), tables, -7)
    return dict(
        q=jnp.asarray(rng.standard_normal((sum(LENGTHS) + 9, h, d)), jnp.bfloat16),
        kv_pages=jnp.asarray(pages, jnp.bfloat16),
        context_lens=jnp.asarray(contexts),
        block_tables=jnp.asarray(tables),
        query_start_loc=jnp.asarray(np.cumsum([0, *LENGTHS])),
        num_seqs=jnp.asarray([n - 1]),
        **mask,
    )


@pytest.mark.parametrize("page", (16, 64, 256))
@pytest.mark.parametrize("window", (None, 9, 130))
@pytest.mark.parametrize("drafts", (None, 0, 25))
def test_blocks_and_pages_are_those_of_a_step(page, window, drafts, monkeypatch):
    """The kernel as a loop: blocks from the plan, masks in those that are not full, zeros instead of hidden values."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, least = a_step(page, 64, window=window, drafts=drafts), 17
    call = OPERATIONS["ragged_page_attention"].prepare_arguments(**x, window=window)
    operands, spec = Operands(**{n: a for n, a in call.named.items() if a is not None}), call.spec
    with lowering_for(HOPPER):
        plan = plan_of(operands, spec)
    (T, H, D), problem = x["q"].shape, plan.problem
    left = None if window is None else window - 1
    table, total, _ = work_tiles(
        operands.context_lens, operands.query_start_loc, operands.num_seqs, T, plan.tokens, least, left, problem.K,
        of_step=None if drafts is None else jnp.full_like(operands.context_lens, drafts),
    )  # fmt: skip
    kv, block_tables = wide(operands.kv_pages).reshape(-1, 2 * problem.G, D), operands.block_tables[0]
    o, lse = np.full((T, H, D), np.nan), np.full((T, H), np.nan)
    rows = min(page, plan.block_k)
    places = jax.jit(lambda of, block: (jnp.stack(plan.slots(of, block, block_tables)), plan.hides(of, block)))
    for entry in np.asarray(table)[: int(total[0])]:
        of = WorkTile(*entry)
        ranges = [int(n) for n in plan.blocks_of_keys(of, 0)]
        positions = of.position + np.arange(of.tokens)[:, None]
        logits, values = [], []
        for block in range(ranges[0], ranges[1]):
            slots, (hides, begin, end) = places(of, block)
            loaded = np.concatenate([kv[slot : slot + rows] for slot in np.asarray(slots)])
            key, row = block * plan.block_k + np.arange(plan.block_k), np.arange(plan.block_k)
            keys, v = (np.repeat(loaded[:, n::2], problem.group, 1) for n in range(2))
            if hides:
                v = np.where(((row >= begin) & (row < end))[:, None, None], v, 0)
            s = spec.softmax_scale * np.einsum("thd,khd->htk", wide(x["q"][of.token : of.token + of.tokens]), keys)
            if not ranges[2] <= block < ranges[3]:
                ok = (key <= positions) & (key >= positions - (left or T + problem.K)) & (key < of.stop)
                s = np.where(ok, s, -np.inf)
            logits.append(s), values.append(v)
        s, v = np.concatenate(logits, 2), np.concatenate(values)
        maximum = np.nan_to_num(s.max(2, keepdims=True), neginf=0.0)
        p = np.exp(s - maximum)
        sums = p.sum(2)
        with np.errstate(divide="ignore"):
            lse[of.token : of.token + of.tokens] = (maximum[..., 0] + np.log(sums)).T
        o[of.token : of.token + of.tokens] = np.einsum("htk,khd->thd", p / np.where(sums, sums, 1)[..., None], v)
    wanted = ragged_defined(x, window=window)
    decoded = np.zeros(T, bool)
    for n, length in enumerate(LENGTHS[:-1]):
        decoded[int(x["query_start_loc"][n]) :][:length] = length < least
    assert np.isnan(o[decoded]).all() and np.isnan(lse[decoded]).all()
    for found, exact in zip((o, lse), wanted, strict=True):
        assert not np.isnan(found[~decoded]).any()
        close(found[~decoded], exact[~decoded], 1e-9)


@pytest.mark.parametrize("window", (None, 130))
def test_splits_share_all_blocks(window):
    """Each block of a work tile is in one split, and full in it if it is full; others have a block and see nothing."""
    with lowering_for(HOPPER):
        plan = plan_of(shapes(), CacheSpec(window=window, num_splits=3))
    assert plan.splits == 3
    for position, tokens in ((0, 16), (200, 16), (700, 9), (1000, 16), (-40, 3)):
        of = WorkTile(*map(jnp.int32, (0, tokens, position, 0, 0, 1280)))
        begin, end, full_begin, full_end = map(int, plan.blocks_of_tokens(of))
        found, full = [], []
        for n in range(plan.splits):
            split = jnp.int32(n)
            ranges = [int(bound) for bound in plan.blocks_of_keys(of, split)]
            assert 0 <= ranges[0] < ranges[1] <= 10 and ranges[0] <= ranges[2] <= ranges[3] <= ranges[1]
            if not plan.sees_nothing(of, split):
                found += range(*ranges[:2])
                full += range(*ranges[2:])
        assert not plan.sees_nothing(of, jnp.int32(plan.splits - 1))
        assert found == list(range(begin, end)) and full == list(range(full_begin, full_end))


def test_steps_of_few_sequences_are_split():
    """So that all multiprocessors have work, unless the bits of a token may not depend on the rest of the step."""
    x = shapes(tokens=256, h=32, g=8, sequences=1, columns=512)
    with lowering_for(HOPPER):
        splits = [plan_of(x, spec).splits for spec in (CacheSpec(), CacheSpec(batch_invariant=True))]
        assert splits == [2, 1]
        assert plan_of(shapes(tokens=512, h=32, g=8, sequences=1, columns=512), CacheSpec()).splits == 1
        assert plan_of(shapes(tokens=64, h=32, g=8, sequences=1, columns=32), CacheSpec()).splits == 2


@pytest.mark.parametrize("total", (0, 1, 7, 40))
def test_thread_blocks_share_all_work_tiles(total, monkeypatch):
    from ejkernel.kernels._pallas.gpu.ragged_page_attention import plan as of_plan

    with lowering_for(HOPPER):
        plan = plan_of(shapes(tokens=8000), CacheSpec())
    found = []
    for block in range(plan.blocks):
        monkeypatch.setattr(of_plan.lax, "axis_index", lambda name, block=block: jnp.int32(block))
        count = int(plan.count(jnp.int32(total)))
        for has_decodes in (False, True):
            order = [int(plan.nth(jnp.int32(n), count, jnp.bool_(has_decodes))) for n in range(count)]
            assert order == list(range(count))[:: -1 if has_decodes and block % 2 else 1]
        found += [int(plan.number(jnp.int32(n))) for n in range(count)]
    assert sorted(found) == list(range(total * plan.problem.H // plan.packed_heads))
