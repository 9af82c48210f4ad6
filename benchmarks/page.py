"""Write docs/benchmarks.md from the records: `python -m benchmarks.page`.

Every number on that page stands in a record under benchmarks/records/, which one of the scripts wrote. A test renders
the page again and compares.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.serving import RECORDS, load

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_HEAD = """# Benchmarks

This page is written from the [records](../benchmarks/records) by `python -m benchmarks.page`. Each section names the
script that measured it. All of them ran on a machine of two shared cores without a GPU, on an emulated Tesla P4 that is
ten times slower than the real one (`googlenet-tesla-p4-x10`), unless the section says otherwise. Such a machine is
noisy: compare what was measured side by side in one run. A record is of the code of its commit:
`git log -- benchmarks/records/NAME.json`.
"""


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        title: its heading.
        script: the module that measures it.
        about: what is measured, in a sentence or two.
        render: makes the section's text, mostly a table.
    """

    title: str
    script: str
    about: str
    render: Callable[[], str]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def recorded(name: str) -> Callable[[], str]:
    """Return what makes the text of a record that is a page already, without its heading."""

    def text() -> str:
        lines = (RECORDS / f"{name}.md").read_text().strip().splitlines()
        return "\n".join(lines[1:] if lines[0].startswith("# ") else lines).strip()

    return text


def _ceiling() -> str:
    record = load("ceiling")
    names = {"ours": "Batchwright", "without a log": "without a line of log for each batch", "bare": "bare FastAPI"}
    base = median(run["requests_per_s"] for run in record["bare"])
    rates = {name: median(run["requests_per_s"] for run in record[key]) for key, name in names.items()}
    rows = [(name, f"{rate:.0f}", f"{rate / base:.2f}") for name, rate in rates.items()]
    return table(("server", "calls/s, median of three", "of bare FastAPI"), rows)


def _closed_loop() -> str:
    rows = []
    for name, run in load("closed_loop").items():
        policy, _, loads = name.partition(", ")
        noticed = run["noticed_after_s"]
        told = "" if noticed is None else f"{noticed:.1f}"
        rows.append((loads.removeprefix("load "), policy, run["cost"], run["mean_ms"], run["mean_power_w"], told))
    return table(("load", "policy", "cost", "mean response time, ms", "mean power, W", "adapted after, s"), rows)


def _objective() -> str:
    record = load("objective")
    ours, greedy = (record[name]["steps"] for name in ("smdp:slo_p95_ms=120", "greedy"))
    rows = [
        (one["load"], one["p95_ms"], other["p95_ms"], one["energy_mj"], other["energy_mj"])
        for one, other in zip(ours, greedy, strict=True)
    ]
    return table(("load", "p95, ms", "greedy", "energy per request, mJ", "greedy"), rows)


def _soak() -> str:
    record = load("soak")
    answered, memory = record["counted_by_the_server"], record["rss_mb"]
    rows = [
        ("minutes", record["minutes"]),
        ("calls", record["calls"]),
        *((f"requests counted as {outcome}", count) for outcome, count in answered.items()),
        ("policies swapped", sum(record["swaps"].values())),
        ("faults ordered", sum(record["faults"].values())),
        ("memory in the first calm half minute after minute 2, MB", memory["early"]),
        ("memory in the last calm half minute, MB", memory["end"]),
        ("memory when all was over, MB", memory["idle after"]),
        ("wrong answers, and contradictions in the counts", record["wrong_in_all"]),
    ]
    return table(("", ""), rows)


def _fuzz() -> str:
    record = load("fuzz")
    rows = [
        ("hostile inputs of the parsers", record["parser"]["cases"], record["parser"]["failures"]),
        ("calls drawn from the OpenAPI document", record["routes"]["calls"], record["routes"]["failures"]),
    ]
    return table(("", "number", "failures"), rows)


def _decision() -> str:
    return table(("policy", "us"), load("decision").items())


def _mutations() -> str:
    rows = ((one["mutation"], "<br>".join(f"`{name}`" for name in one["caught_by"])) for one in load("mutations"))
    return table(("safeguard that is removed", "test that fails"), rows)


SECTIONS = (
    Section(
        "Measured against simulated",
        "live_against_simulated",
        "One minute of Poisson arrivals over HTTP with 150,528-byte bodies, and the same arrivals in the simulator. "
        "The difference is what HTTP and the interpreter cost; `bare` is the shortest batcher that FastAPI allows.",
        recorded("live_against_simulated"),
    ),
    Section(
        "Gateway throughput",
        "ceiling",
        "wrk on 32 connections sends pictures of 150,528 bytes to a device that takes a microsecond for each batch.",
        _ceiling,
    ),
    Section(
        "A decision",
        "decision",
        "Time to decide and to take the batch out of a queue with 1,000 waiting requests.",
        _decision,
    ),
    Section(
        "Adapting to a device that changes",
        "closed_loop",
        "The device becomes half as slow again, and takes half as much energy again, while it serves under "
        "`smdp:w2=16`. Cost is the mean response time in ms plus 16 times the mean power in W over the 40 s after it "
        "settled.",
        _closed_loop,
    ),
    Section(
        "Keeping a percentile",
        "objective",
        "`smdp:slo_p95_ms=120` while the load rises in steps of 30 s. No policy keeps the bound at the last step.",
        _objective,
    ),
    Section(
        "Overload",
        "overload",
        "More requests than the device can serve, from clients that wait for 1 s. Goodput counts answers in time. The "
        "rows of other servers are of an earlier run.",
        recorded("overload"),
    ),
    Section(
        "Attacks on the HTTP edge",
        "attacks",
        "Attacks on a server with a memory budget of 64 MiB, beside honest clients at load 0.5 and a liveness probe "
        "every 50 ms.",
        recorded("attacks"),
    ),
    Section(
        "Soak",
        "soak",
        "Bursts, corrupt pictures, clients that leave, time-outs, policy swaps, and a fault of the device every 30 s.",
        _soak,
    ),
    Section("Hostile input", "fuzz", "Bodies, headers and pictures that are wrong in every way, at random.", _fuzz),
    Section(
        "Mutations",
        "mutations",
        "Each safeguard is removed from a copy of the code; a test has to fail.",
        _mutations,
    ),
    Section("Two devices", "fleet", "One server with two emulated devices, measured and simulated.", recorded("fleet")),
    Section(
        "Planning",
        "planning",
        "Fleets as `solve-policy --plan` sizes them, checked by simulation.",
        recorded("planning"),
    ),
    Section("Ray Serve", "ray_serve", "Two replicas on emulated devices behind Ray's proxies.", recorded("ray_serve")),
    Section("Texts", "text_live", "Text models on the CPU under multi-bin policies.", recorded("text_live")),
    Section(
        "LazyBatching of texts",
        "lazy_texts",
        "The small translator on the CPU, iteration by iteration.",
        recorded("lazy_texts"),
    ),
)


def render() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *map(_text, SECTIONS)])


def _text(section: Section) -> str:
    about = f"{section.about} (`python -m benchmarks.{section.script}`)"
    return f"## {section.title}\n\n{about}\n\n{section.render()}\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(render())


if __name__ == "__main__":
    main()
