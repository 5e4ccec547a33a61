"""`axlearn checkpoint export-hf --dtype`."""

import json

from click.testing import CliRunner

from axlearn_core.cli.main import cli
from support.paths import RUN_OF_LLAMA


def test_the_dtype_of_an_export(tmp_path):
    for options, kind in (([], "F32"), (["--dtype", "bfloat16"], "BF16")):
        out = tmp_path / kind
        result = CliRunner().invoke(cli, ["checkpoint", "export-hf", str(RUN_OF_LLAMA), str(out), *options])
        assert result.exit_code == 0, result.output
        raw = (out / "model.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {kind}
