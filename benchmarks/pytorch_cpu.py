"""Compare our train step on CPU with PyTorch, eager and compiled: a Llama of 58M parameters, float32, batch 8 x 512.

    uv run --with torch python benchmarks/pytorch_cpu.py [--rounds 10] [--compile] [--json]

Both have the same dimensions (`58m` of `baselines/handwritten_llama.py`), AdamW and tokens. PyTorch uses its scaled
dot-product attention and `torch.optim.AdamW`. Ours is resolved for the target `cpu`, whose mesh rule unrolls the
layers. Each runs in a separate process, and they alternate step by step. Ours starts like `axlearn train`, with
`GLIBC_TUNABLES` for huge pages. PyTorch starts with its defaults, and once more with the same setting. `--compile` adds
`torch.compile`, also with that setting. Reports the ratios of seconds per step (ours / theirs): the medians over rounds
with their 95% bootstrap intervals. All three or four processes keep their model in memory.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import torch
from framework_tax import MODELS, interval
from torch import nn
from torch.nn import functional as F

from axlearn_core.compat import glibc_tunables

RATE, DECAY, EPS = 3e-4, 0.1, 1e-5
WARM_UP = 2  # warm-up steps that compile and allocate


class Norm(nn.Module):
    """RMS normalization."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


def rotate(x, cos, sin):
    """Rotate [B, N, S, H] by the angles [S, H]."""
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
    """A decoder with its embedding, head and loss."""

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


def ours(dims):
    """Return the step of our program, resolved for the target `cpu`."""
    import jax

    from axlearn_core import resolve
    from axlearn_core.compose import compose

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
    state = program.init(0)

    def step(tokens, targets):
        nonlocal state
        batch = program.put({"tokens": tokens, "targets": targets})
        start = time.perf_counter()
        state, scalars = program.train_step(state, batch)
        jax.block_until_ready((state, scalars))
        return time.perf_counter() - start, float(scalars["loss"])

    return step, program.functional.num_parameters


def pytorch(dims, length, *, compiled=False):
    """Return the step of PyTorch."""
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    model = Llama(dims, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    function = torch.compile(model) if compiled else model

    def step(tokens, targets):
        tokens, targets = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = function(tokens, targets)
        loss.backward()
        optimizer.step()
        return time.perf_counter() - start, loss.item()

    return step, sum(p.numel() for p in model.parameters())


def serve(side, dims, batch, length):
    """Run one side in this process: one step for each input line."""
    step, parameters = ours(dims) if side == "ours" else pytorch(dims, length, compiled=side == "compiled")
    print(json.dumps(parameters), flush=True)
    rng = np.random.default_rng(0)
    for _ in sys.stdin:
        tokens = rng.integers(0, dims.vocab, (batch, length), dtype=np.int32)
        print(json.dumps(step(tokens, np.roll(tokens, -1, 1))), flush=True)


@contextlib.contextmanager
def started(side, args, *, huge_pages) -> Iterator[Callable[[], tuple[float, float]]]:
    """Start a side in a separate process. Return a function that runs a step and returns (seconds, loss)."""
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if huge_pages:
        environment["GLIBC_TUNABLES"] = glibc_tunables(environment)
    words = [sys.executable, __file__, "--side", side, "--model", args.model]
    words += ["--batch", str(args.batch), "--seq", str(args.seq)]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def answer():
            if not (line := process.stdout.readline()):
                raise SystemExit(f"{side} exited with code {process.wait()}")
            return json.loads(line)

        def step():
            process.stdin.write("step\n")
            process.stdin.flush()
            return answer()

        step.parameters = answer()
        yield step
        process.stdin.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="58m", choices=MODELS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="also run torch.compile, which needs a C++ compiler")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", choices=["ours", "eager", "compiled"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return serve(args.side, MODELS[args.model], args.batch, args.seq)
    sides = {"ours": ("ours", True), "eager": ("eager", False), "eager, huge pages": ("eager", True)}
    if args.compile:
        sides["compiled, huge pages"] = ("compiled", True)
    with contextlib.ExitStack() as stack:
        steps = {k: stack.enter_context(started(side, args, huge_pages=huge)) for k, (side, huge) in sides.items()}
        counts = {name: step.parameters for name, step in steps.items()}
        if len(set(counts.values())) > 1:
            raise SystemExit(f"not the same model: {counts} parameters")
        times, losses = {name: [] for name in steps}, {}
        for turn in range(args.rounds + WARM_UP):
            for name in list(steps) if turn % 2 else reversed(list(steps)):
                seconds, losses[name] = steps[name]()
                if turn >= WARM_UP:
                    times[name].append(seconds)
    result = {
        "ratios": {
            name: interval([x / y for x, y in zip(times["ours"], times[name], strict=True)])
            for name in times
            if name != "ours"
        },
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "losses": losses,
        "versions": {name: version(name) for name in ("jax", "jaxlib", "torch")},
    }
    if args.json:
        print(json.dumps(result))
        return None
    for name, (median, low, high) in result["ratios"].items():
        print(f"ours / PyTorch {name}: {median:.3f}  95% [{low:.3f}, {high:.3f}] over {args.rounds} rounds")
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in result["seconds"].items()))
    return None


if __name__ == "__main__":
    main()
