"""Three plans of solve-policy --plan, each checked by simulation of the fleet.

A plan's means are exact, and its percentile is simulated for one device at its share of the arrival rate. The check
draws other arrivals for the whole fleet, and routes them at random, as the plan assumes, or to the device with the
least expected response time, as the server does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.support.harness import argument_parser, markdown_table, run_json, save_record, save_table

PLANS: Mapping[str, tuple[str, ...]] = {
    "fewest devices": ("googlenet-tesla-p4", "--arrival-rate", "5000", "--slo-p95-ms", "10"),
    "least power": ("googlenet-h200-prior", "--arrival-rate", "250000", "--slo-p95-ms", "6"),
    "least money": (
        *("googlenet-tesla-p4", "--arrival-rate", "20000", "--slo-mean-ms", "8"),
        *("--device-price", "0.004", "--power-price", "0.30", "--idle-power-w", "7"),
    ),
}
_ROUTINGS = ("random", "least expected")


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    head = ["plan", "devices", "load", "cost"]
    for quantity in ("mean ms", "p95 ms", "W"):
        head += [f"{quantity}, planned", *_ROUTINGS]
    return markdown_table(head, (list(_cells(name, answer)) for name, answer in record.items())) + "\n"


def _cells(name: str, answer: Mapping[str, Any]) -> Iterator[object]:
    best = next(row for row in answer["candidates"] if row["devices"] == answer["devices"])
    runs = [answer["simulated"][routing] for routing in _ROUTINGS]
    yield from (name, answer["devices"], f"{best['load']:.3f}", f"{answer['cost']:.5g} {answer['cost_unit']}")
    for planned, key in (("mean_response_time_ms", "mean"), ("p95_ms", "p95")):
        yield f"{best[planned]:.3f}"
        yield from (f"{run[f'{key}_ms']:.3f} ± {run['standard_error_ms'][key]:.3f}" for run in runs)
    yield from (f"{row['mean_power_w']:.2f}" for row in (best, *runs))


def main() -> None:
    """Plan, print and record."""
    argument_parser(__doc__).parse_args()
    record = {name: run_json("solve-policy", *flags, "--plan") for name, flags in PLANS.items()}
    save_record("planning", {name: {"flags": list(PLANS[name]), **answer} for name, answer in record.items()})
    save_table("planning", "Plans, checked by simulation of the fleet", table(record))


if __name__ == "__main__":
    main()
