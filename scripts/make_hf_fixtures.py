"""Make tests/plugins/models/huggingface/fixtures: a tiny random `transformers` model of each family, and its outputs.

    uv run --group parity python scripts/make_hf_fixtures.py [--to DIR] [--seed N] [NAME ...]

Set UV_FIND_LINKS to a folder with a CPU build of torch, if you have one. Without names, all fixtures are made. The slow tests call
this script with another seed and compare with the outputs of that call.

Each folder is a model directory as users have it. `expected.safetensors` has the outputs: tokens and logits of padded and of packed
rows, 64 greedy tokens, the losses of three steps of AdamW, and the gradients of two models. The weights are chosen such that the
most likely token always leads the next one by at least 1e-3. `vit` classifies images; its outputs are pixels, logits, labels and
the losses of three steps.
"""

import argparse
import copy
import functools
import json
import re
import shutil
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

PLUGINS = Path(__file__).parents[1] / "tests/plugins"
VOCAB, NEW, MARGIN = 96, 64, 1e-3
ROUNDING = 1e-5  # the most that it may change a loss
LENGTHS = (40, 23)  # of padded rows
PACKED = (17, 5, 18)  # of the documents in one row

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
WINDOWED, GLOBAL = "sliding_attention", "full_attention"
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}

DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1000000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
FACTORS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
NEMOTRON_H = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 3,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
KIMI_LINEAR = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 3,
    },
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "num_expert_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 20}
GROUPS = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
}
INDEXER = {"moe_intermediate_size": 8, "index_head_dim": 16, "index_n_heads": 16, "index_topk": 6}
GRANITE = {
    "intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 0.6,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.25,
    "logits_scaling": 0.5,
}

TEXT_MODELS = {"Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe"}
"""Multimodal models. Their text models have separate config classes."""

SMALL = {"Gemma4": ("q_norm", "per_layer_input_gate"), "Gemma3n": ("q_norm", "per_layer_input_gate")}
"""Small weights: these models do not scale attention scores, or normalize the output of a gate."""

# name -> (class, config, options): shards, gradients, a model_type that transformers does not have, names of published
# tensors that transformers writes differently
MODELS = {
    "llama2": ("Llama", {"num_key_value_heads": 4}, {"gradients": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, {"shard": "20KB"}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 1000000.0}, {}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                               "norm_topk_prob": True}, {}),
    "gemma2": ("Gemma2", {**GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 6.0}, {"gradients": True}),
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 7}, {}),
    "gemma3n": ("Gemma3n", {"head_dim": 8, "sliding_window": 8, "intermediate_size": 16, "num_hidden_layers": 5,
                            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                            "layer_types": [WINDOWED, WINDOWED, GLOBAL, WINDOWED, GLOBAL], "laurel_rank": 6,
                            "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0], "vocab_size_per_layer_input": VOCAB - 16,
                            "final_logit_softcapping": 6.0}, {}),
    "gemma4": ("Gemma4", {**GEMMA4, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                          "layer_types": [WINDOWED, WINDOWED, GLOBAL, WINDOWED, GLOBAL],
                          "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
                          "final_logit_softcapping": 6.0}, {}),
    "gemma4-moe": ("Gemma4", {**GEMMA4, "num_hidden_layers": 3, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                              "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                              "moe_intermediate_size": 16, "layer_types": [WINDOWED, WINDOWED, GLOBAL],
                              "use_bidirectional_attention": "vision"}, {}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4,
                                   "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False}, {}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2,
                                   "rope_parameters": YARN}, {}),
    "glm4-moe": ("Glm4Moe", {**GROUPS, "n_shared_experts": 2, "attention_bias": True, "use_qk_norm": True, "head_dim": 16,
                             "rope_theta": 10000.0, "partial_rotary_factor": 0.25}, {}),
    "kimi-k2": ("DeepseekV3", {**LATENT, "moe_intermediate_size": 8, "q_lora_rank": 24, "n_group": 1, "topk_group": 1,
                               "n_shared_experts": 1,
                               "routed_scaling_factor": 2.827, "rope_parameters": {**YARN, "beta_fast": 1.0}},
                {"model_type": "kimi_k2"}),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, "moe_intermediate_size": 8, "q_lora_rank": 24,
                                      "mlp_layer_types": ["dense", "dense", "sparse"],
                                      "rope_theta": 10000.0}, {}),
    "qwen2-moe": ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                               "shared_expert_intermediate_size": 24, "norm_topk_prob": True}, {}),
    "dots1": ("Dots1", {**GROUPS, "n_shared_experts": 2, "head_dim": 12, "sliding_window": 8, "max_window_layers": 2}, {}),
    "exaone-moe": ("ExaoneMoe", {**{k: v for k, v in GROUPS.items() if k != "n_routed_experts"}, "num_experts": 8,
                                 "head_dim": 12, "sliding_window": 8, "sliding_window_pattern": 2}, {}),
    "ernie4-5-moe": ("Ernie4_5_Moe", {"num_hidden_layers": 4, "moe_intermediate_size": 12, "moe_num_experts": 4, "moe_k": 2,
                                      "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_interval": 2,
                                      "tie_word_embeddings": False}, {}),
    "granite-moe": ("GraniteMoe", GRANITE, {}),
    "granite-moe-shared": ("GraniteMoeShared", {**GRANITE, "shared_intermediate_size": 24, "tie_word_embeddings": True}, {}),
    "minimax-m2": ("MiniMaxM2", {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
                                 "rotary_dim": 8}, {}),
    "olmoe": ("Olmoe", {"intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}, {}),
    "hunyuan-moe": ("HunYuanMoEV1", {"intermediate_size": 16, "num_experts": 4, "moe_topk": 2, "head_dim": 16,
                                     "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0,
                                                         "factor": 1.0}}, {}),
    "llama4": ("Llama4", {"intermediate_size": 16, "intermediate_size_mlp": 24, "num_hidden_layers": 4, "num_local_experts": 4,
                          "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2,
                          "attention_chunk_size": 8, "floor_scale": 6, "attn_scale": 0.3, "head_dim": 8,
                          "rope_theta": 10000.0}, {}),
    "deepseek-v32": ("DeepseekV32", {**LATENT, **INDEXER, "num_hidden_layers": 2, "q_lora_rank": 24, "n_group": 4,
                                     "topk_group": 2, "rope_parameters": YARN}, {}),
    "glm-moe-dsa": ("GlmMoeDsa", {**LATENT, **INDEXER, "q_lora_rank": 16, "kv_lora_rank": 24, "n_shared_experts": 1,
                                  "rope_theta": 10000.0, "indexer_types": ["full", "shared", "full"]}, {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
                      "hidden_size": 64, "sliding_window": 8}, {}),
    "olmo2": ("Olmo2", {}, {}),
    "olmo3": ("Olmo3", {"sliding_window": 8, "num_hidden_layers": 4, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "full_attention": {k: v for k, v in YARN.items() if "mscale" not in k}
                           | {"rope_theta": 500000.0, "attention_factor": 1.1}}}, {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}, {}),
    "granite": ("Granite", {k: v for k, v in GRANITE.items() if "expert" not in k and "intermediate" not in k}, {}),
    "cohere": ("Cohere", {"logit_scale": 0.5, "attention_bias": True}, {}),
    "cohere2": ("Cohere2", {"logit_scale": 0.5, "num_hidden_layers": 4, "sliding_window": 8}, {}),
    "hunyuan-dense": ("HunYuanDenseV1", {"head_dim": 16, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 8.0, "factor": 1.0}}, {}),
    "ernie4-5": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}, {}),
    "glm": ("Glm", {"head_dim": 16}, {}),
    "glm4": ("Glm4", {"head_dim": 16}, {}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}, {}),
    "arcee": ("Arcee", {"head_dim": 12, "mlp_bias": True}, {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}, {}),
    "exaone4": ("Exaone4", {"sliding_window": 8, "num_hidden_layers": 4}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "mistral": ("Mistral", {"sliding_window": 8}, {}),
    "ministral": ("Ministral", {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 8,
                                "layer_types": ["full_attention", *["sliding_attention"] * 2]}, {}),
    "ministral3": ("Ministral3", {"head_dim": 16, "num_hidden_layers": 3,
                                  "rope_parameters": {**YARN, "original_max_position_embeddings": 16,
                                                      "llama_4_scaling_beta": 0.4}}, {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "gpt-oss": ("GptOss", {"head_dim": 16, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
                           "sliding_window": 5, "rope_parameters": {**YARN, "truncate": False}}, {}),
    "qwen3-next": ("Qwen3Next", {"head_dim": 16, "num_hidden_layers": 3, "full_attention_interval": 2, **DELTA_NET, **SHARED_EXPERT,
                                 "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}, {}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}, {}),
    "apertus": ("Apertus", {"attention_bias": True, "rope_parameters": LLAMA3_ROPE}, {}),
    "olmo": ("Olmo", {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "nemotron": ("Nemotron", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}, {}),
    "stablelm": ("StableLm", {"num_attention_heads": 2, "use_qkv_bias": True}, {}),
    "stablelm-parallel": ("StableLm", {"num_attention_heads": 2, "num_key_value_heads": 1, "use_parallel_residual": True}, {}),
    "helium": ("Helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}, {}),
    "gemma": ("Gemma", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}, {}),
    "gpt-neox": ("GPTNeoX", {"num_attention_heads": 2}, {}),
    "gpt-neox-sequential": ("GPTNeoX", {"num_attention_heads": 2, "use_parallel_residual": False, "attention_bias": False}, {}),
    "qwen3.5": ("Qwen3_5", {"head_dim": 16, "num_hidden_layers": 3, "full_attention_interval": 2, **DELTA_NET,
                            "rope_parameters": MROPE, "tie_word_embeddings": True}, {}),
    "qwen3.5-moe": ("Qwen3_5Moe", {"head_dim": 16, "num_hidden_layers": 3, "full_attention_interval": 3, **DELTA_NET,
                                   **SHARED_EXPERT, "rope_parameters": MROPE, "num_experts": 3,
                                   "num_experts_per_tok": 2, "moe_intermediate_size": 12}, {}),
    "granite-hybrid": ("GraniteMoeHybrid", {**MAMBA, **FACTORS, "num_local_experts": 0, "shared_intermediate_size": 40,
                                            "position_embedding_type": "rope",
                                            "layer_types": ["full_attention", "linear_attention", "linear_attention"]}, {}),
    "granite-hybrid-moe": ("GraniteMoeHybrid", {**MAMBA, **FACTORS, "num_local_experts": 3, "shared_intermediate_size": 20,
                                                "intermediate_size": 16, "position_embedding_type": "nope",
                                                "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, {}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}, {}),
    "nemotron-h": ("NemotronH", {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe",
                                                                    "linear_attention"]}, {}),
    "lfm2": ("Lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "intermediate_size": 70,
                      "block_multiple_of": 8, "block_ffn_dim_multiplier": 0.9, "conv_bias": True, "conv_L_cache": 4}, {}),
    "olmo-hybrid": ("OlmoHybrid", {"num_hidden_layers": 3, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
                                   "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
                                   "rope_parameters": {"rope_theta": None},
                                   "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
                    {"rename": (r"layers\.1\.feedforward_layer_norm", "layers.1.post_attention_layernorm")}),
    "kimi-linear": ("KimiLinear", KIMI_LINEAR, {"rename": (r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.")}),
    "cwm": ("Cwm", {"head_dim": 16, "num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": LLAMA3_ROPE,
                    "layer_types": [GLOBAL, WINDOWED, WINDOWED, WINDOWED, GLOBAL]}, {}),
    "solar-open": ("SolarOpen", {"moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
                                 "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "head_dim": 12}, {}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}, {}),
}  # fmt: skip


def tokenizer() -> tokenizers.Tokenizer:
    """Return a word-level tokenizer of 96 tokens whose template puts `<s>` in front."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(VOCAB - 3))]
    instance = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    instance.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    instance.decoder = tokenizers.decoders.WordPiece(prefix="##")
    instance.add_special_tokens(["<unk>", "<s>", "</s>"])
    instance.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return instance


def build(kind: str, more: dict, seed: int) -> torch.nn.Module:
    """Return the model, with weights that bfloat16 represents exactly."""
    prefix = f"{kind}Text" if kind in TEXT_MODELS else kind
    sizes = {"bos_token_id": 1, "eos_token_id": 2} if kind == "GPT2" else SIZES
    if kind == "GPTNeoX":  # it has no such key
        sizes = {key: value for key, value in sizes.items() if key != "num_key_value_heads"}
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **more}, attn_implementation="eager")
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        *model.named_parameters(),
        *((n, b) for n, b in model.named_buffers() if "correction_bias" in n or "layer_scalar" in n),
    ]
    with torch.no_grad():
        for name, value in tensors:
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name or "ln_" in name or "scal" in name:
                noise = 0.2 * noise + (value if value.ndim == 1 else 0)
            elif value.ndim == 1:
                noise = 0.1 * noise
            else:
                fan = value.shape[-2 if kind == "GPT2" and "wte" not in name and "wpe" not in name else -1]
                noise = noise * (
                    (0.15 if "Gemma" in kind else 0.5)
                    if "emb" in name or "wte" in name or "wpe" in name
                    else 1.2 * fan**-0.5
                )
            if any(part in name for part in SMALL.get(kind, ())):
                noise = 0.3 * noise
            value.copy_(noise.bfloat16().float())
    return model


def entropy(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens, without auxiliary losses."""
    logits = model(input_ids=tokens).logits
    return cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), tokens[:, 1:].reshape(-1))


def losses(model: torch.nn.Module, tokens: torch.Tensor) -> list[float]:
    """Return the losses before each of three steps of AdamW, and after the last."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = entropy(model, tokens)
        values.append(loss.item())
        loss.backward()
        optimizer.step()
    return [*values, entropy(model, tokens).item()]


def perturb(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy whose weights differ by about the rounding error of float32."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(11)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1 + 1e-6 * torch.randn(value.shape, generator=generator))
    return model


def expectations(model: torch.nn.Module, gradients: bool) -> dict[str, torch.Tensor] | None:
    """Return the outputs of a model, or None if a margin is too small."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randint(3, VOCAB, shape, generator=generator)  # noqa: E731
    prompt = draw(1, 12)
    with torch.no_grad():
        generated = model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        logits = model(generated).logits[0, 11:-1]
        top = logits.topk(2).values
        if (
            generated.shape[1] != 12 + NEW
            or (logits.argmax(-1) != generated[0, 12:]).any()  # rounding changed the keys that an indexer selects
            or (top[:, 0] - top[:, 1]).min() < MARGIN
            or len(set(generated[0, 12:].tolist())) < 8
        ):
            return None
        padded = draw(len(LENGTHS), max(LENGTHS))
        mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
        padded = torch.where(mask, padded, 0)
        packed = draw(1, sum(PACKED))
        results = {
            "padded": padded,
            "lengths": torch.tensor(LENGTHS),
            "padded_logits": model(padded, attention_mask=mask.long()).logits,
            "packed": packed,
            "documents": torch.tensor(PACKED),
            "packed_logits": torch.cat([model(part).logits for part in packed.split(PACKED, dim=1)], dim=1),
            "prompt": prompt[0],
            "generated": generated[0, 12:],
        }
    batch = draw(4, 24)
    results |= {"batch": batch, "losses": torch.tensor(losses(model, batch), dtype=torch.float64)}
    if (torch.tensor(losses(perturb(model), batch)) - results["losses"]).abs().max() > ROUNDING:
        return None  # rounding changes the keys or the experts that a token selects
    if gradients:
        entropy(model, batch).backward()
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        results |= {f"gradient.{n}": p.grad for n, p in model.named_parameters() if n not in tied}
    return {k: v.int() if v.dtype == torch.int64 else v.contiguous() for k, v in results.items()}


def make_vit(folder: Path, seed: int) -> None:
    """Write the image classifier."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.ViTConfig(
        **sizes, image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attn_implementation="eager"
    )
    model = transformers.ViTForImageClassification(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            large = value.ndim > 1 and "embeddings." not in name
            value.copy_((noise * (value.shape[-1] ** -0.5 if large else 0.2) + ("norm" in name)).bfloat16().float())
    pixels = torch.randn((6, 3, 16, 16), generator=generator)
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    with torch.no_grad():
        results = {"pixels": pixels, "labels": labels.int(), "logits": model(pixels).logits}
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = cross_entropy(trained(pixels).logits, labels)
        steps.append(loss.item())
        loss.backward()
        optimizer.step()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_file({**results, "losses": torch.tensor(steps, dtype=torch.float64)}, folder / "expected.safetensors")
    print(f"vit: {sum(f.stat().st_size for f in folder.iterdir()) / 1000:.0f} kB, losses {steps}", flush=True)


def make(name: str, folder: Path, first: int) -> None:
    """Write one folder, with the first seed that fits."""
    kind, more, options = MODELS[name]
    for seed in range(first, first + 200):
        model = build(kind, more, seed)
        if (results := expectations(model, options.get("gradients", False))) is not None:
            break
    else:
        raise SystemExit(f"{name}: no seed of 200 fits")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = None
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=options.get("shard", "50GB"))
    if rename := options.get("rename"):
        tensors = load_file(folder / "model.safetensors")
        save_file({re.sub(*rename, n): t for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = options.get("model_type", config["model_type"])
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    (folder / "tokenizer.json").write_text(tokenizer().to_str() + "\n")
    save_file(results, folder / "expected.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(
        f"{name}: seed {seed}, {size / 1000:.0f} kB, logits up to {results['padded_logits'].abs().max():.1f}",
        flush=True,
    )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--to", type=Path, help="a folder for all of them; default: where the tests read them")
    parser.add_argument("--seed", type=int, default=0, help="the first that is tried")
    args = parser.parse_args()
    for model_name in args.names or (*MODELS, "vit"):
        folder = "vit" if model_name == "vit" else "huggingface"
        to = args.to or PLUGINS / "models" / folder / "fixtures"
        (make_vit if model_name == "vit" else functools.partial(make, model_name))(to / model_name, args.seed)
