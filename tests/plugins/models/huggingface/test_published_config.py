"""The published experiments have as many parameters as the published weights."""

import pytest

from axlearn_core.compose.functional import Functional
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.registry import registry
from axlearn_plugins_models.huggingface.published_config import published_model

# Totals of the safetensors files on huggingface.co, the page of each model. DeepSeek-V3 is without `model.layers.61`, its layer
# for multi-token prediction, and without the 58 x 256 biases of its routers, which are variables here; other models are without
# these parts, too. Gemma 3 and Llama 4 are without the vision tower and its projection.
TOTALS = {
    "apertus-8b": 8_053_338_176,
    "bamba-9b": 9_780_235_392,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "dots1": 142_774_373_888,
    "ernie4.5-21b-a3b": 21_825_436_160,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-4b": 3_880_263_168,
    "glm-5": 743_911_199_232,
    "glm4.5-air": 106_852_245_504,
    "glm4.6": 352_797_814_784,
    "glm4.7-flash": 29_943_390_976,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2-1.5b": 1_557_611_200,
    "gpt2-124m": 124_439_808,
    "granite3.1-3b-a800m": 3_298_793_472,
    "helium1-2b": 2_172_643_840,
    "hunyuan-a13b": 80_393_183_232,
    "k-exaone": 236_571_150_336,
    "kimi-k2": 1_026_408_209_408,
    "granite4-h-micro": 3_191_396_096,
    "granite4-h-tiny": 6_939_037_248,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "llama2-70b": 68_976_648_192,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama4-maverick": 400_711_848_960,
    "llama4-scout": 107_769_861_120,
    "minimax-m2": 228_689_748_992,
    "minitron-4b": 4_190_509_056,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmoe-1b-7b": 6_919_161_856,
    "pythia-1.4b": 1_414_647_808,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "stablelm-3b": 2_795_443_200,
    "stablelm2-1.6b": 1_644_515_328,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron3-nano-30b-a3b": 31_577_937_344,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-9b": 8_953_803_264,
}

COUNTED = {
    "afm-4.5b": 4_619_189_760,
    "command-r-35b": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "cwm-32b": 32_581_097_472,
    "ernie4.5-0.3b": 360_748_032,
    "exaone4-1.2b": 1_279_391_488,
    "exaone4-32b": 32_003_216_384,
    "gemma3n-e2b": 4_435_182_688,
    "gemma3n-e4b": 6_835_235_568,
    "gemma4-26b-a4b": 25_233_141_760,
    "gemma4-31b": 30_697_345_280,
    "gemma4-e2b": 4_628_569_344,
    "gemma4-e4b": 7_463_013_376,
    "glm4-9b": 9_399_951_360,
    "glm4-9b-0414": 9_400_094_720,
    "gpt-oss-120b": 116_829_156_672,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "hunyuan-7b": 7_504_568_320,
    "ministral-8b": 8_019_808_256,
    "ministral3-14b": 13_506_073_600,
    "ministral3-3b": 3_429_006_336,
    "ministral3-8b": 8_489_553_920,
    "nemotron-h-8b": 8_100_852_736,
    "olmo-hybrid-7b": 7_430_870_688,
    "olmo2-32b": 32_234_279_936,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "seed-oss-36b": 36_151_104_512,
    "smollm3-3b": 3_075_098_624,
    "solar-open-100b": 102_651_793_408,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
}
"""Counts of our configs, which were not compared with files."""


def test_every_published_experiment_is_here():
    small = {"gpt-oss-toy", "quickstart", "qwen3-next-toy", "vit-b16", "vit-tiny"}
    assert {e.name for e in registry().entries("experiments")} - small == TOTALS.keys() | COUNTED.keys()


@pytest.mark.fast_cases("gpt2-124m", "llama2-70b", "llama2-7b", "llama3-8b", "mistral-7b", "qwen3-30b-a3b")
@pytest.mark.parametrize("name", [*TOTALS, *COUNTED])
def test_the_parameters_are_those_of_the_published_weights(name):
    functional = Functional.from_config(registry().experiment(name).model)
    assert functional.num_parameters == (TOTALS | COUNTED)[name]


def test_a_config_json_that_is_not_understood():
    sizes = {"vocab_size": 9, "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 4}
    with pytest.raises(ValueError, match=r"does not read these keys of config\.json: n_heads"):
        published_model("gpt2", sizes | {"n_heads": 3})
    with pytest.raises(ConfigError, match=r"config\.json.*n_positions"):
        published_model("gpt2", {k: v for k, v in sizes.items() if k != "n_positions"})
