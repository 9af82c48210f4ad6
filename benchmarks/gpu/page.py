"""Tables, figures and profiles of a GPU call's records, also of one that was stopped: `make gpu-page`."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from batchwright.analysis import simulate
from benchmarks.gpu.live import OURS
from benchmarks.gpu.records import Record, Samples, read_records
from benchmarks.support.harness import (
    RECORDS,
    argument_parser,
    finish_axes,
    markdown_table,
    new_figure,
    save_figure,
)
from policies.command_line.results import SimulationResult
from policies.profile import Profile, parse_profile
from policies.types import SpecError
from profiler.energy import Mean, Windows, mean
from profiler.energy_plan import EnergyPlan
from profiler.energy_sweep import EnergySweep, LoadPoint
from server.energy.meters import EnergyMeter

_BOUND = 0.04  # of the relative error of outputs in fp16
_WINDOWS = Windows(0.3, 2.0, 1)
_SIZES = 1, 2, 4, 8, 16, 32, 64, 128
_REQUESTS = 50_000  # of a simulation


def calls(records: Sequence[Record]) -> Iterator[list[Record]]:
    """The records of each call, of which the first one says what it is."""
    begins = [index for index, record in enumerate(records) if record["kind"] == "call"]
    for begin, end in zip(begins, [*begins[1:], len(records)], strict=True):
        yield [*records[begin:end]]


def samples_of(call: Sequence[Record], folder: Path) -> Samples:
    """The samples of a call: another one may have run on another machine, with another clock."""
    return Samples.read(folder / call[0]["samples"])


def profile_of(call: Sequence[Record], folder: Path, model: str) -> Profile | None:
    """A model's profile by a call, with energies if its smallest and largest batch have them; None without times."""
    samples = samples_of(call, folder)
    times = [record for record in call if record["kind"] == "times" and record["model"] == model]
    if not times:
        return None
    profile = parse_profile(json.dumps(times[-1]["profile"]), model)
    sweep = sweep_of(call, samples, model, profile)
    meter = SimpleNamespace(source="nvml", about=samples.about)
    return profile if sweep is None else sweep.apply_to(profile, cast(EnergyMeter, meter))


def sweep_of(call: Sequence[Record], samples: Samples, model: str, profile: Profile) -> EnergySweep | None:
    """The energies of a model's windows; None if idle power, or the smallest or largest batch, was not measured."""
    idle = [
        watts
        for record in call
        if record["kind"] == "idle" and (watts := samples.power(record["begin"], record["end"])) is not None
    ]
    points = defaultdict[tuple[float, int], list[Record]](list)
    for record in call:
        if record["kind"] == "window" and record["model"] == model and record["batch_size"] <= profile.max_batch_size:
            points[record["share"], record["batch_size"]].append(record)
    loads = {key: found for key, each in points.items() if (found := _load_point(each, samples)) is not None}
    steady = tuple(loads[key] for key in sorted(loads) if key[0] == 1.0)
    sizes = tuple(point.batch_size for point in steady)
    if not idle or not {1, profile.max_batch_size} <= {*sizes}:
        return None
    part_loads = tuple(loads[key] for key in sorted(loads) if key[0] < 1.0)
    checked = part_loads[0].batch_size if part_loads else 1
    passes = max(len(point.passes) for point in steady)
    shares = tuple(key[0] for key in sorted(loads) if key[0] < 1.0)
    plan = EnergyPlan(sizes, passes, _WINDOWS, 0.0, Windows(1.0, 15.0, 1), checked, shares)
    return EnergySweep(plan, steady, Mean(idle[0], inf), Mean(idle[-1], inf), part_loads)


def _load_point(windows: Sequence[Record], samples: Samples) -> LoadPoint | None:
    measured = [
        (watts, each["batches_hz"], samples.conditions_within(each["begin"], each["end"]))
        for each in windows
        if (watts := samples.power(each["begin"], each["end"])) is not None
    ]
    if not measured:
        return None
    powers, rates, conditions = zip(*measured, strict=True)
    every = tuple(each for window in conditions for each in window)
    return LoadPoint(windows[0]["batch_size"], mean(powers), mean(rates), powers, every)


def write_page(folder: Path) -> None:
    """Write report.md, gpu.png, and the profile of each model, into the folder of the records."""
    found = [*calls(read_records(folder))]
    profiles: dict[str, Profile] = {}  # of the last call that measured the model
    for call in found:
        for model in dict.fromkeys(record["model"] for record in call if record["kind"] == "times"):
            profile = profile_of(call, folder, model)
            if profile is not None:
                profiles[model] = profile
                (folder / f"{model}.profile.json").write_text(profile.to_json())
    cells = [cell for call in found for cell in predicted_cells(call, folder)]
    parts = (*(part for call in found for part in _report(call, folder)), _cells(cells))
    text = "\n\n".join(filter(None, parts)) + "\n"
    (folder / "report.md").write_text(text)
    print(text)
    if profiles:
        draw(profiles, cells, folder / "gpu.png")


def predicted_cells(call: Sequence[Record], folder: Path) -> list[dict[str, Any]]:
    """The cells of a call with measured power, W, and those of our server with what a simulation predicts."""
    model, samples = call[0]["models"][0], samples_of(call, folder)
    profile = profile_of(call, folder, model)
    documents = {record["name"]: record["document"] for record in call if record.get("document")}
    found = []
    for record in call:
        if record["kind"] == "cell":
            cell = {**record, "model": model, "power_w": samples.power(record["begin"], record["end"])}
            if record["server"] == OURS and profile is not None:
                cell |= _prediction(profile, record["policy"], documents, record["rate"])
            found.append(cell)
    return found


def _prediction(profile: Profile, policy: str, documents: dict[str, Any], rate: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        spec = policy
        if policy in documents:
            spec = str(Path(name) / "policy.json")
            Path(spec).write_text(json.dumps(documents[policy]))
        try:
            simulated: SimulationResult = simulate(profile, spec, arrival_rate=rate, requests=_REQUESTS)
        except SpecError:  # more than the device can serve
            return {}
    power = {}
    if simulated.mean_power_w is not None:
        power = {"predicted_w": (profile.idle_power or 0.0) + simulated.mean_power_w}
    return {"predicted_ms": simulated.mean_ms, "predicted_p95_ms": simulated.p95_ms, **power}


def _report(call: Sequence[Record], folder: Path) -> Iterator[str]:
    first, samples = call[0], samples_of(call, folder)
    versions = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    yield f"{first['device']}, {first['date']}: {', '.join(first['models'])}; {versions}."
    parts = [(each["name"], each["seconds"], each.get("failed", "-")) for each in _of(call, "part")]
    yield _table(("part", "s", "not measured, because"), parts)
    implementations = [
        (each["model"], each["name"], _number(each.get("ms")), each["seconds"], each["search"], each.get("failed"))
        for each in _of(call, "implementation")
    ]
    yield _table(("model", "implementation", "ms a batch", "s to measure", "search", "failed"), implementations)
    yield from _facts(call)
    outputs = [
        (each["model"], each["batch_size"], each["relative_l2"], each["mixed_up"], _verdict(each))
        for each in _of(call, "outputs")
    ]
    yield _table(("model", "b", "relative L2 from fp32", "samples mixed up", "verdict"), outputs)
    for model in dict.fromkeys(each["model"] for each in _of(call, "times")):
        profile = profile_of(call, folder, model)
        assert profile is not None
        yield from _profile(call, samples, profile)
    limits = [
        (each["rate"], each["throughput_hz"], each["p99_ms"], each["busiest_process"]) for each in _of(call, "limit")
    ]
    yield _table(("offered, 1/s", "throughput, 1/s", "p99, ms", "busiest process, CPUs"), limits)
    solved = [(each["name"], each["seconds"], each.get("failed")) for each in _of(call, "policy")]
    yield _table(("policy", "s to solve", "failed"), solved)


def _verdict(outputs: Record) -> str:
    return "right" if outputs["relative_l2"] <= _BOUND and not outputs["mixed_up"] else "WRONG"


def _of(call: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in call if record["kind"] == kind]


def _facts(call: Sequence[Record]) -> Iterator[str]:
    for wait in _of(call, "wait"):
        yield (
            f"A wait for the device takes {wait['blocking_us']:.0f} us if it blocks, and {wait['spinning_us']:.0f} us "
            "if it spins."
        )
    for found in _of(call, "registration"):
        yield f"64 MiB of shared memory are page-locked in {found['ms']:.1f} ms: {found['page_locked']}."


def _profile(call: Sequence[Record], samples: Samples, profile: Profile) -> Iterator[str]:
    times = [record for record in _of(call, "times") if record["model"] == profile.model][-1]
    sweep = sweep_of(call, samples, profile.model, profile)
    energies = {} if sweep is None else {each.batch_size: each for each in sweep.batch_energies(profile.service_times)}
    spread = {} if sweep is None else {
        point.batch_size: max(point.passes) / min(point.passes) - 1.0
        for point in sweep.points
        if len(point.passes) > 1 and min(point.passes) > 0
    }  # fmt: skip
    rows = []
    for size in dict.fromkeys((*(size for size in _SIZES if size < profile.max_batch_size), profile.max_batch_size)):
        seconds, replay = profile.service_times[size - 1], times["replay_s"].get(str(size))
        row = [size, 1e3 * seconds, None if replay is None else 1e3 * replay, size / seconds]
        if size in energies:
            found = energies[size]
            row += [found.power.value, 1e3 * found.marginal.value, 1e3 * found.marginal.value / size]
        else:
            row += [None] * 3
        rows.append((*row, spread.get(size)))
    head = ("b", "l(b), ms", "a replay, ms", "1/s", "P(b), W", "zeta(b), mJ", "zeta(b) / b, mJ", "between passes")
    yield f"{profile.model}:\n\n{_table(head, rows)}\n\n{profile.note}."
    if sweep is not None and sweep.part_loads:
        checks = "; ".join(
            f"at load {load:.2f} {check.measured:.1f} W, {check.error:+.1%} from idle power and batches"
            for load, check in sweep.checks(profile.service_times)
        )
        idle = f"Idle {sweep.before.value:.1f} W before and {sweep.after.value:.1f} W after"
        yield f"{idle}. Batches of {sweep.plan.checked}: {checks}."


def _cells(cells: Sequence[dict[str, Any]]) -> str:
    rows = []
    for cell in cells:
        answered, power = cell["throughput_hz"], cell["power_w"]
        rows.append((
            cell["model"], cell["server"], cell.get("network"), cell["policy"], cell["rate"], answered, cell["mean_ms"],
            cell.get("predicted_ms"), cell["p95_ms"], cell.get("predicted_p95_ms"), cell["slo_attainment"], power,
            cell.get("predicted_w"), 1e3 * power / answered if power and answered else None, cell["mean_batch_size"],
            1e3 * cell["cpu_s"] / cell["ok"] if cell["ok"] else None, cell["busiest_process"], cell["send_lag_p99_ms"],
        ))  # fmt: skip
    head = (
        *("model", "server", "network", "policy", "offered, 1/s", "throughput, 1/s", "mean, ms", "predicted"),
        *("p95, ms", "predicted", "share within SLO", "W", "predicted", "mJ a request", "mean batch"),
        *("CPU s for 1000 requests", "busiest process, CPUs", "send lag, p99 ms"),
    )
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return markdown_table(head, [[_number(value) for value in row] for row in rows]) if rows else ""


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(profiles: dict[str, Profile], cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw l(b) and zeta(b) / b, and response times and power of our server beside their predictions."""
    figure = new_figure(11.0, 7.0)
    (times, energies), (responses, powers) = figure.subplots(2, 2)
    for model, profile in profiles.items():
        sizes = range(1, profile.max_batch_size + 1)
        times.plot(sizes, [1e3 * seconds for seconds in profile.service_times], label=model)
        if profile.energies is not None:
            energies.plot(
                sizes, [1e3 * joules / size for size, joules in zip(sizes, profile.energies, strict=True)], label=model
            )
    times.set_yscale("log", base=2)
    for axes in (times, energies):
        axes.set_xscale("log", base=2)
    for axis in (times.xaxis, times.yaxis, energies.xaxis):
        axis.set_major_formatter("{x:g}")
    ours = [cell for cell in cells if cell["server"] == OURS and cell["mean_ms"] is not None]
    for index, series in enumerate(dict.fromkeys((cell["model"], cell["policy"]) for cell in ours)):
        found, colour = [cell for cell in ours if (cell["model"], cell["policy"]) == series], f"C{index}"
        for axes, measured, predicted in (
            (responses, "mean_ms", "predicted_ms"), (powers, "power_w", "predicted_w")
        ):  # fmt: skip
            for key, style, label in ((measured, "o-", ", ".join(series)), (predicted, "x--", None)):
                points = [(cell["rate"], cell[key]) for cell in found if cell.get(key) is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
    for axes, across, up in (
        (times, "batch size", "l(b), ms"), (energies, "batch size", "energy above idle of a request, mJ"),
        (responses, "requests/s (predicted: dashed)", "mean response time, ms"),
        (powers, "requests/s (predicted: dashed)", "power, W"),
    ):  # fmt: skip
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        finish_axes(axes, {} if axes.get_legend_handles_labels()[0] else None)
    save_figure(figure, path)


def main() -> None:
    """Write the page of a folder."""
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RECORDS / "gpu", help="(default: %(default)s)")
    write_page(parser.parse_args().folder)


if __name__ == "__main__":
    main()
