"""Vision Transformer image classifiers (`ViTForImageClassification`) in Hugging Face format."""

from typing import Any, ClassVar

from axlearn_plugins_models.huggingface.decoder import ACTIVATIONS
from axlearn_plugins_models.huggingface.family import Family, Json, Key, Settings
from axlearn_plugins_models.huggingface.table import Rule

LAYER, EMBEDDING = "model.encoder.layer", "model.encoder.embedding"
OURS, THEIRS = "encoder.layer", "vit.encoder.layer.{layer}"
SAME = {"encoder.norm": "vit.layernorm", f"{OURS}.attention_norm": f"{THEIRS}.layernorm_before",
        f"{OURS}.feed_forward_norm": f"{THEIRS}.layernorm_after"}  # fmt: skip
MAPS = {"head": "classifier", f"{OURS}.feed_forward.up": f"{THEIRS}.intermediate.dense",
        f"{OURS}.feed_forward.down": f"{THEIRS}.output.dense"}  # fmt: skip
ATTENTION, PATCHES = f"{OURS}.attention", "vit.embeddings.patch_embeddings.projection"


class ViT(Family):
    """ViT: patches, a class token and learned positions, pre-norm layers, and a classifier on the class token."""

    experiment = "vit-b16"
    architectures = ("ViTForImageClassification",)
    text = False
    keys: ClassVar = {
        "hidden_size": "model.hidden_dim", "num_hidden_layers": "model.encoder.num_layers",
        "num_attention_heads": f"{LAYER}.attention.num_heads",
        "intermediate_size": f"{LAYER}.feed_forward.hidden_dim",
        "hidden_act": Key(f"{LAYER}.feed_forward.activation", default="gelu", values=ACTIVATIONS),
        "layer_norm_eps": Key((f"{LAYER}.norm.eps", "model.encoder.norm.eps"), default=1e-12, read=float),
        "image_size": Key(f"{EMBEDDING}.image_size", default=224), "patch_size": Key(f"{EMBEDDING}.patch_size", default=16),
        "num_channels": Key(f"{EMBEDDING}.channels", default=3),
        "qkv_bias": Key(tuple(f"{LAYER}.attention.{n}.bias" for n in ("query", "key", "value")), default=True),
    }  # fmt: skip
    unused_keys = ("encoder_stride", "hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_act", "pooler_output_size",
            "problem_type", "label2id")  # fmt: skip
    ignored = ("vit.pooler.*",)
    copies: ClassVar = {}
    rules = (
        Rule("encoder.embedding.token", "vit.embeddings.cls_token"),
        Rule("encoder.embedding.position", "vit.embeddings.position_embeddings"),
        Rule("encoder.embedding.projection.weight", f"{PATCHES}.weight", "d c p q -> p q c d"),
        Rule("encoder.embedding.projection.bias", f"{PATCHES}.bias"),
        *(Rule(f"{a}.{part}", f"{b}.{part}") for a, b in SAME.items() for part in ("weight", "bias")),
        *(Rule(f"{a}.weight", f"{b}.weight", "f d -> d f") for a, b in MAPS.items()),
        *(Rule(f"{a}.bias", f"{b}.bias") for a, b in MAPS.items()),
        *(rule for n in ("query", "key", "value") for rule in (
            Rule(f"{ATTENTION}.{n}.weight", f"{THEIRS}.attention.attention.{n}.weight", "(n h) d -> d n h"),
            Rule(f"{ATTENTION}.{n}.bias", f"{THEIRS}.attention.attention.{n}.bias", "(n h) -> n h"))),
        Rule(f"{ATTENTION}.output.weight", f"{THEIRS}.attention.output.dense.weight", "d (n h) -> n h d"),
        Rule(f"{ATTENTION}.output.bias", f"{THEIRS}.attention.output.dense.bias"),
    )  # fmt: skip

    def settings(self, hf: Settings) -> Json:
        """Return settings for the number of classes, derived from the label names. transformers omits two placeholder names."""
        return {"model.num_classes": len(hf.get("id2label") or (0, 1))}

    def export_keys(self, config: Any) -> Json:
        """Invert `settings`."""
        names = {str(i): f"LABEL_{i}" for i in range(config.model.num_classes)}
        return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
