"""The `fewstep` command: a table from subcommand to the function that runs it, imported only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("fewstep.benchmarks.cli:demo", "The embedded model, plain beside accelerated: a picture and a table."),
    "generate": ("fewstep.accel.generate:generate", "Images from a pipeline folder or hub id, with a recipe."),
    "sweep": ("fewstep.benchmarks.cli:sweep", "Schedulers x steps x guidance x recipes: quality and speed of each."),
    "fit": ("fewstep.accel.fit:app", "Learn from your own model what a technique is set by."),
    "bench": ("fewstep.benchmarks.cli:bench", "Our caches against other libraries', at equal distance to plain."),
    "train": ("fewstep.distill.cli:app", "Train an autoencoder or a base model."),
    "doctor": ("fewstep.accel.doctor:doctor", "What this machine has, and which techniques can run on it."),
}


def main() -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("--help", "-h"):
        print(usage())
    elif arguments[0] == "--version":
        print(f"fewstep {version('fewstep')}")
    elif arguments[0] in COMMANDS:
        run(arguments[0], arguments[1:])
    else:
        sys.exit(f"fewstep: no command {arguments[0]!r}; known: {', '.join(COMMANDS)}")


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: fewstep COMMAND [options]      fewstep COMMAND --help      fewstep --version", ""]
    return "\n".join(lines + [f"  {name:{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()])


def run(name: str, arguments: list[str]) -> None:
    """Runs a subcommand; an error that fewstep raises on purpose is one line and exit code 2, not a traceback."""
    import typer

    from .errors import FewstepError

    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    app = found if isinstance(found, typer.Typer) else as_app(found)
    try:
        app(args=arguments, prog_name=f"fewstep {name}")
    except (FewstepError, OSError) as error:  # a folder that cannot be written is the user's to mend, too
        typer.secho(f"fewstep {name}: {error}", fg="red", err=True)
        sys.exit(2)


def as_app(function: object) -> typer.Typer:
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)  # type: ignore[arg-type]  # typer takes any annotated function
    return app
