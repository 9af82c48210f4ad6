"""What the four commands share: a mistake is one line on stderr and exit code 2."""

import sys

import typer

from policies.types import SpecError


def run(app: typer.Typer, name: str) -> None:
    """Run the command called `name` to its exit code: 0, 2 for what the caller got wrong, 130 for Ctrl-C.

    Raises:
        SystemExit: always.
    """
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


def _complain(name: str, message: str) -> int:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201  (this is the command's voice)
    return 2
