"""Hostile input: the tensor protocol's parser and the image codec by hypothesis, the routes by schemathesis.

Every case must give a consistent result or a client error of one line. Failures are: any other exception, a 5xx that
is not documented, and an answer that the OpenAPI document does not describe.
"""

import json
import resource
import time
import warnings
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from benchmarks.support.harness import argument_parser, load_record, save_record, serving
from benchmarks.support.hostile_inputs import CASES, Case, judge

_ROUND = 5000  # cases a round; hypothesis keeps all cases of a round in memory
_SLOW = 1.0  # s of CPU time; a case that takes longer is a failure


def fuzz(cases: int) -> dict[str, Any]:
    """Judge this many cases, and count them by target and outcome."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    slowest = 0.0

    def one(case: Case) -> None:
        nonlocal slowest
        began = time.process_time()  # other processes of the machine do not count
        try:
            outcome = judge(case)
        except Exception as error:  # noqa: BLE001  (counted as a failure)
            outcome = f"FAILED {type(error).__name__}"
            failures.append(f"{outcome}: {error}"[:200] + f" on {case!r}"[:2000])
        took = time.process_time() - began
        slowest = max(slowest, took)
        if took > _SLOW:
            failures.append(f"took {took:.1f} s: {case!r}"[:2000])
        outcomes[f"{case.target}: {outcome}"] += 1

    done, began = 0, time.monotonic()
    while done < cases:
        _round(one, min(_ROUND, cases - done), done)
        done = sum(outcomes.values())
        print(f"{done} cases, {len(failures)} failures, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "cases": done,
        "failures": len(failures),
        "outcomes": dict(sorted(outcomes.items())),
        "slowest_ms": round(1e3 * slowest, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "first_failures": failures[:10],
    }


def _round(one: Any, cases: int, number: int) -> None:
    quiet = settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    seed(number)(quiet(given(CASES)(one)))()


def fuzz_routes(examples: int) -> dict[str, Any]:
    """Make this many calls of every route of a server, half of them invalid."""
    from benchmarks.support.openapi_fuzzing import check_routes  # importing schemathesis takes a second

    with serving("googlenet", "--device", "emulated:googlenet-tesla-p4", "--policy", "greedy") as server:
        tally = check_routes(server.url, examples)
    return {
        "calls": sum(tally.statuses.values()),
        "failures": len(tally.complaints),
        "statuses": dict(sorted(tally.statuses.items())),
        "first_failures": tally.complaints[:10],
    }


def main() -> None:
    """Fuzz, print and record; exit code 1 if anything failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", type=int, default=200_000, help="cases of the parser and codec; 0 skips them")
    parser.add_argument("--examples", type=int, default=300, help="calls of each route; 0 skips the routes")
    parser.add_argument("--record", default="fuzz", help="name of the record")
    chosen = parser.parse_args()
    warnings.simplefilter("error")
    record: dict[str, Any] = load_record(chosen.record)
    if chosen.cases:
        record["parser"] = fuzz(chosen.cases)
    if chosen.examples:
        record["routes"] = fuzz_routes(chosen.examples)
    save_record(chosen.record, record)
    print(json.dumps(record, indent=1))
    raise SystemExit(1 if any(part["failures"] for part in record.values()) else 0)


if __name__ == "__main__":
    main()
