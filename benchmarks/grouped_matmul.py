"""grouped_matmul beside its rivals, on uneven groups, one of which is empty."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax import Array

from ejkernel.modules import grouped_matmul
from ejkernel.types.shapes.grouped_matmul import GroupedMatmulShape

from . import _referee
from ._contenders import Inputs, arrays_of, imported, normal, of_jax, of_ours, of_torch, torch_on_gpu
from ._driver import Case
from ._harness import Check, Contender, Unavailable
from ._versions import of_earlier

_ROWS = 256  # of each group that are judged, and of its matrix
_EXPANDED = 2 * 2**30  # bytes; with more the compiler tries kernels for minutes, and finds that memory does not suffice


def case(shape: GroupedMatmulShape, mode: str, dtype: Any, platforms: Sequence[str]) -> Case:
    """One layer in one mode."""
    given, sizes = _inputs(shape, dtype), shape.group_sizes()
    return Case(_contenders(mode, given, sizes, platforms), cache(partial(_check, mode, given, sizes)))


@lru_cache(maxsize=1)
def _inputs(shape: GroupedMatmulShape, dtype: Any) -> Inputs:
    arrays = arrays_of(shape, dtype)
    operands = arrays.pop("lhs"), arrays.pop("rhs")
    return Inputs(operands, normal(jax.random.key(1), (shape.rows, shape.columns), dtype), others=arrays)


def _check(mode: str, given: Inputs, sizes: np.ndarray) -> Check:
    """Judges o, dlhs and drhs in the first _ROWS rows of the largest group, the smallest and the empty one."""
    arrays, do = given.operands, given.cotangent
    starts = np.cumsum(sizes) - sizes
    groups = (int(sizes.argmax()), int(np.where(sizes > 0, sizes, sizes.max()).argmin()), int(sizes.argmin()))
    few = [slice(starts[g], starts[g] + min(sizes[g], _ROWS)) for g in groups]

    def of_mode(o: list, dlhs: list, drhs: list) -> list:
        return {"fwd": o, "bwd": dlhs + drhs, "fwd_bwd": o + dlhs + drhs}[mode]

    def parts(results: Sequence[Any]) -> list:
        found = dict(zip({"fwd": "o", "bwd": "lr", "fwd_bwd": "olr"}[mode], results, strict=True))
        rows = lambda name: [found[name][part] for part in few] if name in found else []
        return of_mode(rows("o"), rows("l"), [found["r"][g][:_ROWS] for g in groups] if "r" in found else [])

    def formula(dtype: Any) -> list[np.ndarray]:
        wide = np.float64 if dtype == np.float64 else np.float32
        number = lambda x: np.asarray(x).astype(wide)
        product = lambda x, y: (number(x) @ number(y)).astype(dtype).astype(np.float64)
        (lhs, rhs), whole = arrays, [slice(starts[g], starts[g] + sizes[g]) for g in groups]
        return of_mode(
            [product(lhs[part], rhs[g]) for g, part in zip(groups, few, strict=True)],
            [product(do[part], rhs[g].T) for g, part in zip(groups, few, strict=True)],
            [product(lhs[part, :_ROWS].T, do[part]) for part in whole] if mode != "fwd" else [],
        )

    return _referee.check(parts, formula, do.dtype)


def _contenders(mode: str, given: Inputs, sizes: np.ndarray, platforms: Sequence[str]) -> list[Contender]:
    """Ours on each platform ("auto" for the choice of the library), then the rivals."""

    def ours(platform: str | None) -> Callable[..., Array]:
        return lambda lhs, rhs, group_sizes: grouped_matmul(
            lhs, rhs, group_sizes, preferred_element_type=lhs.dtype, platform=platform
        )

    def ragged_dot() -> Callable[..., Array]:
        expanded = sizes.size * given.operands[0].nbytes
        if expanded > _EXPANDED:
            raise Unavailable(f"it brings lhs to [rows, groups, features], {expanded / 2**30:.0f} GiB")
        return lambda lhs, rhs, group_sizes: jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=lhs.dtype)

    def tokamax() -> Callable[..., Array]:
        if mode != "fwd":
            raise Unavailable(
                "its gradients erred 25 times as much as the formula on such groups, of which one is empty"
            )
        dot = imported("tokamax").ragged_dot
        return lambda lhs, rhs, group_sizes: dot(lhs, rhs, group_sizes, preferred_element_type=lhs.dtype)

    def mosaic() -> Callable[..., Array]:
        if mode != "fwd":
            raise Unavailable("it has no gradients")
        dot = imported("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu").ragged_dot
        blocks = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=8)
        return lambda lhs, rhs, group_sizes: dot(lhs, rhs, group_sizes=group_sizes, **blocks)

    def torch_grouped() -> Callable[..., Any]:
        torch = torch_on_gpu()
        offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
        return lambda lhs, rhs: torch._grouped_mm(lhs, rhs, offs=offsets)

    return [
        *of_ours("grouped_matmul", platforms, ours, mode, given),
        of_jax("jax.lax.ragged_dot", ragged_dot, mode, given),
        of_jax("tokamax", tokamax, mode, given),
        of_jax("jax pallas mosaic", mosaic, mode, given),
        of_torch("torch._grouped_mm", torch_grouped, mode, given),
        of_earlier(
            "grouped_matmul", ("lhs", "rhs"), {"preferred_element_type": given.cotangent.dtype.name}, mode, given
        ),
    ]
