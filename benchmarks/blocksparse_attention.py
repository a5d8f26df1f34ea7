"""Block-sparse attention beside its rivals: `python benchmarks/blocksparse_attention.py --shapes 16k-10%`.

A causal layer of 16 heads whose block mask, which differs between heads, keeps the blocks at the diagonal and a share
of those below it, at random. Every contender is judged against the formula in float64, in the first head, before it is
timed. Dense flash_attention, which computes all blocks, is timed in the same run.

The lists of blocks are made within each call of ours, from a block mask that is an argument of the program;
flex_attention of torch is given its own, made before, with blocks that need no mask told apart.
"""

import sys
from dataclasses import dataclass
from functools import cache, partial

from _packed import gate, of_jax, of_torch, run, torch_on_gpu  # isort: skip (sets what JAX reads)

import jax
import jax.numpy as jnp
import numpy as np
from _harness import Contender, Prepared, measure, queued, yardstick

import ejkernel
from ejkernel.cli._equations import equations

BLOCK = 128
CONVENTION = "forward 4·D flops for each pair that is kept and causal, fwd_bwd 3.5 ×; of the dense one, too"
_OURS, _RIVAL, _WORK = {"fwd": 2.0, "fwd_bwd": 3.0}, 10.0, {"fwd": 1.0, "fwd_bwd": 3.5}
_DENSE = "dense"


@dataclass(frozen=True)
class Layer:
    """Tokens, heads and features, and the share of the blocks below the diagonal that is kept."""

    length: int
    share: float
    heads: int = 16
    features: int = 128

    def __str__(self) -> str:
        return f"s{self.length} h{self.heads} d{self.features} blocks of {BLOCK}, {self.share:.0%} kept"

    @property
    def kept(self) -> np.ndarray:
        """The block mask [heads, blocks, blocks]."""
        blocks = self.length // BLOCK
        kept = np.random.default_rng(0).random((self.heads, blocks, blocks)) < self.share
        return np.tril(kept, -1) | np.eye(blocks, dtype=bool)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that are computed, of all heads."""
        diagonal = self.heads * (self.length // BLOCK)
        return (self.kept.sum() - diagonal) * BLOCK**2 + diagonal * BLOCK * (BLOCK + 1) // 2


SHAPES = {
    f"{length // 1024}k-{share}%": Layer(length, share / 100) for length in (16384, 4096) for share in (10, 25, 50)
}


def case(layer: Layer, mode: str, arguments) -> list:
    """The rows of one layer; the backward is timed with its forward alone."""
    if mode not in _WORK:
        return []
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, layer.length, layer.heads, layer.features)
    *qkv, do = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    mask = jnp.asarray(layer.kept)
    judge = cache(partial(_gate, layer, mode, qkv, do))
    contenders = [
        *(
            Contender(f"ejkernel {name}", partial(_ours, qkv, mask, do, mode, name), ours=True)
            for name in arguments.platforms
        ),
        Contender("ejkernel, dense", partial(_dense, qkv, do, mode)),
        Contender("torch flex_attention", partial(_flex, layer, qkv, do, mode)),
    ]
    return measure(
        str(layer),
        mode,
        contenders,
        lambda results: judge()(results),
        bounds=(_OURS[mode], _RIVAL),
        work=_WORK[mode] * layer.pairs * 4 * layer.features,
        yardstick=yardstick("bfloat16"),
        repeats=arguments.repeats,
    )


# --- The referee


def _gate(layer: Layer, mode: str, qkv, do):
    """Judges the first head: of the dense contender by the formula without a block mask."""
    of_head = lambda x: x[0, :, 0]
    judges = {
        dense: gate(
            partial(map, of_head), partial(_formula, layer, mode, dense, (*map(of_head, qkv), of_head(do))), do.dtype
        )
        for dense in (False, True)
    }

    def error(results) -> float:
        is_dense = results[0] is _DENSE
        return judges[is_dense](list(results[is_dense:]))

    return error


def _formula(layer: Layer, mode: str, dense: bool, arrays, dtype) -> list[np.ndarray]:
    """The results of a mode for one head, products in `dtype`, all else in float32, or float64 where that is given."""
    wide = jnp.promote_types(dtype, jnp.float32)
    kept = jnp.asarray(np.ones_like(layer.kept[0]) if dense else layer.kept[0])
    columns = jnp.arange(layer.length)

    def attention(q, k, v):
        k, v = k.astype(wide), v.astype(wide)

        @jax.checkpoint
        def row(q, position):
            s = jnp.einsum("d,td->t", q, k.astype(dtype), preferred_element_type=wide) * layer.features**-0.5
            visible = (columns <= position) & kept[position // BLOCK, columns // BLOCK]
            p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf)).astype(dtype)
            return jnp.einsum("t,te->e", p, v.astype(dtype), preferred_element_type=wide).astype(dtype)

        return jax.lax.map(lambda x: row(*x), (q, columns), batch_size=256)

    def results(q, k, v, do):
        if mode == "fwd":
            return (attention(q, k, v),)
        o, pull = jax.vjp(attention, q, k, v)
        return (o, *pull(do))

    found = jax.jit(results)(*(jnp.asarray(x, dtype) for x in arrays))
    return [np.asarray(x).astype(np.float64) for x in found]


# --- The contenders


def _ours(qkv, mask, do, mode: str, platform: str) -> Prepared:
    options = dict(block_size=(BLOCK, BLOCK), causal=True, platform=None if platform == "auto" else platform)
    attend = lambda q, k, v, mask: ejkernel.modules.blocksparse_attention(q, k, v, block_mask=mask, **options)

    def forward(qkv, mask, do):
        return (attend(*qkv, mask),)

    def fwd_bwd(qkv, mask, do):
        o, pull = jax.vjp(lambda *x: attend(*x, mask), *qkv)
        return (o, *pull(do))

    # The block mask is an argument: of a constant, the compiler might make the lists.
    run, given = jax.jit(forward if mode == "fwd" else fwd_bwd), (tuple(qkv), mask, do)
    ran = equations(run.trace(*given).jaxpr, "blocksparse_attention")
    detail = "; ".join(f"{equation.primitive.name}: {equation.params['config']}" for equation in ran)
    return Prepared(jax.block_until_ready(run(*given)), queued(run, *given), detail)


def _dense(qkv, do, mode: str) -> Prepared:
    prepared = of_jax(partial(ejkernel.lax.flash_attention, causal=True), tuple(qkv), do, mode, "flash_attention")
    return Prepared([_DENSE, *prepared.results], prepared.batch, prepared.detail)


def _flex(layer: Layer, qkv, do, mode: str) -> Prepared:
    torch = torch_on_gpu()
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    kept = torch.from_numpy(layer.kept).cuda()[None]
    diagonal = torch.eye(kept.shape[-1], dtype=torch.bool, device="cuda")

    def listed(kept):
        order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
        return kept.sum(-1).to(torch.int32), order.to(torch.int32)

    masks = (*listed(kept & diagonal), *listed(kept & ~diagonal))
    block_mask = BlockMask.from_kv_blocks(*masks, BLOCK_SIZE=BLOCK, mask_mod=lambda b, h, i, j: i >= j)
    attend = torch.compile(flex_attention, dynamic=False)
    by_heads = lambda x: x.transpose(1, 2)
    call = lambda q, k, v: by_heads(attend(by_heads(q), by_heads(k), by_heads(v), block_mask=block_mask))
    return of_torch(call, tuple(qkv), do, mode)


if __name__ == "__main__":
    sys.exit(run("blocksparse_attention", __doc__, SHAPES, case, CONVENTION, "TFLOP/s"))
