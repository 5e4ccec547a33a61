"""Speed and memory of reading a Hugging Face checkpoint into parameters.

    uv run python benchmarks/hf_import.py [--gigabytes 1] [--pairs 5] [--param-dtype bfloat16] [--json]

Writes a random bfloat16 Llama to disk in shards. Then it alternates between a plain read (every byte, into fresh
memory) and a read into the parameters of the model. Reports the median and range of plain seconds / our seconds, and
the peak of host memory above the parameters, compared with the largest tensor.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import ml_dtypes
import numpy as np
import tokenizers

from axlearn_core.compose import compose
from axlearn_plugins_models.huggingface import files
from axlearn_plugins_models.huggingface.source import open_model

WIDTH, HIDDEN, VOCAB, HEADS = 2048, 5632, 32_000, 16


def write_model(directory: Path, gigabytes: float) -> None:
    """Write a Llama of about this size."""
    sizes = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH, WIDTH), "self_attn.v_proj": (WIDTH, WIDTH),
             "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
             "mlp.down_proj": (WIDTH, HIDDEN), "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}  # fmt: skip
    outer = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }
    each = 2 * sum(int(np.prod(s)) for s in sizes.values())
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCAB * WIDTH) / each))
    tensors = [(n, "BF16", s) for n, s in outer.items()]
    tensors += [(f"model.layers.{i}.{n}.weight", "BF16", s) for i in range(layers) for n, s in sizes.items()]
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(VOCAB * WIDTH, np.float32).astype(ml_dtypes.bfloat16)
    values = (noise[: int(np.prod(s))].reshape(s) for _, _, s in tensors)
    files.write(directory, files.shards(tensors, limit=400_000_000), values)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": WIDTH,
              "intermediate_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS, "eos_token_id": 0,
              "num_key_value_heads": HEADS, "dtype": "bfloat16", "tie_word_embeddings": False}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1}, "a")).save(str(directory / "tokenizer.json"))


def plain(directory: Path) -> float:
    """Return the seconds to read every byte of the files into fresh memory."""
    start = time.perf_counter()
    arrays = [np.fromfile(file, np.uint8) for file in sorted(directory.glob("*.safetensors"))]
    seconds = time.perf_counter() - start
    del arrays
    return seconds


def memory(field: str) -> int:
    """Return the bytes of this process from /proc: VmRSS is the current value, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("needs Linux: /proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--param-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, options.gigabytes)
        source = open_model(directory, set=[f"model.param_dtype={options.param_dtype}"])
        like = compose(source.config, jax.devices()[:1]).state.params
        size = sum(t.bytes for t in source.stored.values())
        largest = max(t.bytes for t in source.stored.values())
        expected_bytes = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in like.values())
        plain(directory)  # warm up: fill the page cache, and compile
        jax.block_until_ready(source.read(like))
        gc.collect()
        ratios, seconds, over, processor = [], [], [], []
        for _ in range(options.pairs):
            used = [time.process_time()]
            before = plain(directory)
            used.append(time.process_time())
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            resting, start = memory("VmRSS"), time.perf_counter()
            params = jax.block_until_ready(source.read(like))
            seconds.append(time.perf_counter() - start)
            used.append(time.process_time())
            processor.append((used[2] - used[1]) / (used[1] - used[0]))
            over.append(memory("VmHWM") - resting - expected_bytes)
            ratios.append(before / seconds[-1])
            del params
            gc.collect()  # otherwise, these parameters count as resting memory of the next pair
    results = {
        "gigabytes": size / 1e9,
        "param_dtype": options.param_dtype,
        "speed_against_plain_read": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "processor_time_over_plain_read": statistics.median(processor),
        "gigabytes_per_second": size / 1e9 / statistics.median(seconds),
        "memory_over_parameters": max(over),
        "largest_tensor": largest,
        "memory_against_largest_tensor": max(over) / largest,
    }
    print(json.dumps(results) if options.json else "\n".join(f"{k}: {v}" for k, v in results.items()))


if __name__ == "__main__":
    main()
