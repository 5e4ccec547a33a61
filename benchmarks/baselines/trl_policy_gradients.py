"""Compute policy-gradient losses and gradients with TRL. `rl_formulas.py` runs this file in TRL's environment.

    python trl_policy_gradients.py DIR

`DIR/cases.json` lists the cases. For each case, writes `DIR/NAME.trl.safetensors` with the loss and the gradient of each weight. The
losses are those of TRL's trainers, which are created without their data loading.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head
from trl_preferences import Settings, create

LEARNING = {
    "current_gradient_accumulation_steps": 1, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
    "use_vllm": False, "vllm_importance_sampling_correction": False, "loss_type": "grpo", "importance_sampling_level": "token",
    "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "max_completion_length": 0, "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False, "entropy_coef": 0.0,
}  # fmt: skip


def read_inputs(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the batch in TRL's format: the prompt is the first token, and `tool_mask` masks targets that were not drawn."""
    tensors = {name: torch.tensor(x) for name, x in arrays.items()}
    attended = (tensors["segment_ids"] > 0).long()
    return {
        "prompt_ids": tensors["tokens"][:, :1].long(), "prompt_mask": torch.ones(len(attended), 1, dtype=torch.long),
        "completion_ids": tensors["targets"].long() * attended, "completion_mask": attended,
        "tool_mask": tensors["weights"].long(), "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["rollout_logprobs"], "num_items_in_batch": tensors["weights"].sum(),
    }  # fmt: skip


def log_probabilities(trainer: Any, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probabilities of the completions as the trainer computes them."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))[0]


def grpo(model: Any, reference: Any, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `GRPOTrainer`. `correction` limits the importance weights of the correction for the rollouts."""
    options = dict(options)
    correction, arguments = options.pop("correction", None), {"delta": None, "use_bias_correction_kl": False}
    arguments |= {name: options.pop(name) for name in list(options) if name in arguments}
    args = Settings(**arguments, steps_per_generation=1)
    trainer = create(GRPOTrainer, model=model, args=args, **{**LEARNING, **options})
    inputs = read_inputs(arrays)
    if trainer.beta:
        inputs["ref_per_token_logps"] = log_probabilities(trainer, reference, inputs)
    if correction is not None:
        current = log_probabilities(trainer, model, inputs)
        log_weights = (current - inputs["old_per_token_logps"]) * inputs["tool_mask"]
        inputs["importance_sampling_ratio"] = torch.exp(log_weights).clamp(*correction)
        inputs["old_per_token_logps"] = current
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    return trainer._compute_loss(model, inputs)


def rloo(model: Any, reference: Any, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `RLOOTrainer`. It has one advantage per row, and no mask of tools."""
    trainer = create(RLOOTrainer, model=model, args=Settings(), **{**LEARNING, **options})
    inputs = read_inputs(arrays)
    weights = torch.tensor(arrays["weights"])
    inputs["advantages"] = torch.tensor(arrays["row_advantages"])
    inputs["old_logps"] = (inputs["old_per_token_logps"] * weights).sum(1)
    # The completion is all trained targets, which follow one another in these batches.
    start = int((weights > 0).float().argmax(dim=1).unique().item())
    inputs["prompt_ids"] = torch.cat([inputs["prompt_ids"], inputs["completion_ids"][:, :start]], dim=1)
    inputs["prompt_mask"] = torch.cat([inputs["prompt_mask"], inputs["completion_mask"][:, :start]], dim=1)
    inputs["completion_ids"], inputs["completion_mask"] = inputs["completion_ids"][:, start:], weights[:, start:].long()
    return trainer._compute_loss(model, inputs)


def main(directory: Path) -> None:
    """Run all cases."""
    for case in json.loads((directory / "cases.json").read_text()):
        arrays = dict(np.load(directory / f"{case['name']}.npz"))
        models = [AutoModelForCausalLM.from_pretrained(directory / n, dtype=torch.float32) for n in ("policy", "reference")]
        for model in models:
            add_fused_lm_head(model, temperature=float(arrays["temperature"][0]), outputs=("log_probs", "entropy"))
        model, reference = models[0].train(), models[1].eval()
        loss = {"grpo": grpo, "rloo": rloo}[case["trl"]](model, reference, arrays, case["options"])
        loss.backward()
        gradients = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
        save_file({**gradients, "loss": loss.detach().reshape(1)}, directory / f"{case['name']}.trl.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
