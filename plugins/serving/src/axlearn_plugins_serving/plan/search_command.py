"""`axlearn plan search serve`."""

from typing import Any

import click

from axlearn_core.cli.common import experiment_argument, no_devices, request_options
from axlearn_core.cli.extensible import ExtensibleCommand
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.plan.command import require_plan


@click.command("plan-search-serve", cls=ExtensibleCommand)
@experiment_argument
@request_options
@click.option("--budget", metavar="MINUTES", help="Time for compiling (default: 10).")
@click.option("--chips", metavar="A..B", help="Use the target's machine with A to B chips.")
@click.option("--vary", metavar="cache-dtype", help="Also vary the dtype of the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with bytes per device.")
def search_serving(request: Any, budget: str | None, chips: str | None, vary: str | None, as_json: bool) -> None:
    """Rank a server's layouts: replicas, tensor parallelism, concurrent requests.

    The layout with the most tokens/s comes first. `--set serving.PATH=VALUE` sets the engine. Exit code 1 if none fits.
    """
    no_devices()
    require_plan()
    from axlearn_core.plugins.targets import find_machine
    from axlearn_plugins_plan.search.command import parse_positive
    from axlearn_plugins_plan.search.machines import machine_names
    from axlearn_plugins_plan.search.rank import parse_vary
    from axlearn_plugins_serving.plan import layout_search

    names = machine_names(request.target, chips)
    if len(names) > 1:
        raise RequestError(
            f"a search for serving needs exactly one machine\n    got: {', '.join(names)}\n    fix: name one"
        )
    machine = find_machine(names[0])
    seconds = 60 * parse_positive("--budget", budget, 10.0)
    result = layout_search.search_serving(
        request, machine, parse_vary(vary, layout_search.VARIED), seconds, lambda line: echo(line, err=True)
    )
    echo(layout_search.dumps(machine, result) if as_json else layout_search.text(request, machine, result))
    if not any(row.fits for row in result.rows):
        raise SystemExit(1)
