"""Output tokens per second with and without a draft model that shares the first layers of the served model.

    uv run python benchmarks/draft_model.py [--scales 0 0.1 0.2] [--requests 1] [--tokens 96] [--length 4]

Writes a random float32 Llama with 12 layers and a draft model with its first 2 layers, embedding and output layer. The outputs of
the other 10 layers are multiplied by a scale: with 0, the draft model computes the same tokens, and with larger scales fewer drafts
are right. So the first figure is an upper bound for a draft model of this size.

For each scale, prints the acceptance rate, and the tokens per second with drafts divided by those without them: the median over
rounds that alternate between both. Drafting is never switched off (`adapt_drafting` is false).
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import attrs
import numpy as np
from large_requests import write_model
from safetensors.numpy import load_file, save_file
from serving import SIZES

from axlearn_plugins_serving.draft_model import DraftModel
from axlearn_plugins_serving.local_engine import LocalEngine, serve

LAYERS, SHARED = 12, 2
SCALED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def write_models(folder: Path, scale: float) -> tuple[Path, Path]:
    """Write the served model and the draft model."""
    served, draft = folder / "served", folder / "draft"
    SIZES["draft"] = attrs.evolve(
        SIZES["88m"], layers=LAYERS, width=512, hidden=1408, heads=8, kv_heads=4, dtype="float32"
    )
    write_model(served, "draft")
    shutil.copytree(served, draft)
    for layer in range(SHARED, LAYERS):
        file = served / f"layer-{layer}.safetensors"
        tensors = {k: v * np.float32(scale) if k.endswith(SCALED) else v for k, v in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        (draft / file.name).unlink()
    index = json.loads((draft / "model.safetensors.index.json").read_text())
    names = {f"layer-{layer}.safetensors" for layer in range(SHARED, LAYERS)}
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v not in names}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "num_hidden_layers": SHARED}))
    return served, draft


def measure(engine: LocalEngine, requests: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Return the tokens per second, and the tokens."""
    prompts = [list(range(10 + i, 74 + i)) for i in range(requests)]
    started = time.perf_counter()
    results = engine.generate(prompts, max_tokens=tokens, temperature=0, ignore_end=True)
    return requests * tokens / (time.perf_counter() - started), [list(result.tokens) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=float, nargs="+", default=[0, 0.1, 0.2], help="scales of the other layers")
    parser.add_argument("--requests", type=int, default=1, help="concurrent requests (default: 1)")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per request (default: 96)")
    parser.add_argument("--length", type=int, default=4, help="tokens per draft (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    args = parser.parse_args()
    sizes = {"runner.max_context": 512, "runner.max_rows": args.requests, "runner.chunk": 8, "runner.row_buckets": ()}
    sizes |= {"runner.chunk_buckets": (args.requests,), "runner.max_step_tokens": 64, "adapt_drafting": False}
    print("| scale | acceptance | tokens/s without | tokens/s with | ratio |\n|---|---|---|---|---|")
    for scale in args.scales:
        with tempfile.TemporaryDirectory() as scratch:
            served, draft = write_models(Path(scratch), scale)
            drafter = {"drafter": DraftModel.Config(path=str(draft), length=args.length)}
            with (
                serve(str(served), set=sizes, warm_up=False) as plain,  # the first round compiles
                serve(str(served), set={**sizes, **drafter}, warm_up=False) as drafting,
            ):
                pairs = [
                    [measure(e, args.requests, args.tokens) for e in (plain, drafting)] for _ in range(args.rounds + 1)
                ]
                assert all(a[1] == b[1] for a, b in pairs), "drafts changed the tokens"
                rate = drafting.statistics().acceptance_rate or 0.0
        speeds = [(a[0], b[0]) for a, b in pairs[1:]]
        medians = [statistics.median(speed[i] for speed in speeds) for i in (0, 1)]
        ratio = statistics.median(b / a for a, b in speeds)
        print(f"| {scale:g} | {rate:.2f} | {medians[0]:.1f} | {medians[1]:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
