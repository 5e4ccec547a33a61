"""Vision Transformers: a small one for images that are drawn on demand, and ViT-B/16 (Dosovitskiy et al., 2020)."""

from axlearn_core.checkpoint import ShardedCheckpointer
from axlearn_core.config import patch
from axlearn_core.learn import AdamW, Cosine, Learner
from axlearn_core.nn.remat import Remat
from axlearn_core.train import LossEvaluator, Trainer
from axlearn_core.train.trackers import JsonlTracker
from axlearn_plugins_models.vit.images import DrawnShapes, ImageArrays
from axlearn_plugins_models.vit.model import ImageClassifier
from axlearn_plugins_tools.reporting.console import ConsoleTracker
from axlearn_plugins_tools.reporting.tensorboard import TensorBoardTracker
from axlearn_plugins_transformer.stack import Stack

TRACKERS = (ConsoleTracker.Config(), JsonlTracker.Config(), TensorBoardTracker.Config())


def vit(
    *, num_classes: int, image_size: int, patch_size: int, num_layers: int, hidden_dim: int, num_heads: int
) -> ImageClassifier.Config:
    """Return a Vision Transformer: pre-norm layers, biases everywhere, feed-forward layers of four times the width."""
    sizes = {
        "encoder.num_layers": num_layers,
        "encoder.layer.attention.num_heads": num_heads,
        "encoder.embedding.image_size": image_size,
        "encoder.embedding.patch_size": patch_size,
    }
    return patch(ImageClassifier.Config(num_classes=num_classes, hidden_dim=hidden_dim), sizes)


def vit_tiny() -> Trainer.Config:
    """Train a small Vision Transformer to classify drawn shapes, in a minute or two on two CPU cores.

    0.214M parameters.
    """
    model = vit(num_classes=4, image_size=32, patch_size=8, num_layers=4, hidden_dim=64, num_heads=4)
    return Trainer.Config(
        model=patch(model, {"encoder.stack": Stack.Config(mode="unrolled")}),
        learner=Learner.Config(optimizer=AdamW(learning_rate=Cosine(peak=2e-3, warmup_steps=50), weight_decay=0.05)),
        input=DrawnShapes.Config(batch_size=64, image_size=32),
        evaluators={"eval": LossEvaluator.Config(every_steps=200)},
        checkpointer=ShardedCheckpointer.Config(every_steps=200, keep_last=2),
        trackers=TRACKERS,
        max_steps=600,
        log_every_steps=20,
    )


def vit_b16() -> Trainer.Config:
    """Train ViT-B/16 from scratch on ImageNet-1k for 300 epochs, as in the paper.

    86.6M parameters; images of 224 x 224, 1000 classes.

    Requires you to set `input.paths`.
    """
    model = vit(num_classes=1000, image_size=224, patch_size=16, num_layers=12, hidden_dim=768, num_heads=12)
    model = patch(model, {"dtype": "bfloat16", "encoder.stack": Stack.Config(mode="scan", remat=Remat.Config())})
    return Trainer.Config(
        model=model,
        learner=Learner.Config(
            optimizer=AdamW(learning_rate=Cosine(peak=3e-3, warmup_steps=10_000), weight_decay=0.3), max_grad_norm=1.0
        ),
        input=ImageArrays.Config(batch_size=4096, image_size=224),
        checkpointer=ShardedCheckpointer.Config(every_steps=1000, keep_last=3),
        trackers=TRACKERS,
        max_steps=94_000,
    )
