"""The process of a model: what a worker runs. See server/workers."""

import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from policies.types import SpecError
from server.backends.executor import Batch, Completion, Device, DeviceRun
from server.backends.glibc_heap import keep_freed_memory
from server.backends.pipeline_loop import serve_pipeline
from server.backends.real_device import Optimise, RealDevice
from server.backends.tensor_device import TensorDevice
from server.models.model import Decoded, ServedModel
from server.models.sources import file_source
from server.models.tensors.codec import TensorCodec, as_json, decode_bodies, read_decoded
from server.models.tensors.python_source import one_line_errors, place_of
from server.telemetry.logs import configured_logging, flush_log
from server.telemetry.printed import printed_to_log
from server.workers.channel import Channel
from server.workers.errors import sent
from server.workers.remote_model import Description, FileModel, TorchvisionModel, describe
from server.workers.shared_memory import SharedMemory
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
    """What the main process calls of any model."""

    def set_threads(self, count: int) -> bool:
        """Set the threads of torch for batches on the calling thread; False if the model has not imported torch."""
        if "torch" not in sys.modules:
            return False
        import torch

        torch.set_num_threads(count)
        return True


class _FileService(_Service):
    """The model of a file, and the methods that the main process calls.

    Attributes:
        device: that runs batches; None until the model is loaded.
    """

    def __init__(self, model: FileModel, _: SharedMemory) -> None:
        self._spec = model.spec
        self._made = threading.Lock()
        self._model: Any = None
        self.device: TensorDevice | None = None

    def describe(self) -> Description:
        """Make the model, and describe it."""
        with _only_exceptions():
            model = self._made_model()
        with _only_exceptions(), one_line_errors(f"{self._spec}: samples"):
            return describe(model, [dict(sample) for sample in model.samples()])

    def load(self, what: str, place: str, _: Optimise) -> None:
        """Load the model for a device, on the thread that runs it; `what` begins the message of an error."""
        self.device = TensorDevice(self._made_model(), place)
        with _only_exceptions(), one_line_errors(what):
            self.device.load()

    def decode(self, body: bytes, content_type: str) -> Decoded:
        """What the model's own returns, with samples as arrays."""
        model = self._made_model()
        return read_decoded(model.decode(body, content_type), TensorCodec(model).signature(0))

    def decode_each(self, bodies: Sequence[tuple[bytes, str]]) -> Any:
        """One sample from each body, with its content type."""
        model = self._made_model()
        return decode_bodies(model, bodies, TensorCodec(model).signature(0))

    def render(self, outputs: Mapping[str, Any], *kept: bytes) -> Any:
        """What the model's own returns, as JSON; `kept` is what its `decode` kept."""
        render = self._made_model().render
        return as_json(render(outputs, *map(pickle.loads, kept)))

    def run_pipeline(self, lane: Channel) -> None:
        """Serve the calls of the pipeline on the calling thread, until the lane is closed."""
        serve_pipeline(lane, self._made_model())

    def _made_model(self) -> Any:
        with self._made:
            if self._model is None:
                self._model = file_source(self._spec).make()
            return self._model


class _TorchvisionService(_Service):
    """A model of torchvision, and the methods that the main process calls.

    Attributes:
        device: that runs batches; None until the model is loaded.
    """

    def __init__(self, model: TorchvisionModel, shared: SharedMemory) -> None:
        self._model = model
        self._memory = shared.memory
        self._made = threading.Lock()
        self._loaded: Any = None
        self.device: Device | None = None

    def describe(self) -> ServedModel:
        """Load the network, and describe the model."""
        served: ServedModel = self._made_model()[0]
        return served

    def load(self, what: str, place: str, optimise: Optimise) -> None:
        """Put the network on a device, on the thread that runs it; `what` begins the message of an error."""
        from server.backends.cuda.graph import GraphDevice
        from server.backends.cuda.page_locked import page_locked
        from server.backends.torch_images import device_of

        served, net = self._made_model()
        with one_line_errors(what):
            self.device = device_of(net, served, place, optimise)
        if isinstance(self.device, GraphDevice):  # it copies samples from there
            page_locked.add(self._memory)

    def _made_model(self) -> Any:
        from server.models.images.torchvision_source import load_image_model

        with self._made:
            if self._loaded is None:
                model = self._model
                self._loaded = load_image_model(model.name, model.weights, model.max_batch_size, model.stages)
            return self._loaded


_SERVICES = {FileModel: _FileService, TorchvisionModel: _TorchvisionService}


class _Lanes:
    """The threads of the process, each of which serves one lane.

    Attributes:
        service: of the model that was named; None before.
        fields: of each line of the log.
        other_time: CPU time of the calls so far that run no batch, such as `decode`, s.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self.other_time = 0.0
        self._counting = threading.Lock()
        self.service: Any = None
        self.fields: dict[str, Any] = {"pid": os.getpid()}

    def start(self, file: int) -> None:
        """Start the thread of a lane, whose socket has this descriptor."""
        lane = Channel(socket.socket(fileno=file), maps=True, shared=self._shared)
        threading.Thread(target=self._serve, args=(lane,), name="lane", daemon=True).start()

    def _serve(self, lane: Channel) -> None:
        """Serve the calls of one lane until its other end is closed."""
        files = list[int]()  # of its standby, if it is for batches
        runner = _BatchRunner(lane, self)
        while True:
            try:
                (number, method, arguments), file = lane.receive()
            except EOFError:
                return
            if file is not None:
                files.append(file)
                if len(files) == 2:
                    runner.standby = StandbyMemory((files[0], files[1]), self._shared)
                continue
            try:
                if method == "run_pipeline":
                    self.service.run_pipeline(lane)
                    return
                if method in ("serve", "serve_alone"):
                    runner.serve(self.service.device, (number, *arguments), method == "serve")
                    continue
                answer: Any
                began = time.thread_time()
                try:
                    answer = _find_device(*arguments) if method == "find_device" else self._call(method, arguments)
                except BaseException as error:  # noqa: BLE001  (it is the answer)
                    answer = sent(error, place_of(error))
                    error.__traceback__ = None  # its frames have the inputs
                    if method in ("describe", "load", "find_device"):
                        flush_log()  # the error may be the last line of the main process
                del arguments
                _send(lane, number, answer)
                del answer
                with self._counting:
                    self.other_time += time.thread_time() - began
            except OSError:
                return

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "load":
            self.fields["device"] = arguments[1]
        return getattr(self.service, method)(*arguments)


def _find_device(spec: str) -> RealDevice:
    from server.backends.torch_device import resolve_device

    return resolve_device(spec)


class _BatchRunner:
    """Runs the batches of a lane, and keeps the outputs of stages that are not the last.

    Attributes:
        standby: of the lane; None before it was sent.
    """

    def __init__(self, lane: Channel, lanes: _Lanes) -> None:
        self.standby: StandbyMemory | None = None
        self._lane = lane
        self._lanes = lanes
        self._kept: dict[int, Any] = {}  # outputs of stages, by number
        self._numbers = count()

    def serve(self, device: Device, message: Any, follows: bool) -> None:
        """Run a batch, and then, if launches may follow, those that are taken from the standby."""
        number, began = message[0], self._cpu_time()
        running: DeviceRun | None = self._start(device, message, ())
        while running is not None:
            has_ended = running.wait()
            ended = self._cpu_time()
            taken = self.standby.take() if has_ended and follows and self.standby is not None else None
            following = None if taken is None else self._start(device, taken, running.outputs)
            next_started = None if following is None else following.started
            result = running.result(next_started)
            answer: Any
            if isinstance(result, Completion):
                answer = self._keep(result.outputs), result.started, result.finished, max(ended - began, 0.0)
            else:
                answer = sent(result, place_of(result))
                result.__traceback__ = None
            running = following
            del following, result
            _send(self._lane, number, answer, next_started)
            number, began = 0 if taken is None else taken[0], ended
            del taken, answer

    def _cpu_time(self) -> float:
        """CPU time of the process so far that was not for other calls, s; those that run are counted at their end."""
        return time.process_time() - self._lanes.other_time

    def _start(self, device: Device, message: Any, outputs: Sequence[Any]) -> DeviceRun:
        """Start a batch as `BatchLane` describes it; without inputs it has the outputs of the one before."""
        _, inputs, first_stage, stages, dropped = message
        upload = getattr(device, "upload", None)
        samples = [self._kept[each] for each in inputs] if first_stage else [*map(upload, inputs)] if upload else inputs
        for each in dropped:
            self._kept.pop(each, None)
        return DeviceRun(device, Batch("", samples or outputs, first_stage, stages))

    def _keep(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """The outputs, or the numbers of those that stay on the device for the next stage."""
        if isinstance(outputs[0], np.ndarray | Mapping):
            return outputs
        numbers = [next(self._numbers) for _ in outputs]
        self._kept.update(zip(numbers, outputs, strict=True))
        return numbers


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
    keep_freed_memory()  # before there are threads, which have arenas of their own
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the main process drains, and then closes the socket
    try:
        (level, log_format), file = control.receive()
        assert file is not None
        shared = SharedMemory(file)
        lanes = _Lanes(shared)
        with configured_logging(level, log_format), printed_to_log():
            _mark_records(lanes.fields)
            while True:
                model, file = control.receive()
                if file is None:
                    lanes.fields["source"] = str(model)
                    lanes.service = _SERVICES[type(model)](model, shared)
                else:
                    lanes.start(file)
    except EOFError:
        os._exit(0)


def _mark_records(fields: Mapping[str, Any]) -> None:
    """Let each line of the log say which model, device and process it is of."""
    make = logging.getLogRecordFactory()

    def marked(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        record.__dict__.update(fields)
        return record

    logging.setLogRecordFactory(marked)
