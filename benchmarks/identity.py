"""Does everybody get their own answer? Different pictures, all at once, against the answers that each gives alone.

While they are served the policy is swapped at random, so that batch sizes vary; corrupt pictures ride among them.
"""

import argparse
import asyncio
import io
from dataclasses import asdict, dataclass

import aiohttp
import numpy as np
from PIL import Image

from benchmarks.serving import save, serving

_RAW = {"Inference-Header-Content-Length": "0"}


@dataclass(frozen=True)
class Outcome:
    """What came back.

    Attributes:
        pictures: that were sent at once.
        corrupt: that rode among them.
        refused: of the corrupt ones, those answered 400.
        others: answers to good pictures that were not 200.
        error: largest difference of a logit from the answer alone, over the largest logit.
        difference: least over all pictures of the largest difference to the next picture's logits, likewise scaled.
        batch_sizes: how many different sizes of batches there were.
    """

    pictures: int
    corrupt: int
    refused: int
    others: int
    error: float
    difference: float
    batch_sizes: int


def draw(count: int, rng: np.random.Generator) -> list[bytes]:
    """Different smooth pictures, as PNG."""
    pictures = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
        buffer = io.BytesIO()
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(buffer, "PNG", compress_level=1)
        pictures.append(buffer.getvalue())
    return pictures


async def _ask(session: aiohttp.ClientSession, url: str, picture: bytes) -> tuple[int, bytes]:
    async with session.post(url, data=picture, headers=_RAW) as response:
        body = await response.read()
        length = response.headers.get("Inference-Header-Content-Length")
        return response.status, body if length is None else body[int(length) :]


async def _swap(session: aiohttp.ClientSession, url: str, rng: np.random.Generator) -> None:
    while True:
        change = {"policy": f"static:{rng.integers(1, 33)},max_wait_ms=100"}
        async with session.put(url, json=change) as response:
            response.raise_for_status()
        await asyncio.sleep(0.2)


async def _compare(base: str, model: str, pictures: list[bytes], corrupt: int) -> Outcome:
    infer, policy = f"{base}/v2/models/{model}/infer", f"{base}/admin/models/{model}/policy"
    rng = np.random.default_rng(2)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        alone = np.array([np.frombuffer((await _ask(session, infer, p))[1], np.float32) for p in pictures])
        swapping = asyncio.create_task(_swap(session, policy, rng))
        sent = [*((n, p) for n, p in enumerate(pictures)), *((-1, p[: len(p) // 2]) for p in pictures[:corrupt])]
        shuffled = [sent[i] for i in rng.permutation(len(sent))]
        answers = await asyncio.gather(*(_ask(session, infer, picture) for _, picture in shuffled))
        if swapping.done():
            swapping.result()  # a failed swap would leave batch sizes to chance
        swapping.cancel()
        async with session.get(f"{base}/v2/models/{model}/stats") as response:
            stats = (await response.json())["model_stats"][0]
    good = [(n, body) for (n, _), (status, body) in zip(shuffled, answers, strict=True) if n >= 0 and status == 200]
    largest = np.abs(alone).max()
    errors = [np.abs(np.frombuffer(body, np.float32) - alone[n]).max() for n, body in good]
    return Outcome(
        pictures=len(pictures),
        corrupt=corrupt,
        refused=sum(n < 0 and status == 400 for (n, _), (status, _) in zip(shuffled, answers, strict=True)),
        others=len(pictures) - len(good),
        error=float(max(errors) / largest),
        difference=float(np.abs(alone - np.roll(alone, 1, axis=0)).max(axis=1).min() / largest),
        batch_sizes=len(stats["batch_stats"]),
    )


def check(model: str, pictures: int, corrupt: int, *arguments: str) -> Outcome:
    """Serve `model` on the CPU and compare."""
    flags = ["--device", "cpu", "--weights", "random", "--queue-capacity", "4096", "--policy", "greedy", *arguments]
    with serving(model, *flags) as server:
        drawn = draw(pictures, np.random.default_rng(1))
        return asyncio.run(_compare(server.url, model, drawn, corrupt))


def main() -> None:
    """Check, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--corrupt", type=int, default=50)
    chosen = parser.parse_args()
    outcome = check(chosen.model, chosen.pictures, chosen.corrupt)
    save("identity", {"model": chosen.model, **asdict(outcome)})
    print(outcome)


if __name__ == "__main__":
    main()
