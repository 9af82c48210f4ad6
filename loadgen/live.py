"""One run against a server, from this process or from several when one is too slow."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import ClientSession

from loadgen import client
from loadgen.client import RunLog
from loadgen.progress import EVERY, Progress
from loadgen.schedule import Schedule
from loadgen.texts import text_sender
from policies.types import SpecError


@dataclass(frozen=True)
class LoadTarget:
    """What is sent where.

    Attributes:
        url: of the server.
        model: its name; None where only one is loaded.
        image: the picture to send; None: matplotlib's sample photograph.
        pixels: send raw pixels by the Open Inference Protocol instead.
        give_up_after: longest wait for an answer, s.
        key: what a server with keys asks for.
        lengths: of the texts to send, in order, tokens; None: a picture or one text, as the model takes.
    """

    url: str
    model: str | None = None
    image: Path | None = None
    pixels: bool = False
    give_up_after: float = client.GIVE_UP_AFTER
    key: str | None = None
    lengths: Sequence[int] | None = None

    async def sender(self, session: ClientSession) -> client.Sender:
        """What sends one request after another; see client.photograph, client.pixels and text_sender.

        Raises:
            SpecError: there is no server, or it has no model that takes what is to be sent.
        """
        if self.pixels:
            return await client.pixel_sender(session, self.url, self.model)
        found = None if self.image else await text_sender(session, self.url, self.model, self.lengths)
        if found is None and self.lengths is not None:
            raise SpecError(f"the model at {self.url} takes no texts, and only texts have sizes; leave out --sizes")
        return found or await client.image_sender(session, self.url, self.model, self.image)

    def share(self, first: int, step: int) -> "LoadTarget":
        """The same for those who send only every `step`-th request."""
        return self if self.lengths is None else replace(self, lengths=self.lengths[first::step])


def run_load(target: LoadTarget, schedule: Schedule, progress: Progress, log: RunLog) -> bool:
    """Send all requests and wait for their answers; whether Ctrl-C cut that short.

    Args:
        target: what is sent where.
        schedule: when.
        progress: is shown how it goes.
        log: what happened; it is whole even when cut short.

    Raises:
        SpecError: nothing can be sent at all.
    """
    allow_many_connections()
    try:
        with progress, asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run_load(target, schedule, progress, log))
    except KeyboardInterrupt:
        return True
    return False


async def _run_load(target: LoadTarget, schedule: Schedule, progress: Progress, log: RunLog) -> None:
    async with client.open_session(target.give_up_after, target.key) as session:
        sender = await target.sender(session)
        ticker = asyncio.create_task(_tick(progress, log))
        try:
            await client.offer(sender, schedule.instants.tolist(), log)
        finally:
            ticker.cancel()
            await asyncio.wait([ticker])


async def _tick(progress: Progress, log: RunLog) -> None:
    start = time.monotonic()
    while not progress.quiet:
        progress.show(time.monotonic() - start, log)
        await asyncio.sleep(EVERY / 2)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop there is."""
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return None
    return uvloop.new_event_loop


def allow_many_connections() -> None:
    """An open loop has a connection for each request in flight: more, in overload, than shells usually allow files."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
