"""A live run against a server from one process; processes.py runs it from several."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import ClientSession

from loadgen import client
from loadgen.client import RunLog
from loadgen.progress import INTERVAL, Progress
from loadgen.requests.images import image_content, pixel_content, takes_images
from loadgen.requests.metadata import ModelMetadata, find_model, predict_path, read_metadata
from loadgen.requests.raw_bodies import body_content
from loadgen.requests.tensors import tensor_content
from loadgen.schedule import Schedule
from policies.types import SpecError


@dataclass(frozen=True)
class LoadTarget:
    """Server, model and content of the requests, and how they are sent.

    Attributes:
        url: URL of the server.
        model: model name; None if the server has only one.
        image: the image file to send; None is matplotlib's sample photograph.
        pixels: whether to send raw pixels by the Open Inference Protocol instead of an image.
        give_up_after: time-out of a request, s.
        key: API key; None for a server without keys.
        lengths: lengths of the samples to send in order; None sends samples of one length.
        sample: file with the sample to send as tensors; None sends an image, a text or synthetic samples, as the model
            takes.
        precise: whether requests are sent at the instants of a thread that sleeps precisely.
        bodies: files whose content is sent in turn, whatever the model takes; empty sends what it takes.
        levels: level and value of the header Priority of the requests in order; None sends no header.
    """

    url: str
    model: str | None = None
    image: Path | None = None
    pixels: bool = False
    give_up_after: float = client.GIVE_UP_AFTER
    key: str | None = None
    lengths: Sequence[int] | None = None
    sample: Path | None = None
    precise: bool = False
    bodies: Sequence[Path] = ()
    levels: Sequence[tuple[int, str]] | None = None

    async def sender(self, session: ClientSession) -> client.PostSender:
        """Make the sender for the model's input.

        Raises:
            SpecError: there is no server, or no model on it that takes this content.
        """
        content = await self._content_of(session)
        return client.PostSender(session, self.url, content, None if self.levels is None else iter(self.levels))

    async def _content_of(self, session: ClientSession) -> client.RequestContent:
        if self.bodies and urlsplit(self.url).path.strip("/"):
            return body_content("", self.bodies)
        name = await find_model(session, self.url, self.model)
        if self.bodies:
            return body_content(predict_path(name), self.bodies)
        metadata = None if name is None else await read_metadata(session, self.url, name)
        if metadata is not None:
            return self._content(metadata)
        if self.pixels or self.sample is not None or self.lengths is not None:
            raise SpecError(
                f"{self.url} has no metadata of {name or 'its model'}; name one with --model, check the URL"
            )
        return image_content(name, self.image)

    def _content(self, model: ModelMetadata) -> client.RequestContent:
        """The content of the requests: the one that is asked for, or what the model takes."""
        if self.sample is not None:
            return tensor_content(model, self.sample, self.lengths)
        if self.pixels:
            return pixel_content(model)
        if takes_images(model) and self.lengths is None:
            return image_content(model.name, self.image)
        if self.image is not None:
            raise SpecError(f"{model.name} takes {model.input_names()}, no image; leave out --image")
        return tensor_content(model, lengths=self.lengths)

    def share(self, first: int, step: int) -> "LoadTarget":
        """The target of a process that sends only every `step`-th request, from the `first` on."""
        count = len(self.bodies)
        return replace(
            self,
            lengths=None if self.lengths is None else self.lengths[first::step],
            bodies=[self.bodies[(first + turn * step) % count] for turn in range(count)],
            levels=None if self.levels is None else self.levels[first::step],
        )


def run_load(target: LoadTarget, schedule: Schedule, progress: Progress, log: RunLog) -> bool:
    """Send all requests and wait for their responses; return whether Ctrl-C interrupted the run.

    Args:
        target: server, model and content.
        schedule: arrival instants.
        progress: shows the progress.
        log: receives the records, also those of an interrupted run.

    Raises:
        SpecError: the target cannot be used.
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
            await client.offer(sender, schedule.instants.tolist(), log, precise=target.precise)
        finally:
            ticker.cancel()
            await asyncio.wait([ticker])


async def _tick(progress: Progress, log: RunLog) -> None:
    start = time.monotonic()
    while not progress.quiet:
        progress.show(time.monotonic() - start, log)
        await asyncio.sleep(INTERVAL / 2)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of uvloop's event loop; None, for asyncio's own, where it is not installed."""
    try:
        import uvloop
    except ImportError:  # not available for Windows
        return None
    return uvloop.new_event_loop


def allow_many_connections() -> None:
    """Raise the limit of open files to its maximum, since an open loop has one connection per request in flight."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
