"""The suites of the slots find what is wrong: each of these parts breaks one promise, and the test for it fails."""

import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose import Functional
from axlearn_core.config import Configurable, node
from axlearn_core.errors import RequestError
from axlearn_core.testing import (
    EvaluatorSuite,
    ProcessGroupSuite,
    ProfilerSuite,
    TokenizerSuite,
    WatchdogSuite,
    WeightsSuite,
)
from axlearn_core.testing.train import Line, TrainerSuite
from axlearn_core.train.evaluators import LossEvaluator, Periodic
from axlearn_plugins_attention.latent_cache import ContiguousLatentCache
from axlearn_plugins_attention.testing import LatentCacheSuite
from axlearn_plugins_text.tokenizers import ByteTokenizer
from axlearn_plugins_transformer.kv_cache import ContiguousCache
from axlearn_plugins_transformer.testing import KVCacheSuite

FAILS = (AssertionError, pytest.fail.Exception)


def suite(base, config, **more):
    return type("Suite", (base,), {"config": config, **more})()


class Wrong(Configurable):
    """The base of parts that are wrong in the way that `wrong` names."""

    @node
    class Config(Configurable.Config["Wrong"]):
        wrong: str = ""


class Tokenizer(Wrong):
    def __init__(self, cfg):
        self.wrong, self.bytes = cfg.wrong, ByteTokenizer.Config().build()
        self.vocab_size = 200 if cfg.wrong == "range" else 257
        self.eos_id = 97 if cfg.wrong == "eos" else 256
        self.digest = str(id(self)) if cfg.wrong == "digest" else ""

    def encode(self, text):
        return [*([256] if self.wrong == "front" else []), *self.bytes.encode(text)]

    def decode(self, ids):
        if self.wrong == "strict":
            return bytes(i for i in ids if i < 256).decode()
        return self.bytes.decode(ids).strip() if self.wrong == "strip" else self.bytes.decode(ids)

    def token_bytes(self):
        return self.bytes.token_bytes() * (2 if self.wrong == "bytes" else 1)


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ("range", "test_ids_are_below_vocab_size"),
        ("eos", "test_no_text_ends_a_document"),
        ("front", "test_no_text_is_no_token"),
        ("strip", "test_decoding_gives_the_text_back"),
        ("strict", "test_any_ids_can_be_decoded"),
        ("bytes", "test_bytes_of_tokens_are_those_of_the_text"),
        ("digest", "test_two_builds_agree"),
    ],
)
def test_tokenizers(wrong, test):
    getattr(suite(TokenizerSuite, Tokenizer.Config()), test)()
    with pytest.raises((*FAILS, UnicodeDecodeError)):
        getattr(suite(TokenizerSuite, Tokenizer.Config(wrong=wrong)), test)()


class Evaluator(Periodic):
    @node
    class Config(Periodic.Config["Evaluator"]):
        wrong: str = ""

    def __init__(self, cfg: Config, *, name: str):
        super().__init__(cfg, name=name)
        self.count = 0

    def due(self, step, last):
        self.count += 1
        if self.cfg.wrong == "never":
            return False
        return super().due(step, last) if self.cfg.wrong != "number" else step

    def run(self, session):
        wrong = self.cfg.wrong
        if wrong == "changes":
            params = {path: x * 2 for path, x in session.state.params.items()}
            session.state = type(session.state)(**{**vars(session.state), "params": params})
        value = {"nan": float("nan"), "random": time.perf_counter()}.get(wrong, 1.0)
        return {"loss" if wrong == "name" else f"{self.name}_x": value}


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ("never", "test_it_measures_under_its_own_name"),
        ("nan", "test_it_measures_under_its_own_name"),
        ("name", "test_it_measures_under_its_own_name"),
        ("random", "test_two_of_them_measure_apart"),
        ("changes", "test_it_changes_no_step"),
    ],
)
def test_evaluators(wrong, test, tmp_path):
    with pytest.raises(FAILS):
        getattr(suite(EvaluatorSuite, Evaluator.Config(wrong=wrong, every_steps=2)), test)(tmp_path)


def test_an_evaluator_says_by_a_bool_whether_it_is_due():
    suite(EvaluatorSuite, LossEvaluator.Config()).test_due_is_a_matter_of_the_step()
    with pytest.raises(FAILS):
        suite(EvaluatorSuite, Evaluator.Config(wrong="number")).test_due_is_a_matter_of_the_step()


class Observer(Wrong):
    """A profiler and a watchdog."""

    running = False

    def __init__(self, cfg, *, run_dir):
        self.wrong, self.path, self.ended = cfg.wrong, Path(run_dir), threading.Event()
        self.closed = False

    def start(self):
        (self.path / "log").touch()
        self.last, self.thread = time.monotonic(), threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.ended.wait(0.02):
            if time.monotonic() - self.last > 0.3 or self.wrong == "hasty":
                (self.path / "acted").touch()

    def beat(self, phase, step):
        if phase == "save" and self.wrong == "phases":
            raise ValueError(phase)
        self.last = time.monotonic() + (100 if self.wrong == "sleepy" else 0)

    def before(self, step):
        if self.wrong == "exclusive":  # like a trace, of which a process has one
            assert not Observer.running
            Observer.running = True
        if self.wrong == "prints":
            print("step", step)

    def after(self, step, scalars):
        if self.wrong != "exclusive" or step == 2:
            Observer.running = False

    def close(self):
        if self.closed and self.wrong == "once":
            raise RuntimeError("closed twice")
        self.closed = True
        if self.wrong == "shared":
            (self.path / "log").unlink()
        if self.wrong != "thread":
            self.ended.set()


@pytest.mark.parametrize(
    ("wrong", "test"),
    [("exclusive", "test_it_may_be_closed_within_a_step"), ("once", "test_it_watches_every_step")],
)
def test_profilers(wrong, test, tmp_path, monkeypatch):
    monkeypatch.setattr(Observer, "running", False)
    getattr(suite(ProfilerSuite, Observer.Config()), test)(tmp_path)
    with pytest.raises((*FAILS, RuntimeError)):
        getattr(suite(ProfilerSuite, Observer.Config(wrong=wrong)), test)(tmp_path)


def test_a_profiler_prints_nothing(tmp_path, capfd):
    with pytest.raises(AssertionError, match="standard output is for results"):
        suite(ProfilerSuite, Observer.Config(wrong="prints")).test_it_changes_no_step(tmp_path, capfd)


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ("phases", "test_it_takes_every_phase"),
        ("thread", "test_it_takes_every_phase"),
        ("shared", "test_processes_share_the_run_directory"),
        ("hasty", "test_it_acts_on_silence_alone"),
        ("sleepy", "test_it_acts_on_silence_alone"),
        ("thread", "test_nothing_happens_once_it_is_closed"),
    ],
)
def test_watchdogs(wrong, test, tmp_path):
    more = {"seconds": 0.3, "acted": staticmethod(lambda run_dir: (run_dir / "acted").exists())}
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    getattr(suite(WatchdogSuite, Observer.Config(), **more), test)(tmp_path / "right")
    with pytest.raises((*FAILS, ValueError, OSError)):
        getattr(suite(WatchdogSuite, Observer.Config(wrong=wrong), **more), test)(tmp_path / "wrong")


@pytest.mark.slow
def test_a_process_group_that_looks_for_devices(tmp_path, monkeypatch):
    source = """
from axlearn_core.config import Configurable

class Early(Configurable):
    def __init__(self, cfg):
        pass

    def initialize(self):
        import jax
        jax.devices()
"""
    (tmp_path / "early.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import early

    with pytest.raises(AssertionError, match="jax_num_cpu_devices"):
        suite(ProcessGroupSuite, early.Early.Config()).test_one_process_stays_alone()


class Tensors:
    """Weights of a line that are wrong in the way that `wrong` names."""

    def __init__(self, wrong):
        self.wrong, self.experiment, self.config = wrong, TrainerSuite().trainer(), Line.Config()
        self.step, self.tokenizer = (-1 if wrong == "step" else 3), None

    def specs(self):
        specs = Functional.of(self.config).abstract
        return {"other": specs["weight"]} if self.wrong == "path" else dict(specs)

    def read(self, pattern="**", shardings=None):
        if self.wrong != "silent" and (pattern.startswith("no.") or (shardings and "no.such.tensor" in shardings)):
            raise RequestError("unknown")
        if shardings == {} and self.wrong != "default":
            raise RequestError("without a sharding")
        value = np.arange(8, dtype=np.float32).reshape(4, 2)
        if self.wrong == "dtype":
            value = value.astype(np.float16)
        if self.wrong == "devices" and shardings:
            value = value + 1
        place = (shardings or {}).get("weight")
        return {"weight": jax.device_put(value, place or jax.local_devices()[0])}


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ("step", "test_they_say_what_they_are"),
        ("path", "test_they_are_those_of_their_model"),
        ("dtype", "test_what_is_read_is_what_was_announced"),
        ("devices", "test_the_devices_change_no_value"),
        ("silent", "test_requests_that_do_not_fit_are_refused"),
        ("default", "test_requests_that_do_not_fit_are_refused"),
    ],
)
def test_weights(wrong, test, tmp_path):
    made = lambda wrong: type("S", (WeightsSuite,), {"weights": lambda self, path: Tensors(wrong)})()  # noqa: E731
    getattr(made(""), test)(tmp_path)
    with pytest.raises(FAILS):
        getattr(made(wrong), test)(tmp_path)


class Cache(ContiguousCache):
    """Takes the first row's slots for all, rounds, or takes any kernel."""

    @node
    class Config(ContiguousCache.Config):
        wrong: str = ""

    def attend(self, cache, op, slots, kernel):
        wrong = self.cfg.wrong
        if wrong == "slots":
            slots = jnp.broadcast_to(slots[:1], slots.shape)
        result, new = super().attend(cache, op, slots, None if wrong == "kernel" else kernel)
        if wrong == "rounds":
            result = result.astype("bfloat16").astype("float32")
        return result, new


class Latents(ContiguousLatentCache):
    """As `Cache`."""

    @node
    class Config(ContiguousLatentCache.Config):
        wrong: str = ""

    def attend(self, cache, latents, slots, attention, kernel):
        wrong = self.cfg.wrong
        if wrong == "slots":
            slots = jnp.broadcast_to(slots[:1], slots.shape)
        if wrong == "rounds":
            latents = latents.astype("bfloat16").astype("float32")
        return super().attend(cache, latents, slots, attention, None if wrong == "kernel" else kernel)


@pytest.mark.parametrize(
    ("wrong", "test", "args"),
    [
        ("rounds", "test_chunks_are_the_whole", ((5, 7),)),
        ("slots", "test_rows_may_be_at_different_slots", ()),
        ("kernel", "test_an_unknown_kernel_is_refused", ()),
    ],
)
def test_caches(wrong, test, args):
    for base, cache in ((KVCacheSuite, Cache), (LatentCacheSuite, Latents)):
        getattr(suite(base, cache.Config()), test)(*args)
        with pytest.raises(FAILS):
            getattr(suite(base, cache.Config(wrong=wrong)), test)(*args)
