"""The data must have the same tokenizer as the run that the parameters come from."""

import pytest

import axlearn_core as ax
from axlearn_core.errors import RequestError
from axlearn_plugins_finetune.lora.start import StartFromRun
from axlearn_plugins_transformer.text import ByteTokenizer, TokenizerJson


class Input:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer.build()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Write the config of a run to its directory."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.yaml").write_text(ax.resolve("quickstart").to_yaml(), "utf-8")
    return str(folder)


def test_another_tokenizer_is_refused_before_anything_is_written(base):
    other = Input(ByteTokenizer.Config())
    with pytest.raises(
        RequestError, match=r"is not the tokenizer of [\s\S]*got: digest utf-8 bytes[\s\S]*expected: dig"
    ):
        StartFromRun.Config(run_dir=base).build(input=other).check_start()
    StartFromRun.Config(run_dir=base, same_tokenizer=False).build(input=other).check_start()
    StartFromRun.Config(run_dir=base).build(input=Input(TokenizerJson.Config(builtin="python-2k"))).check_start()


def test_a_base_that_is_gone_or_changed_does_not_stop_a_run_that_goes_on(base, tmp_path):
    for run_dir in (str(tmp_path / "gone"), base):
        StartFromRun.Config(run_dir=run_dir).build(input=Input(ByteTokenizer.Config()))


def test_the_trainer_offers_its_input(base, tmp_path):
    settings = {
        "input.tokenizer": {"type": "byte-tokenizer"},
        "loop": {"type": "start-from-run", "run_dir": base},
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_dim": 32,
        "evaluators": {},
    }
    with pytest.raises(RequestError, match="is not the tokenizer of"):
        ax.train("quickstart", set=settings, steps=1, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
