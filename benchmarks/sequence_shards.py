"""Sequences sharded over the GPUs of a machine, beside one GPU: `python -m benchmarks.sequence_shards`.

ring_attention by each strategy, causal, in zigzag, and gla and lightning_attention with `axis_name`; forward, and with
the backward. Results are first compared with those of one GPU; those with too large an error are not timed. Beside them
is cuDNN over gathered keys, without a mask. Prints the fraction of the ideal, which is the time of one GPU divided by
their number, and writes a record.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel import lax

from ._program import difference, milliseconds, parser_of
from ._records import result_file, save_record

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TOKENS = P(None, "x")
LINE = "{layer:<32}{mode:<9}{length:>7} {milliseconds:>9.3f} ms {ideal:>5.0%} of ideal, {off}"
CUDNN = "all_gather and cuDNN, no mask"
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
LARGEST_DIFFERENCE = 0.02  # of the largest value, in bfloat16


def main() -> int:
    """Measures, prints and writes the record; 1 if results differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, default=len(jax.devices()), help="how many; all by default")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[16384, 65536], help="of the whole sequence")
    of = parser.parse_args()
    mesh = jax.make_mesh((of.devices,), ("x",), devices=jax.devices()[: of.devices], axis_types=(AxisType.Auto,))
    rows, file = [], result_file("sequence_shards", of.out)
    evidence = f"sequences over {of.devices} devices beside one"
    convention = (
        f"median of {of.repeats} rounds; batch {of.batch}, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, bfloat16, causal"
    )
    for length in of.lengths:
        for row in measured(mesh, of.batch, length, of.repeats):
            rows.append(row)
            print(LINE.format(off="not compared" if row["layer"] == CUDNN else f"{row['difference']:.1e} off", **row))
            save_record(file, evidence, convention, devices=of.devices, xla_flags=XLA_FLAGS, rows=rows)
    print(f"kept in {file}")
    return int(not all(row["layer"] == CUDNN or row["difference"] <= LARGEST_DIFFERENCE for row in rows))


def measured(mesh: Any, batch: int, length: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each layer and mode."""
    order = lax.ring_order(length, mesh.size, "zigzag")[0]
    in_order = np.arange(length)
    ring = lambda strategy: partial(lax.ring_attention, axis_name="x", causal=True, strategy=strategy)
    strategies = {f"ring_attention, {name}": ring(name) for name in ("ring", "all_gather", "ulysses")}
    slopes = dict(layer_idx=0, num_layers=2)
    lightning = {"lightning_attention": partial(lax.lightning_attention, axis_name="x", **slopes)}
    strategies |= {CUDNN: _gathered_cudnn} if jax.default_backend() == "gpu" else {}
    yield from _beside_one(mesh, batch, repeats, order, partial(lax.flash_attention, causal=True), strategies, 0)
    yield from _beside_one(mesh, batch, repeats, in_order, lax.gla, {"gla": partial(lax.gla, axis_name="x")}, 1)
    whole = partial(lax.lightning_attention, **slopes)
    yield from _beside_one(mesh, batch, repeats, in_order, whole, lightning, 0)


def _beside_one(
    mesh: Any,
    batch: int,
    repeats: int,
    order: np.ndarray,
    whole: Callable[..., Any],
    sharded: dict[str, Callable[..., Any]],
    gates: int,
) -> Iterator[dict[str, Any]]:
    x = arrays(batch, len(order), gates)
    over_mesh = lambda a: jax.device_put(jnp.take(a, order, axis=1), NamedSharding(mesh, TOKENS))
    placed = list(map(over_mesh, x))
    specs = (TOKENS,) * len(x)
    of_shards = partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=TOKENS)
    over = {n: of_shards(f, check_vma=n != CUDNN) for n, f in sharded.items()}
    for mode, transform in (("fwd", lambda f: f), ("fwd_bwd", with_backward)):
        alone = jax.jit(transform(whole))
        wanted = list(map(over_mesh, jax.tree.leaves(alone(*x))))
        programs = {name: jax.jit(transform(f)) for name, f in over.items()}
        found = {name: jax.tree.leaves(f(*placed)) for name, f in programs.items() if name != CUDNN}
        off = {"one device": 0.0} | {name: difference(results, wanted) for name, results in found.items()}
        timed = {n: (f, placed) for n, f in programs.items() if n == CUDNN or off[n] <= LARGEST_DIFFERENCE}
        times = milliseconds({"one device": (alone, x)} | timed, repeats)
        for name in ("one device", *programs):
            time, devices = times.get(name, float("nan")), mesh.size if name in over else 1
            ideal = times["one device"] / devices / time
            layer = name if name in over else f"{next(iter(over)).split(',')[0]}, one device"
            row = dict(layer=layer, mode=mode, length=len(order), milliseconds=time, ideal=ideal)
            yield row | dict(difference=off.get(name))


def _gathered_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """All pairs: cuDNN aligns a causal mask by the first query, which is not the first of the sequence."""
    k, v = (jax.lax.all_gather(x, "x", axis=1, tiled=True) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def arrays(batch: int, length: int, gates: int) -> list[jax.Array]:
    """q, k, v, and gates by which a state halves in about sixteen tokens."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, *[HEADS] * gates)]
    made = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False)]
    return [*made[:3], *(jax.nn.log_sigmoid(a) / 16 for a in made[3:])]


def with_backward(f: Callable[..., Any]) -> Callable[..., Any]:
    """o and the gradients for the cotangent q, the same whatever the rounding of o."""

    def run(q, *x):
        o, pull = jax.vjp(f, q, *x)
        return o, pull(q)

    return run


if __name__ == "__main__":
    sys.exit(main())
