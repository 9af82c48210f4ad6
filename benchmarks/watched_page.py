"""CPU time of a server of ten models on four emulated devices, without and with its dashboard open in a browser.

The page polls twice a second. It is open for a while in turns, since the machine's other work varies: first without
calls, then with some calls a second to the model that it shows, whose measured rate changes what it draws. Needs
chromium and playwright.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.support.harness import (
    Server,
    argument_parser,
    markdown_table,
    save_record,
    serving,
    start_load,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MODELS = tuple(f"model-{n}=googlenet" for n in range(10))
DEVICES = ",".join(["emulated:googlenet-tesla-p4"] * 4)
POLICY = "smdp:w2=16"
RATE = 10  # calls a second
LIMIT = 0.01  # of a processor that a watched page may take
NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator["Browser | None"]:
    """A browser without a window; None where playwright or chromium is missing."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None or find_spec("playwright") is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()


@contextmanager
def calls(server: Server, rate: int) -> Iterator[None]:
    """Send this many calls a second to the first model meanwhile."""
    if not rate:
        yield
        return
    with start_load(server.url, "--model", "model-0", "--pixels", "--rate", str(rate), "--duration", "86400") as load:
        try:
            time.sleep(10.0)  # until the measured rate is about this one
            yield
        finally:
            load.kill()


def share(server: Server, seconds: float, page: "Page | None" = None) -> float:
    """CPU time of the server over `seconds`, s, as a share of one processor; an open page goes on meanwhile."""
    began, before = time.monotonic(), server.cpu_seconds()
    if page is None:
        time.sleep(seconds)
    else:
        page.wait_for_timeout(1e3 * seconds)
    return (server.cpu_seconds() - before) / (time.monotonic() - began)


def measure(server: Server, chromium: "Browser", rounds: int, seconds: float) -> dict[str, Any]:
    """Shares of a processor of the server in each round, without a page and with one; and what the page fetched."""
    alone, watched, fetched = [], [], list[str]()
    for _ in range(rounds):
        alone.append(share(server, seconds))
        page = chromium.new_page()
        page.goto(server.url)
        page.wait_for_selector("#chart-policy.js-plotly-plot")
        page.wait_for_timeout(3000)  # all files are sent, and the points of the past
        page.on("request", lambda request: fetched.append(request.url))
        watched.append(share(server, seconds, page))
        page.close()
    added = [one - other for one, other in zip(watched, alone, strict=True)]
    charts = sum("/live/policy?" in url for url in fetched)
    return {
        "alone": [round(value, 5) for value in alone],
        "watched": [round(value, 5) for value in watched],
        "added_median": round(median(added), 5),
        "polls_per_s": round(sum("/live?" in url for url in fetched) / (rounds * seconds), 2),
        "charts_per_min": round(60 * charts / (rounds * seconds), 1),
    }


def table(record: dict[str, Any]) -> str:
    """The record as a Markdown table, in per cent of a processor."""
    rows = [
        (
            about,
            *(f"{100 * value:.2f}" for value in (median(part["alone"]), median(part["watched"]), part["added_median"])),
            *(part["polls_per_s"], part["charts_per_min"]),
        )
        for about, part in record["parts"].items()
    ]
    head = ("calls", "no page, %", "one page, %", "added by the page, %", "polls/s", "charts/min")
    return markdown_table(head, rows, range(1, len(head)))


def main() -> None:
    """Print and record both; exit code 1 if a page adds more than a hundredth of a processor."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds without and with a page (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each, s (default: %(default)s)")
    chosen = parser.parse_args()
    flags = ("--device", DEVICES, "--policy", POLICY)
    with browser() as chromium:
        if chromium is None:
            print("skipped: playwright or chromium is not installed (apt-get install chromium)")
            return
        record: dict[str, Any] = {"cpus": psutil.cpu_count(), "load_average": psutil.getloadavg()[0], "parts": {}}
        with serving(*MODELS, *flags) as server:
            for rate in (0, RATE):
                with calls(server, rate):
                    part = measure(server, chromium, chosen.rounds, chosen.seconds)
                record["parts"][f"{rate} a second" if rate else "none"] = part
                print(part, flush=True)
    save_record("watched_page", record)
    print(table(record))
    raise SystemExit(max(part["added_median"] for part in record["parts"].values()) > LIMIT)


if __name__ == "__main__":
    main()
