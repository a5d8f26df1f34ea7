"""Estimates of flash attention on TPUs, without one: `python -m benchmarks.tpu_estimates --generations v5e,v6e`.

Not a measurement. The compiler's `cost_analysis()` does not look inside Mosaic kernels (it repeats the `cost_estimate`
of a kernel, and has next to nothing without one), but the programs that it makes can be read: `_bundles` counts the
bundles that each kernel issues, and the bytes that it copies. Only kernels are compared, without the layout changes and
small fusions around them. Rivals are JAX's splash_attention and flash_attention, each with the best of the block sizes
below for every case; flash_attention, which has no grouped heads, gets repeated ones. Bundles do not include all stalls
of a matrix unit: if a rate is near the peak of a chip, or above it, the time is a lower bound.
"""

import argparse
import datetime
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from ejkernel.kernels._pallas.tpu import flash_attention as ours
from ejkernel.kernels._pallas.tpu.flash_attention.backward import DQ_BYTES, dq_bytes
from ejkernel.kernels._pallas.tpu.flash_attention.problem import plan
from ejkernel.kernels._pallas.tpu.flash_attention.schedule import mask_info_of, schedule_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import ATTENTION_SHAPES, AttentionShape, Target

from ._records import RESULTS, save_record
from ._tpu_compiler import GENERATIONS, Compiler

MODES = "fwd", "bwd", "jvp"
UNITS = "MATMUL", "VALU", "VLOAD", "VSTORE"
# Block sizes of the rivals: (queries, keys, keys of an inner step).
SPLASH = {"fwd": ((1024, 1024, 512), (512, 512, 512)), "bwd": ((1024, 1024, 512), (512, 512, 512))}
FLASH = {"fwd": ((1024, 1024, 512), (512, 512, 512)), "bwd": ((512, 512, 512),)}


@dataclass(frozen=True)
class Row:
    """An estimate for the kernels of one call.

    Attributes:
        detail: the block sizes.
        bound: which takes longer, "bundles" or "copies".
        bundles: the number of issued bundles.
        busy: the fraction of their slots that is used, by functional unit.
        reason: why there is no estimate.
    """

    case: str
    mode: str
    generation: str
    contender: str
    detail: str = ""
    milliseconds: float | None = None
    bound: str = ""
    teraflops: float | None = None
    bundles: int | None = None
    busy: dict[str, float] | None = None
    reason: str = ""


@dataclass(frozen=True)
class Call:
    """A function to compile, its arguments, and the tables that its kernels read, by kernel name."""

    detail: str
    function: Callable[..., Any]
    arguments: tuple
    kernels: dict[str, Sequence[np.ndarray]]


def main(argv: list[str] | None = None) -> int:
    """Estimates all cases and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", default="v5e,v6e", help=f"of {', '.join(GENERATIONS)}")
    parser.add_argument("--shapes", default=",".join(ATTENTION_SHAPES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    file = chosen.out / f"tpu_estimates-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}.json"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tpu-estimates-") as folder:
        compiler = Compiler(Path(folder))
        for generation in chosen.generations.split(","):
            for name in chosen.shapes.split(","):
                for mode in chosen.modes.split(","):
                    rows += _case(compiler, ATTENTION_SHAPES[name], mode, generation)
                    _save(file, rows)
    print(*_summary(rows), f"written: {file}", sep="\n")
    return 0


def _case(compiler: Compiler, shape: AttentionShape, mode: str, generation: str) -> list[Row]:
    """A row for each contender, with its best blocks or with the reason why it cannot take the case."""
    rows = []
    for contender, calls in (("ejkernel", _ours), ("splash_attention", _splash), ("flash_attention", _flash)):
        row = Row(shape.name, mode, generation, contender)
        try:
            found = [_estimated(compiler, row, shape, call) for call in calls(shape, mode, generation)]
            rows.append(min(found, key=lambda row: row.milliseconds))
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            rows.append(replace(row, reason=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    for row in rows:
        said = row.reason or f"{row.milliseconds:8.3f} ms {row.teraflops:6.1f} TFLOP/s, bound by {row.bound}"
        print(f"{row.generation:6}{row.case:18}{row.mode:4} {row.contender:17} {said}  {row.detail}", flush=True)
    return rows


def _estimated(compiler: Compiler, row: Row, shape: AttentionShape, call: Call) -> Row:
    """The row with the work of all kernels of the call."""
    chip = GENERATIONS[row.generation]
    issued = compiler.issued(row.generation, call.function, call.arguments, call.kernels)
    computing, copying = (
        [x / rate for x in xs]
        for xs, rate in (
            ([kernel.bundles for kernel in issued], chip.clock),
            ([kernel.copied for kernel in issued], chip.bandwidth),
        )
    )
    seconds = sum(map(max, computing, copying))
    bundles = sum(kernel.bundles for kernel in issued)
    slots = {unit: sum(kernel.instructions[unit] / kernel.capacity[unit] for kernel in issued) for unit in UNITS}
    return replace(
        row,
        detail=call.detail,
        milliseconds=seconds * 1e3,
        bound="copies" if sum(copying) > sum(computing) else "bundles",
        teraflops=shape.work(row.mode) / seconds / 1e12,
        bundles=bundles,
        busy={unit: round(n / bundles, 3) for unit, n in slots.items()},
    )


# --- The contenders


def _array(*size: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(size, dtype)


def _ours(shape: AttentionShape, mode: str, generation: str) -> Iterator[Call]:
    spec = FlashAttentionSpec(**shape.options, softmax_scale=shape.head_dim**-0.5)
    sizes = shape.sizes
    sinks = _array(1, *sizes["sinks"], dtype=jnp.float32) if shape.sinks else None
    x = Operands(*(_array(*sizes[name]) for name in "qkv"), sinks=sinks)
    o = _array(*sizes["q"][:3], shape.value_dim)
    outputs = Outputs(o, _array(shape.batch, shape.heads, shape.seq_q, dtype=jnp.float32))
    implementation = {
        "fwd": ours.flash_attention,
        "bwd": ours.flash_attention_bwd,
        "jvp": ours.flash_attention_jvp,
    }[mode]
    config = implementation.heuristic(spec, x, Target("tpu", GENERATIONS[generation].kind))
    run = partial(implementation, spec=spec, config=config)
    problem = plan(x, spec, config)
    queries, keys = ([schedule_of(mask_info_of(x, problem), by=by).table] for by in ("queries", "keys"))
    detail = f"{problem.block_q}×{problem.block_k}, {config.num_stages} stages"
    if mode == "fwd":
        yield Call(detail, lambda x: run(*x), (x,), {"flash_attention_forward": queries})
    elif mode == "jvp":
        tangents = x._replace(sinks=None)
        yield Call(detail, run, (x, outputs, tangents), {"flash_attention_tangent": queries})
    else:
        kernels = {"flash_attention_backward": keys}
        if dq_bytes(x, problem) > DQ_BYTES:
            kernels = {"flash_attention_backward_keys": keys, "flash_attention_backward_queries": queries}
        pull = lambda x, out, do: run(x, out, Outputs(do, None), wrt=("q", "k", "v"))
        yield Call(detail, pull, (x, outputs, o), kernels)


def _heads_first(shape: AttentionShape, kv_heads: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q [b,g,h/g,s,d], k [b,g,t,d], v [b,g,t,e] and o."""
    q = (shape.batch, kv_heads, shape.heads // kv_heads, shape.seq_q)
    keys = (shape.batch, kv_heads, shape.seq_k)
    d, e = shape.head_dim, shape.value_dim
    return _array(*q, d), _array(*keys, d), _array(*keys, e), _array(*q, e)


def _splash(shape: AttentionShape, mode: str, generation: str) -> Iterator[Call]:
    if mode == "jvp":
        raise NotImplementedError("no forward mode")
    square = (shape.seq_q, shape.seq_k)
    mask = masks.CausalMask(square) if shape.causal else masks.FullMask(square)
    if shape.window != (None, None):
        mask = masks.LocalMask(square, shape.window, 0)
    group = shape.heads // shape.kv_heads
    q, k, v, o = _heads_first(shape, shape.kv_heads)
    for blocks in _fitting(SPLASH[mode], shape):
        sizes = splash.BlockSizes(
            *blocks,
            block_q_dkv=blocks[0],
            block_kv_dkv=blocks[1],
            block_kv_dkv_compute=blocks[2],
            use_fused_bwd_kernel=True,
        )
        kernel = splash.make_splash_mqa(
            masks.MultiHeadMask([mask] * group),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=shape.softcap,
        )
        attend = jax.vmap(jax.vmap(kernel))
        info = kernel.fwd_mask_info if mode == "fwd" else kernel.dkv_mask_info
        tables = [np.asarray(x) for x in (info.data_next, info.block_mask, info.mask_next) if x is not None]
        detail = "×".join(map(str, blocks[:2])) + f", {blocks[2]} inner"
        if mode == "fwd":
            yield Call(detail, attend, (q, k, v), {"splash_mqa_fwd_no_residuals": tables})
        else:
            pull = lambda q, k, v, do, attend=attend: jax.vjp(attend, q, k, v)[1](do)
            yield Call(detail, pull, (q, k, v, o), {"splash_mqa_dkv_no_residuals": tables})


def _flash(shape: AttentionShape, mode: str, generation: str) -> Iterator[Call]:
    if mode == "jvp":
        raise NotImplementedError("no forward mode")
    for option in ("softcap", "sinks"):
        if getattr(shape, option):
            raise NotImplementedError(f"no {option}")
    if shape.window != (None, None):
        raise NotImplementedError("no window")
    q, k, v, o = (
        jax.ShapeDtypeStruct((x.shape[0], shape.heads, *x.shape[-2:]), x.dtype)
        for x in _heads_first(shape, shape.heads)
    )
    for blocks in _fitting(FLASH[mode], shape):
        major = dict(zip(("block_q", "block_k_major", "block_k"), blocks, strict=True), block_b=1)
        sizes = flash.BlockSizes(
            **major,
            block_q_major_dkv=blocks[0], block_k_major_dkv=blocks[1], block_k_dkv=blocks[2], block_q_dkv=blocks[0],
            block_k_major_dq=blocks[1], block_k_dq=blocks[2], block_q_dq=blocks[0],
        )  # fmt: skip
        attend = lambda q, k, v, sizes=sizes: flash.flash_attention(
            q, k, v, causal=shape.causal, sm_scale=shape.head_dim**-0.5, block_sizes=sizes
        )
        detail = "×".join(map(str, blocks[:2])) + f", {blocks[2]} inner"
        if mode == "fwd":
            yield Call(detail, attend, (q, k, v), {"flash_attention.*": []})
        else:
            pull = lambda q, k, v, do, attend=attend: jax.vjp(attend, q, k, v)[1](do)
            yield Call(detail, pull, (q, k, v, o), {"flash_mha_bwd_dkv.*": [], "flash_mha_bwd_dq.*": []})


def _fitting(choices: Sequence[tuple[int, ...]], shape: AttentionShape) -> list[tuple[int, ...]]:
    """Blocks no larger than the sequence, which they have to divide."""
    length = math.gcd(shape.seq_q, shape.seq_k)
    found = dict.fromkeys(tuple(min(block, length) for block in blocks) for blocks in choices)
    fitting = [blocks for blocks in found if blocks[0] % 128 == 0 and all(length % block == 0 for block in blocks)]
    if not fitting:
        raise NotImplementedError(f"no block of whole lanes divides {length}")
    return fitting


# --- The record


def _save(file: Path, rows: Sequence[Row]) -> None:
    generations = {name: asdict(chip) for name, chip in GENERATIONS.items()}
    evidence, convention = "estimates of flash_attention on TPUs", "estimates from compiled programs; nothing ran"
    more = dict(generations=generations, rows=list(map(asdict, rows)))
    save_record(file, evidence, convention, device="TPUs that are not there", **more)


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    """The speedup over each rival, as the geometric mean of the cases that it takes."""
    known = {(r.generation, r.mode, r.case, r.contender): r.milliseconds for r in rows if r.milliseconds}
    for generation, mode in dict.fromkeys((r.generation, r.mode) for r in rows):
        for rival in ("splash_attention", "flash_attention"):
            ratios = [
                time / known[generation, mode, case, "ejkernel"]
                for (g, m, case, contender), time in known.items()
                if (g, m, contender) == (generation, mode, rival) and (g, m, case, "ejkernel") in known
            ]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                yield f"{generation} {mode}: {mean:.2f} × as fast as {rival}, {len(ratios)} cases"


if __name__ == "__main__":
    sys.exit(main())
