"""The `my-captions` experiment."""

import axlearn_core as ax
from axlearn_core.extend import Trainer, patch, replace_config
from axlearn_plugins_my_captions.data import DrawnSquares
from axlearn_plugins_my_captions.model import Captioner
from axlearn_plugins_transformer.causal_lm import CausalLM


def my_captions() -> Trainer.Config:
    """Return a small captioner that learns to say where a bright pixel is.

    Its decoder is that of the quickstart.
    """
    config = patch(
        ax.resolve("quickstart").config,
        {"model.vocab_size": 257, "model.decoder.num_layers": 2, "model.decoder.hidden_dim": 64},
    )
    model = replace_config(config.model, CausalLM, Captioner.Config())
    return patch(
        config,
        {
            "model": model,
            "input": DrawnSquares.Config(),
            "evaluators": {"eval": config.evaluators["eval"]},
            "max_steps": 300,
            "checkpointer.every_steps": 300,
        },
    )
