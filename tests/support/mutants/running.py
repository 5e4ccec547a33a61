"""Wrong profilers, watchdogs, process groups and options of commands."""

import os
import threading
import time
from pathlib import Path

import attrs
import click
import jax

from axlearn_core.config import Configurable, node
from axlearn_core.contracts.options import CommandOption
from axlearn_core.errors import PluginError
from axlearn_core.plugins.request import Setting
from axlearn_plugins_plan.bench_command import step as bench_step
from axlearn_testing import CommandOptionSuite, CommandSuite, ProcessGroupSuite, ProfilerSuite, WatchdogSuite
from support.mutants.harness import mutants, suite


class Observer(Configurable):
    """A profiler and a watchdog."""

    running = False

    @node
    class Config(Configurable.Config["Observer"]):
        wrong: str = ""

    def __init__(self, cfg: Config, *, run_dir: Path):
        self.wrong, self.path, self.ended = cfg.wrong, Path(run_dir), threading.Event()
        self.closed = False

    def start(self):
        (self.path / "log").touch()
        self.last, self.thread = time.monotonic(), threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.ended.wait(0.02):
            silent = time.monotonic() - self.last > 0.3
            if (silent and self.wrong != "nothing") or self.wrong == "hasty":
                (self.path / "acted").touch()

    def beat(self, phase, step):
        if phase == "save" and self.wrong == "phases":
            raise ValueError(phase)
        self.last = time.monotonic()

    def before(self, step):
        if self.wrong == "exclusive":  # like a trace, which can exist only once per process
            assert not Observer.running
            Observer.running = True
        if self.wrong == "prints":
            print("step", step)

    def after(self, step, scalars):
        if self.wrong != "exclusive" or step == 2:
            Observer.running = False
        if self.wrong != "nothing":
            (self.path / "profile").write_text(str(step))

    def close(self):
        Observer.running = Observer.running and self.wrong == "exclusive"
        if self.closed and self.wrong == "once":
            raise RuntimeError("closed twice")
        self.closed = True
        if self.wrong == "shared":
            (self.path / "log").unlink()
        if self.wrong != "thread":
            self.ended.set()


def _profiler(wrong=""):
    return suite(ProfilerSuite, Observer.Config(wrong=wrong), setup_method=_end_trace)


def _end_trace(self):
    Observer.running = False


PROFILERS = mutants(
    _profiler(),
    {
        "writes no trace": (_profiler("nothing"), "test_run_writes_files"),
        "prints to standard output": (_profiler("prints"), "test_training_is_unchanged"),
        "does not stop its trace": (_profiler("exclusive"), "test_close_during_step"),
    },
) + mutants(
    _profiler(),
    {"cannot be closed twice": (_profiler("once"), "test_close_without_start")},
    errors=(RuntimeError,),
)


def _acted(run_dir):
    return (run_dir / "acted").exists()


def _watchdog(wrong=""):
    return suite(WatchdogSuite, Observer.Config(wrong=wrong), seconds=0.3, acted=staticmethod(_acted))


WATCHDOGS = mutants(
    _watchdog(),
    {
        "does nothing": (_watchdog("nothing"), "test_watchdog_acts_only_without_heartbeats"),
        "reacts to a run that makes progress": (_watchdog("hasty"), "test_watchdog_acts_only_without_heartbeats"),
        "does not stop its thread": (_watchdog("thread"), "test_watchdog_handles_every_phase"),
        "reacts after it is closed": (_watchdog("thread"), "test_closed_watchdog_does_not_act"),
    },
) + mutants(
    _watchdog(),
    {
        "rejects a phase": (_watchdog("phases"), "test_watchdog_handles_every_phase"),
        "uses the files of another process": (_watchdog("shared"), "test_processes_share_the_run_directory"),
    },
    errors=(ValueError, OSError),
)


class Group(Configurable):
    """A process group that joins by JAX's own environment variables."""

    @node
    class Config(Configurable.Config["Group"]):
        wrong: str = ""

    def __init__(self, cfg: Config):
        self.wrong = cfg.wrong

    def initialize(self):
        if self.wrong == "early":
            jax.devices()
        if "JAX_PROCESS_ID" not in os.environ or self.wrong == "alone":
            return
        if self.wrong == "always" or not jax.distributed.is_initialized():
            rank, count = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
            rank = count - 1 - rank if self.wrong == "ranks" else rank
            jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], count, rank)


def _environment(self, rank, count, address):
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(rank)}


def _group(wrong=""):
    return suite(ProcessGroupSuite, Group.Config(wrong=wrong), environment=_environment)


GROUPS = mutants(
    _group(),
    {
        "queries devices before it joins": (_group("early"), "test_single_process_has_no_group"),
        "never joins": (_group("alone"), "test_two_processes_form_one_job"),
        "joins more than once": (_group("always"), "test_two_processes_form_one_job"),
    },
    slow=True,
)


class Registered:
    """An entry point that no distribution has."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def load(self):
        return self.value


def _seeded(value, request):
    return attrs.evolve(request, settings=(*request.settings, Setting(path="seed", value=int(value))))


def _option(name="--every", change=_seeded, text="Seed of the run.", metavar="N", command="train"):
    option = CommandOption(help=text, metavar=metavar, change=change)
    return suite(
        CommandOptionSuite,
        None,
        command=command,
        name=name,
        value="3",
        arguments=("quickstart",),
        entry=lambda self: Registered(f"{self.command}{self.name}", option),
    )


OPTIONS = mutants(
    _option(),
    {
        "has an underscore in its name": (_option(name="--at_once"), "test_option_name_and_help_are_valid"),
        "has no help": (_option(text=" "), "test_option_name_and_help_are_valid"),
        "takes a value but claims to be a flag": (_option(metavar=None), "test_option_name_and_help_are_valid"),
        "changes nothing": (_option(change=lambda value, request: request), "test_option_changes_request"),
        "returns no request": (_option(change=lambda value, request: None), "test_option_changes_request"),
        "belongs to a command without a request": (_option(command="serve"), "test_command_accepts_option"),
        "is not listed": (_option(name="--not-registered"), "test_help_lists_option_without_importing_jax"),
    },
    errors=(PluginError,),
)


@click.command()
def count():
    """Counts nothing."""


def _command(name="bench-step", arguments=("--help",), value=bench_step, line="Measure steps.", exit_code=0):
    return suite(
        CommandSuite,
        None,
        name=name,
        arguments=arguments,
        exit_code=exit_code,
        entry=lambda self: Registered(self.name, value),
        summary=lambda self: line,
    )


COMMANDS = mutants(
    _command(),
    {
        "is not a command": (_command(value=len), "test_command_matches_entry_point_name"),
        "is a subcommand of a command without subcommands": (
            _command(name="bench-step-count", value=count),
            "test_command_matches_entry_point_name",
        ),
        "has no docstring": (_command(line=None), "test_command_has_summary"),
        "fails": (_command(arguments=("--nope",)), "test_command_succeeds"),
    },
    errors=(PluginError,),
)

MUTANTS = [*PROFILERS, *WATCHDOGS, *GROUPS, *OPTIONS, *COMMANDS]
