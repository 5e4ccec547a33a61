"""GuideLLM, an independent load generator, against our server."""

import json
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.client_environments import python_environment
from support.fake_engine import FakeEngine
from support.server_thread import serving

PROMPT, OUTPUT, REQUESTS = 40, 12, 6
REQUIREMENTS = Path(__file__).parent / "clients/guidellm.txt"


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer of bytes, as the server's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_guidellm_measures_every_request(path, tokenizer, tmp_path, pytestconfig):
    python = python_environment(Path(pytestconfig.cache.mkdir("clients")), REQUIREMENTS)
    report = tmp_path / "report.json"
    with serving(FakeEngine(script=list(b"A scripted answer."), delay=0.001, max_context=1024)) as server:
        command = [
            python.with_name("guidellm"), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={server.url},model=tiny,request_format={path}",
            "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stderr[-3000:]
        prompts = [request.prompt for request in server.engine.seen]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (REQUESTS, [], [])
    assert {request["output"] for request in requests["successful"]} == {"A scripted answer."[:OUTPUT]}
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {OUTPUT}
    assert all(len(prompt) >= PROMPT for prompt in prompts)
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["min"] > 0
