"""Tiny models of EasyDeL, with the installed ejkernel.

`python -O tests/easydel/models.py llama/flash_attn2 mamba` prints the results of each, one JSON object a line. Without
-O EasyDeL asserts that the version of ejkernel is "0.0.78".

The weights come from NumPy by the names of the parameters, so that every version of JAX has the same.
"""

import os

os.environ.setdefault("EASYDEL_AUTO", "0")  # the XLA flags that EasyDeL sets are unknown to jaxlib 0.10
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import sys
import tempfile
import time
import traceback
import zlib

import numpy as np

VOCABULARY, BATCH, LENGTH, PADDED, NEW = 64, 2, 12, 3, 6
TINY = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
WINDOW = dict(sliding_window=8)
# The name of the class in EasyDeL, and its configuration besides the sizes in TINY.
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", WINDOW),
    "gemma2": ("Gemma2", dict(query_pre_attn_scalar=16, attn_logit_softcapping=20.0, **WINDOW)),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "gpt_oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW)),
    "gpt_oss_bfloat16": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW)),
    "deepseek_v2": (
        "DeepseekV2",
        dict(
            num_key_value_heads=4,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            kv_lora_rank=32,
            q_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            topk_method="greedy",
            head_dim=None,
        ),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            full_attention_interval=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            shared_expert_intermediate_size=32,
            **EXPERTS,
        ),
    ),
    "mamba": ("Mamba", dict(state_size=8, bos_token_id=1, eos_token_id=2)),
    "mamba2": ("Mamba2", dict(state_size=16, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)),
}
STATE_SPACES = ("mamba", "mamba2")
# The implementations of paged attention that EasyDeL's engine uses.
PAGED = ("ragged_page_attention_v2", "ragged_page_attention_v3")
LATENTS = tuple(f"multi_latent_ragged_page_attention_v{version}" for version in (1, 2))
# The attention implementations that work on a CPU; cudnn and cuda_flash_attn2 are sdpa there.
DENSE = ("flash_attn2", "vanilla", "sdpa", "blocksparse", "ring", "autoregressive_decodeattn", "auto")
# Tokens of a prompt, if not all: EasyDeL's cache for windows is right only for prompts within the window.
PROMPTS = {"mistral": 7, "gemma2": 7}
WITHOUT_FLASH = ("deepseek_v2", "gpt_oss", "gpt_oss_bfloat16")  # compared with the release
CASES = (
    *(f"llama/{mechanism}" for mechanism in (*DENSE, *PAGED)),
    *(f"{family}/flash_attn2" for family in FAMILIES if family not in (*STATE_SPACES, *WITHOUT_FLASH, "llama")),
    *(f"{family}/vanilla" for family in WITHOUT_FLASH),
    "gpt_oss/flash_attn2",  # of which the release's sinks are wrong
    *STATE_SPACES,
    "qwen3_next/ragged_page_attention_v3",
    *(f"deepseek_v2/{mechanism}" for mechanism in LATENTS),
)


def configuration(easydel, family, mechanism):
    import jax.numpy as jnp

    name, more = FAMILIES[family]
    sizes = (
        TINY if family not in STATE_SPACES else {n: TINY[n] for n in ("vocab_size", "hidden_size", "num_hidden_layers")}
    )
    given = {n: x for n, x in (sizes | more).items() if x is not None}
    if mechanism:
        given["attn_mechanism"] = mechanism
    return getattr(easydel, f"{name}Config")(
        **given,
        pad_token_id=0,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        blocksize_q=4,
        blocksize_k=4,
        attn_dtype=jnp.float32,  # bfloat16 by default
        kvdtype=jnp.float32,
    )


def weight(name, x):
    """A constant vector plus a tenth of a normal one; a matrix of normal numbers divided by the root of its rows."""
    x = np.asarray(x)
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(x.shape)
    if x.ndim < 2:
        middle = x.flat[0] if (x == x.flat[0]).all() else 0
        return (middle + 0.1 * normal).astype(x.dtype)
    return (normal / np.sqrt(x.shape[-2])).astype(x.dtype)


def build(family, mechanism):
    """(graph, parameters, rest) of a model with those weights."""
    import easydel
    import flax.nnx as nn
    import jax
    import jax.numpy as jnp

    cls = getattr(easydel, f"{FAMILIES[family][0]}ForCausalLM")
    config = configuration(easydel, family, mechanism)
    model = cls(config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nn.Rngs(0))
    if family == "gpt_oss":
        for layer in model.model.layers:
            layer.mlp.dtype = jnp.float32  # which are left in bfloat16
    graph, parameters, rest = nn.split(model, nn.Param, ...)
    named = lambda path, x: jnp.asarray(weight(jax.tree_util.keystr(path, simple=True, separator="."), x))
    return model.mesh, graph, jax.tree_util.tree_map_with_path(named, parameters), rest


def told(what):
    print(f"{what} after {time.process_time():.0f} s of CPU", file=sys.stderr, flush=True)


def inputs():
    """Tokens, a mask whose first sequence begins with padding, and targets, −1 for none."""
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(3, VOCABULARY - 1, (BATCH, LENGTH)), np.ones((BATCH, LENGTH), np.int32)
    mask[0, :PADDED] = 0
    targets = np.where(mask[:, :-1] * mask[:, 1:], ids[:, 1:], -1)
    return ids.astype(np.int32), mask, targets


def run(family, mechanism=""):
    """The loss, the norm of its gradient, the logits of the last tokens, and greedy tokens."""
    import flax.nnx as nn
    import jax
    import jax.numpy as jnp
    from transformers import GenerationConfig

    mesh, graph, parameters, rest = build(family, mechanism)
    ids, mask, targets = map(jnp.asarray, inputs())

    def loss(parameters):
        logits = nn.merge(graph, parameters, rest)(input_ids=ids, attention_mask=mask).logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.maximum(targets, 0)[..., None], -1)
        return -(chosen[..., 0] * (targets >= 0)).sum() / (targets >= 0).sum(), logits[:, -1]

    told("built")
    with mesh:
        (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
        norms = {
            jax.tree_util.keystr(path, simple=True, separator="."): float(np.linalg.norm(np.asarray(x, np.float64)))
            for path, x in jax.tree_util.tree_leaves_with_path(gradient)
        }
        told("differentiated")
        options = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=VOCABULARY - 1)
        model = nn.merge(graph, parameters, rest)
        prompt = dict(input_ids=ids[:, : PROMPTS.get(family)], attention_mask=mask[:, : PROMPTS.get(family)])
        tokens = model.generate(**prompt, generation_config=options).sequences
    told("generated")
    return dict(
        loss=float(value),
        gradient=float(np.linalg.norm(list(norms.values()))),
        logits=float(np.linalg.norm(np.asarray(logits, np.float64))),
        gradients=norms,
        tokens=np.asarray(tokens)[:, -NEW:].tolist(),
    )


def tokenizer(folder):
    """Writes a tokenizer of the words w0, w1, … to a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="w0", unk_token="w2", eos_token=f"w{VOCABULARY - 1}", bos_token="w1")
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def serve(family, mechanism):
    """Greedy tokens by eSurge, EasyDeL's engine over pages, for the tokens of `inputs` without padding."""
    import easydel
    import flax.nnx as nn
    import jax.numpy as jnp
    from easydel.caching.mla_ragged_page import cache as of_latents
    from easydel.caching.ragged_page import cache

    # On a CPU a pool of pages has 4 GiB, whatever hbm_utilization says. EasyDeL is not changed otherwise.
    cache.per_device_hbm_budget_bytes = of_latents.per_device_hbm_budget_bytes = lambda *args, **kwargs: 1 << 20
    _, graph, parameters, rest = build(family, mechanism)
    ids, mask, _ = inputs()
    prompts = [" ".join(f"w{i}" for i in row[kept > 0]) for row, kept in zip(ids, mask, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer(folder)
        engine = easydel.eSurge(
            nn.merge(graph, parameters, rest),
            tokenizer=folder,
            dtype=jnp.float32,
            max_model_len=32,
            min_input_pad=16,
            max_num_seqs=BATCH,
            max_num_batched_tokens=32,
            page_size=8,
            auto_shard_model=False,
            tool_parser="llama3_json",  # other ids are not in the tokenizer
            reasoning_parser="deepseek_r1",
            enable_prefix_caching=False,
        )
        told("built")
        options = easydel.SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
        try:
            outputs = engine.generate(prompts, options, use_tqdm=False)
        finally:
            engine.terminate()  # and its workers, which are processes
        told("served")
    return dict(tokens=[list(output.outputs[0].token_ids) for output in outputs])


def outcome(case):
    """The result of a case, `family` or `family/mechanism`, or its error."""
    told(case)
    family, mechanism = (*case.split("/"), "")[:2]
    try:
        return (serve if mechanism in PAGED + LATENTS else run)(family, mechanism)
    except Exception as error:
        traceback.print_exc()
        return dict(error=f"{type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps({case: outcome(case)}), flush=True)
