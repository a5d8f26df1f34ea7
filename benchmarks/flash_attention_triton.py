"""Times flash_attention in Triton over its configs, beside cuDNN in the same run.

    python benchmarks/flash_attention_triton.py --json results.json [--shapes NAME …] [--operations fwd bwd jvp]
        [--configs heuristic | space | Q,K,WARPS,STAGES …]

A time is the median over repeats of a loop of calls that are enqueued and then waited for once. TFLOP/s count the pairs
(i, j) that are seen: 2·(D + V) each forward, 2.5 times that backward and for the tangent.
"""

import argparse
import datetime
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.kernels._triton.flash_attention import flash_attention, flash_attention_bwd, flash_attention_jvp
from ejkernel.kernels._triton.flash_attention.configs import heuristic, space
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
        reach = min(self.window or self.S, self.S)
        pairs = reach * (reach + 1) / 2 + (self.S - reach) * reach if self.causal else self.S**2
        return 2 * (self.D + self.V) * self.B * self.H * pairs

    def arrays(self, dtype) -> Operands:
        keys = jax.random.split(jax.random.key(0), 3)
        sizes = ((self.H, self.D), (self.G, self.D), (self.G, self.V))
        return Operands(
            *(jax.random.normal(key, (self.B, self.S, *size), dtype) for key, size in zip(keys, sizes, strict=True))
        )


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
FACTORS = {"fwd": 1.0, "bwd": 2.5, "jvp": 2.5, "fwd+bwd": 3.5}


def operation(name: str, spec: FlashAttentionSpec, config: KernelConfig):
    """A function of (operands, outputs, cotangents, tangents) that runs one kernel."""
    if name == "fwd":
        return lambda x, outputs, cotangents, tangents: flash_attention(*x, spec=spec, config=config)
    if name == "bwd":
        return lambda x, outputs, cotangents, tangents: flash_attention_bwd(
            x, outputs, cotangents, wrt=("q", "k", "v"), spec=spec, config=config
        )
    return lambda x, outputs, cotangents, tangents: flash_attention_jvp(x, outputs, tangents, spec=spec, config=config)


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


def chosen_configs(which: list[str], name: str, x: Operands, spec: FlashAttentionSpec, target: Target):
    if which == ["heuristic"]:
        return [heuristic(name, x, spec, target)]
    if which == ["space"]:
        return space(name, x, spec, target)
    sizes = (map(int, text.split(",")) for text in which)
    return [KernelConfig(q, k, num_warps=warps, num_stages=stages) for q, k, warps, stages in sizes]


def measure(name: str, shape: Shape, arguments) -> list[dict]:
    """Every config of every operation on one shape, and cuDNN: compiled side by side, timed one after the other."""
    x, *_ = arguments
    candidates = {}
    for op in arguments_.operations:
        for config in chosen_configs(arguments_.configs, NAMES[op], x, shape.spec, TARGET):
            label = f"{config.block_q}x{config.block_k} w{config.num_warps} s{config.num_stages}"
            candidates[op, label] = operation(op, shape.spec, config)
    if shape.D == shape.V:
        candidates |= {(op, "cudnn"): function for op, function in cudnn(shape).items()}

    def compiled(function):
        try:
            return jax.jit(function).lower(*arguments).compile()
        except Exception as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        programs = dict(zip(candidates, pool.map(compiled, candidates.values()), strict=True))
    rows = []
    for (op, label), program in programs.items():
        try:
            if isinstance(program, Exception):
                raise program
            time_s = seconds(program, arguments, arguments_.repeats)
        except Exception as error:
            print(f"{name:18s} {op:8s} {label:16s} {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        rate = FACTORS[op] * shape.forward_flops / time_s / 1e12
        rows.append({"shape": name, "operation": op, "config": label, "ms": time_s * 1e3, "tflops": rate})
    for row in sorted(rows, key=lambda row: (row["operation"], row["ms"])):
        print("{shape:18s} {operation:8s} {config:16s} {ms:9.4f} ms {tflops:7.1f} TFLOP/s".format(**row), flush=True)
    summary(name, shape, rows)
    return rows


def summary(name: str, shape: Shape, rows: list[dict]):
    """The best of ours beside cuDNN's."""
    best = {
        op: min((r["ms"] for r in rows if r["operation"] == op and r["config"] != "cudnn"), default=None)
        for op in NAMES
    }
    rival = {r["operation"]: r["ms"] for r in rows if r["config"] == "cudnn"}
    parts = []
    if best["fwd"] and "fwd" in rival:
        parts.append(f"forward {rival['fwd'] / best['fwd']:.2f} of cuDNN")
    if best["fwd"] and best["bwd"] and "fwd+bwd" in rival:
        both = best["fwd"] + best["bwd"]
        rate = 3.5 * shape.forward_flops / both / 1e9
        parts.append(f"forward and backward {rate:.0f} TFLOP/s, {rival['fwd+bwd'] / both:.2f} of cuDNN")
        parts.append(f"backward alone {(rival['fwd+bwd'] - rival['fwd']) / best['bwd']:.2f}")
    if best["fwd"] and best["jvp"]:
        parts.append(f"tangent {best['jvp'] / best['fwd']:.2f} × forward")
    print(f"  = {name}: " + "; ".join(parts), flush=True)


def main():
    rows = []
    for name in arguments_.shapes:
        shape = SHAPES[name]
        x = shape.arrays(jnp.dtype(arguments_.dtype))
        outputs = jax.jit(
            lambda x, shape=shape: flash_attention(
                *x, spec=shape.spec, config=heuristic("flash_attention", x, shape.spec, TARGET)
            )
        )(x)
        cotangents = Outputs(jax.random.normal(jax.random.key(1), outputs.o.shape, outputs.o.dtype), None)
        rows += measure(name, shape, (x, outputs, cotangents, x))
    record = {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "versions": {"jax": jax.__version__, "triton": __import__("triton").__version__},
        "dtype": arguments_.dtype,
        "rows": rows,
    }
    if arguments_.json:
        with open(arguments_.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--operations", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--configs", nargs="+", default=["heuristic"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    arguments_ = parser.parse_args()
    TARGET = Target("cuda", jax.devices()[0].device_kind)
    main()
