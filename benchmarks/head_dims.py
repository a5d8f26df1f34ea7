"""flash_attention at head dims between the powers of two: every config of the Hopper kernels beside rivals.

    python benchmarks/head_dims.py [--head-dims 96,72] [--modes fwd,fwd_bwd,jvp] [--deterministic] [--fa3 FOLDER]

First the numbers of each contender are judged against float64, then all are timed interleaved: each config of the space
of Mosaic GPU, what Triton and the library choose, cuDNN by jax.nn and torch, and FlashAttention-3 from the folder that
holds `_vllm_fa3_C.abi3.so`, built for the torch that is installed. Of derivatives one config at a time is replaced, and
the forward is the likeliest. With --deterministic gradients of the same bits in every run are timed beside the others.
"""

import os
import sys
from argparse import Namespace
from functools import cache, partial

# torch needs memory on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
from _attention import CONVENTION, WORK, Inputs, gate, inputs, operations
from _attention_rivals import _compiled, _prepare, _torch_batch, contenders
from _cases import Case, chosen, parser, run, started
from _harness import Contender, Prepared, Unavailable

from ejkernel.kernels._pallas.gpu.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
    takes,
    takes_bwd,
    takes_jvp,
)
from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import AttentionShape, KernelConfig, Target

_FORWARD, _DERIVATIVE, _RIVAL = 2.0, 3.0, 10.0
_OPERATION = {"fwd": "flash_attention", "fwd_bwd": "flash_attention_bwd", "jvp": "flash_attention_jvp"}
_TAKES = {"fwd": takes, "fwd_bwd": takes_bwd, "jvp": takes_jvp}
_RIVALS = ("ejkernel auto", "ejkernel triton", "jax.nn cudnn", "tokamax mosaic", "torch cudnn", "torch flash")
_SHAPES = [
    AttentionShape("d40-full", 16, 16, 40, 40, 8, 4096, 4096, causal=False),
    AttentionShape("siglip-so400m-d72-full", 16, 16, 72, 72, 32, 729, 729, causal=False),
    AttentionShape("d64", 32, 32, 64, 64, 2, 4096, 4096),
    AttentionShape("d64-full", 32, 32, 64, 64, 2, 4096, 4096, causal=False),
    AttentionShape("d72", 32, 32, 72, 72, 2, 4096, 4096),
    AttentionShape("d72-full", 32, 32, 72, 72, 2, 4096, 4096, causal=False),
    AttentionShape("phi2-d80", 32, 32, 80, 80, 2, 4096, 4096),
    AttentionShape("d80-full", 32, 32, 80, 80, 2, 4096, 4096, causal=False),
    AttentionShape("vit-h-d80-full", 16, 16, 80, 80, 16, 1024, 1024, causal=False),
    AttentionShape("phi3-mini-d96", 32, 32, 96, 96, 2, 4096, 4096),
    AttentionShape("d96-full", 32, 32, 96, 96, 2, 4096, 4096, causal=False),
    AttentionShape("d104-full", 16, 16, 104, 104, 4, 4096, 4096, causal=False),
    AttentionShape("d112", 32, 32, 112, 112, 2, 4096, 4096),
    AttentionShape("d112-full", 32, 32, 112, 112, 2, 4096, 4096, causal=False),
    AttentionShape("d128", 32, 32, 128, 128, 2, 4096, 4096),
    AttentionShape("d128-full", 32, 32, 128, 128, 2, 4096, 4096, causal=False),
    AttentionShape("d160", 32, 32, 160, 160, 2, 4096, 4096),
    AttentionShape("d160-full", 32, 32, 160, 160, 2, 4096, 4096, causal=False),
    AttentionShape("d192", 32, 32, 192, 192, 2, 4096, 4096),
    AttentionShape("d192-full", 32, 32, 192, 192, 2, 4096, 4096, causal=False),
    AttentionShape("d192-v128", 32, 32, 192, 128, 2, 4096, 4096),
    AttentionShape("d256", 16, 16, 256, 256, 2, 4096, 4096),
    AttentionShape("d224", 16, 16, 224, 224, 4, 4096, 4096),
    AttentionShape("d96-v64", 32, 32, 96, 64, 2, 4096, 4096),
]
SHAPES = {shape.name: shape for shape in _SHAPES}


def main(argv: list[str] | None = None) -> int:
    """Measures all cases and saves them; 1 if an implementation of this library failed or was wrong."""
    asked = parser(__doc__, SHAPES)
    asked.add_argument("--modes", type=chosen("mode", WORK), default=["fwd"], help="fwd, fwd_bwd, jvp")
    asked.add_argument("--head-dims", type=lambda text: [int(x) for x in text.split(",")], help="of these alone")
    asked.add_argument("--deterministic", action="store_true", help="gradients of the same bits in every run, too")
    asked.add_argument("--fa3", help="the folder of FlashAttention-3")
    arguments = asked.parse_args(argv)
    dtype, shapes = started(arguments, SHAPES, "d72@1x512")
    shapes = [s for s in shapes if arguments.head_dims is None or s.head_dim in arguments.head_dims]
    cases = [case for shape in shapes for case in _cases(shape, dtype, arguments)]
    return run("head_dims", cases, CONVENTION, arguments)


def _cases(shape: AttentionShape, dtype: jnp.dtype, arguments: Namespace) -> list[Case]:
    given = inputs(shape, dtype)
    return [
        Case(
            shape,
            mode,
            dtype,
            [
                *_configured(shape, mode, given),
                *(_configured(shape, mode, given, True) if arguments.deterministic and mode == "fwd_bwd" else []),
                *(c for c in contenders(shape, mode, given, ["auto", "triton"]) if c.name in _RIVALS),
                Contender("FlashAttention-3", partial(_fa3, shape, mode, given, arguments.fa3)),
            ],
            cache(partial(gate, shape, mode, given)),
            bounds=(_FORWARD if mode == "fwd" else _DERIVATIVE, _RIVAL),
            work=operations(shape, mode),
        )
        for mode in arguments.modes
    ]


def _configured(shape: AttentionShape, mode: str, given: Inputs, deterministic: bool = False) -> list[Contender]:
    """A contender for each config of the Hopper kernels."""
    options = dict(softmax_scale=shape.head_dim**-0.5, deterministic=deterministic)
    spec, x = FlashAttentionSpec(**shape.options, **options), Operands(*given.operands)
    target = Target("cuda", jax.devices()[0].device_kind)
    if _TAKES[mode](spec, x, target) is not None:
        return []
    (forward, *_), configs = (space(name, x, spec, target) for name in ("flash_attention", _OPERATION[mode]))

    def contender(config: KernelConfig) -> Contender:
        arrays = x, given.tangents, given.cotangent
        made = cache(lambda: _compiled(jax.jit(partial(_call, mode, spec, forward, config)), arrays))
        name = f"{config.block_q} x {config.block_k}, {config.num_stages} stages" + ", in order" * deterministic
        return Contender(name, lambda: _prepare(*made()), ours=True, warm=made)

    return [contender(config) for config in configs]


def _call(mode: str, spec: FlashAttentionSpec, forward: KernelConfig, config: KernelConfig, x, dx, do) -> tuple:
    outputs = flash_attention(*x, spec=spec, config=config if mode == "fwd" else forward)
    if mode == "fwd":
        return (outputs.o,)
    if mode == "jvp":
        return outputs.o, flash_attention_jvp(x, outputs, Operands(*dx), spec=spec, config=config).o
    cotangents, wrt = Outputs(do, None), ("q", "k", "v")
    return outputs.o, *flash_attention_bwd(x, outputs, cotangents, wrt=wrt, spec=spec, config=config)


def _fa3(shape: AttentionShape, mode: str, given: Inputs, folder: str | None) -> Prepared:
    if folder is None or mode != "fwd":
        raise Unavailable("FlashAttention-3 is here for its forward, from a folder that has to be given")
    import torch

    torch.ops.load_library(f"{folder}/_vllm_fa3_C.abi3.so")
    q, k, v = (torch.from_dlpack(x).flatten(0, 1) for x in given.operands)
    cu = torch.arange(0, q.shape[0] + 1, shape.seq_q, dtype=torch.int32, device="cuda")
    before, between = [None] * 4, [None] * 2
    arguments = [q, k, v, *before, cu, cu, *between, None, shape.seq_q, shape.seq_k, None, *[None] * 8]
    arguments += [shape.head_dim**-0.5, shape.causal, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None]

    def once():
        with torch.no_grad():
            o = torch.ops._vllm_fa3_C.fwd(*arguments)[0]
        return (o.unflatten(0, (shape.batch, shape.seq_q)),)

    return Prepared(once(), _torch_batch(once))


if __name__ == "__main__":
    sys.exit(main())
