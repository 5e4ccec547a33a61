"""Train a model on sums with TRL's `GRPOTrainer`. `rl_learning.py` runs this file in TRL's environment.

    python trl_learning.py SETTINGS.json

Writes one JSON line per evaluation to `out`: the step, the seconds since the start of the process and of the training, and the
share of correct answers to the held-out sums.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

START = time.time()  # before the large imports, whose time counts as start-up

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

END = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the exported model: a token per byte, and the end token."""
    shown = pre_tokenizers.ByteLevel.alphabet()  # printable characters that stand for the bytes
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    assert set(vocabulary) == set(shown)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.encode("12+34=").ids == list(b"12+34=") and tokenizer.token_to_id("<end>") == END
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", padding_side="left")


def read_rows(path: str) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for each correct answer, otherwise 0."""
    return [float(text.strip() == reference) for text, reference in zip(completions, answer, strict=True)]


@torch.inference_mode()
def measure_reward(model: Any, tokenizer: Any, rows: list[dict[str, Any]], max_tokens: int) -> float:
    """Return the share of correct answers. Answers are sampled, as in the training."""
    generator = torch.Generator().manual_seed(0)
    lengths: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        lengths.setdefault(len(row["prompt"]), []).append(row)
    correct = 0
    for group in lengths.values():
        tokens = torch.tensor([list(row["prompt"].encode()) for row in group])
        for _ in range(max_tokens):
            probabilities = model(input_ids=tokens).logits[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        for row, answer in zip(group, tokens[:, len(group[0]["prompt"]) :].tolist(), strict=True):
            ended = END in answer
            text = bytes(t for t in answer[: answer.index(END)] if t < 256).decode(errors="replace") if ended else ""
            correct += text == row["answer"]
    return correct / len(rows)


class Evaluation(TrainerCallback):
    """Measures the reward every `every` steps. Stops at the target, or after the time limit."""

    def __init__(self, settings: dict[str, Any], tokenizer: Any):
        self.settings, self.tokenizer = settings, tokenizer
        self.rows, self.begin = read_rows(settings["held_out"]), 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the initial weights."""
        self.begin = time.time()
        self._record(state, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate if it is due."""
        if state.global_step % self.settings["every"] == 0:
            reward = self._record(state, kwargs["model"])
            control.should_training_stop |= reward >= self.settings["target"]
        control.should_training_stop |= time.time() - START > self.settings["seconds"]

    def _record(self, state: Any, model: Any) -> float:
        reward = measure_reward(model, self.tokenizer, self.rows, self.settings["max_tokens"])
        now = time.time()
        line = {"step": state.global_step, "seconds": now - START, "training_seconds": now - self.begin, "reward": reward}
        with open(self.settings["out"], "a") as file:
            file.write(json.dumps(line) + "\n")
        return reward


def main() -> None:
    """Train."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    tokenizer = byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = END
    rollouts = settings["batch_size"] * settings["group_size"]
    args = GRPOConfig(
        output_dir=settings["folder"], report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=False, seed=settings["seed"], dataloader_num_workers=0,
        per_device_train_batch_size=rollouts, num_generations=settings["group_size"], max_steps=settings["steps"],
        max_completion_length=settings["max_tokens"], temperature=1.0, top_k=0, top_p=1.0, beta=0.0, epsilon=0.2,
        loss_type="grpo", scale_rewards="group", learning_rate=settings["learning_rate"], weight_decay=0.1,
        adam_beta2=0.95, max_grad_norm=1.0, entropy_coef=settings["entropy"], **settings["schedule"],
        use_transformers_continuous_batching=settings["continuous"],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=exact, args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_list(read_rows(settings["train"])), callbacks=[Evaluation(settings, tokenizer)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
