"""Calls that once failed with a kernel of a GPU, each with what was wrong."""

from .calls import Call

FAILURES_OF_KERNELS = (
    # With logits beyond 2³¹: the multiply-add s·scale − m is not 0 where s is the maximum, but half a unit, up to 128.
    Call(
        "flash_mla",
        sizes={"b": 2, "s": 63, "t": 256, "d": 24, "e": 16, "h": 2, "c": 32, "y": 8, "x": 16},
        operands={"q": "b s h d", "kv_latent": "b t c", "k_rope": "b t y", "w_kc": "c h x", "w_vc": "c h e"},
        maps=({"k_rope": 0, "kv_latent": 1, "q": -1, "w_vc": 0},),
        jit=True,
        api="modules",
        platform="triton",
        values="huge",
        seed=4722,
    ),
    # A float32 cotangent was passed on as two numbers of bfloat16: 16 bits.
    Call(
        "grouped_matmul",
        sizes={"m": 1, "k": 64, "n": 64, "e": 3, "f": 3},
        operands={"lhs": "m k", "rhs": "e k n", "group_sizes": "f", "rhs_scale": "e n"},
        dtype="bfloat16",
        dtypes={"group_sizes": "int32", "rhs_scale": "float32"},
        derivative="checkpoint",
        wrt=("lhs", "rhs", "rhs_scale"),
        maps=(
            {"lhs": 1, "group_sizes": -1, "rhs": -1, "rhs_scale": 0, "tangents": 0},
            {"group_sizes": -1, "rhs": -1, "cotangents": 0, "tangents": 0},
        ),
        jit=True,
        api="modules",
        platform="triton",
        values="uniform",
        infinite=True,
        seed=5905,
    ),
    # Fewer tokens than a block has: attention to no keys was asked of the kernels of flash_attention.
    Call(
        "native_sparse_attention",
        sizes={"s": 33, "t": 33, "d": 32, "e": 32, "n": 5, "h": 3, "g": 3, "m": 3},
        operands={"cu_seqlens": "m", "q": "1 s h d", "k": "1 s g d", "v": "1 s g e", "block_indices": "1 s g n"}
        | {"g_cmp": "1 s h"},
        options={"block_size": 64, "return_block_indices": True},
        dtypes={"cu_seqlens": "int64", "block_indices": "int8", "g_cmp": "bfloat16"},
        derivative="vjp",
        wrt=("g_cmp", "k", "q", "v"),
        jit=True,
        api="modules",
        platform="triton",
        poison=True,
        seed=528,
    ),
    # The backward of Mosaic GPU sums logits of 10⁹ in another order than the forward: s − lse was over 128, p infinite.
    Call(
        "flash_attention",
        sizes={"b": 1, "s": 256, "t": 256, "d": 256, "e": 256, "h": 1, "g": 1},
        operands={"q": "b s h d", "k": "b t g d", "v": "b t g e", "q_segment_ids": "b s", "kv_segment_ids": "b t"},
        options={"return_lse": True},
        dtype="bfloat16",
        dtypes={"q_segment_ids": "uint8", "kv_segment_ids": "uint8"},
        derivative="vjp",
        wrt=("k", "q", "v"),
        jit=True,
        api="modules",
        platform="pallas",
        values="huge",
        seed=2629,
    ),
    # The value of a draft that no token sees is NaN here; 0, which is its weight, times that was added to o.
    Call(
        "ragged_page_attention",
        sizes={"t": 1, "d": 8, "h": 1, "g": 1, "z": 8, "n": 1, "m": 2, "j": 1, "p": 12, "c": 2, "w": 1},
        operands={"q": "t h d", "kv_pages": "p z c d", "context_lens": "n", "block_tables": "n j"}
        | {"query_start_loc": "m", "num_seqs": "", "k_scale": "g", "v_scale": "g", "draft_mask": "t w"},
        options={"window": (4, 4), "softcap": 2.0, "return_lse": True},
        dtype="bfloat16",
        dtypes={
            "context_lens": "int16",
            "block_tables": "uint32",
            "query_start_loc": "int64",
            "num_seqs": "int32",
        },
        jit=True,
        api="modules",
        platform="triton",
        values="uniform",
        poison=True,
        seed=4277,
    ),
    # Both terms of a tangent are beyond 65504, and were rounded to float16 before they were added to 22159.
    Call(
        "grouped_matmul",
        sizes={"m": 1, "k": 16, "n": 16, "e": 1, "f": 1},
        operands={"lhs": "m k", "rhs": "e k n", "group_sizes": "f", "existing_out": "m n"},
        options={"preferred_element_type": "float16"},
        dtypes={"group_sizes": "int32", "existing_out": "call"},
        derivative="linearize",
        wrt=("existing_out", "lhs", "rhs"),
        maps=(
            {"lhs": 0, "rhs": 0, "group_sizes": 0, "existing_out": 0},
            {"lhs": 0, "rhs": 0, "existing_out": 0},
        ),
        outside=True,
        jit=True,
        api="modules",
        platform="triton",
        values="huge",
        seed=416,
    ),
    # The config, and in it the rows of a tile, is that of one example: rows of the others were not computed.
    Call(
        "quantized_matmul",
        sizes={"m": 16, "u": 1, "p": 1, "k": 16, "c": 16},
        operands={"x": "m k", "w": "k p", "scales": "k u", "zeros": "k u"},
        options={"mode": "affine", "group_size": 16, "bits": 2},
        dtype="bfloat16",
        dtypes={"w": "uint32", "scales": "call", "zeros": "call"},
        maps=({"x": 0},),
        jit=True,
        api="modules",
        platform="triton",
    ),
    # XLA gave the decodes, which write in the place of what the prefills left, another place in a scan: o was 0.
    Call(
        "ragged_page_attention_v3",
        sizes={"t": 72, "d": 64, "h": 1, "g": 1, "z": 16, "n": 1, "m": 2, "j": 1, "c": 2, "p": 1},
        operands={"q": "t h d", "k": "t g d", "v": "t g d", "kv_pages": "p z c d", "context_lens": "n"}
        | {"block_tables": "n j", "query_start_loc": "m", "num_seqs": "1"},
        dtype="bfloat16",
        within="scan",
        jit=True,
        api="modules",
        platform="pallas",
        poison=True,
        seed=112,
    ),
)
