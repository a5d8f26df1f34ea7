"""Calls that once failed, each with its error. They run before the search."""

from .calls import Call
from .failures_of_kernels import FAILURES_OF_KERNELS

QKV = {"q": "b s h d", "k": "b t g d", "v": "b t g e"}

FAILURES = (
    # A window beyond int32 raised an OverflowError of JAX.
    Call(
        "flash_attention",
        sizes={"b": 1, "s": 13, "t": 2, "d": 16, "e": 16, "h": 3, "g": 1},
        operands=QKV,
        options={"window": (None, 2**31)},
    ),
    # The gradient of a traced scale was NaN, as that of tokens of no sequence was NaN · 0.
    Call(
        "recurrent",
        sizes={"s": 17, "h": 6, "g": 2, "d": 8, "e": 8, "m": 5, "n": 4},
        operands={"q": "1 s h d", "k": "1 s g d", "v": "1 s g e", "cu_seqlens": "m", "softmax_scale": ""},
        dtype="bfloat16",
        derivative="vjp",
        wrt=("k", "q", "softmax_scale", "v"),
        maps=({"v": -1, "q": -1, "cu_seqlens": -1},),
        jit=True,
        poison=True,
        seed=3480,
    ),
    # The gradient of the sinks of a ring was NaN: 0 · NaN of a query that sees sinks alone, whose cotangent is unread.
    Call(
        "ring_attention",
        sizes={"b": 1, "s": 4, "t": 4, "c": 4, "d": 8, "e": 8, "h": 4, "g": 4, "y": 2},
        operands={"q": "b s h d", "k": "b t g d", "v": "b t g e", "mask": "b h s c", "sinks": "h"},
        options={"axis_name": "y", "layout": "zigzag", "strategy": "ring", "causal": False},
        derivative="vjp",
        wrt=("k", "q", "sinks", "v"),
        jit=True,
        poison=True,
    ),
    # A second derivative was ∞ · 0, as the logit of 6e8 of a weight of 1 was rounded otherwise than that of its sum.
    Call(
        "flash_attention",
        sizes={"s": 7, "t": 7, "d": 24, "e": 8, "h": 2, "g": 2, "m": 3},
        operands={"q": "s h d", "k": "t g d", "v": "t g e", "cu_seqlens_q": "m", "cu_seqlens_k": "m"}
        | {"bias": "1 h s t", "softmax_scale": ""},
        dtypes={"cu_seqlens_q": "int32", "cu_seqlens_k": "int32"},
        derivative="jvp_of_vjp",
        wrt=("q",),
        jit=True,
        values="huge",
        seed=1,
    ),
    # Bounds of a loop over the pages were int64 and int32.
    Call(
        "ragged_page_attention_v3",
        sizes={"t": 1, "d": 32, "h": 3, "g": 3, "z": 16, "n": 5, "m": 6, "j": 2, "c": 6, "p": 13},
        operands={"q": "t h d", "k": "t g d", "v": "t g d", "kv_pages": "p z c d", "context_lens": "n"}
        | {"block_tables": "n j", "query_start_loc": "m", "num_seqs": "1"},
        x64=True,
    ),
    # A gradient that is 0, as that of the one key of a query is, was held to the formula, which gets it exactly.
    Call(
        "flash_attention",
        sizes={"s": 33, "t": 1, "d": 24, "e": 24, "h": 2, "g": 2, "m": 6},
        operands={"q": "s h d", "k": "t g d", "v": "t g e", "cu_seqlens_q": "m", "cu_seqlens_k": "m"},
        options={"causal": True, "softcap": 30.0, "return_lse": True},
        dtype="bfloat16",
        derivative="jvp_of_vjp",
        wrt=("k", "q", "v"),
        jit=True,
        seed=884,
    ),
    # Empty sequences, the longest of which has 0 tokens.
    Call(
        "flash_attention",
        sizes={"s": 0, "t": 0, "d": 32, "e": 32, "h": 4, "g": 2, "m": 2},
        operands={"q": "s h d", "k": "t g d", "v": "t g e", "cu_seqlens_q": "m", "cu_seqlens_k": "m"},
        options={"max_seqlen_q": 0, "max_seqlen_k": 0, "return_lse": True},
        derivative="vjp",
        wrt=("q",),
        jit=True,
    ),
    # Logits of 4e7, of which float32 keeps every fourth number, were held to a formula that knows them but once.
    Call(
        "flash_attention",
        sizes={"b": 2, "s": 5, "t": 5, "d": 8, "e": 32, "h": 3, "g": 1},
        operands={"q": "b s h d", "k": "b t g d", "v": "b t g e"},
        derivative="jvp",
        wrt=("k", "q", "v"),
        jit=True,
        values="huge",
        seed=45,
    ),
    # A second derivative that is 0 uses nothing of what an Explicit axis splits; JAX wants its jit inside of the mesh.
    Call(
        "mean_pooling",
        sizes={"s": 40, "d": 8, "b": 2},
        operands={"x": "b s d"},
        options={"chunk_size": 4},
        dtype="float16",
        derivative="vjp_of_jvp",
        wrt=("x",),
        jit=True,
        mesh=("explicit", {"d": "y"}),
        seed=703,
    ),
    # A product with a row that is all but zeros is exact in the formula, whose logits others sum another way.
    Call(
        "ragged_page_attention_v3",
        sizes={"t": 3, "d": 32, "h": 5, "g": 1, "z": 16, "n": 1, "m": 2, "j": 2, "c": 2, "p": 2},
        operands={"q": "t h d", "k": "t g d", "v": "t g d", "kv_pages": "p z c d", "context_lens": "n"}
        | {"block_tables": "n j", "query_start_loc": "m", "num_seqs": "1"},
        dtypes={"context_lens": "uint32", "block_tables": "int32", "query_start_loc": "int32", "num_seqs": "int32"},
        values="one_hot",
        seed=602,
    ),
    # An example without a row in any group: the matrix of a tile without rows, NaN, entered the scale that all share.
    Call(
        "grouped_matmul",
        sizes={"m": 8, "k": 1, "n": 8, "e": 3, "f": 3},
        operands={"lhs": "m k", "rhs": "e k n", "group_sizes": "f", "existing_out": "m n", "rhs_scale": ""},
        options={"preferred_element_type": "float16"},
        dtypes={"group_sizes": "int32", "existing_out": "bfloat16", "rhs_scale": "float32"},
        derivative="vjp_of_jvp",
        wrt=("existing_out", "lhs", "rhs", "rhs_scale"),
        maps=({"lhs": -1, "existing_out": 0, "group_sizes": 0, "rhs": -1, "rhs_scale": -1, "cotangents": 0},),
        jit=True,
        values="large",
        poison=True,
        seed=4846,
    ),
    # A product of bfloat16 that XLA compiled for the CPU and could not run.
    Call(
        "grouped_matmul",
        sizes={"m": 65, "k": 16, "n": 20, "e": 1, "f": 1},
        operands={"lhs": "m k", "rhs": "e k n", "group_sizes": "f"},
        dtype="bfloat16",
        dtypes={"group_sizes": "int32"},
        derivative="jvp_of_vjp",
        wrt=("lhs", "rhs"),
        maps=({"lhs": -1, "rhs": -1, "cotangents": 0},),
        jit=True,
        x64=True,
        values="zero",
        poison=True,
        seed=5248,
    ),
    # Over a mesh a call of empty arrays left XLA a program that reads nothing; it made an error of it, or crashed.
    Call(
        "gla",
        sizes={"b": 2, "s": 0, "h": 2, "g": 2, "k": 8, "v": 8},
        operands={"q": "b s h k", "k": "b s g k", "v": "b s g v", "gk": "b s h k"},
        jit=True,
        mesh=("explicit", {"b": "x", "h": "y", "g": "y"}),
    ),
    Call(
        "grouped_matmul",
        sizes={"m": 0, "k": 8, "n": 8, "e": 2, "f": 2},
        operands={"lhs": "m k", "rhs": "e k n", "group_sizes": "f"},
        dtypes={"group_sizes": "int32"},
        derivative="vjp",
        wrt=("lhs", "rhs"),
        jit=True,
        mesh=("shard_map", {"n": "y"}),
        api="modules",
    ),
    # A second derivative that was transposed last rounded to float16 what it then summed, of which some overflowed.
    Call(
        "gla",
        sizes={"s": 31, "h": 3, "g": 3, "d": 3, "e": 3, "m": 6, "n": 5},
        operands={"q": "1 s h d", "k": "1 s g d", "v": "1 s g e", "gk": "1 s h d", "cu_seqlens": "m"},
        options={"softmax_scale": 1.0, "reverse": True, "return_state": True},
        dtype="float16",
        dtypes={"cu_seqlens": "uint32", "gk": "call"},
        derivative="vjp_of_vjp",
        wrt=("gk", "k", "q", "v"),
        maps=(
            {"q": 0, "k": -1, "cu_seqlens": -1, "gk": 0},
            {"v": -1, "cu_seqlens": 0, "gk": 0, "tangents": 0},
        ),
        jit=True,
        values="huge",
        poison=True,
        seed=1196,
    ),
    # The gradient of an operand that all examples share is a sum of theirs, of which some overflow in float16; of the
    # formula the sum was taken in float64.
    Call(
        "gla",
        sizes={"b": 1, "s": 2, "h": 3, "g": 3, "d": 16, "e": 3},
        operands={"q": "b s h d", "k": "b s g d", "v": "b s g e", "gk": "b s h d"},
        options={"return_state": True},
        dtype="float16",
        derivative="vjp_of_vjp",
        wrt=("gk", "k"),
        maps=({"k": -1, "gk": 0, "q": 0}, {"v": 0, "q": 0}),
        outside=True,
        jit=True,
        values="huge",
        seed=1,
    ),
    # The gradient of a bias that is one number per head, a sum of 1089 that XLA adds one after the other.
    Call(
        "flash_attention",
        sizes={"b": 1, "s": 33, "t": 33, "d": 64, "e": 64, "h": 2, "g": 2},
        operands={"q": "b s h d", "k": "b t g d", "v": "b t g e", "bias": "1 h 1 1", "softmax_scale": ""},
        options={"return_lse": True},
        dtype="float16",
        derivative="vjp",
        wrt=("bias", "k", "q", "softmax_scale", "v"),
        jit=True,
        values="zero",
        poison=True,
        seed=771,
    ),
    # A `jax.checkpoint` outside of jit, over Explicit axes, which JAX wants to know before it makes zeros for a key.
    Call(
        "flash_attention",
        sizes={"b": 2, "s": 5, "t": 5, "d": 16, "e": 8, "h": 2, "g": 2},
        operands={"q": "b s h d", "k": "b t g d", "v": "b t g e", "dropout_key": ""},
        options={"dropout_rate": 0.1},
        derivative="checkpoint",
        wrt=("k", "q", "v"),
        mesh=("explicit", {"b": "x", "h": "y", "g": "y"}),
    ),
    # The tangent of block indices, which are integers, has no numbers to be compared.
    Call(
        "native_sparse_attention",
        sizes={"b": 1, "s": 5, "t": 5, "d": 16, "e": 16, "n": 1, "h": 1, "g": 1},
        operands={"q": "b s h d", "k": "b t g d", "v": "b t g e", "block_indices": "b s g n"},
        options={"block_size": 1, "return_block_indices": True},
        derivative="linearize",
        wrt=("k", "q", "v"),
        jit=True,
    ),
    # The gradient of A, of a float16 that a vmap shares between rows, was rounded for each row before the sum.
    Call(
        "state_space_v2",
        sizes={"b": 3, "s": 65, "h": 3, "g": 3, "e": 1, "d": 64},
        operands={
            "x": "b s h e",
            "A": "h",
            "B": "b s g d",
            "C": "b s g d",
            "D": "h",
            "dt": "b s h",
            "initial_state": "b h e d",
        },
        dtype="float16",
        dtypes={"D": "bfloat16", "initial_state": "call"},
        derivative="vjp",
        wrt=("A", "B", "C", "D", "dt", "initial_state", "x"),
        maps=({"A": -1, "C": 0, "x": -1, "B": 0, "initial_state": 0, "tangents": 0},),
        jit=True,
        api="modules",
        values="ties",
        seed=622,
    ),
    # The tangent of the gradient of logits, which was rounded to float16, was beyond 65504 where that of dq is not.
    Call(
        "flash_attention",
        sizes={"b": 1, "s": 64, "t": 64, "d": 40, "e": 128, "h": 1, "g": 1},
        operands=QKV,
        options={"causal": True, "window": (None, None), "softcap": 2.0},
        dtype="float16",
        derivative="jvp_of_vjp",
        wrt=("k", "q", "v"),
        jit=True,
        api="modules",
        values="huge",
        seed=904,
    ),
    *FAILURES_OF_KERNELS,
)
