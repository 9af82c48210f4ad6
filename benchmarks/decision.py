"""Time of one decision with 1000 waiting requests, including taking the batch out of the queue."""

from statistics import median
from time import perf_counter

from benchmarks.support.harness import argument_parser, save_record
from policies.catalog import choose
from policies.profile import load_profile
from policies.queue.batcher import Batcher
from policies.types import BatchKey, Launch, Request

SPECS = ("greedy", "static:8", "timeout:20", "rate-matching", "max-under-deadline:slo_ms=100", "smdp:w2=1.6")


def microseconds(spec: str, rounds: int = 2000) -> float:
    """Median time of a decision that launches out of 1000 waiting requests, us."""
    profile = load_profile("googlenet-tesla-p4")
    chosen = choose(spec, profile)
    batcher = Batcher(chosen.policy, {"m": profile.max_batch_size}, chosen.monitor)
    times, ids, now = [], 0, 0.0
    for _ in range(rounds):
        while batcher.queue_length < 1000:
            now += 0.0005
            batcher.arrive(Request(ids, now, BatchKey("m"), deadline=now + chosen.slo))
            ids += 1
        start = perf_counter()
        action = batcher.decide(now)
        times.append(perf_counter() - start)
        assert isinstance(action, Launch)
        batcher.complete(action)
    return 1e6 * median(times)


def main() -> None:
    """Print and record the medians."""
    argument_parser(__doc__).parse_args()
    record = {spec: round(microseconds(spec), 2) for spec in SPECS}
    save_record("decision", record)
    for spec, value in record.items():
        print(f"{spec:40s} {value:6.2f} us")


if __name__ == "__main__":
    main()
