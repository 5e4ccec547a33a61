"""Compute preference losses and gradients with TRL. `preference_formulas.py` runs this file in TRL's environment.

    python trl_preferences.py DIR

`DIR/cases.json` lists the cases. For each case, writes `DIR/NAME.trl.safetensors` with the loss and the gradient of each weight. The
losses are those of TRL's trainers, which are created without their data loading.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import add_fused_lm_head


class Settings:
    """A namespace for the arguments of a trainer."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)


def create(trainer: type, **attributes: Any) -> Any:
    """Create a trainer without its constructor, which would load data."""
    self = trainer.__new__(trainer)
    common = {"accelerator": Accelerator(cpu=True), "aux_loss_enabled": False, "precompute_ref_logps": False}
    counters = {"_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1}
    for name, value in {**common, **counters, **attributes}.items():
        setattr(self, name, value)
    return self


def full_rows(arrays: dict[str, np.ndarray], answer: str) -> dict[str, torch.Tensor]:
    """Return the ids, the attention mask and the answer mask of rows that include the last target."""
    tokens, targets, weights = (torch.tensor(arrays[f"{answer}_{n}"]) for n in ("tokens", "targets", "weights"))
    first = torch.ones(len(tokens), 1, dtype=torch.long)
    positions = torch.arange(weights.shape[1])
    last = torch.where(weights > 0, positions, -1).max(dim=1, keepdim=True).values
    attended = torch.cat([first, (positions <= last).long()], dim=1)
    ids = torch.cat([tokens[:, :1].long(), targets.long()], dim=1) * attended
    return {"ids": ids, "attended": attended, "answer": torch.cat([0 * first, weights.long()], dim=1)}


def fuse_heads(*models: Any) -> None:
    """Prepare models as the constructors of `DPOTrainer` and `KTOTrainer` do."""
    for model in models:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))


def answer_labels(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the ids of answers, and -100 elsewhere."""
    return rows["ids"].masked_fill(rows["answer"] == 0, -100)


def dpo(model: Any, reference: Any, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `DPOTrainer` with `loss_type` (`sigmoid` or `ipo`)."""
    fuse_heads(model, reference)
    trainer = create(
        DPOTrainer, model=model, ref_model=reference, ld_alpha=None, f_divergence_type="reverse_kl", label_smoothing=0.0,
        loss_types=[options["loss_type"]], loss_weights=[1.0], beta=options["beta"], use_weighting=False,
        args=Settings(gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    rows = [full_rows(arrays, answer) for answer in ("chosen", "rejected")]
    ids, attended, answer = (torch.cat([r[n] for r in rows]) for n in ("ids", "attended", "answer"))
    inputs = {"input_ids": ids, "attention_mask": attended, "completion_mask": answer}
    return trainer._compute_loss(model, inputs, return_outputs=False)


def kto(model: Any, reference: Any, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `KTOTrainer`."""
    fuse_heads(model, reference)
    trainer = create(
        KTOTrainer, model=model, ref_model=reference, loss_type="kto", calculate_KL=True,
        args=Settings(gradient_checkpointing_kwargs=None), **options,
    )  # fmt: skip
    rows, other = (full_rows(arrays, answer) for answer in ("completion", "mismatched"))
    inputs = {
        "input_ids": rows["ids"], "attention_mask": rows["attended"], "completion_mask": rows["answer"],
        "KL_input_ids": other["ids"], "KL_attention_mask": other["attended"], "KL_completion_mask": other["answer"],
        "label": torch.tensor(arrays["labels"]) > 0,
    }  # fmt: skip
    return trainer._compute_loss(model, inputs, return_outputs=False)


def without_reference(trainer: Any, model: Any, arrays: dict[str, np.ndarray]) -> torch.Tensor:
    """Return the loss of a trainer without a reference."""
    inputs: dict[str, Any] = {}
    for answer in ("chosen", "rejected"):
        rows = full_rows(arrays, answer)
        inputs |= {f"{answer}_input_ids": rows["ids"], f"{answer}_attention_mask": rows["attended"]}
        inputs[f"{answer}_labels"] = answer_labels(rows)
    return trainer.get_batch_loss_metrics(model, inputs)[0]


def orpo(model: Any, reference: Any, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `ORPOTrainer`."""
    trainer = create(ORPOTrainer, beta=options["beta"], is_encoder_decoder=False, padding_value=0)
    return without_reference(trainer, model, arrays)


def simpo(model: Any, reference: Any, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `CPOTrainer` with the loss type `simpo`."""
    settings = {"loss_type": "simpo", "cpo_alpha": 0.0, "alpha": 0.0, "is_encoder_decoder": False, "pad_token_id": 0}
    return without_reference(create(CPOTrainer, **settings, **options), model, arrays)


def gkd(model: Any, teacher: Any, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `GKDTrainer`."""
    rows = {n: torch.tensor(arrays[n]).long() for n in ("tokens", "targets")}
    labels = rows["targets"].masked_fill(torch.tensor(arrays["weights"]) == 0, -100)
    with torch.no_grad():
        teacher_logits = teacher(input_ids=rows["tokens"]).logits
    return GKDTrainer.generalized_jsd_loss(model(input_ids=rows["tokens"]).logits, teacher_logits, labels, **options)


def reward(model: Any, head: np.ndarray, arrays: dict[str, np.ndarray], options: dict[str, Any]) -> torch.Tensor:
    """Return the loss of `RewardTrainer`. The rows end at the last token of the answer."""
    with torch.no_grad():
        model.score.weight.copy_(torch.tensor(head).T)
    trainer = create(RewardTrainer, model=model, args=Settings(center_rewards_coefficient=options["center"]))
    rows = [full_rows(arrays, answer) for answer in ("chosen", "rejected")]
    attended = torch.cat([r["attended"][:, 1:] for r in rows])  # one less than the row with its end
    ids = torch.cat([r["ids"][:, :-1] for r in rows]) * attended
    return trainer.compute_loss(model, {"input_ids": ids, "attention_mask": attended})


LOSSES = {"dpo": dpo, "kto": kto, "orpo": orpo, "simpo": simpo, "gkd": gkd}


def main(directory: Path) -> None:
    """Run all cases."""
    for case in json.loads((directory / "cases.json").read_text()):
        arrays = dict(np.load(directory / f"{case['name']}.npz"))
        kind, options = case["trl"], case["options"]
        if kind == "reward":
            model = AutoModelForSequenceClassification.from_pretrained(
                directory / "policy", num_labels=1, pad_token_id=0, dtype=torch.float32
            )
            loss = reward(model.train(), arrays.pop("head"), arrays, options)
        else:
            model, reference = (
                AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32)
                for name in ("policy", "reference")
            )
            loss = LOSSES[kind](model.train(), reference.eval(), arrays, options)
        loss.backward()
        gradients = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
        save_file({**gradients, "loss": loss.detach().reshape(1)}, directory / f"{case['name']}.trl.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
