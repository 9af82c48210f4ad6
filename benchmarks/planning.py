"""Three plans, each checked by simulation of the fleet: as theory splits the arrivals, and as a server sends them.

What is told of a plan is the solver's: exact means, and a percentile by simulation of one device at its share of the
rate. The check draws other arrivals for the whole fleet.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.serving import RECORDS, run_json, save

NAME = "planning"
PLANS: Mapping[str, tuple[str, ...]] = {
    "fewest devices": ("googlenet-tesla-p4", "--arrival-rate", "5000", "--slo-p95-ms", "10"),
    "least power": ("googlenet-h200-prior", "--arrival-rate", "250000", "--slo-p95-ms", "6"),
    "least money": (
        *("googlenet-tesla-p4", "--arrival-rate", "20000", "--slo-mean-ms", "8"),
        *("--device-price", "0.004", "--power-price", "0.30", "--idle-power-w", "7"),
    ),
}


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "| plan | devices | load | cost | mean ms, planned | random | least expected | p95 ms, planned | random "
        "| least expected | W, planned | random | least expected |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, answer in record.items():
        best = next(row for row in answer["candidates"] if row["devices"] == answer["devices"])
        runs = [answer["simulated"][routing] for routing in ("random", "least expected")]
        cells = [name, answer["devices"], f"{best['load']:.3f}", f"{answer['cost']:.5g} {answer['cost_unit']}"]
        for planned, key in (("mean_response_time_ms", "mean"), ("p95_ms", "p95")):
            simulated = (f"{run[f'{key}_ms']:.3f} ± {run['standard_error_ms'][key]:.3f}" for run in runs)
            cells += [f"{best[planned]:.3f}", *simulated]
        cells += [f"{row['mean_power_w']:.2f}" for row in (best, *runs)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plan, print and record."""
    record = {name: run_json("solve-policy", *flags, "--plan") for name, flags in PLANS.items()}
    save(NAME, {name: {"flags": list(PLANS[name]), **answer} for name, answer in record.items()})
    (RECORDS / f"{NAME}.md").write_text(f"# Plans, checked by simulation of the fleet\n\n{table(record)}")
    print(table(record))


if __name__ == "__main__":
    main()
