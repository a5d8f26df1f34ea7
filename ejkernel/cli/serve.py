"""Serve a small language model with continuous batching: continue prompts, measure it, or listen for clients.

The demo's model is trained for a minute the first time, and its weights are kept in a file. `--model llama-1b --random`
has the shape of Llama 3.2 1B and random weights, for measurements. Without `--prompt`, `--bench` or `--http` a few
prompts are continued together, and statistics of the steps are printed.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..callib import calibrate, known_ceilings
from ..serving import HEADS, Done, Engine, Limits, Sampling
from ..serving.text import decode, encode
from ._progress import progress
from ._replay import Replay, arrivals, lengths, replay, summary
from ._replay_plot import plot_replay
from ._served import MODELS, drawn_weights, prompts_of, weights_of
from ._table import print_rows

_PROMPTS = tuple(f"import os\nimport sys\n\n\ndef {name}" for name in ("main(", "read_file(", "_parse", "copy("))
_GOLDEN, _SILVER = 0.6180339887498949, 0.41421356237309515  # 1/φ and √2 − 1
_ALONE, _ALONE_TOKENS = 4, 64  # requests that are computed one at a time, and tokens of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, the model, the limits of the engine, and sampling."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", action="append", metavar="TEXT", help="continue this; may be given several times")
    what.add_argument("--bench", action="store_true", help="replay requests of uneven lengths and time them")
    what.add_argument("--http", action="store_true", help="serve OpenAI's completions API over HTTP")
    model = parser.add_argument_group("the model")
    model.add_argument("--model", choices=MODELS, default="demo", help="the model to serve")
    model.add_argument("--random", action="store_true", help="random weights instead of trained ones")
    weights = Path("ejkernel-demo/weights.npz")
    model.add_argument("--weights", type=Path, default=weights, metavar="FILE", help="where trained weights are kept")
    model.add_argument("--steps", type=int, default=400, help="training steps, if there is no such file")
    limits = parser.add_argument_group("limits; those without a default depend on the model")
    limits.add_argument("--pages", type=int, help="pages of 16 tokens in the cache")
    limits.add_argument("--sequences", type=int, help="sequences in a batch, at most")
    limits.add_argument("--drafts", type=int, default=0, help="draft tokens by prompt lookup in each step, at most")
    limits.add_argument("--branches", type=int, default=1, help="leaves of the tree of drafts, at most; 1 for a chain")
    quantised = ("int8", "float8_e4m3fn")
    limits.add_argument("--cache-dtype", choices=quantised, help="dtype of the cache, by default that of the weights")
    limits.add_argument("--devices", type=int, default=1, help="devices over which heads are sharded")
    text = parser.add_argument_group("sampling")
    text.add_argument("--max-tokens", type=int, default=200, help="tokens that are generated for a prompt, at most")
    text.add_argument("--temperature", type=float, default=0.7, help="0 takes the most likely token")
    text.add_argument("--top-k", type=int, default=0, help="sample among so many of the most likely tokens; 0 for all")
    text.add_argument(
        "--top-p", type=float, default=1.0, help="sample among the most likely tokens of this probability"
    )
    text.add_argument("--seed", type=int, default=0, help="seed of weights and sampling")
    bench = parser.add_argument_group("with --bench")
    bench.add_argument("--requests", type=int, default=256, help="number of requests that are replayed")
    bench.add_argument("--out", type=Path, default=Path("ejkernel-serve"), metavar="DIR", help="directory of the plot")
    server = parser.add_argument_group("with --http")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on")
    server.add_argument("--port", type=int, default=8000, help="port to listen on")
    server.add_argument("--queue", type=int, default=256, help="requests that may wait; more get status 429")


def run(arguments: argparse.Namespace) -> int:
    """Makes the engine, and continues prompts, measures or serves HTTP."""
    _check(arguments)
    serve = _server() if arguments.http else None
    try:
        sampling = Sampling(
            arguments.max_tokens, arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed
        )
        prompts = [encode(prompt) for prompt in arguments.prompt or _PROMPTS]
        engine = _engine(arguments)
        if not (arguments.bench or arguments.http):
            for prompt in prompts:
                engine.check(prompt, sampling)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentError(None, str(error)) from error
    if serve:
        return serve(engine, arguments)
    if arguments.bench:
        return _bench(engine, arguments)
    return _continue(engine, prompts, sampling)


def _check(arguments: argparse.Namespace) -> None:
    """Raises an ArgumentError for an option that is out of bounds, or would have no effect."""
    for name, least in (("steps", 1), ("devices", 1), ("requests", 1), ("queue", 0), ("port", 0)):
        if (given := getattr(arguments, name)) < least:
            raise argparse.ArgumentError(None, f"--{name} is {given}; it must be at least {least}")
    if arguments.port > 65_535:
        raise argparse.ArgumentError(None, f"--port is {arguments.port}; it must be at most 65535")
    sampling = ("max_tokens", "temperature", "top_k", "top_p")
    rules = (
        (arguments.http, sampling, "a client asks for its own"),
        (arguments.bench, sampling, "a replay takes the most likely tokens, and as many as it always does"),
        (not arguments.bench, ("requests", "out"), "it is one of --bench"),
        (not arguments.http, ("host", "port", "queue"), "it is one of --http"),
        (arguments.random, ("weights", "steps"), "--random neither reads weights nor trains them"),
    )
    for holds, names, why in rules:
        for name in names:
            if holds and getattr(arguments, name) != arguments.parser.get_default(name):
                raise argparse.ArgumentError(None, f"--{name.replace('_', '-')} has no effect: {why}")


def _engine(arguments: argparse.Namespace) -> Engine:
    """The compiled engine of the model and limits that are asked for, which are printed."""
    served, mesh = MODELS[arguments.model], None
    if arguments.model != "demo" and not arguments.random:
        raise ValueError(f"there are no weights of {arguments.model} here; --random makes random ones")
    if arguments.devices > 1:
        devices = jax.devices()
        if len(devices) < arguments.devices:
            raise ValueError(f"--devices is {arguments.devices}; there are {len(devices)}")
        mesh = jax.make_mesh((arguments.devices,), (HEADS,), devices=devices[: arguments.devices])
    given = {name: getattr(arguments, name) for name in ("pages", "sequences", "drafts", "branches", "cache_dtype")}
    limits = dataclasses.replace(served.limits, **{name: x for name, x in given.items() if x is not None})
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    if arguments.random:
        weights = drawn_weights(served.decoder, arguments.seed, dtype, mesh)
    else:
        weights = weights_of(served.decoder, arguments.weights, arguments.steps, arguments.seed, dtype, mesh)
    engine = Engine(served.decoder, weights, limits, mesh)
    count = sum(x.size for x in jax.tree.leaves(weights))
    print(f"{arguments.model}: {count / 1e6:,.1f} million weights in {dtype}, on {_devices(arguments.devices)}")
    print(
        f"{limits.pages:,} pages of {limits.page_size} tokens ({engine.cache_bytes / 1e6:,.1f} MB), "
        f"up to {limits.sequences} sequences in a batch, steps of up to {limits.buckets[-1]} tokens"
        + (f", {limits.drafts} drafts" if limits.drafts else "")
    )
    engine.compile()
    return engine


def _devices(count: int) -> str:
    return f"{count} × {jax.devices()[0].device_kind}"


# --- Continue prompts -------------------------------------------------------------------------------------------------


def _continue(engine: Engine, prompts: Sequence[list[int]], sampling: Sampling) -> int:
    """Prints the continued texts, a single one token by token, and statistics of the steps."""
    requests, steps = [engine.submit(prompt, sampling) for prompt in prompts], []
    if len(requests) == 1:
        print("\n" + decode(prompts[0]), end="│", flush=True)
    while not engine.idle:
        if done := engine.step():
            steps.append(done)
            for event in done.events if len(requests) == 1 else ():
                print(decode(event.tokens), end="", flush=True)
    for request, prompt in zip(requests, prompts, strict=True):
        if len(requests) > 1:
            print("\n" + decode(prompt) + "│" + decode(request.tokens[len(prompt) :]))
    print("\n\n" + _told(engine, prompts, steps))
    return 0


def _told(engine: Engine, prompts: Sequence[list[int]], steps: Sequence[Done]) -> str:
    """Statistics of the steps: tokens of prompts and shared prefixes, sequences, pages, preemptions and drafts."""
    chunks = [chunk for done in steps for chunk in done.chunks]
    first = {chunk.request: chunk.start for chunk in reversed(chunks)}
    given, shared = sum(map(len, prompts)), sum(first.values())
    generated = sum(len(request.tokens) - len(request.prompt) for request in first)
    lines = [
        f"{given} tokens of prompts, of which {shared} were shared; {generated} generated",
        f"{len(steps)} steps with up to {max(len(done.chunks) for done in steps)} sequences, "
        f"{max(done.pages for done in steps)} pages in use at most, {engine.scheduler.preemptions} preemptions",
    ]
    if drafts := sum(len(chunk.drafts.tokens) for chunk in chunks):
        accepted = sum(len(event.tokens) - 1 for done in steps for event in done.events)
        lines.append(f"{drafts} drafts, of which {accepted} were accepted")
    return "\n".join(lines)


# --- Measure ----------------------------------------------------------------------------------------------------------


def _bench(engine: Engine, arguments: argparse.Namespace) -> int:
    """Replays requests with batching, and some of them one at a time, and prints the measurements."""
    served, count = MODELS[arguments.model], arguments.requests
    sizes, outputs = lengths(count, served.prompts, _GOLDEN), lengths(count, served.outputs, _SILVER)
    prompts = prompts_of(sizes, served.decoder, arguments.seed)
    alone = _alone(engine, prompts[:: -(-count // _ALONE)])
    try:
        wanted = arrivals(prompts, outputs)
        for _, prompt, sampling in wanted:
            engine.check(prompt, sampling)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentError(None, str(error)) from error
    found = replay(engine, wanted, progress("requests", count, every=32))
    device = jax.devices()[0]
    ceilings = known_ceilings(device.device_kind) or calibrate(device)
    rows = summary(found, alone, arguments.devices * ceilings.copy, engine.limits.pages)
    rows["preemptions"] = str(engine.scheduler.preemptions)
    work = f"{count} requests, {sum(sizes):,} tokens of prompts and {found.generated:,} generated"
    print_rows(f"\n{work}, in {found.seconds:.1f} s and {len(found.steps):,} steps", rows)
    _plot(engine.limits, found, f"{arguments.model} on {_devices(arguments.devices)}: {work}", arguments.out)
    return 0


def _alone(engine: Engine, prompts: Sequence[list[int]]) -> float:
    """Tokens a second of the same model without batching: one request after the other."""
    limits = engine.limits
    pages = -(-limits.length // limits.page_size)
    buckets = tuple(sorted({1 + limits.drafts, limits.buckets[-1]}))
    single = dataclasses.replace(limits, pages=pages, sequences=1, buckets=buckets)
    engine = Engine(engine.decoder, engine.weights, single, engine.mesh)
    engine.compile()
    show = progress("one by one", len(prompts), every=1)
    records = []
    for i, prompt in enumerate(prompts, start=1):
        records.append(replay(engine, arrivals([prompt], [_ALONE_TOKENS]), lambda done, text: None))
        show(i, "requests")
    return float(np.sum([x.generated for x in records]) / np.sum([x.seconds for x in records]))


def _plot(limits: Limits, found: Replay, title: str, out: Path) -> None:
    try:
        plot_replay(found, limits.pages, limits.sequences, title, out / "replay.png")
        print(f"written: {out / 'replay.png'}")
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")


# --- Listen -----------------------------------------------------------------------------------------------------------


def _server():
    """The function that serves an engine over HTTP; raises an ArgumentError if a package that it needs is missing."""
    try:
        import uvicorn

        from ..serving.completions import Completions
        from ..serving.worker import Worker
    except ImportError as error:
        needed = "--http needs starlette and uvicorn: pip install 'ejkernel[serve]'"
        raise argparse.ArgumentError(None, f"{needed} ({error})") from error

    def serve(engine: Engine, arguments: argparse.Namespace) -> int:
        worker = Worker(engine, engine.limits.sequences + arguments.queue)
        app = Completions(worker, arguments.model).application()
        try:
            uvicorn.run(app, host=arguments.host, port=arguments.port, timeout_graceful_shutdown=5)
        finally:
            worker.close()
        return 1 if worker.failure else 0

    return serve
