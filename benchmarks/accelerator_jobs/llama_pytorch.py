"""The same Llama in PyTorch for `torch.compile`, with float32 parameters, bf16 products and fused AdamW."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accelerator_jobs.models import NORM_EPS, Shape


class Norm(nn.Module):
    """RMS normalization."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Any) -> Any:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPS)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate [B, N, S, H] by the angles [S, H]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """A pre-norm block of attention and a gated feed-forward layer."""

    def __init__(self, shape: Shape, *, grouped: bool):
        super().__init__()
        size = shape.width // shape.heads
        self.heads, self.kv_heads, self.grouped = shape.heads, shape.kv_heads, grouped
        self.norms = nn.ModuleList([Norm(shape.width), Norm(shape.width)])
        self.query = nn.Linear(shape.width, shape.heads * size, bias=False)
        self.key_value = nn.Linear(shape.width, 2 * shape.kv_heads * size, bias=False)
        self.out = nn.Linear(shape.heads * size, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        batch, length, _ = x.shape
        h = self.norms[0](x)
        q = self.query(h).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(h).view(batch, length, 2 * self.kv_heads, -1).transpose(1, 2).chunk(2, dim=1)
        a = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, grouped=self.grouped)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def attend(q: Any, k: Any, v: Any, *, grouped: bool) -> Any:
    """Return causal attention.

    Args:
        grouped: Let the kernel handle groups of heads. Otherwise repeat keys and values.
    """
    if k.shape[1] == q.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if grouped:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Llama(nn.Module):
    """A decoder with its embedding, output layer and loss.

    Args:
        shape: Dimensions.
        grouped: Whether the attention kernel supports groups of heads.
        checkpointed: Whether the backward pass recomputes each layer.
    """

    def __init__(self, shape: Shape, *, grouped: bool, checkpointed: bool = False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList([Layer(shape, grouped=grouped) for _ in range(shape.layers)])
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        size = shape.width // shape.heads
        rates = shape.theta ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(shape.length), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(torch.bfloat16))
        self.register_buffer("sin", angles.sin().to(torch.bfloat16))

    @torch.no_grad()
    def reset(self) -> None:
        """Initialize the parameters randomly."""
        for weight in self.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            else:
                weight.fill_(1.0)

    def forward(self, tokens: Any, targets: Any) -> Any:
        """Return the mean loss. The residual stream is bf16, like ours."""
        x = self.embedding(tokens).to(torch.bfloat16)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
