"""An open loop of calls of one image each, of which every answer is checked."""

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import numpy as np

from benchmarks.support.mixed_calls import FEATURES, MixedCalls
from policies.queue import arrivals

OK, REJECTED, NO_ANSWER, OTHER = "200", "503 with Retry-After", "no answer", "other"
_CLIENT_TIMEOUT = 30.0


@dataclass(frozen=True)
class PixelCall:
    """One call.

    Attributes:
        sent: instant of time.monotonic.
        ended: instant of time.monotonic.
        outcome: "200" for the right answer, "503 with Retry-After", "no answer" if the connection was refused or broke,
            or "other: STATUS".
    """

    sent: float
    ended: float
    outcome: str


async def offer_pixels(url: str, rate: float, duration: float) -> list[PixelCall]:
    """Make calls at random instants, `rate` a second for `duration` s, and return all of them when they have ended."""
    rng = np.random.default_rng(5)
    calls, drawn, began = list[PixelCall](), MixedCalls(FEATURES, rng), time.monotonic()
    timeout, connector = aiohttp.ClientTimeout(total=_CLIENT_TIMEOUT), aiohttp.TCPConnector(limit=0)

    async def one(session: aiohttp.ClientSession) -> None:
        call, sent = drawn.draw("raw pixels"), time.monotonic()
        try:
            async with session.post(call.path, data=call.body, headers=call.headers) as response:
                status, body = response.status, await response.read()
                length = int(response.headers.get("Inference-Header-Content-Length", 0))
                again = "Retry-After" in response.headers
        except (aiohttp.ClientError, OSError):
            outcome = NO_ANSWER
        else:
            right = status == 200 and call.is_right(body, length)
            outcome = OK if right else REJECTED if status == 503 and again else f"{OTHER}: {status}"
        calls.append(PixelCall(sent, time.monotonic(), outcome))

    async with (
        aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for instant in arrivals.poisson(rate, duration, rng).tolist():
            await asyncio.sleep(max(0.0, began + instant - time.monotonic()))
            tasks.create_task(one(session))
    return calls
