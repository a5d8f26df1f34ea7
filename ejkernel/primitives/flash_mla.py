"""flash_mla: flash_attention whose keys and values are projections of one latent for each position.

    b batch · s queries · t keys · h heads · c features of a latent
    x features of a key without position · y of its rotary part · d = x + y of a query · e of a value

All heads share the latents and the rotary part, so their cotangents are sums over heads, and over devices if heads are
split. The axis `b?` of a projection exists for `vmap`: the public operation has none.
"""

from typing import Any, NamedTuple

import jax

from . import flash_attention as flash
from ._axes import axes
from ._sharding import Layout
from ._trio import Trio
from .flash_attention import Outputs


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,s,h,d], kv_latent [b,t,c], k_rope [b,t,y], w_kc [b?,c,h,x] and w_vc [b?,c,h,e] of one dtype; all others are
    those of flash_attention.
    """

    q: Any
    kv_latent: Any
    k_rope: Any
    w_kc: Any
    w_vc: Any
    bias: Any = None
    mask: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    sinks: Any = None
    softmax_scale: Any = None
    dropout: Any = None

    def attention(self, k: Any, v: Any) -> flash.Operands:
        """The operands of flash_attention with these keys and values."""
        return flash.Operands(k=k, v=v, **{n: getattr(self, n) for n in self._fields if n in flash.Operands._fields})

    def shapes(self, dtype: Any) -> flash.Operands:
        """The operands of flash_attention, with keys [b,t,h,d] and values [b,t,h,e] as shapes of this dtype."""
        tokens, (heads, features) = self.kv_latent.shape[:2], self.w_kc.shape[2:]
        k = jax.ShapeDtypeStruct((*tokens, heads, features + self.k_rope.shape[2]), dtype)
        return self.attention(k, jax.ShapeDtypeStruct((*tokens, heads, self.w_vc.shape[3]), dtype))


flash_mla = Trio(
    "flash_mla",
    Operands,
    Outputs,
    {
        **{name: of for name, of in flash.TABLE.items() if name in (*Operands._fields, *Outputs._fields)},
        "kv_latent": axes("b t c"),
        "k_rope": axes("b t y"),
        "w_kc": axes("b? c h x"),
        "w_vc": axes("b? c h e"),
    },
    differentiable=("q", "kv_latent", "k_rope", "w_kc", "w_vc", "bias", "sinks", "softmax_scale"),
    dtypes=flash.dtypes_of_outputs,
    layout=Layout(split=("b", "h"), group=None, advice="shard the batch or the heads"),
    linear=[("w_vc",)],
)
