"""The process of a model: what a worker runs. See server/workers."""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from policies.types import SpecError
from server.backends.executor import Batch
from server.backends.tensor_device import TensorDevice
from server.models.sources import TensorSource
from server.models.tensors.codec import TensorCodec, as_json, check_sample
from server.models.tensors.python_source import one_line_errors, place_of
from server.telemetry.logs import configured_logging
from server.telemetry.printed import printed_to_log
from server.workers.channel import Channel
from server.workers.errors import sent
from server.workers.remote_model import Description, describe
from server.workers.standby import StandbyMemory

_PR_SET_PDEATHSIG = 1


@contextmanager
def _only_exceptions() -> Iterator[None]:
    """Turn what would end a thread into a SpecError."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit) as error:
        raise SpecError(f"it raised {type(error).__name__}") from error


class _Service:
    """The methods that the main process calls."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._made = threading.Lock()
        self._model: Any = None
        self._device: TensorDevice | None = None

    def describe(self) -> Description:
        """Make the model, and describe it."""
        with _only_exceptions():
            model = self._made_model()
        with _only_exceptions(), one_line_errors(f"{self._spec}: samples"):
            return describe(model, [dict(sample) for sample in model.samples()])

    def load(self, device: str, what: str) -> None:
        """Load the model for a device, on the thread that runs it; `what` begins the message of an error."""
        self._device = TensorDevice(self._made_model(), device)
        with _only_exceptions(), one_line_errors(what):
            self._device.load()

    def run(self, samples: Sequence[Any]) -> Sequence[Any]:
        """The outputs of a batch, for each sample."""
        assert self._device is not None
        return self._device.serve(Batch("", samples))

    def decode(self, body: bytes, content_type: str) -> Any:
        """The sample that the model's own returns, as arrays."""
        model = self._made_model()
        return check_sample(model.decode(body, content_type), TensorCodec(model).signature(0), "decode")

    def render(self, outputs: Mapping[str, Any]) -> Any:
        """What the model's own returns, as JSON."""
        return as_json(self._made_model().render(outputs))

    def _made_model(self) -> Any:
        with self._made:
            if self._model is None:
                self._model = TensorSource(self._spec).make()
            return self._model


def _serve(lane: Channel, service: _Service) -> None:
    """Serve the calls of one lane until its other end is closed."""
    files = list[int]()  # of its standby, if it is for batches
    standby: StandbyMemory | None = None
    while True:
        try:
            (number, method, arguments), file = lane.receive()
        except EOFError:
            return
        if file is not None:
            files.append(file)
            if len(files) == 2:
                standby = StandbyMemory((files[0], files[1]))
            continue
        if method == "serve":
            try:
                _serve_batches(lane, service, (number, *arguments), standby)
            except OSError:
                return
            continue
        try:
            answer: Any = getattr(service, method)(*arguments)
        except BaseException as error:  # noqa: BLE001  (it is the answer)
            answer = sent(error, place_of(error))
            error.__traceback__ = None  # its frames have the inputs
        del arguments
        try:
            _send(lane, number, answer)
        except OSError:
            return
        del answer


def _serve_batches(lane: Channel, service: _Service, batch: Any, standby: StandbyMemory | None) -> None:
    """Run a batch, its number and samples, and then those that are taken from the standby."""
    while batch is not None:
        number, samples = batch
        started, following = time.monotonic(), None
        try:
            answer: Any = service.run(samples), started, time.monotonic()
            following = None if standby is None else standby.take()
        except BaseException as error:  # noqa: BLE001  (it is the answer)
            answer = sent(error, place_of(error))
            error.__traceback__ = None
        batch = following
        del samples
        _send(lane, number, answer, None if following is None else time.monotonic())


def _send(lane: Channel, number: int, answer: Any, next_started: float | None = None) -> None:
    """Send an answer, with the instant at which the standby launch was started after it, s."""
    try:
        lane.send((number, answer, next_started))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001  (a result that cannot be pickled, or too large)
        lane.send((number, sent(error, ""), next_started))


def _end_with(parent: int) -> None:
    """End this process when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve lanes until the control socket is closed."""
    control, parent = Channel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2])
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the main process drains, and then closes the socket
    try:
        (spec, (level, log_format)), _ = control.receive()
        with configured_logging(level, log_format), printed_to_log():
            _mark_records(spec)
            service = _Service(spec)
            while True:
                _, file = control.receive()
                assert file is not None
                lane = Channel(socket.socket(fileno=file), maps=True)
                threading.Thread(target=_serve, args=(lane, service), name="lane", daemon=True).start()
    except EOFError:
        os._exit(0)


def _mark_records(spec: str) -> None:
    """Let each line of the log say which model and process it is of."""
    make, fields = logging.getLogRecordFactory(), {"source": os.path.basename(spec), "pid": os.getpid()}

    def marked(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        record.__dict__.update(fields)
        return record

    logging.setLogRecordFactory(marked)
