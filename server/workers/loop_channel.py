"""A channel on an event loop: no message waits in the loop's thread."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from server.workers.channel import Channel

_log = logging.getLogger("batchwright.pipeline")
_BURST = 32  # messages that are received before others of the loop run


class LoopChannel:
    """One end of a channel; all methods, and the functions that it calls, run on the loop in which it was made."""

    def __init__(self, channel: Channel, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Call `on_message` with each message, and `on_end` once, when the other end is closed or a message is lost."""
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._on_message, self._on_end = on_message, on_end
        self._waiting = deque[Any]()  # messages for which the socket has no room
        self._closed = False
        self._loop.add_reader(channel.fileno(), self._receive)

    def send(self, message: Any) -> None:
        """Send a message, when there is room; without effect after the end.

        Raises:
            Exception: it cannot be sent, such as what cannot be pickled.
        """
        if self._closed or (not self._waiting and self._is_sent(message)):
            return
        self._waiting.append(message)
        if len(self._waiting) == 1:
            self._loop.add_writer(self._channel.fileno(), self._send_waiting)

    def _is_sent(self, message: Any) -> bool:
        try:
            self._channel.send(message, wait=False)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):  # which `_receive` sees, too
            return True
        return True

    def _send_waiting(self) -> None:
        try:
            while self._waiting and self._is_sent(self._waiting[0]):
                self._waiting.popleft()
        except Exception:  # noqa: BLE001  (a message is lost)
            _log.exception("a message of a pipeline cannot be sent")
            self._end()
            return
        if not self._waiting:
            self._loop.remove_writer(self._channel.fileno())

    def _receive(self) -> None:
        for _ in range(_BURST):
            try:
                message, _ = self._channel.receive(wait=False)
            except BlockingIOError:
                return
            except EOFError:
                self._end()
                return
            except Exception:  # noqa: BLE001  (a message is lost)
                _log.exception("a message of a pipeline cannot be read")
                self._end()
                return
            self._on_message(message)
            if self._closed:
                return

    def _end(self) -> None:
        self.close()
        self._on_end()

    def close(self) -> None:
        """Close this end; no function is called any more."""
        if self._closed:
            return
        self._closed = True
        self._waiting.clear()
        with suppress(ValueError):
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
