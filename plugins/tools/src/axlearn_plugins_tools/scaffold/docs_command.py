"""`axlearn docs`: builds the documentation of the project around the current folder, and serves it."""

from pathlib import Path

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), help="Where to write the site. Default: build/site beside docs/"
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--serve/--no-serve", default=True, help="Serve the site on 127.0.0.1 once it is built.")
def docs(out: Path | None, port: int, serve: bool) -> None:
    """Build the documentation site, and serve it on this machine.

    Every warning is an error: broken links, pages that no list names, docstrings that do not parse.
    """
    from axlearn_plugins_tools.scaffold.site import build_site, open_server, project_folder

    project = project_folder(Path.cwd())
    server = open_server(port) if serve else None  # a taken port is said before the build, not after it
    try:
        folder = build_site(project, out or project / "build/site")
        echo(folder)
        if server is not None:
            server.serve_folder(folder)
    except KeyboardInterrupt:
        echo("stopped", err=True)
    finally:
        if server is not None:
            server.server_close()
