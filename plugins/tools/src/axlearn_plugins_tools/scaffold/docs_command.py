"""`axlearn docs`: build and serve the documentation of the project that contains the current folder."""

from pathlib import Path

import click

from axlearn_core.cli.terminal import echo


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), help="Output folder of the site (default: build/site in the project)."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on. 0 picks a free port.",
)
@click.option("--serve/--no-serve", default=True, help="Serve the site on 127.0.0.1 after the build.")
def docs(out: Path | None, port: int, serve: bool) -> None:
    """Build the documentation site and serve it on this machine.

    All warnings are errors, such as broken links, pages missing from the navigation, and malformed docstrings.
    """
    from axlearn_plugins_tools.scaffold.site import build_site, open_server, project_folder

    project = project_folder(Path.cwd())
    server = open_server(port) if serve else None  # report a port that is in use before building
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
