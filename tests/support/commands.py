"""The project's commands, run in this process: to start one takes a second."""

import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from subprocess import CompletedProcess
from unittest.mock import patch


def run_command(main: Callable[[], None], name: str, *arguments: str) -> "CompletedProcess[str]":
    """Run a command's main function with these arguments; return its exit code and its output."""
    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", [name, *arguments]):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return CompletedProcess([name, *arguments], code, out.getvalue(), err.getvalue())
