"""generate-load: load a server, or a simulation of it, and report."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from loadgen import client
from loadgen.report import Record, Report, comparison, from_records, from_run, report, table
from loadgen.schedule import PROCESSES, Schedule, schedule
from loadgen.simulated import Simulation
from policies.command import run
from policies.profile import load_profile
from policies.types import SpecError

INTERRUPTED = 130  # what shells say of a command that Ctrl-C ended

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class _Job:
    """What both kinds of run share; the SLO in s (inf: none)."""

    schedule: Schedule
    model: str | None
    slo: float
    output: Path | None
    json: bool

    @property
    def quiet(self) -> bool:
        return self.json or not sys.stderr.isatty()


@dataclass(frozen=True)
class _Target:
    """What is sent where."""

    url: str
    image: Path | None
    pixels: bool
    give_up_after: float


@app.command()
def generate_load(
    url: Annotated[str | None, typer.Argument(help="Of a server, such as http://127.0.0.1:8000.")] = None,
    simulate: Annotated[str | None, typer.Option(help="Instead of a URL: a profile, by name or file.")] = None,
    policy: Annotated[str | None, typer.Option(help="With --simulate: the policy.")] = None,
    compare: Annotated[list[str] | None, typer.Option(help="Instead of --policy, repeatable: one row each.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name; needless where one is loaded.")] = None,
    rate: Annotated[float | None, typer.Option(help="Mean arrival rate, 1/s.")] = None,
    duration: Annotated[float | None, typer.Option(help="Time for which requests arrive, s.")] = None,
    arrivals: Annotated[str, typer.Option(help=PROCESSES)] = "poisson",
    seed: Annotated[int, typer.Option(help="The same seed, the same arrivals.")] = 0,
    image: Annotated[Path | None, typer.Option(help="The picture to send to /predict.")] = None,
    pixels: Annotated[bool, typer.Option("--pixels", help="Send raw pixels by the Open Inference Protocol.")] = False,
    slo_ms: Annotated[float | None, typer.Option(help="Report how many are answered within this time.")] = None,
    give_up_after: Annotated[float, typer.Option(help="Longest wait for an answer, s.")] = client.GIVE_UP_AFTER,
    output: Annotated[Path | None, typer.Option(help="Write one JSON line for each request.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Send requests at their scheduled instants, whatever the answers do, and report the response times."""
    live, specs = url is not None, compare or ([policy] if policy else [])
    _refuse(
        {
            "give the URL of a server, or --simulate PROFILE": not live and simulate is None,
            "a URL and --simulate exclude each other; leave one out": live and simulate is not None,
            "--policy and --compare are for --simulate; the server has its own policy": live and bool(specs),
            "--policy and --compare exclude each other; leave one out": bool(policy and compare),
            "--simulate needs --policy SPEC, or --compare SPEC for each of several": not live and not specs,
            "--image and --pixels are for a server; leave them out": not live and (pixels or image is not None),
            "--image and --pixels exclude each other; leave one out": pixels and image is not None,
            "--output holds one run; use --policy instead of --compare": bool(compare) and output is not None,
            f"--slo-ms is {slo_ms}; give a number above 0": not _is_positive(slo_ms),
            f"--give-up-after is {give_up_after}; give a number above 0": not _is_positive(give_up_after),
            f"{url!r} is no URL; write http://HOST:PORT": live and not str(url).startswith(("http://", "https://")),
        }
    )
    slo = inf if slo_ms is None else slo_ms / 1e3
    _check_output(output)
    job = _Job(schedule(arrivals, rate, duration, seed), model, slo, output, json_)
    if url is not None:
        _live(job, _Target(url.rstrip("/"), image, pixels, give_up_after))
    elif simulate is not None:
        _simulated(job, simulate, specs, bool(compare))


def _refuse(reasons: dict[str, bool]) -> None:
    for reason, applies in reasons.items():
        if applies:
            raise SpecError(reason)


def _is_positive(value: float | None) -> bool:
    return value is None or (isfinite(value) and value > 0)


def _check_output(path: Path | None) -> None:
    """Find out before the run, not after it."""
    if path is not None:
        try:
            path.open("a").close()
        except OSError as error:
            raise SpecError(f"cannot write --output {str(path)!r} ({error.strerror}); choose another file") from None


def _simulated(job: _Job, profile_name: str, specs: list[str], compare: bool) -> None:
    profile = load_profile(profile_name)
    runs = {spec: Simulation(profile, spec, job.model or profile.model) for spec in specs}
    rows: dict[str, Report] = {}
    for spec, simulation in runs.items():
        with Console(stderr=True, quiet=job.quiet).status(f"simulating {spec}", refresh_per_second=1):
            outcome = from_run(simulation.run(job.schedule.instants))
        rows[spec] = report(outcome, job.schedule.duration, job.slo)
    if job.output is not None:
        _write(job.output, runs[specs[0]].records(job.schedule.instants))
    if not compare:
        _print(job, rows[specs[0]])
    elif job.json:
        _print_json({"rows": [{"policy": spec, **row} for spec, row in rows.items()]})
    else:
        Console().print(comparison(rows))


def _live(job: _Job, target: _Target) -> None:
    _allow_many_connections()
    records: list[Record] = []
    duration, interrupted = job.schedule.duration, False
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_load(job, target, records))
    except KeyboardInterrupt:
        interrupted = True
        duration = min(duration, max((r.finished for r in records), default=0.0))
    if job.output is not None:
        _write(job.output, sorted(records, key=lambda record: record.scheduled))
    _print(job, report(from_records(records), duration, job.slo))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


async def _load(job: _Job, target: _Target, records: list[Record]) -> None:
    async with client.open_session(target.give_up_after) as session:
        sender: client.Sender = (
            await client.pixels(session, target.url, job.model)
            if target.pixels
            else await client.photograph(session, target.url, job.model, target.image)
        )
        async with _progress(job, records):
            await client.offer(sender, job.schedule.instants.tolist(), records)


@asynccontextmanager
async def _progress(job: _Job, records: list[Record]) -> AsyncIterator[None]:
    if job.quiet:
        yield
        return
    ticker = asyncio.create_task(_tick(job.schedule, records))
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.wait([ticker])


async def _tick(schedule: Schedule, records: list[Record]) -> None:
    clock = asyncio.get_running_loop().time
    start, to_come = clock(), len(schedule.instants)
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as line:
        while True:
            spent = f"{clock() - start:.0f} s of {schedule.duration:.0f} s"
            line.update(f"{spent}, {len(records):,} of {to_come:,} requests are over", refresh=True)
            await asyncio.sleep(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return None
    return uvloop.new_event_loop


def _allow_many_connections() -> None:
    """An open loop has a connection for each request in flight: more, in overload, than shells usually allow files."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _write(path: Path, records: Iterable[Record]) -> None:
    with path.open("w") as lines:
        lines.writelines(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in records)


def _print(job: _Job, content: Report) -> None:
    if job.json:
        _print_json(content)
    else:
        Console().print(table(content))


def _print_json(content: Any) -> None:
    print(json.dumps(content, allow_nan=False))


def main() -> None:
    """The console command generate-load."""
    run(app, "generate-load")


if __name__ == "__main__":
    main()
