"""Hunyuan-A13B, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def hunyuan_a13b() -> Trainer.Config:
    """Pretrain Hunyuan-A13B, a mixture of 64 experts and a shared expert.

    80.4B parameters, of which each token uses 13B.

    Sizes: huggingface.co/tencent/Hunyuan-A13B-Pretrain/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 128_167, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 3072,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64, "moe_topk": 8,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    }  # fmt: skip
    return pretraining(published_model("hunyuan_v1_moe", sizes), sequence_length=8192, peak=3e-4, max_steps=500_000)
