"""The queue in front of one device, and the rules for leaving it. No clock, no I/O.

Life of a request: waiting -> in service (-> suspended -> in service ...) -> gone. Two loops drive a Batcher, the
asyncio Dispatcher and the simulator; whatever both must do alike stands here.
"""

import heapq
from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter

from policies.queue.monitor import Monitor
from policies.rules.drain import Drain
from policies.types import Action, Kind, Launch, Policy, PolicyError, Request, State, Wait

_arrival = attrgetter("arrival")


class Batcher:
    """Holds requests, asks the policy, and breaks loudly when the policy breaks a rule.

    Attributes:
        policy: asked at every decision epoch; may be replaced at any time.
        monitor: measures the arrival rates; may be replaced at any time.
    """

    def __init__(
        self, policy: Policy, max_batch_size: Mapping[str, int], monitor: Monitor, iterating: Collection[str] = ()
    ) -> None:
        """Empty.

        Args:
            policy: asked first.
            max_batch_size: the largest batch of each model; requests of other models are refused.
            monitor: asked first.
            iterating: models whose stage is an iteration, so that a batch may hold requests at different ones.
        """
        self.policy = policy
        self._max_batch_size = dict(max_batch_size)
        self._iterating = frozenset(iterating)
        self.monitor = monitor
        self._waiting: list[Request] = []
        self._waiting_by_model = dict.fromkeys(max_batch_size, 0)
        self._suspended: list[Request] = []
        self._in_service: Sequence[Request] = ()
        self._left: set[int] = set()  # ids that left while in service
        self._expiring: dict[int, Request] = {}  # by id, those here who have a time-out
        self._expiries: list[tuple[float, int]] = []  # heap of (instant, id); ids that left are stale

    def __len__(self) -> int:
        """How many wait or are suspended."""
        return len(self._waiting) + len(self._suspended)

    @property
    def busy(self) -> bool:
        """Whether a batch is in service."""
        return bool(self._in_service)

    @property
    def queue_length(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def suspended(self) -> Sequence[Request]:
        """Those between stages, the latest run last; a view, not to be kept."""
        return self._suspended

    def waiting_of(self, model: str) -> int:
        """How many requests of `model` wait."""
        return self._waiting_by_model.get(model, 0)

    def waiting_by_model(self) -> Mapping[str, int]:
        """How many requests wait, for each model; a view, not to be kept."""
        return self._waiting_by_model

    def limit(self, model: str, max_batch_size: int) -> None:
        """From now on no batch of `model` may be larger."""
        self._max_batch_size[model] = max_batch_size

    def arrive(self, request: Request, now: float | None = None) -> None:
        """Take a request in, behind all who arrived before it.

        Args:
            request: that nobody has begun to serve.
            now: when it comes to this device, s, which is what the rate is of; None: at its arrival.

        Raises:
            PolicyError: its model is not served by this device.
        """
        if request.kind.model not in self._max_batch_size:
            raise PolicyError(f"model {request.kind.model!r} is not served here")
        insort(self._waiting, request, key=_arrival)
        self._waiting_by_model[request.kind.model] += 1
        self.monitor.arrive(request.kind, request.arrival if now is None else now)
        if request.expires < inf:
            self._expiring[request.id] = request
            heapq.heappush(self._expiries, (request.expires, request.id))

    def cancel(self, request: Request) -> bool:
        """Let a request leave at whatever point of its life; False if it is not (or no longer) here."""
        self._forget(request)
        for place in (self._waiting, self._suspended):
            if request in place:
                place.remove(request)
                self._waiting_by_model[request.kind.model] -= place is self._waiting
                return True
        if request in self._in_service and request.id not in self._left:
            self._left.add(request.id)
            return True
        return False

    def expire(self, now: float) -> list[Request]:
        """Let those leave whose client has given up by `now`, at whatever point of their life; return them."""
        gone = []
        while self.next_expiry() <= now:
            request = self._expiring[heapq.heappop(self._expiries)[1]]
            if self.cancel(request):
                gone.append(request)
        return gone

    def next_expiry(self) -> float:
        """The earliest instant at which somebody here expires, s; inf if nobody does."""
        while self._expiries and self._expiries[0][1] not in self._expiring:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else inf

    def rekind(self, kind_of: Callable[[Request], Kind]) -> None:
        """Give everybody here a kind anew, of the same model: a new policy may have other bins."""
        for request in (*self._waiting, *self._suspended, *self._in_service):
            request.kind = kind_of(request)

    def drain(self) -> None:
        """From now on launch whatever is left, without waiting."""
        self.policy = Drain(self._max_batch_size)

    def state(self, now: float) -> State:
        """What a policy would see now."""
        rates, mean_rates = self.monitor.rates(now), self.monitor.mean_rates(now)
        return State(now, tuple(self._waiting), tuple(self._suspended), rates, mean_rates)

    def decide(self, now: float) -> Action:
        """Ask the policy; a batch that it launches leaves the queue for the device.

        Raises:
            PolicyError: the answer breaks a rule of this house; the queue is as before.
        """
        if not self._waiting and not self._suspended:
            return Wait()
        action = self.policy.decide(self.state(now))
        match action:
            case Launch():
                self._take(action, now)
            case Wait(until):
                if not until > now:
                    raise PolicyError(f"a wait until {until} does not end after now, {now}")
        return action

    def ahead(self, launch: Launch, at: float) -> Launch | None:
        """The next launch of the same requests, when `launch` is over at `at` (s) and nothing has happened until then.

        It may be one that is itself ahead of what is in service. None where others would be launched than those; where
        somebody has left; at the end.
        """
        batch = launch.requests
        stage = batch[0].stage + (launch.stages or 0)
        iterating = batch[0].kind.model in self._iterating  # who has finished shows only when the device is done
        if launch.stages is None or iterating or self._left or any(stage >= request.stages for request in batch):
            return None
        moved = [replace(request, stage=stage) for request in batch]
        rates, mean_rates = self.monitor.rates(at), self.monitor.mean_rates(at)
        action = self.policy.decide(State(at, tuple(self._waiting), (*self._suspended, *moved), rates, mean_rates))
        if isinstance(action, Launch) and [r.id for r in action.requests] == [r.id for r in batch]:
            return replace(action, requests=moved)
        return None

    def go_on(self, launch: Launch) -> None:
        """The device is done with `launch` and serves the same requests on."""
        for request in launch.requests:
            request.stage += launch.stages or 0

    def complete(self, launch: Launch) -> list[Request]:
        """The device is done with `launch`: return who is finished; the others are suspended for their next stage.

        Those who left while in service are in neither group.
        """
        staying = [r for r in launch.requests if r.id not in self._left] if self._left else launch.requests
        finished: list[Request] = []
        for request in staying:
            request.stage = request.stages if launch.stages is None else request.stage + launch.stages
            (finished if request.stage >= request.stages else self._suspended).append(request)
        self._release()
        for request in finished:
            self._forget(request)
        return finished

    def fail(self, launch: Launch) -> list[Request]:
        """The device failed on `launch`: everybody in it leaves; return who had not left before."""
        gone = [r for r in launch.requests if r.id not in self._left]
        self._release()
        for request in gone:
            self._forget(request)
        return gone

    def _forget(self, request: Request) -> None:
        """Its time-out concerns nobody any more; nothing may keep it, or its pixels, until then."""
        if self._expiring.pop(request.id, None) is not None and len(self._expiries) > 2 * len(self._expiring) + 64:
            self._expiries = [(r.expires, r.id) for r in self._expiring.values()]
            heapq.heapify(self._expiries)

    def _release(self) -> None:
        self._in_service = ()
        self._left.clear()

    def _take(self, launch: Launch, now: float) -> None:
        batch = launch.requests
        self._check(launch)
        before = len(self._waiting)
        if self._waiting[: len(batch)] == list(batch):  # the oldest ones, as nearly always: no search
            del self._waiting[: len(batch)]
        elif self._suspended[-len(batch) :] == list(batch):  # or those who ran last, between two stages
            del self._suspended[-len(batch) :]
        else:
            self._take_scattered(batch)
        self._waiting_by_model[batch[0].kind.model] -= before - len(self._waiting)  # a batch is of one model
        for request in batch:
            request.started = min(request.started, now)
        self._in_service = batch

    def _take_scattered(self, batch: Sequence[Request]) -> None:
        ids = {r.id for r in batch}
        waiting = [r for r in self._waiting if r.id not in ids]
        suspended = [r for r in self._suspended if r.id not in ids]
        if len(ids) != len(batch) or len(self) - len(waiting) - len(suspended) != len(batch):
            raise PolicyError("a batch is made of distinct requests of this queue")
        self._waiting, self._suspended = waiting, suspended

    def _check(self, launch: Launch) -> None:
        batch = launch.requests
        if self._in_service:
            raise PolicyError("the device is busy: one batch at a time")
        if not batch:
            raise PolicyError("a batch has at least one request")
        if launch.stages is not None and launch.stages < 1:
            raise PolicyError(f"a launch runs at least one stage, not {launch.stages}")
        first = batch[0]
        anywhere = first.kind.model in self._iterating
        if any(r.kind != first.kind or (r.stage != first.stage and not anywhere) for r in batch):
            raise PolicyError("a batch is of one kind and stands at one stage")
        if len(batch) > self._max_batch_size[first.kind.model]:
            limit = self._max_batch_size[first.kind.model]
            raise PolicyError(f"a batch of {len(batch)} is above the maximum of {first.kind.model!r}, {limit}")
