"""The queue in front of one device: arrival, launch, completion, cancellation and expiry. No clock, no I/O.

States of a request: waiting -> in service (-> suspended -> in service ...) -> gone. Two loops drive a Batcher, the
server's Dispatcher and the simulator; everything that both must do identically is here.
"""

import heapq
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter

from policies.queue.drain import Drain
from policies.queue.monitor import LevelShares, Monitor
from policies.types import Action, BatchKey, Launch, Policy, PolicyError, Request, State, Wait

_arrival = attrgetter("arrival")


class Batcher:
    """The requests of one device, and the decisions of its policy; an invalid decision raises `PolicyError`.

    Attributes:
        policy: decides at every decision epoch; may be replaced at any time.
        monitor: measures the arrival rates; may be replaced at any time.
    """

    def __init__(
        self,
        policy: Policy,
        max_batch_size: Mapping[str, int],
        monitor: Monitor,
        max_batch_tokens: Mapping[str, int | None] | None = None,
        levels: Mapping[str, int] | None = None,
    ) -> None:
        """Start with an empty queue.

        Args:
            policy: the first policy.
            max_batch_size: the largest batch of each model; requests of other models are rejected.
            monitor: the first monitor.
            max_batch_tokens: by model, the largest product of batch size and longest length; None for no limit.
                A launch that exceeds it is reduced to the requests that fit.
            levels: by model, the number of priority levels; 1 for others.
        """
        self.policy = policy
        self._max_batch_size = dict(max_batch_size)
        self._max_batch_tokens = dict(max_batch_tokens or {})
        self.monitor = monitor
        self._waiting: list[Request] = []  # in order of arrival
        self._levels = {model: LevelShares(count) for model, count in (levels or {}).items() if count > 1}
        self._waiting_by_model = dict.fromkeys(max_batch_size, 0)
        self._suspended: list[Request] = []
        self._in_service: Sequence[Request] = ()
        self._ahead: Sequence[Request] = ()  # in service after the others, which are not complete yet
        self._removed: set[int] = set()  # ids cancelled or expired while in service
        self._expiring: dict[int, Request] = {}  # by id, requests with a time-out
        self._expiries: list[tuple[float, int]] = []  # heap of (instant, id); ids no longer in `_expiring` are stale

    def __len__(self) -> int:
        """Number of requests that are waiting or suspended."""
        return len(self._waiting) + len(self._suspended)

    @property
    def busy(self) -> bool:
        """Whether a batch is in service."""
        return bool(self._in_service)

    @property
    def queue_length(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def suspended(self) -> Sequence[Request]:
        """Requests suspended between stages, the latest run last; a live view."""
        return self._suspended

    def waiting_of(self, model: str) -> int:
        """Return the number of waiting requests of a model."""
        return self._waiting_by_model.get(model, 0)

    def waiting_through(self, model: str, level: int) -> int:
        """Return the number of waiting requests of a model of this priority level and those before it."""
        return sum(request.kind.model == model and request.level <= level for request in self._waiting)

    def oldest_of(self, model: str) -> float:
        """Return the arrival of the oldest waiting request of a model, s; inf without one."""
        return next((request.arrival for request in self._waiting if request.kind.model == model), inf)

    def waiting_shapes(self, model: str) -> set[str]:
        """Return the shapes of the waiting requests of a model."""
        return {request.kind.shape for request in self._waiting if request.kind.model == model}

    def waiting_by_model(self) -> Mapping[str, int]:
        """Return the number of waiting requests of each model; a live view."""
        return self._waiting_by_model

    def set_limits(self, model: str, max_batch_size: int, max_batch_tokens: int | None = None) -> None:
        """Set the largest batch of a model for all later launches, and its largest product of size and length."""
        self._max_batch_size[model] = max_batch_size
        self._max_batch_tokens[model] = max_batch_tokens

    def arrive(self, request: Request, now: float | None = None) -> None:
        """Queue a request in order of arrival.

        Args:
            request: a request that has not been launched.
            now: instant at which it reaches this device, s, counted in the arrival rate; None: its arrival.

        Raises:
            PolicyError: this device does not serve its model.
        """
        model, waiting = request.kind.model, self._waiting
        if model not in self._max_batch_size:
            raise PolicyError(f"model {model!r} is not served by this device")
        if waiting and request.arrival < waiting[-1].arrival:  # it comes from another device
            insort(waiting, request, key=_arrival)
        else:
            waiting.append(request)
        self._waiting_by_model[model] += 1
        self.monitor.arrive(request.kind, request.arrival if now is None else now)
        if model in self._levels:
            self._levels[model].arrive(request.level)
        if request.expires < inf:
            self._expiring[request.id] = request
            heapq.heappush(self._expiries, (request.expires, request.id))

    def cancel(self, request: Request) -> bool:
        """Remove a request that is waiting, suspended or in service; return False if it is none of these."""
        self._forget(request)
        for queue in (self._waiting, self._suspended):
            if request in queue:
                queue.remove(request)
                self._waiting_by_model[request.kind.model] -= queue is self._waiting
                return True
        if (request in self._in_service or request in self._ahead) and request.id not in self._removed:
            self._removed.add(request.id)
            return True
        return False

    def expire(self, now: float) -> list[Request]:
        """Remove and return the requests that have expired by `now`, wherever they are."""
        expired = []
        while self.next_expiry() <= now:
            request = self._expiring[heapq.heappop(self._expiries)[1]]
            if self.cancel(request):
                expired.append(request)
        return expired

    def next_expiry(self) -> float:
        """Return the earliest instant at which a request expires, s; inf without one."""
        while self._expiries and self._expiries[0][1] not in self._expiring:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else inf

    def set_kinds(self, kind_of: Callable[[Request], BatchKey]) -> None:
        """Assign a new kind of the same model to every request, since a new policy may have other bins."""
        for request in (*self._waiting, *self._suspended, *self._in_service, *self._ahead):
            request.kind = kind_of(request)

    def drain(self) -> None:
        """Replace the policy by `drain_policy`."""
        self.policy = self.drain_policy()

    def drain_policy(self) -> Drain:
        """Return the policy that launches all remaining requests without waiting."""
        return Drain(self._max_batch_size)

    def state(self, now: float) -> State:
        """Return the state of the queue at `now`, s."""
        return self._state(now, tuple(self._suspended))

    def _state(self, now: float, suspended: Sequence[Request]) -> State:
        waiting, rates, mean_rates = tuple(self._waiting), self.monitor.rates(now), self.monitor.mean_rates(now)
        if not self._levels:
            return State(now, waiting, suspended, rates, mean_rates)
        ordered = tuple(sorted(waiting, key=lambda request: 0 if request.urgent_from <= now else request.level))
        shares = {model: known.shares for model, known in self._levels.items()}
        by_level = ordered != waiting
        return State(now, ordered, suspended, rates, mean_rates, level_shares=shares, by_level=by_level)

    def level_shares(self, model: str) -> LevelShares | None:
        """Return the shares of a model's levels in its arrivals; None if it has one level."""
        return self._levels.get(model)

    def next_action(self, now: float) -> Action:
        """Return the action that `decide` would take at `now`, s, unchecked, without taking it."""
        return self._within_tokens(self.policy.decide(self.state(now)))

    def decide(self, now: float) -> Action:
        """Return the policy's action; a launched batch moves from the queue into service.

        Raises:
            PolicyError: the action is invalid; the queue is unchanged.
        """
        if not self._waiting and not self._suspended:
            return Wait()
        action = self.next_action(now)
        match action:
            case Launch():
                self._take(action, now)
            case Wait(until):
                if not until > now:
                    raise PolicyError(f"the wait ends at {until} s, which is not after the decision at {now} s")
        return action

    def lookahead(self, launch: Launch, at: float) -> Launch | None:
        """Return the launch that follows `launch`, which is in service, if that ends at `at`, s, and nothing changes.

        Its requests wait or are suspended, or they are copies of all requests of `launch` at their next stage. Returns
        None if the policy would wait or mix both.

        Raises:
            PolicyError: the policy's action is invalid.
        """
        batch, remaining = launch.requests, tuple[Request, ...]()
        if launch.stages is not None:
            moved = (replace(r, stage=r.stage + launch.stages) for r in batch if r.id not in self._removed)
            remaining = tuple(request for request in moved if request.stage < request.stages)
        if not (self._waiting or self._suspended or remaining):
            return None
        state = self._state(at, (*self._suspended, *remaining))
        action = self._within_tokens(self.policy.decide(state))
        if not isinstance(action, Launch):
            return None
        self._check_batch(action)
        if remaining:
            ids = [request.id for request in action.requests]
            if not {request.id for request in remaining}.isdisjoint(ids):
                return action if ids == [request.id for request in batch] else None
        return action

    def take_ahead(self, launch: Launch, at: float) -> None:
        """Take a launch that the device has begun `at`, s, after the batch in service, which is not complete yet."""
        if launch.requests[0] in self._in_service:
            return  # its next stage: see `advance`
        in_service, self._in_service = self._in_service, ()
        self._take(launch, at)
        self._in_service, self._ahead = in_service, launch.requests

    def advance(self, launch: Launch) -> None:
        """Advance the requests of `launch` to their next stage, which the device has already begun."""
        for request in launch.requests:
            request.stage += launch.stages or 0

    def complete(self, launch: Launch) -> list[Request]:
        """Complete `launch`: return the requests that are finished and suspend the others for their next stage.

        Requests cancelled or expired while in service are in neither group.
        """
        remaining = [r for r in launch.requests if r.id not in self._removed] if self._removed else launch.requests
        finished: list[Request] = []
        for request in remaining:
            request.stage = request.stages if launch.stages is None else request.stage + launch.stages
            (finished if request.stage >= request.stages else self._suspended).append(request)
        self._release()
        for request in finished:
            self._forget(request)
        return finished

    def fail(self, launch: Launch) -> list[Request]:
        """Remove the requests of a failed launch; return those not cancelled or expired before."""
        failed = [r for r in launch.requests if r.id not in self._removed]
        self._release()
        for request in failed:
            self._forget(request)
        return failed

    def abandon(self) -> None:
        """Drop the requests in service, since nothing will complete them."""
        self._in_service = self._ahead = ()
        self._removed.clear()

    def _within_tokens(self, action: Action) -> Action:
        """Keep those requests of a launch, in its order, with which it does not exceed the model's tokens."""
        if not isinstance(action, Launch) or len(action.requests) < 2:
            return action
        limit = self._max_batch_tokens.get(action.requests[0].kind.model)
        if limit is None:
            return action
        kept: list[Request] = []
        longest = 0.0
        for request in action.requests:
            most = max(longest, request.length)
            if not kept or (len(kept) + 1) * most <= limit:
                kept.append(request)
                longest = most
        return action if len(kept) == len(action.requests) else replace(action, requests=kept)

    def _forget(self, request: Request) -> None:
        """Drop the expiry of a request that has left, so that the request and its payload are freed at once."""
        if self._expiring.pop(request.id, None) is not None and len(self._expiries) > 2 * len(self._expiring) + 64:
            self._expiries = [(r.expires, r.id) for r in self._expiring.values()]
            heapq.heapify(self._expiries)

    def _release(self) -> None:
        self._in_service, self._ahead = self._ahead, ()
        self._removed &= {request.id for request in self._in_service}

    def _take(self, launch: Launch, now: float) -> None:
        batch = launch.requests
        self._check(launch)
        before = len(self._waiting)
        if self._waiting[: len(batch)] == list(batch):  # the common case, the oldest requests: no search
            del self._waiting[: len(batch)]
        elif self._suspended[-len(batch) :] == list(batch):  # or the batch that ran last
            del self._suspended[-len(batch) :]
        else:
            self._take_scattered(batch)
        self._waiting_by_model[batch[0].kind.model] -= before - len(self._waiting)  # a batch is of one model
        for request in batch:
            if now < request.started:
                request.started = now
        self._in_service = batch

    def _take_scattered(self, batch: Sequence[Request]) -> None:
        ids = {r.id for r in batch}
        waiting = [r for r in self._waiting if r.id not in ids]
        suspended = [r for r in self._suspended if r.id not in ids]
        if len(ids) != len(batch) or len(self) - len(waiting) - len(suspended) != len(batch):
            raise PolicyError("a batch must consist of distinct requests of this queue")
        self._waiting, self._suspended = waiting, suspended

    def _check(self, launch: Launch) -> None:
        if self._in_service:
            raise PolicyError("the device is busy: one batch at a time")
        self._check_batch(launch)

    def _check_batch(self, launch: Launch) -> None:
        batch = launch.requests
        if not batch:
            raise PolicyError("a batch must have at least one request")
        if launch.stages is not None and launch.stages < 1:
            raise PolicyError(f"a launch must run at least one stage, not {launch.stages}")
        kind, stage = batch[0].kind, batch[0].stage
        for request in batch:
            if request.kind != kind or request.stage != stage:
                raise PolicyError("a batch must be of one kind and at one stage")
        if len(batch) > (limit := self._max_batch_size[kind.model]):
            raise PolicyError(f"a batch of {len(batch)} is above the maximum {limit} of model {kind.model!r}")
