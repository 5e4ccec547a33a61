"""Where checkpoints lie: local and mounted directories here, other URI schemes through `axlearn_checkpoint_storage`."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from axlearn_core.errors import RequestError
from axlearn_core.plugins.manager import Host, host


def resolve(uri: str, plugins: Host | None = None) -> Path:
    """The local or mounted directory for a path or URI. A local one is not created yet.

    Raises:
        RequestError: no plugin stores this scheme.
        PluginError: more than one does.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if "://" not in uri:
        return Path(uri).expanduser()
    plugins = plugins or host()
    storage = plugins.only("axlearn_checkpoint_storage", uri=uri)
    if storage is None:
        others = plugins.hook.axlearn_checkpoint_storage.get_hookimpls()
        names = [f"{o.plugin_name} ({plugins.origins[o.plugin_name]})" for o in others]
        raise RequestError(
            f"no plugin stores checkpoints at {uri!r}: the scheme {parts.scheme!r} is unknown\n"
            "    known: paths and file:// (the core)"
            + "".join(f"; what {name} takes" for name in sorted(names))
            + "\n    fix: install a plugin for it, or mount it and give the path"
        )
    return storage.prepare(uri)
