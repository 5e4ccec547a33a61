"""`axlearn plan --serve --search`."""

import importlib.util
from typing import Any

from axlearn_core.cli.common import no_devices
from axlearn_core.cli.terminal import echo
from axlearn_core.errors import RequestError


def search(
    _flag: bool,
    *,
    request: Any,
    function: str,
    as_json: bool,
    budget: str | None = None,
    chips: str | None = None,
    vary: str | None = None,
    **others: str | None,
) -> None:
    """Prints the layouts of a server, most tokens/s first; exit code 1 where none fits.

    Args:
        request: its settings under `serving.` are of the engine.
        function: has to be the command's default.
        as_json: print one object.
        budget: minutes for compiling.
        chips: another size of the target's machine.
        vary: `cache-dtype`, or nothing.
        others: options of the search for training, which cannot be given.
    """
    no_devices()
    if importlib.util.find_spec("axlearn_plugins_serving") is None:
        raise RequestError(
            "a search for serving needs axlearn-plugins-serving\n    fix: pip install axlearn-plugins-serving"
        )
    from axlearn_core.plugins.targets import find_machine
    from axlearn_plugins_plan.search import serving
    from axlearn_plugins_plan.search.command import positive
    from axlearn_plugins_plan.search.machines import machine_names
    from axlearn_plugins_plan.search.rank import varied

    if function != "train":
        raise RequestError("--serve and --function cannot be given together\n    fix: leave one of them out")
    if unused := [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]:
        raise RequestError(
            f"{unused[0]} is for a search of training layouts\n    fix: leave it out, or leave --serve out"
        )
    names = machine_names(request.target, chips)
    if len(names) > 1:
        raise RequestError(f"a search for serving takes one machine\n    got: {', '.join(names)}\n    fix: name one")
    machine = find_machine(names[0])
    seconds = 60 * positive("--budget", budget, 10.0)
    result = serving.search_serving(
        request, machine, varied(vary, serving.VARIED), seconds, lambda line: echo(line, err=True)
    )
    echo(serving.dumps(machine, result) if as_json else serving.text(request, machine, result))
    if not any(row.fits for row in result.rows):
        raise SystemExit(1)
