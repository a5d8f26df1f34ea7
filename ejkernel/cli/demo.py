"""Train a small language model on the source of Python, twice: with the kernels, and with the plain formula.

The model is decoder-only (grouped-query heads, RoPE, RMSNorm, SwiGLU, a softcap, one sliding-window layer among full
causal ones). With --mixer gla its layers are gated linear attention, and text is generated token by token from the
recurrent states; with --moe each layer has four experts, of which a token uses two. With --context-parallel N one run
has every sequence sharded over N devices, with `ring_attention`, and the other is on one device.

Both runs start from the same weights and see the same text, so their losses must agree; the exit status is 1 if they do
not. On a GPU or TPU the same command computes in bfloat16. The losses, a plot of them (if matplotlib is installed) and
a sample of generated text are written to a directory.
"""

import argparse
import csv
import os
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from .. import lax, ops
from . import _corpus
from ._context_parallel import ContextParallel, make_cpu_devices
from ._curves import SPAN, Tolerance, difference
from ._equations import equations
from ._formulas import plain_attention, plain_gla, plain_grouped_matmul
from ._model import Model, Operations, drawn_at_once, sample, sample_by_state
from ._plot import plot
from ._progress import progress
from ._training import Training, mean_loss, train

_BATCH, _LENGTH, _SAMPLED = 2, 128, 400
_EXPERTS = 4
_KERNELS = Operations(lax.flash_attention, lax.gla, lax.grouped_matmul)
_FORMULAS = Operations(plain_attention, plain_gla, plain_grouped_matmul)
# The number of steps that are compared one by one, the allowed difference of their losses, and that of the means over
# 50 steps after them. Training amplifies rounding: in float32 a token may in the end be routed to another expert, and
# in bfloat16 every loss differs. That is no error, but from then on the losses of single batches may be far apart,
# while the means over many are not.
_TOLERANCE = {"float32": Tolerance(50, 1e-5, 0.02), "bfloat16": Tolerance(20, 5e-3, 0.05)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long to train, from what, and where to leave the results."""
    parser.add_argument("--steps", type=int, default=800, help="training steps of each of the two runs")
    parser.add_argument("--mixer", choices=("attention", "gla"), default="attention", help="how tokens are mixed")
    parser.add_argument("--moe", action="store_true", help="experts instead of each MLP")
    parser.add_argument(
        "--context-parallel", type=int, default=1, metavar="N", help="devices over which each sequence is sharded"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("ejkernel-demo"), metavar="DIR", help="directory of the results"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, excerpts and sample")


def run(arguments: argparse.Namespace) -> int:
    """Trains both models, compares their losses, and shows the kernels that ran; 1 if the losses do not agree."""
    if arguments.steps < 1:
        raise argparse.ArgumentError(None, f"--steps is {arguments.steps}; it must be at least 1")
    os.environ.setdefault("EJKERNEL_OPS_STAMP", "hash")  # labels carry a hash of their config
    context = _context(arguments)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        text, held_out = _corpus.load()
    except OSError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    device = jax.devices()[0]
    dtype = jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
    experts = _EXPERTS if arguments.moe else 0
    model = Model(vocabulary=_corpus.VOCABULARY, mixer=arguments.mixer, experts=experts)
    excerpts = _corpus.windows(text, arguments.steps, _BATCH, _LENGTH, arguments.seed)
    print(f"{device.device_kind}, {dtype}: {arguments.steps} steps of {_BATCH} × {_LENGTH} characters")
    print(f"text: the source of Python's standard library, {len(text):,} characters, and {len(held_out):,} held out\n")

    key = jax.random.key(arguments.seed)
    runs = {
        name: train(model, operations, excerpts, key, dtype, progress(name, arguments.steps, every=100), context=of)
        for name, (operations, of) in _runs(context).items()
    }
    losses, tolerance = {name: training.losses for name, training in runs.items()}, _TOLERANCE[dtype.name]
    agree = _compare(losses, tolerance)
    first = next(iter(runs.values()))
    _show_program(model, first)
    same = _show_text(model, first, held_out, dtype, arguments)
    _save_losses(losses, tolerance, f"trained on {device.device_kind} in {dtype}", arguments.out)
    return 0 if agree and same else 1


def _context(arguments: argparse.Namespace) -> ContextParallel | None:
    """How sequences are sharded; None if they are not."""
    size = arguments.context_parallel
    if size == 1:
        return None
    if arguments.mixer != "attention":
        raise argparse.ArgumentError(None, f"--context-parallel is for attention, not for --mixer {arguments.mixer}")
    if size < 1 or _LENGTH % (2 * size):
        rule = f"it must be at least 1 and divide {_LENGTH // 2}, half the characters of a sequence"
        raise argparse.ArgumentError(None, f"--context-parallel is {size}; {rule}")
    make_cpu_devices(size)
    context = ContextParallel(_LENGTH, size)
    try:
        print(f"sequences over {size} devices, {_LENGTH // size} characters of each on one: {context.mesh}")
    except ValueError as error:
        raise argparse.ArgumentError(None, f"--context-parallel: {error}") from error
    return context


def _runs(context: ContextParallel | None) -> dict[str, tuple[Operations, ContextParallel | None]]:
    """The two runs by name: with the kernels and with the formula, or on several devices and on one."""
    if context is None:
        return {"ejkernel": (_KERNELS, None), "reference": (_FORMULAS, None)}
    ring = _KERNELS._replace(flash_attention=context.attention)
    return {f"{context.size} devices": (ring, context), "one device": (_KERNELS, None)}


def _compare(losses: dict[str, np.ndarray], tolerance: Tolerance) -> bool:
    """Prints the first and last losses of both runs and their largest differences; True if within the tolerance."""
    print(f"\n{'loss in nats per character':<28}{'first step':>12}{'last 50':>12}")
    for name, curve in losses.items():
        print(f"  {name:<26}{curve[0]:>12.4f}{curve[-50:].mean():>12.4f}")
    steps, means = np.split(difference(*losses.values(), tolerance.single), [tolerance.single])
    print("largest difference of the two curves:")
    print(f"  of a step, in the first {len(steps):<8}{steps.max():>8.1e}, tolerance {tolerance.of_steps:g}")
    if len(means):
        print(f"  of means over {SPAN} steps, later  {means.max():>8.1e}, tolerance {tolerance.of_means:g}")
    agree = bool((steps <= tolerance.of_steps).all() and (means <= tolerance.of_means).all())  # False if a loss is NaN
    these = " and ".join({"ejkernel": "the kernels", "reference": "the formula"}.get(name, name) for name in losses)
    print(f"{these} train alike" if agree else f"{these} DO NOT AGREE".upper())
    return agree


def _show_program(model: Model, training: Training) -> None:
    """Prints the equations of the operations in the jaxpr of the step, and their labels in optimised HLO."""
    found = [equation for operation in model.operations for equation in equations(training.jaxpr, operation)]
    counted = Counter(equation.primitive.name for equation in found)
    print("\nin the jaxpr of the training step: " + ", ".join(f"{n} × {name}" for name, n in counted.items()))
    for equation in found[:2]:  # a sliding-window layer and a full one
        print("  " + str(equation).replace("\n", "\n  "))
    labels = ops.extract_labels_from_hlo_text(training.hlo)
    print("the labels in the optimised HLO, and the configs that they stand for:")
    for label, config in ops.labels_to_configs(labels).items():
        print(f"  {label}  {config}")


def _show_text(model: Model, training: Training, held_out: np.ndarray, dtype, arguments: argparse.Namespace) -> bool:
    """Prints the loss on held-out text, and prints and saves a continuation of its beginning by the model.

    False if it was generated from recurrent states and one forward pass over the whole text gives another continuation.
    """
    held_out_tokens = _corpus.windows(held_out, 1, 32, _LENGTH, arguments.seed)[0]
    loss = jax.jit(partial(mean_loss, model, _KERNELS, dtype))(training.parameters, held_out_tokens)
    prompt, keys = jnp.asarray(held_out_tokens[0, :-1]), jax.random.split(jax.random.key(arguments.seed), _SAMPLED)
    by_state, whole = model.mixer == "gla", jnp.float32  # where rounding is least likely to change a token
    write = partial(sample_by_state, dtype=whole) if by_state else partial(sample, dtype=dtype)
    written = jax.jit(partial(write, model, _KERNELS))(training.parameters, prompt, keys)
    text = bytes([*prompt.tolist(), *written.tolist()]).decode("ascii")
    (arguments.out / "sample.txt").write_text(text)
    print(f"\nloss on held-out text {loss:.3f}; {_LENGTH} characters of it, continued by the model (│):")
    before, after = text[:_LENGTH], text[_LENGTH:]
    print("\n".join(f"  {line}" for line in f"{before}│{after}".splitlines()))
    if not by_state:
        return True
    at_once = jax.jit(partial(drawn_at_once, model, _KERNELS, dtype=whole))
    same = int((at_once(training.parameters, jnp.concatenate([prompt, written]), keys) == written).sum())
    print(
        f"\n{same} of {_SAMPLED} characters, generated from recurrent states, agree with a forward over the whole text"
    )
    return same == _SAMPLED


def _save_losses(losses: dict[str, np.ndarray], tolerance: Tolerance, title: str, out: Path) -> None:
    """Saves the curves as a table and, if matplotlib is installed, as a plot; prints the paths of the files."""
    with open(out / "loss.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", *losses])
        rows.writerows([step, *values] for step, values in enumerate(zip(*losses.values(), strict=True), start=1))
    files = ["loss.csv", "sample.txt"]
    try:
        plot(losses, tolerance, title, out / "loss.png")
        files.append("loss.png")
    except ImportError:
        print("\nno plot of the losses: matplotlib is not installed (pip install matplotlib)")
    print("\nwritten: " + ", ".join(str(out / file) for file in files))
