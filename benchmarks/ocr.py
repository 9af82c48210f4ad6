"""Text lines of examples/ocr: accuracy beside the package's own, and throughput by policy beside the simulation.

200 lines of 5 to 60 random characters are drawn and sent as PNGs to /predict, 240 requests in a run, at 1.5 times the
rate that the device can serve. A picture is decoded in a millisecond and recognised in fifty, so that the device is the
bottleneck although the client and HTTP share the other of two cores, and every answer is a text that can be checked.
The policies take turns. The simulation has the profile by length that was measured just before, and the same arrivals
and widths. The package recognises the same pictures in its own batches. The first eighth of the answers does not count
for throughput, since the queue is short and bins have no edges yet. About five minutes on two cores.
"""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import (
    ROOT,
    Server,
    argument_parser,
    markdown_table,
    measure_profile,
    save_record,
    save_table,
    serving,
    temporary_cache,
)
from examples.ocr.lines import draw_line, random_line
from examples.ocr.model import Recogniser, weights_file
from loadgen.report import simulated_records
from policies.planning.simulation import RequestSizes, Simulation
from policies.profile import Profile, load_profile

NAME = "ocr"
BATCH, ROUNDS = 16, 2
LINES, REQUESTS = 200, 240
OVERLOAD = 1.5  # arrival rate over the highest throughput without padding
POLICIES = ("greedy", "static:8", "multi-bin:2", "multi-bin:4", "serial")
_BASE = POLICIES[0]
_SHORTEST, _LONGEST = 5, 60  # characters
_MODEL = (f"ocr={ROOT / 'examples' / 'ocr' / 'model.py'}:Recogniser", "--device", "cpu", "--max-batch-size", str(BATCH))
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """The requests of a run, sent at constant intervals.

    Attributes:
        texts: what the pictures show.
        pictures: PNGs.
        widths: of the decoded pictures, pixels.
        instants: arrival times, s, from 0.
    """

    texts: Sequence[str]
    pictures: Sequence[bytes]
    widths: _Floats
    instants: _Floats


def workload(lines: int, requests: int, profile: Profile) -> Workload:
    """Draw random lines and repeat them, faster than the device can serve them."""
    rng = random.Random(0)
    texts = [random_line(rng, rng.randint(_SHORTEST, _LONGEST)) for _ in range(lines)]
    pictures, model = [draw_line(text) for text in texts], Recogniser()
    widths = np.array([model.decode(picture, "image/png")["image"].shape[2] for picture in pictures], float)
    fastest = max(b / fmean(profile.service_time(b, width) for width in widths) for b in (1, BATCH))
    chosen = np.arange(requests) % lines
    instants = np.arange(requests) / (OVERLOAD * fastest)
    return Workload([texts[i] for i in chosen], [pictures[i] for i in chosen], widths[chosen], instants)


async def _send_all(url: str, work: Workload) -> list[tuple[float, str]]:
    """The time of each answer, s, and the recognised text, in order of the requests."""
    clock = asyncio.get_running_loop().time

    async def send(session: aiohttp.ClientSession, at: float, picture: bytes) -> tuple[float, str]:
        await asyncio.sleep(start + at - clock())
        async with session.post(f"{url}/predict", data=picture, headers={"Content-Type": "image/png"}) as response:
            answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"a picture is answered with {response.status}: {answer['error']}")
        return clock() - start, answer["outputs"]["text"]

    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        start = clock()
        return await asyncio.gather(*map(send, repeat(session), work.instants.tolist(), work.pictures))


def throughput(finished: Iterable[float]) -> float:
    """Answers per second after the first eighth, from the times of all answers, s."""
    ends = sorted(finished)
    first = len(ends) // 8
    return (len(ends) - first) / (ends[-1] - ends[first - 1])


def simulated(spec: str, work: Workload, profile: Profile) -> float:
    """The forecast of the requests per second."""
    simulation = Simulation(profile, spec, sizes=RequestSizes(work.widths))
    return throughput(record.finished for record in simulated_records(simulation.services(work.instants)))


def by_the_package(pictures: Sequence[bytes]) -> list[str]:
    """The texts that the package's own recogniser gives for all pictures, in its own batches."""
    import cv2
    import yaml
    from rapidocr_onnxruntime.ch_ppocr_rec import TextRecognizer

    settings = yaml.safe_load((weights_file().parents[1] / "config.yaml").read_text())["Rec"]
    recogniser = TextRecognizer(settings | {"model_path": str(weights_file())})
    images = [cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR) for picture in pictures]
    return [text for text, _ in recogniser(images)[0]]


def edit_distance(found: str, expected: str) -> int:
    """The least number of characters to insert, delete or replace."""
    row = list(range(len(expected) + 1))
    for i, character in enumerate(found, 1):
        last, row[0] = row[0], i
        for j, wanted in enumerate(expected, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (character != wanted))
    return row[-1]


def accuracy(found: Sequence[str], expected: Sequence[str]) -> float:
    """1 - edit distance / length, over all characters."""
    return 1.0 - sum(map(edit_distance, found, expected)) / sum(map(len, expected))


def measure(server: Server, profile: Profile, work: Workload, package: Sequence[str], rounds: int) -> dict[str, Any]:
    """Throughput and accuracy by policy; gains are over the first policy in the same round."""
    cells: dict[str, dict[str, Any]] = {spec: {"live_hz": [], "gain_live": []} for spec in POLICIES}
    for round_ in range(rounds):
        for spec, cell in cells.items():
            server.set_policy("ocr", spec)
            finished, texts = zip(*asyncio.run(_send_all(server.url, work)), strict=True)
            cell["live_hz"].append(round(throughput(finished), 3))
            cell["gain_live"].append(round(cell["live_hz"][-1] / cells[_BASE]["live_hz"][-1], 3))
            if not round_:
                cell["simulated_hz"] = round(simulated(spec, work, profile), 3)
                cell["gain_simulated"] = round(cell["simulated_hz"] / cells[_BASE]["simulated_hz"], 3)
                cell["accuracy"] = round(accuracy(texts, work.texts), 5)
                cell["differing_lines"] = sum(map(str.__ne__, texts[: len(package)], package))
            print(spec, cell, flush=True)
    return cells


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    package, lines = record["package"], record["lines"]
    caption = (
        f"{lines['number']} lines of {_SHORTEST} to {_LONGEST} characters, {lines['narrowest']:.0f} to "
        f"{lines['widest']:.0f} pixels wide, on {record['device']}; batches of at most {BATCH}. The package's own "
        f"accuracy is {package['accuracy']:.4f}."
    )
    head = (
        "policy",
        "requests/s, live",
        "simulated",
        "gain, live",
        "simulated",
        "accuracy",
        "lines unlike the package's",
    )
    rows = (
        (
            spec,
            *(", ".join(f"{value:.1f}" for value in cell["live_hz"]), f"{cell['simulated_hz']:.1f}"),
            *(", ".join(f"{value:.2f}" for value in cell["gain_live"]), f"{cell['gain_simulated']:.2f}"),
            *(f"{cell['accuracy']:.4f}", cell["differing_lines"]),
        )
        for spec, cell in record["policies"].items()
    )
    return f"{caption}\n\n{markdown_table(head, rows)}"


def main() -> None:
    """Measure, print and record; a quick run records nothing."""
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="40 lines in one round of 80 requests, and no record")
    quick = parser.parse_args().quick
    with temporary_cache() as folder:
        path = folder / "ocr.json"
        measure_profile(_MODEL[0], path, *_MODEL[1:])
        profile = load_profile(str(path))
        lines = 40 if quick else LINES
        work = workload(lines, 80 if quick else REQUESTS, profile)
        package = by_the_package(work.pictures[:lines])
        with serving(*_MODEL, "--profile", str(path), "--policy", _BASE, "--log-level", "warning") as server:
            cells = measure(server, profile, work, package, 1 if quick else ROUNDS)
    record = {
        "device": profile.device,
        "service_ms": {
            str(length): [round(1e3 * profile.service_time(b, length), 2) for b in (1, BATCH)]
            for length in profile.lengths or ()
        },
        "lines": {"number": lines, "narrowest": work.widths.min(), "widest": work.widths.max()},
        "package": {"accuracy": round(accuracy(package, work.texts[:lines]), 5)},
        "policies": cells,
    }
    if quick:
        print(table(record))
    else:
        save_record(NAME, record)
        save_table(NAME, "Text lines", table(record) + "\n")


if __name__ == "__main__":
    main()
