"""FlashAttention-3 and FlashMLA of vLLM's wheel, from the folder in FA3_FOLDER."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ._contenders import torch_batch, torch_on_gpu
from ._harness import Prepared, Unavailable


def library(name: str) -> Any:
    """The torch operations that a library of the wheel registers."""
    torch = torch_on_gpu()
    file = Path(os.environ.get("FA3_FOLDER", "."), f"{name}.abi3.so")
    if not file.exists():
        raise Unavailable(f"FA3_FOLDER names no folder with {file.name}")
    torch.ops.load_library(str(file))
    return getattr(torch.ops, name)


def flash_attention_3() -> Callable[..., Any]:
    """The forward of FlashAttention-3, on packed q [tokens, heads, features] and k, v or pages."""
    fa3 = library("_vllm_fa3_C")

    def attend(
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_q: Any,
        max_q: int,
        max_k: int,
        scale: float,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Any = None,
        cu_k: Any = None,
        used: Any = None,
        table: Any = None,
        plan: Any = None,
    ) -> Any:
        return fa3.fwd(
            q, k, v, None, None, None, None, cu_q, cu_k, None, None, used, max_q, max_k, table,
            *[None] * 8, scale, causal, *window, softcap, True, plan, 0, None, 0, sinks, 1, 0, None,
        )[0]  # fmt: skip

    return attend


def flash_attention_3_of_pages(arrays: dict[str, Any], k: Any, v: Any, ends: Any, max_q: int) -> tuple[Any, Any]:
    """q, and attention over pages as a function of q alone, with its scheduler metadata made in advance."""
    torch = torch_on_gpu()
    q, used, table, ends = map(torch.from_dlpack, (arrays["q"], arrays["context_lens"], arrays["block_tables"], ends))
    k, v = map(torch.from_dlpack, (k, v))
    (_, heads, features), (_, page, kv_heads, _) = q.shape, k.shape
    max_k = int(used.max())
    plan = library("_vllm_fa3_C").get_scheduler_metadata(
        len(used), max_q, max_k, heads, kv_heads, features, features, torch.bfloat16, used, ends,
        None, None, None, None, page, 0, True, -1, -1, False, 0, None, 0,
    )  # fmt: skip
    attend, options = flash_attention_3(), dict(cu_q=ends, used=used, table=table, max_q=max_q, max_k=max_k)
    return q, lambda q: attend(q, k, v, **options, plan=plan, scale=features**-0.5)


def graph(step: Callable[[Any], Any], first: Any, calls: int) -> Prepared:
    """A CUDA graph of a chain of calls, each with the previous output as its queries; results of the first and last."""
    torch = torch_on_gpu()
    alone = step(first)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        last = first
        for _ in range(calls):
            last = step(last)
    return Prepared((alone, last), torch_batch(partial(_replay, captured, step)))


def _replay(captured: Any, step: Callable[[Any], Any]) -> None:
    """Replays a graph. It keeps `step` alive, whose arrays and metadata the graph reads without owning them."""
    captured.replay()
