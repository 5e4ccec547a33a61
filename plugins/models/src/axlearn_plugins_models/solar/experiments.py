"""Solar Open 100B, with the sizes from its `config.json`."""

from axlearn_core.train import Trainer
from axlearn_plugins_models.huggingface.published_config import published_model
from axlearn_plugins_models.llama.experiments import pretraining


def solar_open_100b() -> Trainer.Config:
    """Pretrain Solar Open 100B, a mixture of 128 experts and a shared one.

    102.6B parameters, of which each token uses 12B. Sizes: huggingface.co/upstage/Solar-Open-100B/blob/main/config.json.
    """
    sizes = {
        "vocab_size": 196_608, "num_hidden_layers": 48, "hidden_size": 4096, "moe_intermediate_size": 1280, "head_dim": 128,
        "num_attention_heads": 64, "num_key_value_heads": 8, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    }  # fmt: skip
    return pretraining(published_model("solar_open", sizes), sequence_length=4096, peak=3e-4, max_steps=500_000)
