"""SIGKILL of a gateway, of the serving process, and of the supervisor, under load 0.5: what the clients see.

Each kill has a server of its own with two gateways on an emulated device, and an open loop of calls of one sample. The
supervisor starts the other processes again; the supervisor is started again here, on the same port, as soon as it has
ended, as systemd or Kubernetes would. At the end the server gets SIGTERM, and none of the processes that it ever had
may be left.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from benchmarks.support import harness
from benchmarks.support.gateway_processes import Processes, budget_flags, held_by, processes_of
from benchmarks.support.pixel_load import NO_ANSWER, OK, OTHER, REJECTED, offer_pixels
from policies.profile import load_profile

PROFILE = "googlenet-tesla-p4-x10"
GATEWAYS = 2
TARGETS = ("gateway", "serving process", "supervisor")
LOAD = 0.5
_KILLED_AT, _DURATION = 3.0, 13.0  # s after the start of the load
_ENDED_WITHIN, _STARTED_WITHIN = 30.0, 60.0


@dataclass(frozen=True)
class Kill:
    """What one kill did; times in s after it.

    Attributes:
        outcomes: number of calls by how they ended; "no answer" is a connection that was refused or broke.
        first_answer_s: end of the first call with status 200 that was sent after the kill; if that was of the
            supervisor, after its next start, since gateways whose supervisor was killed still answer for an instant.
        all_answered_s: sending of the last call that was not answered with 200; 0 without one.
        left_over: processes that did not end with the server.
        held: what the gateways held at the end, when no call was open; empty if all slots and bytes were free.
        starts: number of starts of the server after a kill of its supervisor, until the port was free.
    """

    outcomes: dict[str, int]
    first_answer_s: float | None
    all_answered_s: float
    left_over: int
    held: list[str]
    starts: int = 0


def measure(target: str, duration: float) -> Kill:
    """Start a server, kill one of its processes under load, and return what happened."""
    flags = ("googlenet", "--device", f"emulated:{PROFILE}", "--policy", "greedy", "--log-level", "error")
    command = (*harness.command_line("serve-model"), *flags, *budget_flags(GATEWAYS))
    seen, rate = set[int](), LOAD * load_profile(PROFILE).capacity
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        server = stack.enter_context(harness.running(*command))
        before = _processes(server)
        seen |= before.all
        load = pool.submit(lambda: uvloop.run(offer_pixels(server.url, rate, duration)))
        time.sleep(_KILLED_AT)
        pids = {"gateway": before.gateways[0], "serving process": before.serving, "supervisor": before.supervisor}
        killed = up = time.monotonic()
        os.kill(pids[target], signal.SIGKILL)
        starts = 0
        if target == "supervisor":
            server.process.wait()
            up = time.monotonic()
            server, starts = _start_again(stack, command, urlsplit(server.url).port)
        calls = load.result()
        after = _processes(server)
        seen |= after.all
        held = [found for pid in after.gateways if not (found := held_by(server, pid)).is_nothing]
    left = _left_over(seen)
    answered = [call.ended for call in calls if call.sent > up and call.outcome == OK]
    lost = [call.sent for call in calls if call.outcome != OK and call.ended > killed]
    return Kill(
        outcomes=dict(Counter(call.outcome for call in calls)),
        first_answer_s=round(min(answered) - killed, 3) if answered else None,
        all_answered_s=round(max(0.0, max(lost, default=killed) - killed), 3),
        left_over=len(left),
        held=[str(asdict(each)) for each in held],
        starts=starts,
    )


def _processes(server: harness.Server) -> Processes:
    """The processes of a server, once all are there."""
    found: list[Processes] = []

    def complete() -> bool:
        processes = processes_of(server)
        if processes is not None and len(processes.gateways) == GATEWAYS:
            found.append(processes)
        return bool(found)

    harness.wait_until(complete, 30.0, 0.1)
    return found[0]


def _start_again(stack: ExitStack, command: Sequence[str], port: int | None) -> tuple[harness.Server, int]:
    """Start the server on its former port, again while that is in use; return it and the number of starts."""
    end, starts = time.monotonic() + _STARTED_WITHIN, 0
    while True:
        starts += 1
        try:
            return stack.enter_context(harness.running(*command, port=port)), starts
        except RuntimeError:
            if time.monotonic() > end:
                raise


def _left_over(pids: set[int]) -> set[int]:
    """Those of the processes that have not ended after some time; they are killed."""

    def left() -> set[int]:
        return {pid for pid in pids if _runs(pid)}

    with suppress(TimeoutError):
        harness.wait_until(lambda: not left(), _ENDED_WITHIN, 0.1)
    found = left()
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


_HEAD = (
    *("killed", "200", "503 with Retry-After", "no answer", "other", "first answer after, s"),
    *("all answered after, s", "processes left over", "slots or memory held"),
)


def table(record: dict[str, Any]) -> str:
    """The record as Markdown: sums over the kills, and medians and largest times."""
    return harness.markdown_table(_HEAD, (_cells(target, kills) for target, kills in record.items())) + "\n"


def _cells(target: str, kills: Sequence[dict[str, Any]]) -> tuple[object, ...]:
    counts: Counter[str] = Counter()
    for kill in kills:
        counts.update(kill["outcomes"])
    known = (OK, REJECTED, NO_ANSWER)
    others = sum(count for outcome, count in counts.items() if outcome not in known)
    return (
        f"{target}, {len(kills)} times",
        *(counts[outcome] for outcome in known),
        others,
        _times([kill["first_answer_s"] for kill in kills]),
        _times([kill["all_answered_s"] for kill in kills]),
        sum(kill["left_over"] for kill in kills),
        sum(len(kill["held"]) for kill in kills),
    )


def _times(seconds: Sequence[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return "never"
    return f"{median(known):.2f}, at most {max(known):.2f}"


def is_wrong(kill: dict[str, Any]) -> bool:
    """Whether the server did not recover, lost an answer without need, or left something behind."""
    unexpected = [outcome for outcome in kill["outcomes"] if outcome.startswith(OTHER)]
    return bool(unexpected or kill["first_answer_s"] is None or kill["left_over"] or kill["held"])


def main() -> None:
    """Kill, print and record; exit code 1 if a server did not recover, or something was left behind."""
    parser = harness.argument_parser(__doc__)
    parser.add_argument("--times", type=int, default=5, help="kills of each process")
    parser.add_argument("--duration", type=float, default=_DURATION, help="seconds of load around a kill")
    parser.add_argument("--record", default="kills", help="name of the record")
    chosen = parser.parse_args()
    record: dict[str, Any] = {}
    for target in TARGETS:
        for _ in range(chosen.times):
            record.setdefault(target, []).append(asdict(measure(target, chosen.duration)))
            print(target, json.dumps(record[target][-1]), flush=True)
        harness.save_record(chosen.record, record)
    harness.save_table(chosen.record, f"SIGKILL under load {LOAD}, {PROFILE}, {GATEWAYS} gateways", table(record))
    sys.exit(any(is_wrong(kill) for kills in record.values() for kill in kills))


if __name__ == "__main__":
    main()
