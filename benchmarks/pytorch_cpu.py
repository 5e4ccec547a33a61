"""Our train step on CPU against PyTorch in eager mode: a Llama of 58M parameters, float32, batch 8 x 512.

    uv run --with torch python benchmarks/pytorch_cpu.py [--pairs 10] [--json]

Same dimensions (`58m` of `baselines/handwritten_llama.py`), AdamW and tokens; PyTorch uses its scaled dot-product
attention and `torch.optim.AdamW`. Ours is resolved for the target `cpu`, whose mesh rule unrolls the layers. Steps
alternate; reported is the ratio of seconds per step (ours / PyTorch), the median over pairs with its 95% bootstrap interval.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
from framework_tax import MODELS, interval
from torch import nn
from torch.nn import functional as F

from axlearn_core import resolve
from axlearn_core.compose import compose

RATE, DECAY, EPS = 3e-4, 0.1, 1e-5


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


def rotate(x, cos, sin):
    """[B, N, S, H] by the angles [S, H]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """A pre-norm block of attention and a gated feed-forward layer."""

    def __init__(self, dims):
        super().__init__()
        self.heads, size = dims.heads, dims.width // dims.heads
        self.kv_heads = dims.kv_heads
        self.norms = nn.ModuleList([Norm(dims.width), Norm(dims.width)])
        self.query = nn.Linear(dims.width, dims.heads * size, bias=False)
        self.key_value = nn.Linear(dims.width, 2 * dims.kv_heads * size, bias=False)
        self.out = nn.Linear(dims.heads * size, dims.width, bias=False)
        self.gate_up = nn.Linear(dims.width, 2 * dims.hidden, bias=False)
        self.down = nn.Linear(dims.hidden, dims.width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        h = self.norms[0](x)
        q = self.query(h).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(h).view(batch, length, 2 * self.kv_heads, -1).transpose(1, 2).chunk(2, dim=1)
        a = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """The decoder with its embedding, head and loss."""

    def __init__(self, dims, length):
        super().__init__()
        self.embedding = nn.Embedding(dims.vocab, dims.width)
        self.layers = nn.ModuleList([Layer(dims) for _ in range(dims.layers)])
        self.norm = Norm(dims.width)
        self.head = nn.Linear(dims.width, dims.vocab, bias=False)
        size = dims.width // dims.heads
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def ours(dims, batch, length):
    """Our program, resolved for the target `cpu`."""
    settings = {
        "max_steps": 1000,
        "model.vocab_size": dims.vocab,
        "model.dtype": "float32",
        "model.decoder.num_layers": dims.layers,
        "model.decoder.hidden_dim": dims.width,
        "model.decoder.layer.attention.num_heads": dims.heads,
        "model.decoder.layer.attention.num_kv_heads": dims.kv_heads,
        "model.decoder.layer.feed_forward.hidden_dim": dims.hidden,
        "learner.optimizer.learning_rate": RATE,
        "learner.optimizer.weight_decay": DECAY,
    }
    resolved = resolve("llama2-7b", with_=["remat:policy=none"], set=settings, target="cpu")
    program = compose(resolved.config, jax.devices()[:1], machine=resolved.machine)
    return program, program.init(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="58m", choices=MODELS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    dims = MODELS[args.model]
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    model = Llama(dims, args.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    program, state = ours(dims, args.batch, args.seq)
    num_parameters, theirs = program.functional.num_parameters, sum(p.numel() for p in model.parameters())
    if num_parameters != theirs:
        raise SystemExit(f"not the same model: {num_parameters} parameters, PyTorch {theirs}")
    rng = np.random.default_rng(0)
    times, losses = ([], []), ([], [])
    for pair in range(args.pairs + 2):
        tokens = rng.integers(0, dims.vocab, (args.batch, args.seq), dtype=np.int32)
        targets = np.roll(tokens, -1, 1)
        batch = program.put({"tokens": tokens, "targets": targets})
        theirs = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()
        for side in (0, 1) if pair % 2 else (1, 0):
            start = time.perf_counter()
            if side == 0:
                state, scalars = program.train_step(state, batch)
                jax.block_until_ready((state, scalars))
                loss = float(scalars["loss"])
            else:
                optimizer.zero_grad()
                value = model(*theirs)
                value.backward()
                optimizer.step()
                loss = value.item()
            if pair >= 2:  # the first ones compile and allocate
                times[side].append(time.perf_counter() - start)
                losses[side].append(loss)
    median, low, high = interval([x / y for x, y in zip(*times, strict=True)])
    result = {
        "ratio": median,
        "ratio_95": [low, high],
        "step_seconds": statistics.median(times[0]),
        "pytorch_seconds": statistics.median(times[1]),
        "losses": [losses[0][-1], losses[1][-1]],
        "kernels": sorted({c.name for c in program.choices()}),
        "jax": jax.__version__,
        "torch": torch.__version__,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"ours / PyTorch {median:.4f}  95% [{low:.4f}, {high:.4f}] over {args.pairs} pairs")
        print(f"ours {result['step_seconds']:.3f} s, PyTorch {result['pytorch_seconds']:.3f} s; {result['kernels']}")


if __name__ == "__main__":
    main()
