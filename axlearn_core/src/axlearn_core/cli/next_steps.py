"""Suggest commands to run next. Commands that write a run print these suggestions."""

import shlex
from typing import Any

from axlearn_core.cli.commands import plugin_commands
from axlearn_core.cli.terminal import echo
from axlearn_core.config import check, find, flatten
from axlearn_core.contracts.capabilities import GeneratesTokens
from axlearn_core.contracts.experiment import get_chat_template_config, get_evaluator_configs, get_model_config
from axlearn_core.errors import ConfigError
from axlearn_core.plugins.request import Request
from axlearn_core.run import Run

PROMPT = "Once upon a time"


def print_next_steps(commands: list[str]) -> None:
    """Print commands to standard error, one per line."""
    echo("\n  ".join(["try next:", *commands]), err=True)


def after_training(run_dir: str, request: Request) -> list[str]:
    """Return commands that use a trained run, report on it, and explain a part of its config."""
    config: Any = Run(run_dir).config
    layers = [f"{path.partition('.layer.')[0]}.layer" for path in flatten(config) if ".layer." in path]
    report = [f"axlearn report {shlex.quote(run_dir)}"] if "report" in plugin_commands() else []
    explain = ["axlearn", "config", "explain", *request.words, [*layers, "model"][0]]
    return [*_use_commands(run_dir, config), *report, shlex.join(explain)]


def after_import(run_dir: str) -> list[str]:
    """Return commands that use or continue a run whose weights come from another run or model."""
    config: Any = Run(run_dir).config
    return [*_use_commands(run_dir, config), train_command(run_dir, config)]


def train_command(run_dir: str, config: Any) -> str:
    """Return the command that continues training a run. It includes the settings that the config still lacks."""
    try:
        check(config)
        unset: list[str] = []
    except ConfigError as error:
        unset = [problem.path for problem in error.problems]
    settings = [word for path in unset for word in ("--set", f"{path}=...")]
    if any(path.startswith("input.") for path in unset) and get_evaluator_configs(config):
        settings += ["--set", "evaluators={}"]  # evaluation needs held-out data
    return shlex.join(["axlearn", "train", f"{run_dir}/config.yaml", "--run-dir", run_dir, *settings])


def _use_commands(run_dir: str, config: Any) -> list[str]:
    """Return the command for chatting with a run or for continuing a prompt. Empty if the run's model does not generate text."""
    model, run = get_model_config(config), shlex.quote(run_dir)
    if model is None or not (isinstance(model.owner, type) and issubclass(model.owner, GeneratesTokens)):
        return []
    if get_chat_template_config(config) is not None and "serve" in plugin_commands():
        return [f"axlearn serve {run}"]
    prompts = [prompt for prompt in find(config, "evaluators.*.prompt").values() if isinstance(prompt, str)]
    return [f"axlearn generate {run} --prompt {shlex.quote([*prompts, PROMPT][0])}"]
