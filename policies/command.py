"""What the four commands share: a mistake is one line on stderr and exit code 2."""

import sys
from pathlib import Path

import typer
from threadpoolctl import threadpool_limits

from policies.types import SpecError

_PICTURES = {".png", ".pdf", ".svg"}


def run(app: typer.Typer, name: str) -> None:
    """Run the command called `name` to its exit code: 0, 2 for what the caller got wrong, 130 for Ctrl-C.

    Raises:
        SystemExit: always.
    """
    # The solver's matrices are small: on a busy machine, waiting for a second thread takes many times the work itself.
    threadpool_limits(limits=1, user_api="blas")
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except SpecError as error:
        sys.exit(_complain(name, str(error)))
    except Exception as error:
        # typer carries click inside or beside it, depending on the version; both mark usage errors alike
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_complain(name, f"{error.format_message()} See {name} --help."))
    sys.exit(code or 0)


def check_files(output: Path | None, plot: Path | None) -> None:
    """Complain about files that cannot be written before the work, not after it.

    Raises:
        SpecError: no such folder, or no such format of pictures.
    """
    for path in filter(None, (output, plot)):
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise SpecError(f"cannot write {str(path)!r}; give a file in a folder that exists")
    if plot is not None and plot.suffix not in _PICTURES:
        raise SpecError(f"no picture format {plot.suffix!r} (--plot {plot}); give {', '.join(sorted(_PICTURES))}")


def _complain(name: str, message: str) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201  (this is the command's voice)
    return 2
