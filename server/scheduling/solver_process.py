"""Policies solved in a process of their own, so that seconds of arithmetic do not delay answers.

Only specs whose building takes long get a process; all others are built at once. The process (`main`) reads a pickled
call from its standard input and writes the pickled result to its standard output.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from threadpoolctl import threadpool_limits

from policies.adaptation.objective import FIRST_MARGIN
from policies.catalog import ModelPolicy, choose, solved_again, takes_long
from policies.planning.prediction import Prediction, Traffic, predict
from policies.profile import Profile
from policies.queue.monitor import ForgettingMonitor, NoMonitor, rate_time_constant
from policies.types import SpecError

_CACHED = 32  # policies that were set
_RAISED = 3  # the process's exit code if its result is an exception
_OWN = 19  # niceness: threads of a model on the CPU wait for each other, so that little other work delays all of them
_ASKED = 5  # the same for a policy that an operator waits for, which a busy CPU would hardly run at 19
_GROUP = "/proc/self/autogroup"  # of the session, in which alone a niceness counts
_turns = {niceness: threading.Lock() for niceness in (_OWN, _ASKED)}  # one such process of each, for all devices


def choose_in_process(text: str, profile: Profile, defaults: Mapping[str, str]) -> ModelPolicy:
    """As `choose`, with the first margin of a percentile and a cache; blocks meanwhile.

    It holds the interpreter lock only to read the result.

    Raises:
        SpecError: the spec is malformed, or cannot be used with this profile.
        RuntimeError: the process failed.
    """
    if not takes_long(text):
        return choose(text, profile, defaults, margin_share=FIRST_MARGIN)
    chosen: ModelPolicy = pickle.loads(_choose(text, profile, tuple(defaults.items())))  # noqa: S301  (of `main`)
    return replace(chosen, profile=profile)


def solve_again_in_process(
    chosen: ModelPolicy, profile: Profile, factor: float, margin: float, arrival_rate: float | None = None
) -> ModelPolicy:
    """As `solved_again`; blocks meanwhile, but holds the interpreter lock only to read the result.

    Raises:
        SpecError: the spec cannot be used with this profile.
        RuntimeError: the process failed.
    """
    if not (takes_long(chosen.spec) or chosen.solved_sizes or chosen.solved_shares):
        return solved_again(chosen, profile, factor, margin, arrival_rate)
    sent = replace(chosen, monitor=NoMonitor(), bins=None)  # both go on changing, and neither is needed
    result = _call(chosen.spec, solved_again, sent, profile, factor, margin, arrival_rate)
    found: ModelPolicy = pickle.loads(result)  # noqa: S301
    return replace(found, profile=profile, bins=chosen.bins)


def predict_in_process(models: Mapping[str, Traffic]) -> Mapping[str, Prediction]:
    """As `predict`; blocks meanwhile, but holds the interpreter lock only to read the result.

    Raises:
        RuntimeError: the process failed.
    """
    sent = {model: replace(each, chosen=_without_solver(each.chosen)) for model, each in models.items()}
    found: Mapping[str, Prediction] = pickle.loads(_call("predictions", predict, sent))  # noqa: S301
    return found


def _without_solver(chosen: ModelPolicy) -> ModelPolicy:
    """A policy without what cannot be pickled, or goes on changing: of the bins the present edges stay."""
    bins = None if chosen.bins is None else chosen.bins.fixed()
    forgets = isinstance(chosen.monitor, ForgettingMonitor)  # of which a prediction uses one of its own
    monitor = ForgettingMonitor(rate_time_constant(chosen.profile)) if forgets else chosen.monitor
    return replace(chosen, bins=bins, solve_for=None, solve_for_shares=None, monitor=monitor)


@lru_cache(_CACHED)
def _choose(text: str, profile: Profile, defaults: tuple[tuple[str, str], ...]) -> bytes:
    """Return the pickled policy, of which each device needs a monitor of its own."""
    return _call(text, partial(choose, margin_share=FIRST_MARGIN), text, profile, dict(defaults), niceness=_ASKED)


def _call(spec: str, function: Callable[..., Any], *arguments: Any, niceness: int = _OWN) -> bytes:
    """Return the pickled result of a call that is made in a process of this niceness."""
    with _turns[niceness], _start(niceness) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(pickle.dumps((function, arguments)))
            process.stdin.flush()  # but left open: its end tells the process that this one has ended
        except BrokenPipeError:
            with suppress(BrokenPipeError):
                process.stdin.close()
        result = process.stdout.read()
    code = process.returncode
    if code == _RAISED:
        raise pickle.loads(result)  # noqa: S301  (of the process above)
    if code != 0:
        how = f"was killed by signal {-code}; check the memory limit" if code < 0 else f"ended with code {code}"
        raise RuntimeError(f"the process that solves {spec} {how}")
    return result


def _start(niceness: int) -> subprocess.Popen[bytes]:
    """Start the process."""
    command = [sys.executable, "-c", program(niceness)]
    return subprocess.Popen(  # noqa: S603  (this module)
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )


def program(niceness: int) -> str:
    """Return the source of the process's program, which imports from the same folders as the calling process."""
    group = f"os.path.exists({_GROUP!r}) and open({_GROUP!r}, 'w').write('{niceness}')"
    nice = f"import os, sys; os.nice({niceness}); {group}"  # before the imports, which take most of the time
    return f"{nice}; sys.path[:] = {sys.path!r}; import batchwright.commands; from {__name__} import main; main()"


def main() -> None:
    """Answer one call, then exit."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to all processes; this one ends with its parent
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not be taken for a result
    threadpool_limits(limits=1, user_api="blas")  # the matrices are small
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301  (of the process that started this one)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = _RAISED
    try:
        found = function(*arguments)
        code = 0
    except SpecError as error:
        found = SpecError(str(error))  # without what cannot be pickled
    except Exception:  # noqa: BLE001  (reported to the other process)
        found = RuntimeError(traceback.format_exc())
    pickle.dump(found, results)
    results.flush()
    # not `sys.exit`: when the results end, the other process closes the pipe, on which the thread below exits with 1
    os._exit(code)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
