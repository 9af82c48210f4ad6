"""Checks that every request gets its own answer: different images at once, compared with the answers for each alone.

While they are served the policy is swapped at random, so that batch sizes vary, and corrupt images are sent among them.
"""

import asyncio
from dataclasses import asdict, dataclass

import aiohttp
import numpy as np

from benchmarks.support.harness import argument_parser, save_record, serving, synthetic_image

_RAW = {"Inference-Header-Content-Length": "0"}


@dataclass(frozen=True)
class Outcome:
    """The comparison's result.

    Attributes:
        pictures: good images, sent at once.
        corrupt: corrupt images sent among them.
        refused: corrupt images that were answered 400.
        others: good images that were not answered 200.
        error: largest difference of a logit from the answer for the image alone, over the largest logit.
        difference: smallest difference between two neighbouring images' answers, scaled likewise.
        batch_sizes: number of different batch sizes.
    """

    pictures: int
    corrupt: int
    refused: int
    others: int
    error: float
    difference: float
    batch_sizes: int


async def _infer(session: aiohttp.ClientSession, url: str, image: bytes) -> tuple[int, bytes]:
    async with session.post(url, data=image, headers=_RAW) as response:
        body = await response.read()
        length = response.headers.get("Inference-Header-Content-Length")
        return response.status, body if length is None else body[int(length) :]


async def _swap(session: aiohttp.ClientSession, url: str, rng: np.random.Generator) -> None:
    while True:
        change = {"policy": f"static:{rng.integers(1, 33)},max_wait_ms=100"}
        async with session.put(url, json=change) as response:
            response.raise_for_status()
        await asyncio.sleep(0.2)


async def _compare(base: str, model: str, images: list[bytes], corrupt: int) -> Outcome:
    infer, policy = f"{base}/v2/models/{model}/infer", f"{base}/admin/models/{model}/policy"
    rng = np.random.default_rng(2)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        alone = np.array([np.frombuffer((await _infer(session, infer, p))[1], np.float32) for p in images])
        swapping = asyncio.create_task(_swap(session, policy, rng))
        sent = [*((n, p) for n, p in enumerate(images)), *((-1, p[: len(p) // 2]) for p in images[:corrupt])]
        shuffled = [sent[i] for i in rng.permutation(len(sent))]
        answers = await asyncio.gather(*(_infer(session, infer, image) for _, image in shuffled))
        if swapping.done():
            swapping.result()  # without swaps the batch sizes would not vary
        swapping.cancel()
        async with session.get(f"{base}/v2/models/{model}/stats") as response:
            stats = (await response.json())["model_stats"][0]
    good = [(n, body) for (n, _), (status, body) in zip(shuffled, answers, strict=True) if n >= 0 and status == 200]
    largest = np.abs(alone).max()
    errors = [np.abs(np.frombuffer(body, np.float32) - alone[n]).max() for n, body in good]
    return Outcome(
        pictures=len(images),
        corrupt=corrupt,
        refused=sum(n < 0 and status == 400 for (n, _), (status, _) in zip(shuffled, answers, strict=True)),
        others=len(images) - len(good),
        error=float(max(errors) / largest),
        difference=float(np.abs(alone - np.roll(alone, 1, axis=0)).max(axis=1).min() / largest),
        batch_sizes=len(stats["batch_stats"]),
    )


def check(model: str, images: int, corrupt: int, *arguments: str) -> Outcome:
    """Serve `model` on the CPU and compare."""
    flags = ["--device", "cpu", "--weights", "random", "--queue-capacity", "4096", "--policy", "greedy", *arguments]
    rng = np.random.default_rng(1)
    with serving(model, *flags) as server:
        drawn = [synthetic_image(rng, 6, 256, "PNG", compress_level=1) for _ in range(images)]
        return asyncio.run(_compare(server.url, model, drawn, corrupt))


def main() -> None:
    """Check, print and record."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--corrupt", type=int, default=50)
    chosen = parser.parse_args()
    outcome = check(chosen.model, chosen.pictures, chosen.corrupt)
    save_record("identity", {"model": chosen.model, **asdict(outcome)})
    print(outcome)


if __name__ == "__main__":
    main()
