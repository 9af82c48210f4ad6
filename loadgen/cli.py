"""The generate-load command: send load to a server, or to a simulation of it, and report response times."""

import json
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen import client, history, live_run, processes
from loadgen.history import RunResult
from loadgen.levels import LEVELS_USAGE, draw_levels, parse_levels
from loadgen.live_run import LoadTarget
from loadgen.page import render_report_page
from loadgen.plots import plot_runs
from loadgen.policy_admin import find_policy_admin, read_policy_info, restored_policy
from loadgen.progress import Progress
from loadgen.report import Record, RunObjective, make_report, outcome_from_records, outcome_from_run, simulated_records
from loadgen.run_settings import hide_password, run_settings
from loadgen.schedule import ARRIVALS_USAGE, RELATIVE_ARRIVALS, Schedule, make_schedule
from loadgen.sizes import SIZES_USAGE, draw_request_lengths, simulated_profile, whole_lengths
from loadgen.tables import comparison_table, level_table, report_table, step_table
from policies.catalog import by_stages, in_stages
from policies.command_line.common import (
    INTERRUPTED,
    VersionFlag,
    check_files,
    complete_policies,
    complete_profiles,
    examples,
    run,
    writing,
)
from policies.cpus import available_cpus
from policies.files import open_atomically, write_atomically
from policies.planning.simulation import RequestLevels, RequestSizes, Simulation
from policies.profile import load_profile
from policies.rules.by_level import parse_weights
from policies.sample_file import SAMPLE_USAGE, file_of
from policies.sizing.size_distributions import LONGEST_REQUEST
from policies.types import SpecError

_UNANSWERED = 1  # exit code where no request was answered under some policy
MAX_SEND_LAG = 10.0  # ms; above it the generator's own delay distorts the response times

app = typer.Typer()
GROUPS = {
    "Arrivals": ("rate", "duration", "arrivals", "seed"),
    "Requests": ("model", "image", "pixels", "body", "sample", "sizes", "size_scale", "levels"),
    "Server": ("api_key", "give_up_after", "processes_", "precise"),
    "Policies and simulation": ("compare", "simulate", "policy", "stages", "bin_error", "priority_weights"),
    "Report": ("slo_ms", "w1", "w2", "output", "plot", "report_", "json_"),
}
_EXAMPLES = examples(
    "generate-load http://127.0.0.1:8000 --rate 100 --duration 30",
    "generate-load http://127.0.0.1:8000 --rate 100 --duration 60 --arrivals steps:0.5@30,2@30 --report run.html",
    "generate-load http://127.0.0.1:8000 --rate 100 --duration 30 --compare greedy --compare timeout:20",
    "generate-load --simulate googlenet-tesla-p4 --policy smdp --rate 3000 --duration 20",
)
_REMEDIES = {  # of runs without an answered request, by status
    "429": "give a lower --rate",
    "503": "give a lower --rate, or check that the server is ready",
    "504": "give a lower --rate",
    "timeout": "give a lower --rate, or a longer --give-up-after",
    "connection": "check that the server is running",
}
_SUSPICIOUS_RATIO = 10.0  # of the mean rate to --rate, above which relative rates are probably a mistake


@dataclass(frozen=True)
class _Files:
    """Files to write."""

    output: Path | None
    plot: Path | None
    report: Path | None


@dataclass(frozen=True)
class _Job:
    """Parameters of a run, live or simulated; `about` is shown on the report page."""

    schedule: Schedule
    objective: RunObjective
    files: _Files
    specs: Sequence[str]
    compare: bool
    json: bool
    about: Mapping[str, str | None]


@app.command(epilog=_EXAMPLES)
def generate_load(
    url: Annotated[str | None, typer.Argument(help="URL of the server, such as http://127.0.0.1:8000.")] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            help="Simulate instead of sending to a URL: a profile's name or file, PROFILE,PROFILE for several devices, "
            "or longest: a batch takes as many s as the size of its largest request.",
            autocompletion=complete_profiles,
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="With --simulate: the policy's spec.", autocompletion=complete_policies)
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: run under this policy, with the same arrivals for each. On a server the original policy "
            "is restored at the end.",
            autocompletion=complete_policies,
        ),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            help="With --simulate: number of equal stages "
            "(default: the profile's, else 10 for a policy that decides by stage)."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Distribution of request sizes, in elements of the padded dimension, of a model with lengths, in s "
            f"with --simulate longest: {SIZES_USAGE}."
        ),
    ] = None,
    size_scale: Annotated[
        float, typer.Option(help="With --sizes: factor on the sizes; they are rounded up, except in s.")
    ] = 1.0,
    levels: Annotated[str | None, typer.Option(help=LEVELS_USAGE + ".")] = None,
    priority_weights: Annotated[
        str | None,
        typer.Option(
            help="With --simulate and --levels: W1,W2,..., as for serve-model; without them the policy does not know "
            "the levels, and a batch is filled by level."
        ),
    ] = None,
    bin_error: Annotated[
        float,
        typer.Option(
            help="With --simulate and --sizes: probability of each of the two errors by one bin in size prediction, "
            "0 to 0.5."
        ),
    ] = 0.0,
    model: Annotated[
        str | None,
        typer.Option(
            help="Name of the model, or NAME=SOURCE as for serve-model; may be left out if the server has only one."
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Mean arrival rate, requests/s.")] = None,
    duration: Annotated[float | None, typer.Option(help="Time in which requests arrive, s.")] = None,
    arrivals: Annotated[
        str, typer.Option(help=f"Arrival process: {ARRIVALS_USAGE}. Rates R are relative to --rate, lengths S in s.")
    ] = "poisson",
    seed: Annotated[int, typer.Option(help="Seed of random arrivals and sizes.")] = 0,
    image: Annotated[
        Path | None, typer.Option(help="Image file to send to an image model (default: a sample photograph).")
    ] = None,
    pixels: Annotated[
        bool, typer.Option("--pixels", help="Send raw UINT8 pixels by the Open Inference Protocol instead of an image.")
    ] = False,
    body: Annotated[
        list[Path] | None,
        typer.Option(
            help="File whose content is sent as it is, to /predict or to the path of the URL of any HTTP server; "
            "several are sent in turn."
        ),
    ] = None,
    sample: Annotated[
        Path | None,
        typer.Option(
            help="Sample to send as binary tensors (default: synthetic ones, for a model that takes no images), with "
            f"--sizes cut, or repeated, to each length: {SAMPLE_USAGE}."
        ),
    ] = None,
    give_up_after: Annotated[
        float, typer.Option(help="Time-out for a response, counted from sending, s.")
    ] = client.GIVE_UP_AFTER,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="BATCHWRIGHT_API_KEY",
            help="API key of the server; the environment variable keeps it out of the process list.",
        ),
    ] = None,
    processes_: Annotated[
        str,
        typer.Option("--processes", help="Number of sending processes, or auto: one per 1000 requests/s at the peak."),
    ] = "1",
    precise: Annotated[
        bool,
        typer.Option(
            "--precise",
            help="Send at the instants of a thread that sleeps to about 0.1 ms; event loops round to 1 ms, so that at "
            "thousands of requests/s several are sent together.",
        ),
    ] = False,
    slo_ms: Annotated[
        float | None, typer.Option(help="Response time objective, ms: report the share of requests within it.")
    ] = None,
    w1: Annotated[float, typer.Option(help="Weight of the mean response time in the reported cost, per ms.")] = 1.0,
    w2: Annotated[float, typer.Option(help="Weight of the mean power in the reported cost, per W.")] = 0.0,
    output: Annotated[Path | None, typer.Option(help="Write one JSON line per request to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the run into this file (.png, .pdf or .svg).")] = None,
    report_: Annotated[
        Path | None, typer.Option("--report", help="Write an HTML page with figures and charts to this file.")
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object and nothing else.")
    ] = False,
    version: VersionFlag = False,
) -> None:
    """Send requests at their scheduled instants, independently of the responses, and report response times.

    A line of the --output file is one request: scheduled_s, sent_s, finished_s (after the start), status (HTTP code,
    connection, timeout or interrupted), response_ms, batch_size, waiting_ms, service_ms, energy_mj, cpu_ms. Unknown is
    null.
    """
    model = model and model.partition("=")[0]
    is_live, specs = url is not None, compare or ([policy] if policy else [])
    _refuse(
        {
            "give the URL of a server, or --simulate PROFILE": not is_live and simulate is None,
            "a URL and --simulate exclude each other; leave one out": is_live and simulate is not None,
            "--policy is for --simulate; a server has its own, and --compare SPEC swaps it": is_live and bool(policy),
            "--policy and --compare exclude each other; leave one out": bool(policy and compare),
            "--stages is for --simulate; a server has its own": is_live and stages is not None,
            "--sizes excludes --image and --pixels; leave them out": sizes is not None
            and (pixels or image is not None),
            "--bin-error and --size-scale are for --sizes; leave them out": sizes is None
            and (bin_error, size_scale) != (0, 1),
            f"--size-scale is {size_scale:g}; give a number above 0": not _is_positive(size_scale),
            "--bin-error is for --simulate; a server predicts by itself": is_live and bool(bin_error),
            f"--bin-error is {bin_error:g}; give a probability from 0 to 0.5": not 0.0 <= bin_error <= 0.5,
            "--simulate needs --policy SPEC, or --compare SPEC for each of several": not is_live and not specs,
            "--image and --pixels are for a server; leave them out": not is_live and (pixels or image is not None),
            "--image and --pixels exclude each other; leave one out": pixels and image is not None,
            "--sample is for a server; leave it out": not is_live and sample is not None,
            "--body is for a server; leave it out": not is_live and bool(body),
            "--priority-weights is for --simulate; give it to serve-model": is_live and priority_weights is not None,
            "--priority-weights is for --levels; add --levels S1,S2": priority_weights is not None and levels is None,
            "--body excludes --image, --pixels, --sample and --sizes; leave them out": bool(body)
            and (pixels or any(each is not None for each in (image, sample, sizes))),
            "--sample excludes --image and --pixels; leave them out": sample is not None
            and (pixels or image is not None),
            "--processes is for a server; leave it out": not is_live and processes_ != "1",
            "--precise is for a server; leave it out": not is_live and precise,
            "--output takes one run; use --policy instead of --compare": bool(compare) and output is not None,
            "two policies of --compare are the same; name each once": len(set(specs)) < len(specs),
            f"--slo-ms is {slo_ms}; give a number above 0": not _is_positive(slo_ms),
            f"--give-up-after is {give_up_after}; give a number above 0": not _is_positive(give_up_after),
            f"--w1 is {w1:g} and --w2 is {w2:g}; give numbers of 0 or more": not all(map(_is_weight, (w1, w2))),
            "the API key has spaces or characters that an HTTP header cannot carry; give another key": not _is_key(
                api_key
            ),
            **{
                f"no file {str(path)!r}; give one that exists": not file_of(path).exists()
                for path in (image, sample, *(body or ()))
                if path
            },
            f"{url!r} is no URL; write http://HOST:PORT": is_live and not str(url).startswith(("http://", "https://")),
        }
    )
    files = _Files(output, plot, report_)
    check_files(output, plot, report_)
    about = {
        "server": url,
        "profile": simulate,
        "model": model,
        "policies" if compare else "policy": " · ".join(specs) or None,
        "arrivals": f"{arrivals}, seed {seed}",
        "rate": None if rate is None else f"{rate:g}/s",
        "duration": None if duration is None else f"{duration:g} s",
        "processes": processes_ if is_live else None,
        "precise": "yes" if precise else None,
        "sizes": sizes if size_scale == 1.0 else f"{sizes}, times {size_scale:g}",
        "bin error": f"{bin_error:g}" if bin_error else None,
        "levels": levels,
        "priority weights": priority_weights,
    }
    objective = RunObjective(inf if slo_ms is None else slo_ms / 1e3, w1, w2)
    schedule = make_schedule(arrivals, rate, duration, seed)
    if warning := rate_warning(schedule, arrivals, rate):
        print(warning, file=sys.stderr)
    job = _Job(schedule, objective, files, specs, bool(compare), json_, about)
    drawn = (
        None if sizes is None else size_scale * draw_request_lengths(sizes, arrivals, len(job.schedule.instants), seed)
    )
    if url is not None:
        lengths = None if drawn is None else [int(length) for length in whole_lengths(drawn)]
        target = LoadTarget(
            url=url.rstrip("/"),
            model=model,
            image=image,
            pixels=pixels,
            give_up_after=give_up_after,
            key=api_key or None,
            lengths=lengths,
            sample=sample,
            precise=precise,
            bodies=body or (),
            levels=None if levels is None else draw_levels(levels, len(schedule.instants), seed),
        )
        if report_ is not None and not compare:
            job = replace(job, about=about | read_policy_info(target.url, model, target.key))
        _run_live(job, target, processes.process_count(processes_, job.schedule, available_cpus()))
    elif simulate is not None:
        known = (
            None
            if drawn is None
            else RequestSizes(drawn if simulate == LONGEST_REQUEST else whole_lengths(drawn), bin_error, seed)
        )
        first, *others = simulate.split(",")
        fleet = tuple(load_profile(name) for name in others)
        drawn_levels = None
        if levels is not None:
            at = [level for level, _ in draw_levels(levels, len(schedule.instants), seed)]
            drawn_levels = RequestLevels(at, parse_levels(levels), _weights(priority_weights, levels))
        profile = simulated_profile(first, known, specs)
        _run_simulated(job, Simulation(profile, "", model or "", stages, known, fleet, drawn_levels))


def _refuse(reasons: dict[str, bool]) -> None:
    for reason, applies in reasons.items():
        if applies:
            raise SpecError(reason)


def _is_positive(value: float | None) -> bool:
    return value is None or (isfinite(value) and value > 0)


def _is_weight(value: float) -> bool:
    return isfinite(value) and value >= 0


def _is_key(key: str | None) -> bool:
    return key is None or (key.isascii() and key.isprintable() and " " not in key)


def _weights(text: str | None, levels: str) -> str | None:
    """The weights of the levels as a policy takes them."""
    if text is None:
        return None
    weights, count = parse_weights(text), len(parse_levels(levels))
    if len(weights) != count:
        raise SpecError(f"--priority-weights {text}: give {count} weights, one for each of --levels {levels}")
    return text.replace(",", ":")


def _run_simulated(job: _Job, device: Simulation) -> None:
    instants = job.schedule.instants
    runs = {spec: replace(device, spec=spec, model=device.model or device.profile.model) for spec in job.specs}
    results: list[RunResult] = []
    quiet = job.json or not sys.stderr.isatty()
    for spec, simulation in runs.items():
        with Console(stderr=True, quiet=quiet).status(f"simulating {spec}", refresh_per_second=1):
            done = simulation.run(instants)
        figures = make_report(outcome_from_run(done, device.levels is not None), job.schedule.duration, job.objective)
        results.append(RunResult(spec, figures, history.history_from_run(done, instants)))
    if any(map(by_stages, job.specs)) and device.sizes is None and not job.json:
        over = in_stages("lazy", device.profile, device.stages).stage_overhead
        print(f"stage by stage: {over[0]:.3f} times l(1), {over[-1]:.3f} times l({len(over)})", file=sys.stderr)
    errors: list[SpecError] = []
    _report(job, results, errors)
    with _collecting(errors):
        _write_records(job, simulated_records(runs[job.specs[0]].services(instants)))
    _raise_all(errors)


def _run_live(job: _Job, target: LoadTarget, count: int) -> None:
    results: list[RunResult] = []
    errors: list[SpecError] = []
    interrupted = False
    try:
        with _collecting(errors):
            interrupted = _run_each(job, target, count, results, errors)
    except KeyboardInterrupt:
        if any(isfinite(result.end) for result in results):  # the second Ctrl-C: end without a report
            results.clear()
        raise
    finally:
        if results:  # report finished runs even if a later one raised
            _report(job, results, errors)
        unanswered = unanswered_warning(results)
        for warning in filter(None, (unanswered, lateness_warning(results))):
            print(warning, file=sys.stderr)
        _raise_all(errors)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if unanswered:
        raise typer.Exit(_UNANSWERED)


def _run_each(job: _Job, target: LoadTarget, count: int, results: list[RunResult], errors: list[SpecError]) -> bool:
    """Run under each policy; return whether Ctrl-C interrupted it. Errors of writing are added to `errors`."""
    with closing(_policies(job, target)) as specs:
        for spec in specs:
            log, progress = client.RunLog(), Progress(job.schedule, spec, job.json)
            interrupted, ended_early = False, True
            try:
                if count == 1:
                    interrupted = live_run.run_load(target, job.schedule, progress, log)
                else:
                    interrupted = processes.run_load_in_processes(target, job.schedule, progress, log, count)
                ended_early = interrupted
            finally:
                log.records.sort(key=lambda record: record.scheduled)
                if log.records or interrupted:  # report what was received even if a process died
                    results.append(_result(job, spec, log, ended_early))
                    with _collecting(errors):
                        _write_records(job, log.records)
            if interrupted:
                return True
    return False


def _policies(job: _Job, target: LoadTarget) -> Generator[str, None, None]:
    """Yield each policy's spec while it is set on the server; without --compare yield "", the server's own policy."""
    if not job.compare:
        yield ""
        return
    with restored_policy(find_policy_admin(target.url, target.model, target.key)) as swap:
        for spec in job.specs:  # find a rejected policy before the first run
            swap(spec)
        for spec in job.specs:
            swap(spec)
            yield spec


def _result(job: _Job, spec: str, log: client.RunLog, ended_early: bool) -> RunResult:
    end = max((r.finished for r in log.records), default=0.0) if ended_early else inf
    figures = make_report(outcome_from_records(log.records), min(job.schedule.duration, end), job.objective)
    return RunResult(spec, figures, history.history_from_records(log.records), log.first_error, end)


def rate_warning(schedule: Schedule, arrivals: str, rate: float | None) -> str:
    """Warning about relative rates that were probably meant as absolute ones; empty without them."""
    if rate is None or arrivals.partition(":")[0] not in RELATIVE_ARRIVALS:
        return ""
    mean = len(schedule.instants) / schedule.duration
    if mean <= _SUSPICIOUS_RATIO * rate:
        return ""
    return (
        f"generate-load: the rates of --arrivals {arrivals} are relative to --rate {rate:g}, which makes {mean:,.0f}/s "
        f"on average; for absolute rates give --rate 1"
    )


def unanswered_warning(results: Iterable[RunResult]) -> str:
    """Warning about a run without an answered request, with the most frequent status and the remedy; empty if none."""
    for result in results:
        errors = {status: n for status, n in result.report["errors"].items() if status != "interrupted"}
        if errors and not result.report["ok"]:
            status = max(errors, key=errors.__getitem__)
            under = f" under {result.policy}" if result.policy else ""
            said = f"; the first error is {result.first_error!r}" if result.first_error else ""
            return (
                f"generate-load: no request was answered{under}, most often with {status} "
                f"({errors[status]:,} times){said}; {_REMEDIES.get(status, 'check the URL, --model and the request')}"
            )
    return ""


def lateness_warning(results: Iterable[RunResult]) -> str:
    """Warning about requests that the generator sent late; empty if it did not."""
    lag = max((result.report["send_lag_p99_ms"] or 0.0 for result in results), default=0.0)
    late = f"1 % of the requests were sent at least {lag:,.0f} ms late, and their response times include this delay"
    return f"generate-load: {late}; give more --processes, or a lower --rate" if lag > MAX_SEND_LAG else ""


def _write_records(job: _Job, records: Iterable[Record]) -> None:
    path = job.files.output
    if path is not None:
        with writing("--output", path), open_atomically(path) as lines:
            lines.writelines(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in records)


@contextmanager
def _collecting(errors: list[SpecError]) -> Iterator[None]:
    """Add a SpecError of this block to the list, so that an error of one file does not prevent writing the others."""
    try:
        yield
    except SpecError as error:
        errors.append(error)


def _raise_all(errors: Sequence[SpecError]) -> None:
    if errors:
        raise SpecError("; ".join(map(str, errors))) from errors[0]


def _report(job: _Job, results: Sequence[RunResult], errors: list[SpecError]) -> None:
    """Print the report, draw the plot, write the page. Errors of writing are added to `errors`."""
    reports = {result.policy: result.report for result in results}
    edges, steps = job.schedule.edges, {}
    if edges:
        steps = {result.policy: history.step_figures(result.history, edges, result.end) for result in results}
    if job.json:
        rows = [reports[spec] | ({"steps": steps[spec]} if steps else {}) for spec in reports]
        named = [{"policy": spec, **row} for spec, row in zip(reports, rows, strict=True)]
        compared = {"rows": named, "w1": job.objective.w1, "w2": job.objective.w2}
        print(json.dumps(compared if job.compare else rows[0], allow_nan=False))
    else:
        console = Console()
        console.print(
            comparison_table(reports, job.objective) if job.compare else report_table(results[0].report, job.objective)
        )
        if (by_level := level_table(reports)) is not None:
            console.print("\nby priority level; response times in ms", by_level, sep="\n")
        if any(steps.values()):
            console.print("\nby step of the arrival rate; response times in ms", step_table(steps), sep="\n")
    title = _title(job)
    shown = results if job.compare else [replace(results[0], policy="")]
    if (plot := job.files.plot) is not None:
        with _collecting(errors), writing("--plot", plot):
            plot_runs(shown, job.objective, title, plot)
    if (page := job.files.report) is not None:
        settings = run_settings(["generate-load", *sys.argv[1:]], job.about)
        with _collecting(errors), writing("--report", page):
            write_atomically(page, render_report_page(shown, job.objective, title, settings))


def _title(job: _Job) -> str:
    about = job.about
    how = ("simulated", about["profile"]) if about["server"] is None else ("measured", hide_password(about["server"]))
    which = f"{len(job.specs)} policies" if job.compare else about["policy"]
    return " · ".join(filter(None, (*how, which, about["rate"])))


def main() -> None:
    """The console entry point."""
    run(app, "generate-load", GROUPS)


if __name__ == "__main__":
    main()
