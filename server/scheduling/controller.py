"""The controller: closes the loop from what batches took and requests saw to the policy that decides.

It asks the pure rules of policies/adaptation (drift.py, objective.py) after every batch, which takes microseconds;
where they call for another policy, that is solved in a worker thread and swapped between two decisions.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from policies.adaptation.drift import DriftDetector
from policies.adaptation.objective import Objective, ResponseCounts
from policies.catalog import Chosen, solved_again
from policies.profile import Profile
from policies.types import SpecError
from server.energy.meters import EnergyMeter
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.controller")
_READINGS = 0.25  # s between readings of the energy counter, at least
_STEPS = 10.0  # of the counter between two readings, at least
_SHARE = 0.95  # what slo_p95_ms promises
_FIRST_RETRY, _LAST_RETRY = 300.0, 3600.0  # s from a lack of memory to a larger batch; doubled each time it is lacking
_T = TypeVar("_T")


@dataclass(slots=True)
class _Watched:
    """One model's state.

    Attributes:
        asked_for: the policy as its spec was chosen, before anything was adapted.
        deciding: what the dispatcher was given last; another one there means that somebody swapped it.
        evidence: what was seen since the profile was fitted.
        objective: the response-time objective, if the spec names one.
        served: answers since the objective last judged; (requests, within, batches).
        solving: the task that solves another policy now.
    """

    asked_for: Chosen
    deciding: Chosen
    evidence: DriftDetector
    objective: Objective | None
    served: ResponseCounts = field(default_factory=lambda: ResponseCounts(0, 0, 0))
    solving: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Shrunk:
    """A model whose batches did not fit the memory.

    Attributes:
        full: the profile with all sizes.
        wait: time until a larger batch is tried, s.
        retry: the timer for that.
    """

    full: Profile
    wait: float
    retry: asyncio.TimerHandle


class Controller:
    """Watches one dispatcher; everything but the solving happens on its event loop."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, meter: EnergyMeter, pool: Executor) -> None:
        """`meter` is the device's, read in `pool`, where policies are solved too."""
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._meter = meter
        self._pool = pool
        self._counts_idle = meter.scope != "batches"
        self._between = max(_READINGS, _STEPS * meter.resolution)
        self._watched = {model: self._watch(model, chosen) for model, chosen in dispatcher.chosen.items()}
        self._shrunk: dict[str, _Shrunk] = {}
        self._read_at = 0.0
        self._reading: asyncio.Task[None] | None = None

    def served(self, model: str, batch_size: int, service_time: float, responses: Sequence[float]) -> None:
        """A batch was answered: its service time and the response times of its requests, s."""
        watched = self._current(model)
        if watched.deciding.profile.lengths is None:
            watched.evidence.observe_batch(batch_size, service_time)
        else:  # whose service times vary with what is asked for
            watched.evidence.discard_window()
        self._read(watched)
        if watched.solving is not None:
            return
        refit = watched.evidence.refit()
        if refit is not None:
            reason = "; ".join(map(str, refit.drifts))
            self._solve(model, refit.profile, "drift", reason)
        elif watched.objective is not None:
            self._judge(model, watched, watched.objective, responses)

    def disturbed(self, model: str) -> None:
        """The device was busy with stages or failed attempts, whose energy the profile does not predict."""
        self._watched[model].evidence.discard_window()

    def shrunk(self, model: str, before: Chosen) -> None:
        """The batches of this model have to be smaller than `before` had them: solve that again for the smaller size.

        Meanwhile the dispatcher serves greedily.
        """
        last, stand_in = self._watched[model], self._dispatcher.chosen[model]
        watched = self._watched[model] = self._watch(model, stand_in, last)
        watched.asked_for = last.asked_for if before is last.deciding else before
        self._solve(model, stand_in.profile, "memory", f"batches of at most {stand_in.profile.max_batch_size} fit")
        shrunk = self._shrunk.get(model)
        if shrunk is None:
            full, wait = before.profile, _FIRST_RETRY
        else:
            shrunk.retry.cancel()
            full, wait = shrunk.full, min(2 * shrunk.wait, _LAST_RETRY)
        self._shrunk[model] = _Shrunk(full, wait, self._retry_after(wait, model))

    def _retry_after(self, wait: float, model: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(wait, self._grow, model)

    def _grow(self, model: str) -> None:
        """Allow batches of twice the size, as the lack of memory may have passed.

        The larger sizes are as the profile had them before; the drift detector corrects them. If the memory is still
        lacking, the batch is recovered by halves, and the next try comes after twice the time.
        """
        shrunk, watched = self._shrunk[model], self._current(model)
        profile, full = watched.deciding.profile, shrunk.full
        if profile.max_batch_size >= full.max_batch_size:
            del self._shrunk[model]  # all sizes fit again; the next lack of memory is another one
            return
        if watched.solving is None:
            larger = full.truncated(min(2 * profile.max_batch_size, full.max_batch_size))
            self._solve(model, larger, "memory", f"batches of up to {larger.max_batch_size} are tried again")
        shrunk.retry = self._retry_after(shrunk.wait, model)

    def _current(self, model: str) -> _Watched:
        """The state of a model; a new one after a policy swap."""
        watched, chosen = self._watched[model], self._dispatcher.chosen[model]
        if chosen is not watched.deciding:
            watched = self._watched[model] = self._watch(model, chosen, watched)
        return watched

    def _watch(self, model: str, chosen: Chosen, before: _Watched | None = None) -> _Watched:
        if before is not None and before.evidence.profile is chosen.profile:
            evidence = before.evidence
        else:
            evidence = DriftDetector(chosen.profile, (chosen.profile.idle_power or 0.0) if self._counts_idle else 0.0)
        weighted = chosen.table is not None and any(row.w2 for row in chosen.table.rows)
        objective = Objective(chosen.slo, _SHARE) if weighted and "slo_p95_ms" in chosen.parameters else None
        if objective is not None or before is not None:
            self._metrics.objective(model, self._dispatcher.device, 0)
        return _Watched(chosen, chosen, evidence, objective)

    def _judge(self, model: str, watched: _Watched, objective: Objective, responses: Sequence[float]) -> None:
        counted = watched.served
        within = sum(response <= objective.bound for response in responses)
        watched.served = answers = ResponseCounts(
            counted.served + len(responses), counted.within + within, counted.batches + 1
        )
        after = objective.after(answers)
        if after is objective:
            return
        watched.served = ResponseCounts(0, 0, 0)
        watched.objective = after
        self._metrics.objective(model, self._dispatcher.device, after.level)
        if after.level != objective.level:
            late = 1.0 - answers.within / answers.served
            reason = f"{late:.1%} of {answers.served} answers took longer than {1e3 * after.bound:g} ms"
            self._solve(model, watched.deciding.profile, "objective", f"{reason}: weight of power x {after.factor:g}")

    def _solve(self, model: str, profile: Profile, kind: str, reason: str) -> None:
        watched = self._watched[model]
        watched.solving = asyncio.get_running_loop().create_task(self._swap(model, watched, profile, (kind, reason)))

    async def _swap(self, model: str, watched: _Watched, profile: Profile, why: tuple[str, str]) -> None:
        factor = 1.0 if watched.objective is None else watched.objective.factor
        try:
            chosen = await self._off_the_loop(lambda: solved_again(watched.asked_for, profile, factor))
        except SpecError as error:
            _log.warning("%s: %s, but no policy follows: %s", model, why[1], error)
            return
        except Exception:  # noqa: BLE001  (a broken solver must not end the watching)
            _log.exception("%s: %s, but solving again failed; the policy stays", model, why[1])
            return
        finally:
            watched.solving = None
        if self._dispatcher.chosen[model] is not watched.deciding:
            return  # somebody set another policy meanwhile
        watched.deciding = self._dispatcher.use(model, chosen)
        watched.served = ResponseCounts(0, 0, 0)
        self._metrics.policy(model, self._dispatcher.device, chosen.name, chosen.spec)
        self._metrics.adapted(model, why[0])
        _log.info("%s: %s; policy %s follows", model, why[1], chosen.spec)

    def _read(self, watched: _Watched) -> None:
        """Read the counter now and then, where it tells one model's energy.

        It does where that model is alone on the device, and where what the counter adds for idling is known: a measured
        profile's energies are above idle.
        """
        now, profile = self._dispatcher.now(), watched.evidence.profile
        alone = len(self._watched) == 1 and profile.energies is not None
        known = profile.idle_power is not None or not self._counts_idle
        busy = self._reading is not None and not self._reading.done()
        if busy or now < self._read_at + self._between or not (alone and known):
            return
        self._read_at = now
        self._reading = asyncio.get_running_loop().create_task(self._note(watched, watched.evidence.discarded_windows))

    async def _note(self, watched: _Watched, disturbances: int) -> None:
        try:
            joules = await self._off_the_loop(self._meter.read)
        except Exception:  # noqa: BLE001  (a broken sensor must not end the watching)
            _log.exception("the energy counter cannot be read; it is not asked again")
            self._between = inf
            return
        if joules is not None and watched.evidence.discarded_windows == disturbances:
            watched.evidence.observe_energy(self._dispatcher.now(), joules)

    def _off_the_loop(self, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        return asyncio.get_running_loop().run_in_executor(self._pool, work)
