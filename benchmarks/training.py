"""Training of a Qwen3 of 0.6B beside the release of ejkernel on PyPI and cuDNN: `python -m benchmarks.training`.

The same model in plain JAX (`_training_model`), on the same tokens, with three attentions: `ejkernel.modules` called as
by EasyDeL's flash_attn2; that of ejkernel 0.0.78 by Triton in the same form, in a process of its own (EJKERNEL_RELEASE
is a folder with it and its dependencies); and `jax.nn.dot_product_attention` by cuDNN. They alternate: a few untimed
steps each, then `repeats` rounds with an equal part of the other steps.

Prints tokens a second, the speedup of ours over each, and the loss of the last step, and writes a record. Exits with 1
if ours is not 1.5 times as fast as the release, or if the losses of ours and cuDNN differ by more than one percent.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax

from ejkernel import modules
from ejkernel.cli._equations import equations
from ejkernel.types import MaskInfo

from ._harness import Unavailable
from ._process import asked
from ._records import RESULTS, result_file, save_record
from ._training_model import Attention, Sizes, Training, as_easydel_calls

OURS, RELEASE, CUDNN = "ejkernel", "ejkernel of PyPI", "jax.nn cudnn"
LEAST_RATIO, LARGEST_DIFFERENCE = 1.5, 0.01
LINE = (
    "{contender:<18}{tokens_per_second:>10.0f} tokens/s {step_seconds:>8.4f} s a step {ratio:>6.2f} ×   loss {loss:.4f}"
)
CONVENTION = (
    "Qwen3 0.6B in bfloat16 with float32 moments of AdamW, random tokens; tokens a second by the median of {repeats} "
    "rounds of {part} steps; ratio: ours to this; loss: of step {steps}; loss_difference: to ours, relative; "
    "peak_gigabytes: of the process so far"
)
Run = Callable[[int], dict[str, Any]]


def main() -> int:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Sizes):
        name, of = f"--{field.name.replace('_', '-')}", field.default
        parser.add_argument(name, **dict(action="store_true") if of is False else dict(type=int, default=of))
    parser.add_argument("--causal-only", action="store_true", help="without the segment ids of EasyDeL's models")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each that are timed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record")
    given = vars(parser.parse_args())
    sizes = Sizes(**{field.name: given[field.name] for field in fields(Sizes)})
    steps, repeats = given["steps"], given["repeats"]
    if steps <= repeats or repeats < 1:
        parser.error("there have to be more steps than repeats, and one repeat at least")
    part = (steps - 1) // repeats
    file = result_file("training", given["out"])
    about = dict(sizes=asdict(sizes), causal_only=given["causal_only"], repeats=repeats, steps=steps)
    evidence = (
        f"training of Qwen3 0.6B, {sizes.batch} × {sizes.length} tokens a step, beside the ejkernel of PyPI and cuDNN"
    )
    results = {name: [] for name in (OURS, RELEASE, CUDNN)}
    runs = contenders(sizes, not given["causal_only"])
    for round_ in range(repeats + 1):
        for name in list(results)[:: -1 if round_ % 2 else 1]:
            results[name].append(attempted(runs[name], part if round_ else steps - repeats * part, results[name]))
        rows = rows_of(results, part, sizes.batch * sizes.length)
        save_record(file, evidence, CONVENTION.format(repeats=repeats, part=part, steps=steps), **about, rows=rows)
    for row in rows:
        timed = dict(ratio=float("nan")) | row  # None if ours failed
        print(LINE.format(**timed) if row["status"] == "timed" else "{contender:<18}{status}: {reason}".format(**row))
    print(f"kept in {file}")
    return int(not is_met(rows))


def attempted(run: Run, steps: int, before: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a round, or the error of it or of an earlier one."""
    if before and "reason" in before[-1]:
        return before[-1]
    try:
        return run(steps)
    except Unavailable as reason:
        return dict(status="unavailable", reason=str(reason))
    except Exception as error:
        return dict(status="failed", reason=f"{type(error).__name__}: {error}"[:400])


def rows_of(results: dict[str, list[dict[str, Any]]], part: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each contender, from the rounds so far; the first round is not timed."""
    rows = {}
    for name, rounds in results.items():
        last, row = rounds[-1], dict(contender=name, ours=name == OURS)
        if "reason" in last:
            rows[name] = row | last
        elif len(rounds) > 1:
            step = median(round_["seconds"] for round_ in rounds[1:]) / part
            timed = dict(status="timed", tokens_per_second=tokens / step, step_seconds=step)
            rows[name] = row | timed | {key: x for key, x in last.items() if key != "seconds"}
        else:
            rows[name] = row | dict(status="compiled") | last
    ours = rows[OURS]
    for row in rows.values():
        if "timed" == row["status"] == ours["status"]:
            row["ratio"] = ours["tokens_per_second"] / row["tokens_per_second"]
            row["loss_difference"] = abs(row["loss"] / ours["loss"] - 1)
    return list(rows.values())


def is_met(rows: list[dict[str, Any]]) -> bool:
    """Whether the release and cuDNN were timed, and the bars hold."""
    of = {row["contender"]: row for row in rows}
    same_loss = of[CUDNN].get("loss_difference", float("inf")) <= LARGEST_DIFFERENCE
    return of[RELEASE].get("ratio", 0) >= LEAST_RATIO and same_loss


def contenders(sizes: Sizes, mask_info: bool) -> dict[str, Run]:
    """For each contender, a function that trains a number of steps."""
    cudnn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    ours = as_easydel_calls(modules.flash_attention, MaskInfo if mask_info else None)
    request = dict(sizes=asdict(sizes), mask_info=mask_info)
    return {
        OURS: _here(sizes, ours),
        RELEASE: lambda steps: asked("_release_training", "EJKERNEL_RELEASE", request | dict(steps=steps)),
        CUDNN: _here(sizes, cudnn),
    }


def _here(sizes: Sizes, attention: Attention) -> Run:
    training = cache(lambda: Training(sizes, attention))

    def run(steps: int) -> dict[str, Any]:
        model = training()
        ran = equations(model.traced.jaxpr, "flash_attention")
        detail = "; ".join(dict.fromkeys(f"{x.primitive.name}: {x.params['config']}" for x in ran))
        return model.run(steps) | dict(compile_seconds=model.compile_seconds, detail=detail)

    return run


if __name__ == "__main__":
    # Two programs that need most of the memory run in this process, one after the other, in a pool that cannot grow.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    sys.exit(main())
