"""A request laid over the run files that it names."""

import attrs

from axlearn_core.config import Node
from axlearn_core.errors import RequestError
from axlearn_core.plugins.application import overridden
from axlearn_core.plugins.registry import Registry
from axlearn_core.plugins.request import Request, is_file, read


def with_file(request: Request, names: Registry) -> Request:
    """With what the file says, and the files that it stands on."""
    if isinstance(request.experiment, Node) or not is_file(request.experiment):
        return request
    file = _read_chain(str(request.experiment), names)
    both = {k: getattr(file, k) + getattr(request, k) for k in ("features", "without", "file_settings")}
    target = request.target or file.target
    return attrs.evolve(file, **both, settings=request.settings, target=target, layout=request.layout)


def _read_chain(name: str, names: Registry, visited: tuple[str, ...] = ()) -> Request:
    """A run file over the one that it stands on, whose options and values it may override; or over the config of a run."""
    if name in visited:
        raise RequestError(f"run files that begin with one another: {' -> '.join((*visited, name))}")
    file = read(name, names)
    if isinstance(file.experiment, Node) or not is_file(file.experiment):
        return file
    base = _read_chain(str(file.experiment), names, (*visited, name))
    return attrs.evolve(
        base,
        features=overridden(base.features, file.features),
        without=(*base.without, *file.without),
        base_settings=(*base.base_settings, base.file_settings),
        file_settings=file.file_settings,
        target=file.target or base.target,
    )
