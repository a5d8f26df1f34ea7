"""Times flash_attention in Triton over its configs, beside cuDNN in the same run.

    python benchmarks/flash_attention_triton.py --json results.json [--shapes NAME …] [--operations NAME …]
        [--configs heuristic | space | sweep | Q,K,WARPS,STAGES …]

Beside fwd, bwd and jvp, the operations dkdv, dk, dv and dq are the parts of the backward. `sweep` takes the configs of
the table SWEEP. All programs are compiled first, side by side; the best of each operation end the output.

A time is the median over repeats of a loop of calls that are enqueued and then waited for once. TFLOP/s count the pairs
(i, j) that are visible: 2·(D + V) each forward, 2.5 times that backward and for the tangent, and the products that they
need for the parts of the backward.
"""

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.kernels._triton.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp
from ejkernel.kernels._triton.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig, Target


@dataclass(frozen=True)
class Shape:
    """A call on B sequences of S tokens."""

    B: int
    S: int
    H: int
    G: int
    D: int
    V: int
    causal: bool = True
    window: int | None = None

    @property
    def spec(self) -> FlashAttentionSpec:
        left = None if self.window is None else self.window - 1
        return FlashAttentionSpec(causal=self.causal, window=(left, None), softmax_scale=self.D**-0.5)

    @property
    def forward_flops(self) -> float:
        most_keys = min(self.window or self.S, self.S)
        pairs = most_keys * (most_keys + 1) / 2 + (self.S - most_keys) * most_keys if self.causal else self.S**2
        return 2 * (self.D + self.V) * self.B * self.H * pairs

    def arguments(self) -> tuple[Operands, Outputs, Outputs, Operands]:
        """Operands, the outputs on them, cotangents and tangents."""
        abstract = self.abstract()
        leaves, tree = jax.tree.flatten((abstract[0], abstract[2]))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        x, cotangents = tree.unflatten(
            [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
        )
        config = space("flash_attention", x, self.spec, TARGET)[0]
        outputs = jax.jit(operation("fwd", self.spec, config))(x, None, None, None)
        return x, outputs, cotangents, x

    def abstract(self) -> tuple[Operands, Outputs, Outputs, Operands]:
        """The shapes of `arguments`."""
        sizes = ((self.H, self.D), (self.G, self.D), (self.G, self.V))
        x = Operands(*(jax.ShapeDtypeStruct((self.B, self.S, *size), options.dtype) for size in sizes))
        o = jax.ShapeDtypeStruct((self.B, self.S, self.H, self.V), options.dtype)
        lse = jax.ShapeDtypeStruct((self.B, self.H, self.S), jnp.float32)
        return x, Outputs(o, lse), Outputs(o, None), x


SHAPES = {
    "d64-1k": Shape(16, 1024, 32, 32, 64, 64),
    "d64-4k": Shape(4, 4096, 32, 32, 64, 64),
    "d64-16k": Shape(1, 16384, 32, 32, 64, 64),
    "d128-1k": Shape(16, 1024, 16, 16, 128, 128),
    "d128-4k": Shape(4, 4096, 16, 16, 128, 128),
    "d128-4k-full": Shape(4, 4096, 16, 16, 128, 128, causal=False),
    "d128-16k": Shape(1, 16384, 16, 16, 128, 128),
    "d128-16k-full": Shape(1, 16384, 16, 16, 128, 128, causal=False),
    "d128-16k-window1k": Shape(1, 16384, 16, 16, 128, 128, window=1024),
    "llama-8k": Shape(2, 8192, 32, 8, 128, 128),
    "mla-4k": Shape(2, 4096, 32, 32, 192, 128),
    "d256-4k": Shape(4, 4096, 8, 8, 256, 256),
    "d256-16k": Shape(1, 16384, 8, 8, 256, 256),
}
NAMES = {"fwd": "flash_attention", "bwd": "flash_attention_bwd", "jvp": "flash_attention_jvp"}
PARTS = {"bwd": ("q", "k", "v"), "dkdv": ("k", "v"), "dk": ("k",), "dv": ("v",), "dq": ("q",)}
FACTORS = {"fwd": 1.0, "bwd": 2.5, "jvp": 2.5, "fwd+bwd": 3.5, "dkdv": 2.0, "dk": 1.5, "dv": 1.0, "dq": 1.5}

# (block_q, block_k, num_warps, num_stages) by operation and width; in the backward block_k is the block that is held.
SWEEP = {
    "fwd": {
        64: "128,128,8,2 128,128,8,3 128,64,8,2 128,64,8,3 128,64,4,2 128,64,4,3 64,128,4,2 64,64,4,3 64,64,4,4",
        128: "128,128,8,2 128,128,8,3 128,64,8,2 128,64,8,3 128,64,4,2 64,128,4,2 64,64,4,2 64,64,4,3 128,32,4,3",
        256: "128,64,8,2 128,64,8,1 128,32,8,2 128,32,8,3 64,64,4,2 64,32,4,2",
    },
    "dkdv": {
        64: "64,128,8,2 64,128,8,3 32,128,8,3 128,128,8,2 64,64,4,2 64,64,4,3 128,64,4,2 32,64,4,3",
        128: "64,128,8,2 64,128,8,3 32,128,8,2 32,128,8,3 64,64,4,2 32,64,4,2 32,64,4,3",
        256: "32,64,8,2 64,64,8,2 64,64,8,1 32,64,8,3",
    },
    "dk": {256: "32,128,8,2 64,64,8,2 32,64,4,2 64,64,4,1"},
    "dv": {256: "32,128,8,2 32,128,8,3 64,128,8,2 64,64,4,2"},
    "dq": {
        64: "64,128,8,2 64,128,8,3 128,128,8,2 64,128,4,2 64,128,4,3 64,64,4,2 64,64,4,3 128,64,4,2 32,128,4,3",
        128: "64,128,8,2 64,128,8,3 128,128,8,2 32,128,8,2 32,128,8,3 64,64,4,2 32,64,4,2 32,64,4,3",
        256: "32,128,8,2 64,64,8,2 32,64,8,2 32,64,4,2 64,64,4,1",
    },
    "jvp": {
        64: "128,64,8,2 128,64,8,3 128,32,8,3 64,64,4,2 64,64,4,3 64,32,4,3",
        128: "128,64,8,2 128,32,8,2 128,32,8,3 64,64,4,2 64,32,4,2 64,32,4,3",
        256: "128,32,8,2 128,16,8,3 128,16,8,2",
    },
}


def operation(name: str, spec: FlashAttentionSpec, config: KernelConfig):
    """A function of (operands, outputs, cotangents, tangents) that runs one kernel."""
    if name == "fwd":
        return lambda x, outputs, cotangents, tangents: flash_attention(*x, spec=spec, config=config)
    if name == "jvp":
        return lambda x, outputs, cotangents, tangents: flash_attention_jvp(
            x, outputs, tangents, spec=spec, config=config
        )
    return lambda x, outputs, cotangents, tangents: flash_attention_bwd(
        x, outputs, cotangents, wrt=PARTS[name], spec=spec, config=config
    )


def cudnn(shape: Shape):
    """Forward alone, and forward with backward, of `jax.nn.dot_product_attention`."""
    window = None if shape.window is None else (shape.window - 1, 0)

    def forward(x, outputs, cotangents, tangents):
        return jax.nn.dot_product_attention(
            x.q, x.k, x.v, is_causal=shape.causal, local_window_size=window, implementation="cudnn"
        )

    def both(x, outputs, cotangents, tangents):
        f = lambda q, k, v: forward(Operands(q, k, v), None, None, None)
        o, pull = jax.vjp(f, x.q, x.k, x.v)
        return o, pull(cotangents.o)

    return {"fwd": forward, "fwd+bwd": both}


def seconds(compiled, arguments, repeats: int) -> float:
    """Of one call: the median over repeats of as many calls as take about 30 ms."""
    jax.block_until_ready(compiled(*arguments))
    start = time.perf_counter()
    jax.block_until_ready([compiled(*arguments) for _ in range(3)])
    calls = max(3, min(200, round(0.03 * 3 / (time.perf_counter() - start))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def chosen_configs(which: list[str], op: str, shape: Shape) -> list[KernelConfig]:
    x, name = shape.abstract()[0], NAMES.get(op, "flash_attention_bwd")
    if which == ["heuristic"]:
        return [space(name, x, shape.spec, TARGET)[0]]
    if which == ["space"]:
        return space(name, x, shape.spec, TARGET)
    if which == ["sweep"]:
        which = SWEEP.get(op, {}).get(1 << (max(shape.D, shape.V) - 1).bit_length(), "").split()
    sizes = (map(int, text.split(",")) for text in which)
    return [KernelConfig(q, k, num_warps=warps, num_stages=stages) for q, k, warps, stages in sizes]


@dataclass(frozen=True)
class Job:
    """One program: an operation on a shape, with a config of ours or by cuDNN."""

    shape: str
    operation: str
    config: str
    function: Callable

    def compile(self):
        """The program, or what went wrong."""
        try:
            return jax.jit(self.function).lower(*SHAPES[self.shape].abstract()).compile()
        except Exception as error:
            return error


def jobs(name: str) -> list[Job]:
    """Every config of every operation on one shape, and cuDNN."""
    shape = SHAPES[name]
    ours = [
        Job(name, op, label(config), operation(op, shape.spec, config))
        for op in options.operations
        for config in chosen_configs(options.configs, op, shape)
    ]
    rivals = cudnn(shape).items() if shape.D == shape.V else ()
    return ours + [Job(name, op, "cudnn", function) for op, function in rivals]


def label(config: KernelConfig) -> str:
    return f"{config.block_q}x{config.block_k} w{config.num_warps} s{config.num_stages}"


def measure(job: Job, program, arguments) -> dict | None:
    """The row of one program, or None where it does not run."""
    try:
        if isinstance(program, Exception):
            raise program
        time_s = seconds(program, arguments, options.repeats)
    except Exception as error:
        print(f"{job.shape:18s} {job.operation:8s} {job.config:16s} {type(error).__name__}: {str(error)[:120]}")
        return None
    rate = FACTORS[job.operation] * SHAPES[job.shape].forward_flops / time_s / 1e12
    return {"shape": job.shape, "operation": job.operation, "config": job.config, "ms": time_s * 1e3, "tflops": rate}


def print_table(rows: list[dict]):
    """A line for every shape and operation: the configs from the fastest on, with their TFLOP/s, and cuDNN's."""
    for shape in SHAPES:
        for op in FACTORS:
            group = sorted((r for r in rows if (r["shape"], r["operation"]) == (shape, op)), key=lambda r: r["ms"])
            cells = (f"{r['config']} {r['tflops']:.0f}" for r in group)
            if group:
                print(f"{shape:18s} {op:8s} {group[0]['ms']:8.3f} ms | " + " | ".join(cells))
        summary(shape, [r for r in rows if r["shape"] == shape])


def summary(name: str, rows: list[dict]):
    """The best of ours beside cuDNN's; the backward as a whole, or as the sum of its fastest parts."""
    best = {
        op: min((r["ms"] for r in rows if r["operation"] == op and r["config"] != "cudnn"), default=math.inf)
        for op in (*NAMES, *PARTS)
    }
    rival = {r["operation"]: r["ms"] for r in rows if r["config"] == "cudnn"}
    backward = min(best["bwd"], best["dq"] + min(best["dkdv"], best["dk"] + best["dv"]))
    parts = [f"tangent {best['jvp'] / best['fwd']:.2f} × forward"] if best["jvp"] + best["fwd"] < math.inf else []
    if "fwd" in rival and best["fwd"] < math.inf:
        parts.append(f"forward {rival['fwd'] / best['fwd']:.2f} of cuDNN")
    if "fwd+bwd" in rival and backward < math.inf:
        rate = 2.5 * SHAPES[name].forward_flops / backward / 1e9
        parts.append(f"backward {rate:.0f} TFLOP/s, {(rival['fwd+bwd'] - rival['fwd']) / backward:.2f} of cuDNN")
    if parts:
        print(f"  = {name}: " + "; ".join(parts), flush=True)


def main():
    every = [job for name in options.shapes for job in jobs(name)]
    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(Job.compile, every))
    print(f"{len(every)} programs compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rows = []
    for name in options.shapes:
        arguments = SHAPES[name].arguments()
        pairs = ((job, program) for job, program in zip(every, programs, strict=True) if job.shape == name)
        rows += [row for job, program in pairs if (row := measure(job, program, arguments))]
    print_table(rows)
    record = {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "versions": {"jax": jax.__version__, "triton": __import__("triton").__version__},
        "dtype": options.dtype.name,
        "rows": rows,
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--operations", nargs="+", default=list(NAMES), choices=[*NAMES, *PARTS])
    parser.add_argument("--configs", nargs="+", default=["heuristic"])
    parser.add_argument("--dtype", default="bfloat16", type=jnp.dtype)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    TARGET = Target("cuda", jax.devices()[0].device_kind)
    main()
