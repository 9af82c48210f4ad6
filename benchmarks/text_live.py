"""Texts live on the CPU, each number beside its simulation with the profile that was measured just before.

python -m benchmarks.text_live [generator | classifier] [--trace FILE] [--quick]: both without a word, about ten minutes
on two cores, and two of them --quick; draw: only the picture and the tables, from the record.

The models are the small ones with random weights; lengths are those of Azure's trace of conversations (2023), scaled
down, in the order of the file. A generator is made to generate so many tokens as the trace says, a classifier gets a
prompt of so many. Throughput is of requests that come half as fast again as any batches could serve them. The first
eighth of a run does not count: live bins learn their edges, simulated ones know them. Of throughput neither do the last
64 answers: bins that wait for full batches leave some behind, who are served greedily when nothing happens any more.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import text_figures
from benchmarks.serving import RECORDS, Server, command_line, load, run_json, save, serving
from loadgen.sizes import whole_tokens
from loadgen.text_requests import PROMPT
from policies.profile import Profile, load_profile
from policies.queue.arrivals import trace_column

NAME = "text_live"
TRACE = Path(__file__).parents[2] / "shared" / "data" / "azure-llm-2023-conv.csv"
BATCH, BINS = 8, (2, 4, 8)
LEARNING, LEFT_BEHIND = 8, 64  # one in so many does not count at the beginning, and so many at the end
OVERLOAD = 1.5  # arrival rate over the limit of many bins
STILL = 2.0  # s without a batch: longer than any batch takes
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
class Plan:
    """How much is measured.

    Attributes:
        rounds: of overloaded runs, every policy in each.
        generator: requests of such a run.
        classifier: requests of such a run.
        moderate: requests of a run below full load.
        loads: arrival rates over what one bin can serve.
    """

    rounds: int
    generator: int
    classifier: int
    moderate: int
    loads: tuple[float, ...]


FULL = Plan(2, 900, 900, 240, (0.4, 0.7, 1.0, 1.3))
QUICK = Plan(1, 160, 160, 24, (0.7,))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run, as a trace on disk.

    Attributes:
        path: of the trace.
        instants: of arrival, s, from 0; all different.
        lengths: tokens, before they are scaled.
        scale: of the lengths.
        prompt: tokens that each has beside.
    """

    path: Path
    instants: _Floats
    lengths: _Floats
    scale: float
    prompt: int = 0

    def write(self) -> "Workload":
        """Put it on disk."""
        with self.path.open("w", newline="") as lines:
            rows = csv.writer(lines)
            rows.writerow(("TIMESTAMP", "Length"))
            rows.writerows(zip(self.instants.tolist(), self.lengths.tolist(), strict=True))
        return self

    @property
    def tokens(self) -> _Floats:
        """The lengths as they are sent."""
        return whole_tokens(self.scale * self.lengths)

    @property
    def arguments(self) -> tuple[str, ...]:
        """For generate-load."""
        return ("--arrivals", f"trace:{self.path}", "--sizes", "trace:Length", "--size-scale", f"{self.scale!r}")


@dataclass(frozen=True, slots=True)
class Bench:
    """A server of one model, and the profile that was measured of it.

    Attributes:
        model: its name.
        server: which runs.
        profile: its file.
    """

    model: str
    server: Server
    profile: Path

    def use(self, spec: str) -> None:
        """Let the server decide by this policy from now on."""
        url, body = f"{self.server.url}/admin/models/{self.model}/policy", json.dumps({"policy": spec}).encode()
        urllib.request.urlopen(urllib.request.Request(url, body, method="PUT"), timeout=30).close()

    def tokens(self) -> tuple[float, float]:
        """Computed so far: needed, and padding."""
        found = self.server.metric("batchwright_tokens_total")
        uses = {use: sum(v for labels, v in found.items() if f'"{use}"' in labels) for use in ("needed", "padding")}
        return uses["needed"], uses["padding"]

    def live(self, spec: str, work: Workload) -> tuple[list[dict[str, Any]], float]:
        """What became of each request, and padding over needed tokens."""
        before = self.tokens()
        self.use(spec)
        output = work.path.with_suffix(".live.jsonl")
        line = [*command_line("generate-load"), self.server.url, *work.arguments, "--output", str(output), "--json"]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as sending:
            complaint = self._served_to_the_last(sending)
        if sending.returncode:
            raise RuntimeError(f"{spec}: {complaint}")
        needed, padding = (after - earlier for after, earlier in zip(self.tokens(), before, strict=True))
        return answered(output), padding / needed

    def _served_to_the_last(self, sending: "subprocess.Popen[str]") -> str:
        """Wait for the client, and serve who is left behind; what it complained of."""
        seen, since = -1.0, time.monotonic()
        while True:
            try:
                return sending.communicate(timeout=0.5)[1]
            except subprocess.TimeoutExpired:
                batches = sum(self.server.metric("batchwright_batches_total").values())
            waiting = sum(self.server.metric("batchwright_queue_length").values())
            if batches != seen:
                seen, since = batches, time.monotonic()
            elif waiting and time.monotonic() - since > STILL:
                self.use("greedy")

    def simulated(self, spec: str, work: Workload) -> tuple[list[dict[str, Any]], float]:
        """The same on a virtual clock."""
        output = work.path.with_suffix(".simulated.jsonl")
        told = ("--simulate", str(self.profile), "--policy", spec, "--output", str(output))
        run_json("generate-load", *told, *work.arguments)
        records = answered(output)
        return records, 0.0 if spec == JOINING else padding_of(records, work)


def answered(path: Path) -> list[dict[str, Any]]:
    """The records of a run in which everybody was answered."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    failed = sorted({str(record["status"]) for record in records} - {"200"})
    if failed:
        raise RuntimeError(f"some requests of {path.name} ended with {', '.join(failed)}")
    return records


def padding_of(records: Sequence[dict[str, Any]], work: Workload) -> float:
    """Padding over needed tokens of a simulated run, whose batches end at one instant each."""
    tokens = dict(zip(work.instants.tolist(), work.tokens.tolist(), strict=True))
    batches: dict[float, list[float]] = {}
    for record in records:
        batches.setdefault(record["finished_s"], []).append(tokens[record["scheduled_s"]])
    needed = sum(tokens.values())
    padding = sum(len(batch) * max(batch) for batch in batches.values()) - needed
    return padding / (needed + work.prompt * len(tokens))


def throughput(records: Sequence[dict[str, Any]], whole_run: bool = False) -> float:
    """Answers a second, 1/s, without the first and the last ones; or of the whole run."""
    ends: list[float] = sorted(record["finished_s"] for record in records)
    if whole_run:
        return len(ends) / ends[-1]
    first, last = len(ends) // LEARNING, len(ends) - LEFT_BEHIND
    return (last - first) / (ends[last - 1] - ends[first - 1])


def mean_ms(records: Sequence[dict[str, Any]]) -> float:
    """Mean response time, ms, without the first ones."""
    ordered = sorted(records, key=lambda record: float(record["scheduled_s"]))
    return fmean(record["response_ms"] for record in ordered[len(ordered) // LEARNING :])


# overloaded: throughput and padding


def overloaded(bench: Bench, works: dict[str, Workload], rounds: int) -> dict[str, dict[str, Any]]:
    """Throughput and padding by policy; `works` has the workload of each, and "sorted" is one bin in order of length.

    The gain is over one bin of the same round, so that a machine that changes its speed changes it for both.
    """
    cells: dict[str, dict[str, Any]] = {name: {"live_hz": [], "live_padding": [], "gain_live": []} for name in works}
    for round_ in range(rounds):
        for name, work in works.items():
            in_order, cell = name == "sorted", cells[name]  # whose lengths change, so that all of it counts
            spec = ONE_BIN if in_order else name
            records, padding = bench.live(spec, work)
            cell["live_hz"].append(round(throughput(records, in_order), 3))
            cell["gain_live"].append(round(cell["live_hz"][-1] / cells[ONE_BIN]["live_hz"][-1], 4))
            cell["live_padding"].append(round(padding, 4))
            if not round_:
                records, padding = bench.simulated(spec, work)
                cell["simulated_hz"] = round(throughput(records, in_order), 3)
                cell["gain_simulated"] = round(cell["simulated_hz"] / cells[ONE_BIN]["simulated_hz"], 4)
                cell["simulated_padding"] = round(padding, 4)
            print(bench.model, name, cell, flush=True)
    return cells


def limit(profile: Profile, work: Workload) -> float:
    """Throughput if every batch were of one length, 1/s."""
    return BATCH / fmean(profile.service_time(BATCH, length) for length in work.tokens.tolist())


def described(profile: Profile, work: Workload) -> dict[str, Any]:
    """What is served, and where."""
    tokens = work.tokens
    told = {"longest_tokens": float(tokens.max()), "mean_tokens": round(float(tokens.mean()), 2)}
    return {"device": profile.device, "requests": len(tokens), **told, "limit_hz": round(limit(profile, work), 3)}


# the two models


def generator(trace: Path, plan: Plan, folder: Path) -> dict[str, Any]:
    """The decoder: throughput by policy, and mean response time by load."""
    lengths = trace_column(str(trace), "GeneratedTokens")[: plan.generator]

    def measure(bench: Bench, profile: Profile) -> dict[str, Any]:
        work = hurried(Workload(folder / "generator.csv", NO_TIME, lengths, 0.12, PROMPT), profile)
        cells = overloaded(bench, dict.fromkeys((ONE_BIN, *BINNED, JOINING), work), plan.rounds)
        rates = [load_ * cells[ONE_BIN]["simulated_hz"] for load_ in plan.loads]
        return described(profile, work) | {
            "cells": cells,
            "loads": plan.loads,
            "rates_hz": [round(rate, 3) for rate in rates],
            "moderate_requests": plan.moderate,
            "responses": [_responses(bench, poisson(work, rate, plan.moderate)) for rate in rates],
        }

    return served("text-generator", folder, measure)


def hurried(work: Workload, profile: Profile) -> Workload:
    """The same requests, faster than they can be served, at equal distances."""
    gap = 1.0 / (OVERLOAD * limit(profile, work))
    return replace(work, instants=gap * np.arange(len(work.lengths), dtype=np.float64)).write()


def poisson(work: Workload, rate: float, requests: int) -> Workload:
    """The first ones of another workload, arriving at this rate, 1/s."""
    instants = np.cumsum(np.random.default_rng(11).exponential(1.0 / rate, requests))
    path, lengths = work.path.with_name(f"at-{rate:.3f}.csv"), work.lengths[:requests]
    return replace(work, path=path, instants=instants - instants[0], lengths=lengths).write()


def _responses(bench: Bench, work: Workload) -> dict[str, dict[str, float]]:
    found = {}
    for spec in RESPONDING:
        (live, _), (simulated, _) = bench.live(spec, work), bench.simulated(spec, work)
        found[spec] = {"live_ms": round(mean_ms(live), 2), "simulated_ms": round(mean_ms(simulated), 2)}
        print(bench.model, spec, found[spec], flush=True)
    return found


def classifier(trace: Path, plan: Plan, folder: Path) -> dict[str, Any]:
    """The encoder: padding and throughput, in bins and in order of length."""
    lengths = trace_column(str(trace), "ContextTokens")[: plan.classifier]

    def measure(bench: Bench, profile: Profile) -> dict[str, Any]:
        work = hurried(Workload(folder / "classifier.csv", NO_TIME, lengths, 0.1), profile)
        longest_first = replace(work, path=folder / "sorted.csv", lengths=np.sort(lengths)[::-1]).write()
        works = dict.fromkeys((ONE_BIN, *BINNED), work) | {"sorted": longest_first}
        return described(profile, work) | {"cells": overloaded(bench, works, plan.rounds)}

    return served("text-classifier", folder, measure)


def served(model: str, folder: Path, measure: Callable[[Bench, Profile], dict[str, Any]]) -> dict[str, Any]:
    """Profile a model, then measure it behind a server that has this profile."""
    path = folder / f"{model}.json"
    fixed = ("--weights", "random", "--device", "cpu", "--max-batch-size", str(BATCH))
    run_json("profile-model", model, *fixed, "--quick", "--energy-time", "0", "--output", str(path))
    rest = ("--profile", str(path), "--policy", "greedy", "--queue-capacity", "4096", "--log-level", "warning")
    with serving(model, *fixed, *rest) as server:
        return measure(Bench(model, server, path), load_profile(str(path)))


# telling


def short(spec: str) -> str:
    """A policy's name in tables and pictures."""
    return re.sub(rf",(batch_size={BATCH}|max_wait_ms=inf)", "", spec)


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    return "\n\n".join(_throughputs(record[part]) for part in PARTS if part in record) + (
        f"\n\n{_response_table(record['generator'])}\n" if "generator" in record else "\n"
    )


def _throughputs(part: dict[str, Any]) -> str:
    lines = [
        f"{part['requests']} requests of {part['mean_tokens']:g} tokens in the mean and {part['longest_tokens']:g} at "
        f"most, on {part['device']}; by the profile at most {part['limit_hz']:.1f} a second.",
        "",
        "| policy | requests/s, live | simulated | gain, live | simulated | padding, live | simulated |",
        "|---|---|---:|---|---:|---|---:|",
    ]
    for spec, cell in part["cells"].items():
        lines.append(
            f"| {short(spec)} | {_each(cell['live_hz'], '.1f')} | {cell['simulated_hz']:.1f} "
            f"| {_each(cell['gain_live'], '.2f')} | {cell['gain_simulated']:.2f} "
            f"| {_each(cell['live_padding'], '.0%')} | {cell['simulated_padding']:.0%} |"
        )
    return "\n".join(lines)


def _each(values: Sequence[float], style: str) -> str:
    return ", ".join(format(value, style) for value in values)


def _response_table(part: dict[str, Any]) -> str:
    heads = [f"load {load_:g} ({rate:.1f}/s)" for load_, rate in zip(part["loads"], part["rates_hz"], strict=True)]
    lines = [
        f"Mean response time, ms, of {part['moderate_requests']} requests: live (simulated). Load is over one bin's.",
        "",
        f"| policy | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(heads)}",
    ]
    for spec in part["responses"][0]:
        cells = [f"{found[spec]['live_ms']:.0f} ({found[spec]['simulated_ms']:.0f})" for found in part["responses"]]
        lines.append(f"| {short(spec)} | {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[Path, Plan, Path], dict[str, Any]]] = {"generator": generator, "classifier": classifier}


def main() -> None:
    """Measure what is asked for, print, draw and record; a quick run keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "draw"], help="generator and classifier without one")
    parser.add_argument("--trace", type=Path, default=TRACE, help="azure-llm-2023-conv.csv")
    parser.add_argument("--quick", action="store_true", help="few requests, and nothing is kept")
    asked = parser.parse_args()
    parts = [part for part in PARTS if asked.part in (None, part)]
    record = {} if asked.quick else load(NAME)
    if parts and not asked.trace.is_file():
        sys.exit(f"nothing to measure: no trace at {asked.trace}; give --trace azure-llm-2023-conv.csv (Azure's)")
    with TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        for part in parts:
            record[part] = PARTS[part](asked.trace, QUICK if asked.quick else FULL, Path(name))
            if not asked.quick:
                save(NAME, record)
    print(table(record))
    if not asked.quick:
        (RECORDS / f"{NAME}.md").write_text(f"# Texts live and simulated\n\n{table(record)}")
        text_figures.draw(record, short)


if __name__ == "__main__":
    main()
