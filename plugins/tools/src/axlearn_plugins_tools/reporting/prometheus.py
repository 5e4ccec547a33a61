"""A Prometheus endpoint for a training run, and the feature that adds it."""

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from axlearn_core.config import Configurable, Node, node, patch, setting
from axlearn_core.contracts.experiment import get_tracker_configs
from axlearn_core.errors import RequestError, reason
from axlearn_core.plugins.feature import Feature
from axlearn_core.train.trackers import printable, writing

Tree = TypeVar("Tree", bound=Node[Any])
DISCOVERY = "prometheus.json"
"""File in the run directory with the endpoint's address during training, in the format of Prometheus' `file_sd_configs`."""


class PrometheusTracker(Configurable):
    """Serves `http://HOST:PORT/metrics` during training.

    The endpoint reports the values of the last logged step, the progress, the goodput by phase, and the numbers of checkpoints,
    failed saves and incidents. `RUN_DIR/prometheus.json` contains its address in the format of `file_sd_configs`.
    """

    @node
    class Config(Configurable.Config["PrometheusTracker"]):
        """Address to listen on.

        Attributes:
            host: Address of this machine to listen on. The endpoint has no authentication, so use loopback or a private
                network.
            port: Port. 0 picks a free port.
        """

        host: str = "127.0.0.1"
        port: int = setting(default=0, ge=0, le=65535)

    def __init__(self, cfg: Config, *, run_dir: Path):
        self._host, self._port = cfg.host, cfg.port
        self._run_dir = Path(run_dir)
        self._server: tuple[Any, threading.Thread] | None = None
        self._collector: Any = None

    @property
    def address(self) -> str | None:
        """`HOST:PORT` while the endpoint is up, or None."""
        if self._server is None:
            return None
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._server[0].server_port}"

    def start(self, info: Mapping[str, Any]) -> None:
        """Start listening and write the address to the run directory.

        Raises:
            RequestError: If the port is in use, or the host is not an address of this machine.
            WorkError: If the run directory is not writable.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        from axlearn_plugins_tools.reporting.run_metrics import RunCollector

        self.close()
        texts = {
            name: printable(str(info.get(name, ""))) for name in ("experiment", "run_dir", "parameters", "devices")
        }
        self._collector = RunCollector(
            self._run_dir,
            max_steps=int(info.get("max_steps", 0)),
            start_step=int(info.get("start_step", 0)),
            info=texts,
        )
        registry = CollectorRegistry()
        registry.register(self._collector)
        try:
            self._server = start_http_server(self._port, self._host, registry)
        except (OSError, OverflowError, UnicodeError) as error:
            raise _listen_error(self._host, self._port, error) from None
        target = [{"targets": [self.address], "labels": {"run": texts["run_dir"] or str(self._run_dir)}}]
        with writing(self._run_dir / DISCOVERY):
            self._run_dir.mkdir(parents=True, exist_ok=True)
            temporary = self._run_dir / f"{DISCOVERY}.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(target) + "\n")
            temporary.replace(self._run_dir / DISCOVERY)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the values for the next scrape. Values without `loss` are evaluation results."""
        values = {printable(name): float(value) for name, value in values.items()}
        if "loss" not in values:
            self._collector.evaluation = {**self._collector.evaluation, **values}
            return
        self._collector.train = values
        self._collector.logged_step, self._collector.logged_time = int(step), time.time()

    def text(self, step: int, name: str, value: str) -> None:
        """Ignore samples."""

    def close(self) -> None:
        """Stop listening and remove the address file."""
        server, self._server = self._server, None
        if server is None:
            return
        httpd, thread = server
        httpd.shutdown()
        httpd.server_close()
        thread.join()
        with contextlib.suppress(OSError):
            (self._run_dir / DISCOVERY).unlink()


@node
class PrometheusFeature(Feature):
    """Serves the run's metrics to Prometheus during training.

    By default, it listens on loopback at a free port. `<run>/prometheus.json` has the address. The endpoint has no
    authentication. If the experiment already has an endpoint, this sets its options.
    """

    stage = "execute"

    host: str = "127.0.0.1"
    port: int = setting(default=0, ge=0, le=65535)

    def apply(self, cfg: Tree) -> Tree:
        """Add the tracker, or replace its options."""
        other_trackers = tuple(t for t in get_tracker_configs(cfg) if not isinstance(t, PrometheusTracker.Config))
        return patch(cfg, {"trackers": (*other_trackers, PrometheusTracker.Config(host=self.host, port=self.port))})


def _listen_error(host: str, port: int, error: Exception) -> RequestError:
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    why = "the port is in use" if in_use else reason(error)
    return RequestError(
        f"the Prometheus endpoint cannot listen on {host}:{port}: {why}\n"
        "    expected: an address of this machine and a free port\n"
        "    fix: use --with prometheus:port=0, which writes a free port to RUN_DIR/prometheus.json, or stop the other program"
    )
