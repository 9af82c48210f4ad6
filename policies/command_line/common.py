"""What the commands share: one-line errors with exit code 2, help in groups, examples, completion, checks of files."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from threadpoolctl import threadpool_limits

from policies.files import check_writable, first_error
from policies.profile import shipped_profiles
from policies.types import ParameterError, SpecError

INTERRUPTED = 130  # exit code on Ctrl-C, as of shells
_PLOT_FORMATS = {".png", ".pdf", ".svg"}


def _print_version(context: typer.Context, given: bool) -> None:
    if given:
        typer.echo(f"{context.info_name} (Batchwright) {version('batchwright')}")
        raise typer.Exit


VersionFlag = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


def examples(*lines: str) -> str:
    """Return these command lines as the last paragraph of a command's help."""
    return "\n\n".join(["Examples:", *(line.replace("[", "\\[") for line in lines)])


def complete_profiles(incomplete: str) -> list[str]:
    """Return the shipped profiles that begin with this text."""
    return [name for name in shipped_profiles() if name.startswith(incomplete)]


def complete_policies(incomplete: str) -> list[str]:
    """Return the names of policies that begin with this text."""
    from policies.catalog import CATALOG  # not at the top, since the supervisor needs no policies

    return [name for name in CATALOG if name.startswith(incomplete)]


def run(app: typer.Typer, name: str, groups: Mapping[str, Sequence[str]] | None = None) -> None:
    """Run the command called `name` and exit: 0 on success, 2 on a usage or input error, 130 on Ctrl-C.

    Args:
        app: the command.
        name: its name.
        groups: titles of groups in its help, and the parameters in each; the others are under "Options".

    Raises:
        SystemExit: always.
    """
    # The solver's matrices are small. On a busy machine, synchronising threads costs many times the work itself.
    threadpool_limits(limits=1, user_api="blas")
    command = typer.main.get_command(app)
    titles = {parameter: title for title, parameters in (groups or {}).items() for parameter in parameters}
    for parameter in command.params:
        if parameter.name in titles:
            parameter.rich_help_panel = titles[parameter.name]  # type: ignore[attr-defined]
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SpecError as error:
        sys.exit(_report(name, paths_as_given(as_given(error))))
    except Exception as error:
        # typer vendors click or depends on it, by version; usage errors of both have this method
        if not hasattr(error, "format_message"):
            raise
        if isinstance(error.__cause__, ValidationError):
            error.message = first_error(error.__cause__)  # type: ignore[attr-defined]  # with the value
        sys.exit(_report(name, f"{error.format_message().removesuffix('.')}. See {name} --help."))
    if code == INTERRUPTED:
        typer.echo(f"{name}: interrupted", err=True)
    sys.exit(code or 0)


def as_given(error: SpecError, arguments: Sequence[str] | None = None) -> str:
    """The message of an error, in the form --NAME VALUE PROBLEM if a flag gives the parameter this value.

    Args:
        error: the error.
        arguments: of the command; by default those of this process.
    """
    if not isinstance(error, ParameterError):
        return str(error)
    flag, value = f"--{error.name.replace('_', '-')}", error.value.strip("'")
    words = [word for argument in arguments or sys.argv for word in argument.split("=", 1)]
    given = any(word == flag and _are_equal(text, value) for word, text in pairwise(words))
    return f"{flag} {error.value} {error.problem}" if given else str(error)


def _are_equal(first: str, second: str) -> bool:
    """Whether both are the same text or the same number."""
    try:
        return float(first) == float(second)
    except ValueError:
        return first == second


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Report an error of writing this file, which was given with this flag.

    Raises:
        SpecError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise SpecError(f"cannot write {flag} {str(path)!r} ({error.strerror}); choose another file") from error


def check_files(output: Path | None, plot: Path | None, report: Path | None = None) -> None:
    """Check, before any work is done, that the output files can be written.

    Raises:
        SpecError: one cannot be written, or the plot format is unknown.
    """
    for flag, path in {"--output": output, "--plot": plot, "--report": report}.items():
        if path is not None:
            with writing(flag, path):
                check_writable(path)
    if plot is not None and plot.suffix not in _PLOT_FORMATS:
        raise SpecError(f"unknown plot format {plot.suffix!r} (--plot {plot}); give {', '.join(sorted(_PLOT_FORMATS))}")


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print each warning of the solver as one line on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        if not warning.category.__module__.startswith("policies."):
            continue
        print(f"solve-policy: {warning.category.__name__}: {warning.message}", file=sys.stderr)


def paths_as_given(message: str) -> str:
    """The message with paths relative to the current folder, as they were given; settings make them absolute."""
    try:
        folder = Path.cwd()
    except OSError:  # it was removed
        return message
    return message if folder == Path("/") else message.replace(f"{folder}/", "")


def _report(name: str, message: str) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return 2
