"""Qwen 2 MoE (arXiv 2407.10671), Qwen 2.5 (arXiv 2412.15115) and Qwen 3 (arXiv 2505.09388)."""

from axlearn_core.config import patch
from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import llama, pretraining
from axlearn_plugins_moe.mixture_of_experts import MixtureOfExperts
from axlearn_plugins_moe.routers import SoftmaxRouter
from axlearn_plugins_transformer.norm import RMSNorm


def qwen3_30b_a3b() -> Trainer.Config:
    """Pretrain Qwen 3 30B-A3B, a mixture of 128 experts.

    30.5B parameters, of which each token uses 3.3B (8 of the experts).
    """
    model = llama(
        vocab_size=151_936,
        num_layers=48,
        hidden_dim=2048,
        num_heads=32,
        num_kv_heads=4,
        feed_forward_dim=6144,
        theta=1_000_000.0,
        eps=1e-6,
    )
    experts = MixtureOfExperts.Config(
        num_experts=128, top_k=8, hidden_dim=768, router=SoftmaxRouter.Config(normalize=True, load_balance=0.001)
    )
    attention = {"head_dim": 128, "qk_norm": RMSNorm.Config(eps=1e-6)}
    layer = "decoder.layer"
    model = patch(
        model, {f"{layer}.feed_forward": experts, **{f"{layer}.attention.{k}": v for k, v in attention.items()}}
    )
    return pretraining(model, sequence_length=4096, peak=3e-4, max_steps=500_000)


def qwen2_5_7b() -> Trainer.Config:
    """Pretrain Qwen 2.5 7B on 18 trillion tokens.

    7.62B parameters. Sizes: huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 152_064, "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18_944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("qwen2", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def qwen2_57b_a14b() -> Trainer.Config:
    """Pretrain Qwen 2 57B-A14B, a mixture of 64 experts and a shared expert.

    57.4B parameters, of which each token uses 14B. Sizes: huggingface.co/Qwen/Qwen2-57B-A14B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 151_936, "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20_480, "norm_topk_prob": False, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("qwen2_moe", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)


def qwen3_8b() -> Trainer.Config:
    """Pretrain Qwen 3 8B on 36 trillion tokens.

    8.19B parameters. Sizes: huggingface.co/Qwen/Qwen3-8B-Base/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 151_936, "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12_288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("qwen3", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
