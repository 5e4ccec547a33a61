"""ERNIE 4.5 21B-A3B, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def ernie4_5_21b_a3b() -> Trainer.Config:
    """Pretrain ERNIE 4.5 21B-A3B, a mixture of 64 experts and two shared experts.

    21.8B parameters, of which each token uses 3B. Sizes: huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 103_424, "num_hidden_layers": 28, "hidden_size": 2560, "intermediate_size": 12_288,
        "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    }  # fmt: skip
    return pretraining(published_model("ernie4_5_moe", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
