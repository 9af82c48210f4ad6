"""The main function of the commands, which reports an error as one line and exit code 2, and a check of their files."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from threadpoolctl import threadpool_limits

from policies.types import SpecError

INTERRUPTED = 130  # exit code on Ctrl-C, as of shells
_PLOT_FORMATS = {".png", ".pdf", ".svg"}


def _print_version(context: typer.Context, given: bool) -> None:
    if given:
        typer.echo(f"{context.info_name} (Batchwright) {version('batchwright')}")
        raise typer.Exit


VersionFlag = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


def run(app: typer.Typer, name: str) -> None:
    """Run the command called `name` and exit: 0 on success, 2 on a usage or input error, 130 on Ctrl-C.

    Raises:
        SystemExit: always.
    """
    # The solver's matrices are small. On a busy machine, synchronising threads costs many times the work itself.
    threadpool_limits(limits=1, user_api="blas")
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SpecError as error:
        sys.exit(_report(name, str(error)))
    except Exception as error:
        # typer vendors click or depends on it, by version; usage errors of both have this method
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_report(name, f"{error.format_message()} See {name} --help."))
    if code == INTERRUPTED:
        typer.echo(f"{name}: interrupted", err=True)
    sys.exit(code or 0)


def check_files(output: Path | None, plot: Path | None) -> None:
    """Check, before any work is done, that the output files can be written.

    Raises:
        SpecError: the folder does not exist, or the plot format is unknown.
    """
    for path in filter(None, (output, plot)):
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise SpecError(f"cannot write {str(path)!r}; give a file in a folder that exists")
    if plot is not None and plot.suffix not in _PLOT_FORMATS:
        raise SpecError(f"unknown plot format {plot.suffix!r} (--plot {plot}); give {', '.join(sorted(_PLOT_FORMATS))}")


def _report(name: str, message: str) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201  (the command's error output)
    return 2
