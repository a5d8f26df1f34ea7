"""Grouped matrix products beside their rivals: `python benchmarks/grouped_matmul.py --modes fwd fwd_bwd`.

Groups are uneven, and one is empty. Every contender is judged against the formula in float64 before it is timed, in the
largest group, the smallest and the empty one. The table gives the median time of a call, TFLOP/s, the share of the rate
of matrix products measured in the same run, and how many times faster than the best rival it is.
"""

import sys
from functools import cache
from typing import Any

from _packed import MODES, gate, imported, of_jax, of_torch, run, torch_on_gpu  # isort: skip (sets what JAX reads)

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, Prepared, Unavailable, measure, yardstick
from _process import earlier

from ejkernel.modules import grouped_matmul
from ejkernel.types.grouped_matmul import GROUPED_MATMUL_SHAPES, GroupedMatmulShape

CONVENTION = "FLOPs: forward 2·rows·features·columns, backward twice that"
_FORWARD, _DERIVATIVE, _RIVAL = 2.0, 3.0, 10.0
_ROWS = 256  # of each group that are judged, and of its matrix
_EXPANDED = 2 * 2**30  # bytes; with more the compiler tries kernels for minutes, and finds that memory does not suffice


def case(shape: GroupedMatmulShape, mode: str, arguments) -> list:
    """The rows of one shape and mode."""
    arrays, do, sizes = _inputs(shape)
    judge = cache(lambda: _gate(mode, arrays, do, sizes))
    return measure(
        str(shape),
        mode,
        [*_contenders(mode, arrays, do, sizes, arguments.platforms), earlier("grouped_matmul", shape, mode, do.dtype)],
        lambda results: judge()(results),
        bounds=(_FORWARD if mode == "fwd" else _DERIVATIVE, _RIVAL),
        work=MODES[mode] * 2 * shape.rows * shape.features * shape.columns,
        yardstick=yardstick(do.dtype.name),
        repeats=arguments.repeats,
    )


def of_fields(fields: dict[str, Any], mode: str, dtype: str) -> Prepared:
    """Our call of the layer with these fields."""
    ours, *_ = _contenders(mode, *_inputs(GroupedMatmulShape(**fields), dtype), ["auto"])
    return ours.prepare()


def _inputs(shape: GroupedMatmulShape, dtype: str = "bfloat16") -> tuple[tuple, jax.Array, np.ndarray]:
    """lhs and rhs, the cotangent of the product, and the sizes of the groups."""
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, size: jax.random.normal(key, size, jnp.float32).astype(dtype)
    arrays = normal(keys[0], shape.sizes["lhs"]), normal(keys[1], shape.sizes["rhs"])
    return arrays, normal(keys[2], (shape.rows, shape.columns)), shape.group_sizes()


def _gate(mode: str, arrays: tuple, do: jax.Array, sizes: np.ndarray):
    """Judges o, dlhs and drhs where the largest group, the smallest and the empty one are, as far as _ROWS go."""
    starts = np.cumsum(sizes) - sizes
    groups = (int(sizes.argmax()), int(np.where(sizes > 0, sizes, sizes.max()).argmin()), int(sizes.argmin()))
    few = [slice(starts[g], starts[g] + min(sizes[g], _ROWS)) for g in groups]

    def of_mode(o, dlhs, drhs):
        return {"fwd": o, "bwd": dlhs + drhs, "fwd_bwd": o + dlhs + drhs}[mode]

    def parts(results):
        found = dict(zip({"fwd": "o", "bwd": "lr", "fwd_bwd": "olr"}[mode], results, strict=True))
        rows = lambda name: [found[name][part] for part in few] if name in found else []
        return of_mode(rows("o"), rows("l"), [found["r"][g][:_ROWS] for g in groups] if "r" in found else [])

    def formula(dtype):
        wide = np.float64 if dtype == np.float64 else np.float32
        number = lambda x: np.asarray(x).astype(wide)
        product = lambda x, y: (number(x) @ number(y)).astype(dtype).astype(np.float64)
        (lhs, rhs), whole = arrays, [slice(starts[g], starts[g] + sizes[g]) for g in groups]
        return of_mode(
            [product(lhs[part], rhs[g]) for g, part in zip(groups, few, strict=True)],
            [product(do[part], rhs[g].T) for g, part in zip(groups, few, strict=True)],
            [product(lhs[part, :_ROWS].T, do[part]) for part in whole] if mode != "fwd" else [],
        )

    return gate(parts, formula, do.dtype)


def _contenders(mode: str, arrays: tuple, do: jax.Array, sizes: np.ndarray, platforms: list[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then the rivals."""
    group_sizes = jnp.asarray(sizes)

    def ours(platform):
        platform = None if platform == "auto" else platform
        function = lambda lhs, rhs: grouped_matmul(
            lhs, rhs, group_sizes, preferred_element_type=lhs.dtype, platform=platform
        )
        return of_jax(function, arrays, do, mode, "grouped_matmul")

    def ragged_dot():
        expanded = sizes.size * arrays[0].nbytes
        if expanded > _EXPANDED:
            raise Unavailable(f"it brings lhs to [rows, groups, features], {expanded / 2**30:.0f} GiB")
        function = lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=lhs.dtype)
        return of_jax(function, arrays, do, mode)

    def tokamax():
        if mode != "fwd":
            raise Unavailable(
                "its gradients erred 25 times as much as the formula on such groups, of which one is empty"
            )
        dot = imported("tokamax").ragged_dot
        function = lambda lhs, rhs: dot(lhs, rhs, group_sizes, preferred_element_type=lhs.dtype)
        return of_jax(function, arrays, do, mode)

    def mosaic():
        if mode != "fwd":
            raise Unavailable("it has no gradients")
        dot = imported("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu").ragged_dot
        blocks = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=8)
        return of_jax(lambda lhs, rhs: dot(lhs, rhs, group_sizes=group_sizes, **blocks), arrays, do, mode)

    def torch_grouped():
        torch = torch_on_gpu()
        offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
        return of_torch(lambda lhs, rhs: torch._grouped_mm(lhs, rhs, offs=offsets), arrays, do, mode)

    return [
        *(Contender(f"ejkernel {name}", lambda name=name: ours(name), ours=True) for name in platforms),
        Contender("jax.lax.ragged_dot", ragged_dot),
        Contender("tokamax", tokamax),
        Contender("jax pallas mosaic", mosaic),
        Contender("torch._grouped_mm", torch_grouped),
    ]


if __name__ == "__main__":
    sys.exit(run("grouped_matmul", __doc__, GROUPED_MATMUL_SHAPES, case, CONVENTION, "TFLOP/s"))
