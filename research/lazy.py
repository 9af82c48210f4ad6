"""LazyBatching in simulation: the paper's comparison, greedy, and catch-up, which preempts only when it pays.

About 12 minutes on one core. The paper's setting: ResNet, 1.1 ms for one input, batches of at most 64, Poisson
arrivals, 20 runs. The paper gives no times of larger batches; ours are l(b) = 0.9 + 0.2 b ms in 10 equal stages. Means
over the runs are given with their quartiles, the paper's error bars.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support import harness
from policies.catalog import choose
from policies.charts.averages import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from policies.planning.simulation import SimulatedDevice, simulate_policy
from policies.profile import Profile
from policies.queue import simulator
from policies.queue.arrivals import Instants, poisson
from policies.queue.batcher import Batcher
from policies.queue.monitor import ForgettingMonitor, NoMonitor, rate_time_constant
from policies.rules.lazy_batching import LazyBatching, Slack
from policies.types import Action, BatchKey, Policy, Request, State
from policies.unrolled import Node, unrolled
from research import FIGURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS, LARGEST = 20, 64
RATES = (16, 500, 1000, 2000)
SLOS_MS = (20, 40, 60, 80, 100)
REQUESTS = 2000  # in each run of the paper's setting
POLICIES: Mapping[str, tuple[str, str, str]] = {  # name: spec, colour, line style
    "Serial": ("serial", GREY, ":"),
    "GraphB(5)": ("timeout:5", SKY, ":"),
    "GraphB(25)": ("timeout:25", SKY, "--"),
    "GraphB(95)": ("timeout:95", SKY, "-."),
    "greedy": ("greedy", BLUE, "-"),
    "SMDP": ("smdp", PURPLE, "--"),
    "lazy": ("lazy:slo_ms={slo}", VERMILLION, "-"),
    "lazy, remaining": ("lazy:slo_ms={slo},slack=remaining", ORANGE, "--"),
    "lazy, Oracle": ("lazy:slo_ms={slo},slack=oracle", ORANGE, ":"),
    "catch-up": ("catch-up:slo_ms={slo}", GREEN, "-"),
}
RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0)  # a/c of l(b) = c + a b
STAGES = (4, 8, 16)
LOADS = (0.05, 0.2, 0.5, 0.7, 0.9)
LAUNCHES = 6_000  # about, in each run of the grid
STUDENT = 2.093  # 97.5 per cent of the t distribution of 19 degrees of freedom
COVERAGES = (0.16, 0.5, 0.7, 0.9, 0.99, 1.0)
TRANSLATED: tuple[Slack, ...] = ("printed", "remaining")
LONGEST = 80  # words
_Runner = Callable[[Instants], simulator.Run]


def timesteps(lengths: Sequence[int], coverage: float) -> int:
    """Return the least number of time steps that covers this share (above 0, up to 1) of the lengths (section IV-C)."""
    return sorted(lengths)[ceil(coverage * len(lengths)) - 1]


def resnet() -> Profile:
    """The paper's ResNet: 1.1 ms for one input."""
    return Profile("resnet", tuple(1e-3 * (0.9 + 0.2 * b) for b in range(1, LARGEST + 1))).in_stages(10)


def arrivals(rate: float, requests: int, seed: int) -> Instants:
    """About this many Poisson arrivals; the same for every policy."""
    return poisson(rate, requests / rate, np.random.default_rng(seed))


def runner(spec: str, profile: Profile) -> _Runner:
    """A function that simulates a policy, which is solved once; each run has a new monitor."""
    chosen = choose(spec, profile)
    return lambda instants: simulate_policy(
        replace(chosen, monitor=ForgettingMonitor(rate_time_constant(profile))), instants
    )


def paper() -> dict[str, Any]:
    """Mean, 99th percentile and throughput by rate; the share of violations by SLO."""
    cells: dict[str, Any] = {}
    for name, (spec, _, _) in POLICIES.items():
        by_rate = {rate: _runs(spec, rate, 100) for rate in RATES}
        cells[name] = {
            "by_rate": {str(rate): _figures(runs) for rate, runs in by_rate.items()},
            "violations": {
                str(rate): [
                    _spread([_late(run, slo) for run in (_runs(spec, rate, slo) if "{" in spec else by_rate[rate])])
                    for slo in SLOS_MS
                ]
                for rate in RATES[2:]
            },
        }
        print(name, {rate: round(cell["mean_ms"][1], 3) for rate, cell in cells[name]["by_rate"].items()}, flush=True)
    return {"seeds": SEEDS, "requests": REQUESTS, "stage_overhead": overhead(resnet()), "slos_ms": SLOS_MS} | {
        "spread": "first quartile, mean, third quartile of the runs",
        "cells": cells,
    }


def overhead(profile: Profile) -> float:
    """The largest sum over i of l_i(b) over l(b) of all batch sizes."""
    return round(max(profile.stage_overhead), 6)


def _runs(spec: str, rate: float, slo: float) -> list[simulator.Run]:
    serve = runner(spec.format(slo=slo), resnet())
    return [serve(arrivals(rate, REQUESTS, seed)) for seed in range(SEEDS)]


def _late(run: simulator.Run, slo: float) -> float:
    return float(np.mean(run.responses > slo / 1e3))


def _figures(runs: Sequence[simulator.Run]) -> dict[str, Any]:
    return {
        "mean_ms": _spread([1e3 * float(run.responses.mean()) for run in runs]),
        "p99_ms": _spread([1e3 * float(np.quantile(run.responses, 0.99)) for run in runs]),
        "throughput_hz": _spread([len(run.responses) / run.elapsed for run in runs]),
        "mean_batch_size": _spread([float(run.batch_sizes.mean()) for run in runs]),
    }


def _spread(values: Sequence[float]) -> list[float]:
    low, high = np.quantile(values, (0.25, 0.75)).tolist()
    return [round(x, 5) for x in (low, float(np.mean(values)), high)]


def paper_tables(record: Mapping[str, Any]) -> str:
    """The record of the paper's setting as Markdown."""
    tables = [f"stage overhead {record['stage_overhead']:g}"]
    for key in ("mean_ms", "p99_ms", "throughput_hz", "mean_batch_size"):
        rows = (
            _row(name, [cell["by_rate"][str(rate)][key] for rate in RATES]) for name, cell in record["cells"].items()
        )
        tables.append(harness.markdown_table((key, *(f"{rate}/s" for rate in RATES)), rows))
    for rate in RATES[2:]:
        rows = (_row(name, _per_cent(cell["violations"][str(rate)])) for name, cell in record["cells"].items())
        tables.append(harness.markdown_table((f"late at {rate}/s, %", *(f"{slo} ms" for slo in SLOS_MS)), rows))
    return "\n\n".join(tables) + "\n"


def _row(name: str, spreads: Sequence[Sequence[float]]) -> list[str]:
    return [name, *(f"{mean:.2f} ({low:.2f}..{high:.2f})" for low, mean, high in spreads)]


def _per_cent(spreads: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[100 * x for x in spread] for spread in spreads]


@dataclass(frozen=True)
class Setting:
    """A cell of the grid: service times, in stages, at a load; `overhead` is a factor on the times of stages."""

    shape: str
    times: tuple[float, ...]
    stages: int
    load: float
    overhead: float = 1.0

    @property
    def profile(self) -> Profile:
        """The profile, with equal stages."""
        by_stage = tuple((self.overhead * t / self.stages,) * self.stages for t in self.times)
        return Profile(self.shape, self.times, stage_service_times=by_stage)


def settings() -> list[Setting]:
    """The grid of c + a b, two shapes that are not affine, and stages with an overhead."""
    sizes = range(1, LARGEST + 1)
    lines = {f"a/c = {ratio:g}": tuple(1e-3 * (1 + ratio * b) for b in sizes) for ratio in RATIOS}
    bent = {
        "flat up to 16, then 1/16 b": tuple(1e-3 * max(1.0, b / 16) for b in sizes),
        "steps of 8": tuple(1e-3 * (1 + 0.8 * ceil(b / 8)) for b in sizes),
    }
    grid = [Setting(name, times, stages, load) for name, times in lines.items() for stages in STAGES for load in LOADS]
    grid += [Setting(name, times, 8, load) for name, times in bent.items() for load in LOADS]
    return grid + [Setting("a/c = 0.3", lines["a/c = 0.3"], 8, load, o) for o in (1.02, 1.05) for load in LOADS]


def compare(setting: Setting) -> dict[str, Any]:
    """Catch-up and LazyBatching against greedy on the same arrivals, in per cent of greedy's mean response time."""
    profile = setting.profile
    rate = setting.load * profile.capacity
    slo = f"{1e5 * profile.service_time(1):g}"  # ms: 100 times the service time of a request alone
    greedy = runner("greedy:max_wait_ms=inf", profile)
    size = float(greedy(arrivals(rate, 5000, SEEDS)).batch_sizes.mean())
    requests = int(np.clip(LAUNCHES * size / setting.stages, 800, 8000))
    runs = [arrivals(rate, requests, seed) for seed in range(SEEDS)]
    base = _means(greedy, runs)
    gain = 100 * (_means(runner(f"catch-up:slo_ms={slo}", profile), runs) - base) / base.mean()
    few = [instants[:2000] for instants in runs[:3]]
    lazy = 100 * (_means(runner(f"lazy:slo_ms={slo}", profile), few).mean() / _means(greedy, few).mean() - 1)
    return {
        "shape": setting.shape,
        "stages": setting.stages,
        "load": setting.load,
        "stage_overhead": overhead(profile),
        "requests": requests,
        "greedy_ms": round(1e3 * float(base.mean()), 4),
        "catch_up_percent": round(float(gain.mean()), 3),
        "half_interval": round(STUDENT * float(gain.std(ddof=1)) / SEEDS**0.5, 3),
        "lazy_percent": round(float(lazy), 2),
    }


def _means(serve: _Runner, runs: Sequence[Instants]) -> NDArray[np.float64]:
    return np.array([serve(instants).responses.mean() for instants in runs])


def grid() -> list[dict[str, Any]]:
    """All cells, each printed when it is measured."""
    cells = []
    for setting in settings():
        cells.append(compare(setting))
        print(" ".join(f"{value}" for value in cells[-1].values()), flush=True)
    return cells


def transformer() -> Profile:
    """2.4 ms for a sentence of the mean length: a fifth in the encoder, the rest in the decoder, one stage a word.

    Reading the weights takes most of a decoder's time: each sentence adds a fiftieth of a batch's constant time.
    """
    word = 1e-3 * 0.8 * 2.4 / float(np.mean(sentences(100_000, 0)))
    shape = [(1 + 0.02 * b) / 1.02 for b in range(1, LARGEST + 1)]
    encoder = Node("static", tuple(0.48e-3 * x for x in shape))
    return unrolled("transformer", [encoder, Node("decoder", tuple(word * x for x in shape))], 0, LONGEST)


def sentences(number: int, seed: int) -> NDArray[np.int64]:
    """Lengths of German sentences, words: log-normal, 16 per cent up to 10 and 90 per cent up to 32 as in figure 11."""
    words = np.random.default_rng([seed, 11]).lognormal(2.811, 0.511, number)
    return np.clip(np.ceil(words), 1, LONGEST).astype(np.int64)


def coverage(rate: float = 1000.0, slo: float = 0.06) -> list[dict[str, Any]]:
    """Violations of the SLO by the number of words that the slack assumes: section VI-C."""
    profile, seen = transformer(), sentences(100_000, 0).tolist()
    cells = []
    for share, slack in product(COVERAGES, TRANSLATED):
        words = timesteps(seen, share)
        runs = [_translate(LazyBatching(profile, slack, 1 + words), rate, slo, seed + 1) for seed in range(SEEDS)]
        late = _spread([_late(run, 1e3 * slo) for run in runs])
        cells.append({"slack": slack, "coverage": share, "dec_timesteps": words, "violations": late, **_figures(runs)})
        print(slack, share, words, late, cells[-1]["mean_ms"], flush=True)
    return cells


def _translate(policy: LazyBatching, rate: float, slo: float, seed: int) -> simulator.Run:
    instants, kind = arrivals(rate, REQUESTS, seed).tolist(), BatchKey()
    words = sentences(len(instants), seed).tolist()
    requests = [
        Request(i, t, kind, t + slo, stages=1 + n) for i, (t, n) in enumerate(zip(instants, words, strict=True))
    ]
    device = SimulatedDevice(policy.profile, policy.profile.service_time)
    return simulator.run(Batcher(policy, {"": LARGEST}, NoMonitor()), requests, device.service_time, device.energy)


@dataclass(frozen=True)
class Timed:
    """A policy that appends the time of each of its decisions, s, to `times`."""

    inner: Policy
    times: list[float]

    def decide(self, state: State, /) -> Action:
        """The inner policy's decision."""
        began = perf_counter()
        action = self.inner.decide(state)
        self.times.append(perf_counter() - began)
        return action


def decision() -> dict[str, list[float]]:
    """Median and 99th percentile of the time of a decision, us, in the paper's setting at 2000 requests a second."""
    found: dict[str, list[float]] = {}
    for name in ("lazy", "lazy, remaining", "lazy, Oracle", "catch-up"):
        chosen = choose(POLICIES[name][0].format(slo=100), resnet())
        timed = Timed(chosen.policy, [])
        simulate_policy(replace(chosen, policy=timed), arrivals(RATES[-1], REQUESTS, 0))
        found[name] = [round(1e6 * float(x), 1) for x in np.quantile(timed.times, (0.5, 0.99))]
    print(found)
    return found


def draw_paper(record: Mapping[str, Any]) -> None:
    """Mean and 99th percentile by rate, and the share of violations by SLO, as in figures 12, 14 and 15."""
    figure = harness.new_figure(13, 8)
    axes = figure.subplots(2, 2)
    for name, cell in record["cells"].items():
        by_rate = [cell["by_rate"][str(rate)] for rate in RATES]
        _line(axes[0, 0], name, range(len(RATES)), [each["mean_ms"] for each in by_rate])
        _line(axes[0, 1], name, range(len(RATES)), [each["p99_ms"] for each in by_rate])
        for panel, rate in zip(axes[1], RATES[2:], strict=True):
            _line(panel, name, SLOS_MS, _per_cent(cell["violations"][str(rate)]))
    axes[0, 0].set(title="(a) mean response time, SLO 100 ms", ylabel="ms")
    axes[0, 1].set(title="(b) 99th percentile, SLO 100 ms", ylabel="ms")
    for panel in axes[0]:
        panel.set(yscale="log", xlabel="arrival rate, 1/s")
        panel.set_xticks(range(len(RATES)), [str(rate) for rate in RATES])
    for panel, letter, rate in zip(axes[1], "cd", RATES[2:], strict=True):
        panel.set(title=f"({letter}) answered late at {rate}/s", xlabel="SLO, ms", ylabel="per cent", ylim=(-3, 103))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    harness.save_figure(figure, FIGURES / "lazy-paper.png")


def _line(axes: "Axes", name: str, x: Sequence[float], spreads: Sequence[Sequence[float]]) -> None:
    _, colour, style = POLICIES[name]
    low, mean, high = np.array(spreads).T
    axes.plot(x, mean, style, color=colour, marker=".", label=name)
    axes.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
    harness.finish_axes(axes)


def draw_grid(cells: Sequence[Mapping[str, Any]]) -> None:
    """Mean response time of catch-up against greedy's by load; a panel for each number of stages."""
    figure = harness.new_figure(13, 4.6)
    panels = figure.subplots(1, len(STAGES), sharey=True)
    colours = (BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE)
    for panel, stages in zip(panels, STAGES, strict=True):
        for colour, ratio in zip(colours, RATIOS, strict=True):
            mine = [
                c for c in cells if (c["shape"], c["stages"], c["stage_overhead"]) == (f"a/c = {ratio:g}", stages, 1)
            ]
            x, y, error = ([c[key] for c in mine] for key in ("load", "catch_up_percent", "half_interval"))
            panel.errorbar(x, y, error, color=colour, marker=".", capsize=2, label=f"a/c = {ratio:g}")
        panel.axhline(0, color="black", lw=0.8)
        panel.axhline(1, color=GREY, lw=0.8, ls=":")
        panel.set(title=f"{stages} stages", xlabel="load")
        harness.finish_axes(panel)
    panels[0].set_ylabel("mean response time against greedy's, per cent")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    harness.save_figure(figure, FIGURES / "lazy-grid.png")


def draw_coverage(cells: Sequence[Mapping[str, Any]]) -> None:
    """Violations and mean response time by coverage."""
    figure = harness.new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    for panel, key, factor, label in (
        (left, "violations", 100.0, "answered later than 60 ms, per cent"),
        (right, "mean_ms", 1.0, "mean response time, ms"),
    ):
        for slack, colour in zip(TRANSLATED, (VERMILLION, ORANGE), strict=True):
            mine = [cell for cell in cells if cell["slack"] == slack]
            low, mean, high = factor * np.array([cell[key] for cell in mine]).T
            panel.plot(range(len(mine)), mean, color=colour, marker="o", label=f"slack {slack}")
            panel.fill_between(range(len(mine)), low, high, color=colour, alpha=0.15, lw=0)
        words = {c["coverage"]: c["dec_timesteps"] for c in cells}
        panel.set_xticks(range(len(words)), [f"{share:.0%}\n{steps} words" for share, steps in words.items()])
        panel.set(xlabel="coverage of dec_timesteps", ylabel=label, ylim=(0, None))
        harness.finish_axes(panel)
    left.legend(frameon=False)
    harness.save_figure(figure, FIGURES / "lazy-coverage.png")


def main() -> None:
    """Simulate the chosen parts, print, record and draw."""
    parts = (paper, grid, coverage, decision)
    record = harness.measure_parts("lazy", __doc__, {part.__name__: part for part in parts})
    draw_paper(record["paper"])
    draw_grid(record["grid"])
    draw_coverage(record["coverage"])
    print(paper_tables(record["paper"]))


if __name__ == "__main__":
    main()
