"""Policies solved in a process of their own, so that seconds of arithmetic do not delay answers.

Only specs whose building takes long get a process; all others are built at once. The process (`main`) reads a pickled
call from its standard input and writes the pickled result to its standard output.
"""

import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from threadpoolctl import threadpool_limits

from policies.catalog import Chosen, choose, solved_again, takes_long
from policies.profile import Profile
from policies.types import SpecError

_NICENESS = 10  # answers have priority


def choose_apart(text: str, profile: Profile, defaults: Mapping[str, str]) -> Chosen:
    """As `choose`; blocks meanwhile, but does not hold the interpreter lock.

    Raises:
        SpecError: the spec is malformed, or cannot be used with this profile.
        RuntimeError: the process failed.
    """
    return replace(_call(text, choose, text, profile, defaults), profile=profile)


def solved_again_apart(chosen: Chosen, profile: Profile, factor: float, margin: float) -> Chosen:
    """As `solved_again`; blocks meanwhile, but does not hold the interpreter lock.

    Raises:
        SpecError: the spec cannot be used with this profile.
        RuntimeError: the process failed.
    """
    again = _call(chosen.spec, solved_again, chosen, profile, factor, margin)
    return replace(again, profile=profile, bins=chosen.bins)  # these bins have gone on learning


def _call(spec: str, function: Callable[..., Chosen], *arguments: Any) -> Chosen:
    if not takes_long(spec):
        return function(*arguments)
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import batchwright.commands; from {__name__} import main; main()"
    )
    with subprocess.Popen(  # noqa: S603  (this module)
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pickle.dumps((function, arguments)))
            process.stdin.flush()  # but left open: its end tells the process that this one has ended
        except BrokenPipeError:
            pass  # the return code below tells more
        result = process.stdout.read()
    if process.returncode != 0:
        raise RuntimeError(f"the process that solves {spec} ended with {process.returncode}")
    found: Chosen | Exception = pickle.loads(result)  # noqa: S301  (of the process above)
    if isinstance(found, Exception):
        raise found
    return found


def main() -> None:
    """Answer one call, then exit."""
    os.nice(_NICENESS)
    threadpool_limits(limits=1, user_api="blas")  # the matrices are small
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301  (of the process that started this one)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found = function(*arguments)
    except SpecError as error:
        found = SpecError(str(error))  # without what cannot be pickled
    except Exception:  # noqa: BLE001  (reported to the other process)
        found = RuntimeError(traceback.format_exc())
    sys.stdout.buffer.write(pickle.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the thread below may hold the standard input's lock, on which the interpreter's exit would fail


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
