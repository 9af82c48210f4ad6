"""The CUDA calls of captured graphs and uploads, behind an interface that tests replace."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from server.backends.cuda.device_slots import CopyEvent
from server.backends.torch_device import empty_cache

Replay = Callable[[], object]


class Runtime(Protocol):
    """One compute stream, on which batches run one after the other, and one copy stream beside it.

    Attributes:
        device: where the tensors of the batches are.
    """

    device: torch.device

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory from which the device copies without waiting."""
        ...

    def upload(self, copies: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
        """Start copies, of (destination, source), on the copy stream, and return the event of their end."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Make the compute stream the current one."""
        ...

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Start a copy on the compute stream."""
        ...

    def poison_free_memory(self) -> None:
        """Fill memory that tensors on the compute stream may get next with NaN, so that its use is noticed."""
        ...

    def wait_for(self, copy: CopyEvent) -> None:
        """Let the compute stream wait for copies."""
        ...

    def capture(self, run: Callable[[], None]) -> Replay:
        """Capture what `run` starts on the compute stream as a graph, without running it, and return its replay."""
        ...

    def record(self) -> CopyEvent:
        """Return the event of the end of all that was started on the compute stream; waiting for it blocks."""
        ...


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of a capture: to release a slot is a call that ends the capture with an error."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CudaRuntime:
    """The Runtime of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Create the streams."""
        self.device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # memory that the graphs share
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in page-locked memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def upload(self, copies: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
        """Start copies on the copy stream."""
        with torch.cuda.stream(self._copies):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
            return self._event(self._copies)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make the compute stream the current one."""
        with torch.cuda.stream(self._compute):
            yield

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Start a copy on the compute stream."""
        with torch.cuda.stream(self._compute):
            destination.copy_(source, non_blocking=True)

    def poison_free_memory(self) -> None:
        """Fill as much memory as was in use at most; the allocator gives it to the tensors that come next."""
        empty_cache()
        size = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        with torch.cuda.stream(self._compute), suppress(torch.OutOfMemoryError):
            torch.full((size // 2,), torch.nan, dtype=torch.float16, device=self.device)

    def wait_for(self, copy: CopyEvent) -> None:
        """Let the compute stream wait for copies."""
        assert isinstance(copy, torch.cuda.Event)
        self._compute.wait_event(copy)

    def capture(self, run: Callable[[], None]) -> Replay:
        """Capture a graph; other threads may use CUDA meanwhile."""
        empty_cache()  # the graph has memory of its own, so that of its warm-up is not needed any more
        if not self._graphs:  # a pool ends with its last graph: torch refuses to capture into it again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._compute), _no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the capture may have ended by the error
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs.add(graph)
        replay: Replay = graph.replay
        return replay

    def record(self) -> CopyEvent:
        """Return the event of the end of all batches so far."""
        return self._event(self._compute)

    def _event(self, stream: torch.cuda.Stream) -> CopyEvent:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # spinning would occupy a processor
        stream.record_event(event)
        found: CopyEvent = event
        return found
