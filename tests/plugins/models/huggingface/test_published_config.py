"""The published experiments have as many parameters as the published weights."""

import pytest

from axlearn_core.compose.functional import Functional
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.registry import registry
from axlearn_plugins_models.huggingface.published_config import published_model

# Totals of the safetensors files on huggingface.co, the page of each model. DeepSeek-V3 is without `model.layers.61`, its layer
# for multi-token prediction, and without the 58 x 256 biases of its routers, which are variables here; Gemma 3 is without
# the vision tower and its projection.
TOTALS = {
    "bamba-9b": 9_780_235_392,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-4b": 3_880_263_168,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2-1.5b": 1_557_611_200,
    "gpt2-124m": 124_439_808,
    "granite4-h-micro": 3_191_396_096,
    "granite4-h-tiny": 6_939_037_248,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "llama2-70b": 68_976_648_192,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-9b": 8_953_803_264,
}


def test_every_published_experiment_is_here():
    small = {"gpt-oss-toy", "quickstart", "qwen3-next-toy", "vit-b16", "vit-tiny"}
    assert {e.name for e in registry().entries("experiments")} - small == TOTALS.keys()


@pytest.mark.fast_cases("gpt2-124m", "llama2-70b", "llama2-7b", "llama3-8b", "mistral-7b", "qwen3-30b-a3b")
@pytest.mark.parametrize("name", TOTALS)
def test_the_parameters_are_those_of_the_published_weights(name):
    functional = Functional.from_config(registry().experiment(name).model)
    assert functional.num_parameters == TOTALS[name]


def test_a_config_json_that_is_not_understood():
    sizes = {"vocab_size": 9, "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 4}
    with pytest.raises(ValueError, match=r"does not read these keys of config\.json: n_heads"):
        published_model("gpt2", sizes | {"n_heads": 3})
    with pytest.raises(ConfigError, match=r"config\.json.*n_positions"):
        published_model("gpt2", {k: v for k, v in sizes.items() if k != "n_positions"})
