"""Text models live on the CPU under multi-bin policies, beside simulations with a profile measured just before.

About ten minutes on two cores, two minutes with --quick. The models are the small ones with random weights; lengths are
those of Azure's trace of conversations (2023), scaled down, in the order of the file: the number of generated tokens of
the generator, the number of prompt tokens of the classifier. Throughput is measured with an arrival rate of 1.5 times
the limit of many bins. The first eighth of a run does not count: live bins learn their edges, simulated ones know them.
Nor do the last 64 answers count for throughput: bins that wait for full batches keep a rest, which is served by greedy
at the end.
"""

import csv
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support import harness, text_figures
from loadgen.requests.texts import PROMPT
from loadgen.sizes import whole_tokens
from policies.profile import Profile, load_profile
from policies.queue.arrivals import trace_column

NAME = "text_live"
BATCH, BINS = 8, (2, 4, 8)
LEARNING, LEFT_BEHIND = 8, 64  # 1/8 of the requests do not count at the beginning, and 64 at the end
OVERLOAD = 1.5  # arrival rate over the limit of many bins
IDLE = 2.0  # s without a launch, longer than any batch takes
ONE_BIN, JOINING = f"static:{BATCH},max_wait_ms=inf", f"joining:{BATCH}"
BINNED = tuple(f"multi-bin:{bins},batch_size={BATCH},max_wait_ms=inf" for bins in BINS)
RESPONDING = (
    "greedy",
    f"static:{BATCH}",
    f"multi-bin:4,batch_size={BATCH}",
    f"multi-bin:4,batch_size={BATCH},inner=greedy",
    JOINING,
)
_Floats = NDArray[np.float64]
NO_TIME: _Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class RunSizes:
    """How much is measured.

    Attributes:
        rounds: number of overloaded runs of every policy.
        generator: requests of an overloaded run of the generator.
        classifier: requests of an overloaded run of the classifier.
        moderate: requests of a run below full load.
        loads: arrival rates over the throughput of one bin.
    """

    rounds: int
    generator: int
    classifier: int
    moderate: int
    loads: tuple[float, ...]


FULL = RunSizes(2, 900, 900, 240, (0.4, 0.7, 1.0, 1.3))
QUICK = RunSizes(1, 160, 160, 24, (0.7,))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run, and the trace file from which generate-load replays them.

    Attributes:
        path: the trace file.
        instants: arrival times, s, from 0; all different.
        lengths: tokens, before scaling.
        scale: factor on the lengths.
        prompt: prompt tokens of each request, not part of its length.
    """

    path: Path
    instants: _Floats
    lengths: _Floats
    scale: float
    prompt: int = 0

    def write(self) -> "Workload":
        """Write the trace file."""
        with self.path.open("w", newline="") as lines:
            rows = csv.writer(lines)
            rows.writerow(("TIMESTAMP", "Length"))
            rows.writerows(zip(self.instants.tolist(), self.lengths.tolist(), strict=True))
        return self

    @property
    def tokens(self) -> _Floats:
        """The scaled lengths."""
        return whole_tokens(self.scale * self.lengths)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of generate-load that replay the trace."""
        return ("--arrivals", f"trace:{self.path}", "--sizes", "trace:Length", "--size-scale", f"{self.scale!r}")


@dataclass(frozen=True, slots=True)
class TextServer:
    """A running server of one text model, and its measured profile.

    Attributes:
        model: the model's name.
        server: the process.
        profile: file of the profile.
    """

    model: str
    server: harness.Server
    profile: Path

    def set_policy(self, spec: str) -> None:
        """Swap the model's policy."""
        self.server.set_policy(self.model, spec)

    def tokens(self) -> tuple[float, float]:
        """Tokens computed so far: needed, and padding."""
        uses = self.server.by_label("batchwright_tokens_total", "use")
        return uses.get("needed", 0.0), uses.get("padding", 0.0)

    def live(self, spec: str, work: Workload) -> tuple[list[dict[str, Any]], float]:
        """The records of a run under a policy, and its padding over needed tokens."""
        before = self.tokens()
        self.set_policy(spec)
        output = work.path.with_suffix(".live.jsonl")
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with harness.start_load(self.server.url, *work.arguments, "--output", str(output), **pipes) as load:
            errors = self._finish(load)
        if load.returncode:
            raise RuntimeError(f"{spec}: {errors}")
        needed, padding = (after - earlier for after, earlier in zip(self.tokens(), before, strict=True))
        return answered(output), padding / needed

    def _finish(self, load: "subprocess.Popen[str]") -> str:
        """Wait for generate-load; switch to greedy when only incomplete batches are left; return stderr."""
        seen, since = -1.0, time.monotonic()
        while True:
            try:
                return load.communicate(timeout=0.5)[1]
            except subprocess.TimeoutExpired:
                batches = self.server.total("batchwright_batches_total")
            waiting = self.server.total("batchwright_queue_length")
            if batches != seen:
                seen, since = batches, time.monotonic()
            elif waiting and time.monotonic() - since > IDLE:
                self.set_policy("greedy")

    def simulated(self, spec: str, work: Workload) -> tuple[list[dict[str, Any]], float]:
        """The same as `live`, on a virtual clock."""
        output = work.path.with_suffix(".simulated.jsonl")
        flags = ("--simulate", str(self.profile), "--policy", spec, "--output", str(output))
        harness.run_json("generate-load", *flags, *work.arguments)
        records = answered(output)
        return records, 0.0 if spec == JOINING else padding_of(records, work)


def answered(path: Path) -> list[dict[str, Any]]:
    """The records of a run, all of them answered.

    Raises:
        RuntimeError: a request failed.
    """
    records = harness.read_jsonl(path)
    failed = sorted({str(record["status"]) for record in records} - {"200"})
    if failed:
        raise RuntimeError(f"some requests of {path.name} ended with {', '.join(failed)}")
    return records


def padding_of(records: Sequence[dict[str, Any]], work: Workload) -> float:
    """Padding over needed tokens of a simulated run; requests that end at the same instant are one batch."""
    tokens = dict(zip(work.instants.tolist(), work.tokens.tolist(), strict=True))
    batches: dict[float, list[float]] = {}
    for record in records:
        batches.setdefault(record["finished_s"], []).append(tokens[record["scheduled_s"]])
    needed = sum(tokens.values())
    padding = sum(len(batch) * max(batch) for batch in batches.values()) - needed
    return padding / (needed + work.prompt * len(tokens))


def throughput(records: Sequence[dict[str, Any]], whole_run: bool = False) -> float:
    """Answers per second without the first and the last ones, or of the whole run, 1/s."""
    ends: list[float] = sorted(record["finished_s"] for record in records)
    if whole_run:
        return len(ends) / ends[-1]
    first, last = len(ends) // LEARNING, len(ends) - LEFT_BEHIND
    return (last - first) / (ends[last - 1] - ends[first - 1])


def mean_ms(records: Sequence[dict[str, Any]]) -> float:
    """Mean response time, ms, without the first ones."""
    ordered = sorted(records, key=lambda record: float(record["scheduled_s"]))
    return fmean(record["response_ms"] for record in ordered[len(ordered) // LEARNING :])


def overloaded(target: TextServer, works: dict[str, Workload], rounds: int) -> dict[str, dict[str, Any]]:
    """Throughput and padding by policy.

    The gain is over one bin in the same round, so that a change of the machine's speed affects both.

    Args:
        target: the server.
        works: the workload of each policy; "sorted" is one bin with the requests in order of length.
        rounds: number of live runs of each.
    """
    cells: dict[str, dict[str, Any]] = {name: {"live_hz": [], "live_padding": [], "gain_live": []} for name in works}
    for round_ in range(rounds):
        for name, work in works.items():
            in_order, cell = name == "sorted", cells[name]  # lengths change along a sorted run, so all of it counts
            spec = ONE_BIN if in_order else name
            records, padding = target.live(spec, work)
            cell["live_hz"].append(round(throughput(records, in_order), 3))
            cell["gain_live"].append(round(cell["live_hz"][-1] / cells[ONE_BIN]["live_hz"][-1], 4))
            cell["live_padding"].append(round(padding, 4))
            if not round_:
                records, padding = target.simulated(spec, work)
                cell["simulated_hz"] = round(throughput(records, in_order), 3)
                cell["gain_simulated"] = round(cell["simulated_hz"] / cells[ONE_BIN]["simulated_hz"], 4)
                cell["simulated_padding"] = round(padding, 4)
            print(target.model, name, cell, flush=True)
    return cells


def limit(profile: Profile, work: Workload) -> float:
    """Throughput of batches without padding, 1/s."""
    return BATCH / fmean(profile.service_time(BATCH, length) for length in work.tokens.tolist())


def summary(profile: Profile, work: Workload) -> dict[str, Any]:
    """The device, and the number and lengths of the requests."""
    tokens = work.tokens
    lengths = {"longest_tokens": float(tokens.max()), "mean_tokens": round(float(tokens.mean()), 2)}
    return {"device": profile.device, "requests": len(tokens), **lengths, "limit_hz": round(limit(profile, work), 3)}


def generator(trace: Path, sizes: RunSizes, folder: Path) -> dict[str, Any]:
    """The decoder: throughput by policy, and mean response time by load."""
    lengths = trace_column(str(trace), "GeneratedTokens")[: sizes.generator]

    def measure(target: TextServer, profile: Profile) -> dict[str, Any]:
        work = at_overload(Workload(folder / "generator.csv", NO_TIME, lengths, 0.12, PROMPT), profile)
        cells = overloaded(target, dict.fromkeys((ONE_BIN, *BINNED, JOINING), work), sizes.rounds)
        rates = [load * cells[ONE_BIN]["simulated_hz"] for load in sizes.loads]
        return summary(profile, work) | {
            "cells": cells,
            "loads": sizes.loads,
            "rates_hz": [round(rate, 3) for rate in rates],
            "moderate_requests": sizes.moderate,
            "responses": [_responses(target, poisson(work, rate, sizes.moderate)) for rate in rates],
        }

    return served("text-generator", folder, measure)


def at_overload(work: Workload, profile: Profile) -> Workload:
    """The same requests at constant intervals, faster than the limit of many bins."""
    gap = 1.0 / (OVERLOAD * limit(profile, work))
    return replace(work, instants=gap * np.arange(len(work.lengths), dtype=np.float64)).write()


def poisson(work: Workload, rate: float, requests: int) -> Workload:
    """The first requests of a workload with Poisson arrivals at this rate, 1/s."""
    instants = np.cumsum(np.random.default_rng(11).exponential(1.0 / rate, requests))
    path, lengths = work.path.with_name(f"at-{rate:.3f}.csv"), work.lengths[:requests]
    return replace(work, path=path, instants=instants - instants[0], lengths=lengths).write()


def _responses(target: TextServer, work: Workload) -> dict[str, dict[str, float]]:
    found = {}
    for spec in RESPONDING:
        (live, _), (simulated, _) = target.live(spec, work), target.simulated(spec, work)
        found[spec] = {"live_ms": round(mean_ms(live), 2), "simulated_ms": round(mean_ms(simulated), 2)}
        print(target.model, spec, found[spec], flush=True)
    return found


def classifier(trace: Path, sizes: RunSizes, folder: Path) -> dict[str, Any]:
    """The encoder: padding and throughput, in bins and in order of length."""
    lengths = trace_column(str(trace), "ContextTokens")[: sizes.classifier]

    def measure(target: TextServer, profile: Profile) -> dict[str, Any]:
        work = at_overload(Workload(folder / "classifier.csv", NO_TIME, lengths, 0.1), profile)
        longest_first = replace(work, path=folder / "sorted.csv", lengths=np.sort(lengths)[::-1]).write()
        works = dict.fromkeys((ONE_BIN, *BINNED), work) | {"sorted": longest_first}
        return summary(profile, work) | {"cells": overloaded(target, works, sizes.rounds)}

    return served("text-classifier", folder, measure)


def served(model: str, folder: Path, measure: Callable[[TextServer, Profile], dict[str, Any]]) -> dict[str, Any]:
    """Profile a model, serve it with this profile, and return what `measure` returns."""
    path = folder / f"{model}.json"
    fixed = ("--weights", "random", "--device", "cpu", "--max-batch-size", str(BATCH))
    harness.measure_profile(model, path, *fixed)
    rest = ("--profile", str(path), "--policy", "greedy", "--queue-capacity", "4096", "--log-level", "warning")
    with harness.serving(model, *fixed, *rest) as server:
        return measure(TextServer(model, server, path), load_profile(str(path)))


def short_name(spec: str) -> str:
    """A policy's name in tables and figures."""
    return re.sub(rf",(batch_size={BATCH}|max_wait_ms=inf)", "", spec)


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    return "\n\n".join(_throughputs(record[part]) for part in PARTS if part in record) + (
        f"\n\n{_response_table(record['generator'])}\n" if "generator" in record else "\n"
    )


def _throughputs(part: dict[str, Any]) -> str:
    caption = (
        f"{part['requests']} requests of {part['mean_tokens']:g} tokens in the mean and {part['longest_tokens']:g} at "
        f"most, on {part['device']}; by the profile at most {part['limit_hz']:.1f} a second."
    )
    head = ("policy", "requests/s, live", "simulated", "gain, live", "simulated", "padding, live", "simulated")
    rows = ((short_name(spec), *_throughput_cells(cell)) for spec, cell in part["cells"].items())
    return f"{caption}\n\n{harness.markdown_table(head, rows, right_aligned=(2, 4, 6))}"


def _throughput_cells(cell: dict[str, Any]) -> Iterator[str]:
    columns = (("live_hz", "simulated_hz", ".1f"), ("gain_live", "gain_simulated", ".2f"))
    for live, simulated, style in (*columns, ("live_padding", "simulated_padding", ".0%")):
        yield ", ".join(format(value, style) for value in cell[live])
        yield format(cell[simulated], style)


def _response_table(part: dict[str, Any]) -> str:
    caption = f"Mean response time, ms, of {part['moderate_requests']} requests: live (simulated). "
    loads = [f"load {load:g} ({rate:.1f}/s)" for load, rate in zip(part["loads"], part["rates_hz"], strict=True)]
    rows = (
        (short_name(spec), *(f"{f[spec]['live_ms']:.0f} ({f[spec]['simulated_ms']:.0f})" for f in part["responses"]))
        for spec in part["responses"][0]
    )
    found = harness.markdown_table(("policy", *loads), rows, right_aligned=range(1, len(loads) + 1))
    return f"{caption}Load is over one bin's.\n\n{found}"


PARTS: dict[str, Callable[[Path, RunSizes, Path], dict[str, Any]]] = {"generator": generator, "classifier": classifier}


def main() -> None:
    """Measure one or both models, print, draw and record; a quick run records nothing."""
    parser = harness.argument_parser(__doc__)
    choices = [*PARTS, "draw"]
    parser.add_argument("part", nargs="?", choices=choices, help="draw: from the record; default: both models")
    harness.add_trace_argument(parser)
    parser.add_argument("--quick", action="store_true", help="few requests, and no record")
    chosen = parser.parse_args()
    parts = [part for part in PARTS if chosen.part in (None, part)]
    record = {} if chosen.quick else harness.load_record(NAME)
    if parts:
        harness.require_trace(chosen.trace)
    with harness.temporary_cache() as folder:
        for part in parts:
            record[part] = PARTS[part](chosen.trace, QUICK if chosen.quick else FULL, folder)
            if not chosen.quick:
                harness.save_record(NAME, record)
    if chosen.quick:
        print(table(record))
    else:
        harness.save_table(NAME, "Texts live and simulated", table(record))
        text_figures.draw(record, short_name)


if __name__ == "__main__":
    main()
