"""`axlearn train --prove`. Does not import JAX."""

import subprocess
import sys

from axlearn_core.contracts.options import CommandOption
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.plugins.request import Request

MINUTES = 2


def _prove(_: bool, request: Request) -> Request:
    """Prove the request in another process, because this process may use devices other than virtual ones."""
    command = [sys.executable, "-m", "axlearn_core", "prove", *request.words, "--minutes", str(MINUTES)]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    if result.returncode:
        # A property that does not hold does not make the request invalid, so keep the proof's exit code.
        error = WorkError if result.returncode == 1 else RequestError
        raise error(
            "--prove: the config did not pass, so nothing was trained; see above\n"
            "    fix: correct the config, or train without --prove"
        )
    return request


PROVE = CommandOption(help=f"First check the config for {MINUTES} minutes; see `axlearn prove`.", change=_prove)
