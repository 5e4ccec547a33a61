"""OLMoE-1B-7B (arXiv 2409.02060), with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def olmoe_1b_7b() -> Trainer.Config:
    """Pretrain OLMoE-1B-7B, a mixture of 64 experts, on 5 trillion tokens.

    6.92B parameters, of which each token uses 1.3B. Sizes: huggingface.co/allenai/OLMoE-1B-7B-0924/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 50_304, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": False, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    }  # fmt: skip
    return pretraining(published_model("olmoe", sizes), sequence_length=4096, peak=4e-4, max_steps=1_220_000)
