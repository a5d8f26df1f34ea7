"""The types of arguments that several operations take, as their public signatures show them.

Arrays are annotated with jaxtyping: dtype and axes by name, one name being one size within a call; "#" before a name
also allows 1. Nothing is checked when an operation runs: `jaxtyped(typechecker=beartype)` around it checks.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from jaxtyping import Array, Bool, Float, Integer, Key, UInt32

from .config import BwdParams, FwdParams, OperationConfig

#: A config instead of the chosen one: `KernelConfig(block_q=64)`, say, or a mapping of its fields; of a mapping
#: with a platform alone the other fields are chosen.
OneConfig: TypeAlias = OperationConfig | FwdParams | BwdParams | Mapping[str, Any]
#: One config, or a pair, of the forward and of the backward of a gradient.
ConfigLike: TypeAlias = OneConfig | tuple[OneConfig, OneConfig]
#: An int w, the w keys that end with the query's own, or (left, right), both inclusive, where None is unbounded.
Window: TypeAlias = int | tuple[int | None, int | None]
#: Static, or a traced scalar that has a gradient.
Scale: TypeAlias = float | Float[Array, ""]
#: Sequence n is the tokens from entry n to entry n + 1.
CuSeqlens: TypeAlias = Integer[Array, " sequences_plus_1"]
#: Logits that join the denominator of every row, for each head one or several.
Sinks: TypeAlias = Float[Array, " q_heads"] | Float[Array, "q_heads sinks"]
#: Arrays that broadcast to the logits [batch, q_heads, q_len, kv_len].
LogitsBias: TypeAlias = (
    Float[Array, "#batch #q_heads #q_len #kv_len"]
    | Float[Array, "#q_heads #q_len #kv_len"]
    | Float[Array, "#q_len #kv_len"]
    | Float[Array, "#kv_len"]
    | Float[Array, ""]
)
#: True where a query sees a key; broadcasts to the logits [batch, q_heads, q_len, kv_len].
LogitsMask: TypeAlias = (
    Bool[Array, "#batch #q_heads #q_len #kv_len"]
    | Bool[Array, "#q_heads #q_len #kv_len"]
    | Bool[Array, "#q_len #kv_len"]
    | Bool[Array, "#kv_len"]
    | Bool[Array, ""]
)
#: Which blocks of keys are kept for a block of queries.
BlockMask: TypeAlias = (
    Bool[Array, "#batch #q_heads q_blocks kv_blocks"]
    | Bool[Array, "#q_heads q_blocks kv_blocks"]
    | Bool[Array, "q_blocks kv_blocks"]
)
#: `jax.random.key(0)`, the words of `jax.random.PRNGKey(0)`, or words that a mesh has split by batch and heads.
DropoutKey: TypeAlias = Key[Array, ""] | UInt32[Array, " words"] | UInt32[Array, "batch q_heads words"]
#: The state of a linear recurrence, of each row of the batch or of each packed sequence.
RecurrentState: TypeAlias = (
    Float[Array, "batch q_heads head_dim v_head_dim"] | Float[Array, "sequences q_heads head_dim v_head_dim"]
)
