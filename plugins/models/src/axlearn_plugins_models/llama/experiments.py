"""The Llama family: Llama 2 (arXiv 2307.09288), Llama 3 (arXiv 2407.21783), and a small model that trains on any machine.

The large experiments require you to set `input.source.paths` and `input.tokenizer.path`.
"""

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.config import patch
from axlearn_core.contracts.mesh import Mesh, TargetRule
from axlearn_core.learn import AdamW, Cosine, Learner, WarmupStableDecay
from axlearn_core.nn.remat import Remat
from axlearn_core.train import LossEvaluator, Trainer
from axlearn_core.train.trackers import JsonlTracker
from axlearn_plugins_rope.rotary import RotaryEmbedding
from axlearn_plugins_tools.optimizers.muon import Muon
from axlearn_plugins_tools.reporting.console import ConsoleTracker
from axlearn_plugins_tools.reporting.tensorboard import TensorBoardTracker
from axlearn_plugins_transformer.attention import Attention
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.embedding import Head
from axlearn_plugins_transformer.feed_forward import GatedFeedForward
from axlearn_plugins_transformer.norm import RMSNorm
from axlearn_plugins_transformer.stack import Stack
from axlearn_plugins_transformer.text import Files, LanguageModelInput, StandardLibrary, TokenizerJson
from axlearn_plugins_transformer.text.sampling import SampleEvaluator
from axlearn_plugins_transformer.transformer import Decoder, TransformerLayer

PRODUCTS = "remat:save=[query,key,value,{attention},attention_out,mlp_gate,mlp_up]"
"""Saves the result of every matmul in a layer except the last one, so that only cheap ops are recomputed. For attention, it
saves the context, or the residuals that splash attention tags."""
PRODUCTS_TPU = PRODUCTS.format(attention="attention_residuals")
SEARCHED_7B = {
    "h100-8x32": TargetRule(shape={"data": 8, "fsdp": 32}, features=(PRODUCTS.format(attention="context"),)),
    "tpu-v5p-512": TargetRule(shape={"data": 16, "fsdp": 16}, features=(PRODUCTS_TPU,)),
}
"""Layouts that `axlearn plan search` found for the machines of the published training runs; benchmarks/results/layouts.json
lists the compiled candidates. The layouts are within 1% of the fastest and need at least a seventh less memory. Other
machines use the rules of their plugin."""
SEARCHED_70B = {
    "h100-8x64": TargetRule(
        shape={"data": 2, "fsdp": 128, "tensor": 2},
        rules={"activation_embed": ("tensor",)},
        features=(
            "remat:save=[query,key,value,attention_out,mlp_gate,mlp_up]",
            "gradient-accumulation:steps=2",
        ),
    ),
    "tpu-v5p-1024": TargetRule(
        shape={"data": 8, "fsdp": 16, "tensor": 4},
        rules={"activation_embed": ("tensor",)},
        features=(PRODUCTS_TPU, "gradient-accumulation:steps=2"),
    ),
}
"""As above. A detected machine uses its plugin's rule instead, because the machine must not change the number of microbatches."""
TRACKERS = (ConsoleTracker.Config(), JsonlTracker.Config(), TensorBoardTracker.Config())


def llama(
    *,
    vocab_size: int,
    num_layers: int,
    hidden_dim: int,
    num_heads: int,
    num_kv_heads: int | None,
    feed_forward_dim: int,
    theta: float = 10_000.0,
    eps: float = 1e-5,
    dtype: str = "bfloat16",
    tied: bool = False,
    stack: Stack.Config | None = None,
) -> CausalLM.Config:
    """Return a Llama decoder: pre-norm RMSNorm, rotary positions, SwiGLU, an untied output layer, no biases."""
    return CausalLM.Config(
        vocab_size=vocab_size,
        dtype=dtype,
        decoder=Decoder.Config(
            num_layers=num_layers,
            hidden_dim=hidden_dim,
            layer=TransformerLayer.Config(
                attention=Attention.Config(
                    num_heads=num_heads, num_kv_heads=num_kv_heads, position=RotaryEmbedding.Config(theta=theta)
                ),
                feed_forward=GatedFeedForward.Config(hidden_dim=feed_forward_dim),
                norm=RMSNorm.Config(eps=eps),
            ),
            norm=RMSNorm.Config(eps=eps),
            head=None if tied else Head.Config(),
            stack=stack or Stack.Config(mode="scan", remat=Remat.Config()),
        ),
    )


def pretraining(model: CausalLM.Config, *, sequence_length: int, peak: float, max_steps: int) -> Trainer.Config:
    """Return a trainer with the papers' recipe: AdamW, cosine decay to a tenth, clipping at 1, weight decay 0.1."""
    return Trainer.Config(
        model=model,
        learner=Learner.Config(
            optimizer=AdamW(learning_rate=Cosine(peak=peak, warmup_steps=2000, end_ratio=0.1), weight_decay=0.1)
        ),
        input=LanguageModelInput.Config(
            batch_size=1024,
            sequence_length=sequence_length,
            source=Files.Config(),
            tokenizer=TokenizerJson.Config(),
        ),
        checkpointer=ShardedCheckpointer.Config(every_steps=1000, keep_last=3),
        trackers=TRACKERS,
        max_steps=max_steps,
    )


def llama2_7b() -> Trainer.Config:
    """Pretrain Llama 2 7B on 2 trillion tokens.

    6.74B parameters.
    """
    model = llama(
        vocab_size=32_000, num_layers=32, hidden_dim=4096, num_heads=32, num_kv_heads=None, feed_forward_dim=11_008
    )
    config = pretraining(model, sequence_length=4096, peak=3e-4, max_steps=500_000)
    return patch(config, {"mesh": Mesh(targets=SEARCHED_7B)})


def llama2_70b() -> Trainer.Config:
    """Pretrain Llama 2 70B on 2 trillion tokens.

    69B parameters.
    """
    model = llama(
        vocab_size=32_000, num_layers=80, hidden_dim=8192, num_heads=64, num_kv_heads=8, feed_forward_dim=28_672
    )
    config = pretraining(model, sequence_length=4096, peak=1.5e-4, max_steps=500_000)
    return patch(config, {"mesh": Mesh(targets=SEARCHED_70B)})


def llama3_8b() -> Trainer.Config:
    """Pretrain Llama 3 8B.

    8.03B parameters.
    """
    model = llama(
        vocab_size=128_256,
        num_layers=32,
        hidden_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        feed_forward_dim=14_336,
        theta=500_000.0,
    )
    return pretraining(model, sequence_length=8192, peak=3e-4, max_steps=1_800_000)


def quickstart() -> Trainer.Config:
    """Train a small Llama on the source text of the Python standard library, in minutes on two CPU cores.

    1.38M parameters. Nothing is downloaded: the text and the held-out files come from the running interpreter.
    """
    model = llama(
        vocab_size=2048,
        num_layers=4,
        hidden_dim=128,
        num_heads=4,
        num_kv_heads=None,
        feed_forward_dim=384,
        dtype="float32",
        stack=Stack.Config(mode="unrolled"),
    )
    # Layers that start close to the identity learn faster in the first few hundred steps, and this run is no longer than that.
    small = {f"decoder.layer.{part}.init.scale": 0.01 for part in ("attention.output", "feed_forward.down")}
    return Trainer.Config(
        model=patch(model, small),
        # A short run needs momentum that forgets old gradients quickly. Embeddings need a higher rate, since few tokens update
        # each of them.
        learner=Learner.Config(
            optimizer=Muon(
                learning_rate=WarmupStableDecay(peak=0.012, warmup_steps=20, decay_steps=0.6),
                momentum=0.8,
                embedding_rate=5.0,
            )
        ),
        input=LanguageModelInput.Config(
            batch_size=8,
            sequence_length=256,
            source=StandardLibrary.Config(),
            tokenizer=TokenizerJson.Config(builtin="python-2k"),
        ),
        evaluators={
            "eval": LossEvaluator.Config(every_steps=300),
            "sample": SampleEvaluator.Config(prompt="def "),
        },
        checkpointer=ShardedCheckpointer.Config(every_steps=150, keep_last=2),
        trackers=TRACKERS,
        max_steps=600,
        log_every_steps=10,
    )
