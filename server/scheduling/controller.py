"""The controller: adapts the policies of one device to measured service times, energies and response times.

After every batch and answer it evaluates the rules of policies/adaptation (drift.py, objective.py), which takes
microseconds. If they call for another policy, that is solved off the event loop and swapped in between two decisions.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from math import expm1, inf, isclose
from typing import Any, TypeVar

from policies.adaptation.drift import DriftDetector
from policies.adaptation.objective import AgeMargin, Objective, ResponseCounts
from policies.catalog import ModelPolicy, solved_again
from policies.profile import Profile
from policies.types import SpecError
from server.energy.meters import EnergyMeter
from server.scheduling.dispatcher import Dispatcher
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.controller")
_MIN_INTERVAL = 0.25  # s between two readings of the energy counter
_MIN_STEPS = 10.0  # resolution steps of the counter between two readings
_FIRST_RETRY, _LAST_RETRY = 300.0, 3600.0  # s from out of memory to trying a larger batch; doubled at each failure
_SOLVED_AGAIN = 60.0  # s after a failure of solving, or after solving for shares, until it is tried again
RATE_OVER = 10.0  # s of serving over which the arrival rate is averaged that a policy is solved for
_RATE_KNOWN = 0.5  # part of the weight of that mean at which the policy may be solved because the rate has changed
_T = TypeVar("_T")
Solver = Callable[[ModelPolicy, Profile, float, float, float | None], ModelPolicy]  # as `solved_again`


@dataclass(slots=True)
class _MeanRate:
    """Mean of the measured arrival rate over about ten seconds of serving: the measured one is noisy.

    Attributes:
        value: 1/s; 0 before the second observation.
        weight: of the observations, from 0 to 1.
        at: instant of the last one, s.
    """

    value: float = 0.0
    weight: float = 0.0
    at: float = inf

    def observe(self, now: float, rate: float) -> None:
        """Take in the rate measured at an instant, s; after a pause it stands for a second, not for the pause."""
        part, self.at = -expm1(-min(max(now - self.at, 0.0), 1.0) / RATE_OVER), now
        self.weight += part * (1.0 - self.weight)
        if self.weight > 0.0:
            self.value += part / self.weight * (rate - self.value)


@dataclass(slots=True)
class _Monitored:
    """State of a monitored model.

    Attributes:
        configured: the policy as configured, before any adaptation.
        current: the policy that was set last; if the dispatcher has another one, it was swapped by an operator.
        drift: detector of drift from the profile.
        objective: the response-time objective; None where the spec has none. While greedy is in use, because a policy
            is solved for a reduced maximum batch size, it is that policy's.
        served: answers since the objective was last evaluated, or the policy solved.
        begun: whether it was looked up whether the margin of the policy's bound is known.
        margins: the margins by bound and share, also of policies that were set before.
        bins_updates: those of the policy's bins that were looked at.
        solve_shares_from: instant from which it may be solved for shares of levels, s.
        rate: mean arrival rate of the last seconds.
        solve_rate_from: instant from which it may be solved for another rate, s.
        solving: the running task that solves another policy.
    """

    configured: ModelPolicy
    current: ModelPolicy
    drift: DriftDetector
    objective: Objective | AgeMargin | None
    served: ResponseCounts = field(default_factory=ResponseCounts)
    begun: bool = False
    margins: dict[tuple[float, float], AgeMargin] = field(default_factory=dict)
    bins_updates: int = 0
    solve_shares_from: float = 0.0
    rate: _MeanRate = field(default_factory=_MeanRate)
    solve_rate_from: float = 0.0
    solving: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Reduced:
    """State of a model with a reduced maximum batch size, because larger batches ran out of memory.

    Attributes:
        full: the profile with all sizes.
        wait: time until a larger batch is tried, s.
        retry: the timer of that attempt.
    """

    full: Profile
    wait: float
    retry: asyncio.TimerHandle


class Controller:
    """Adapts the policies of one dispatcher. All but solving and reading the meter runs on the event loop."""

    def __init__(
        self, dispatcher: Dispatcher, metrics: Metrics, meter: EnergyMeter, pool: Executor, solve: Solver = solved_again
    ) -> None:
        """`meter` measures the device. Readings of it, and `solve`, which may take long, run in threads of `pool`."""
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._meter = meter
        self._pool = pool
        self._solver = solve
        self._counts_idle = meter.scope != "batches"
        self._interval = max(_MIN_INTERVAL, _MIN_STEPS * meter.resolution)
        self._monitored = {model: self._monitor(model, chosen) for model, chosen in dispatcher.chosen.items()}
        self._reduced: dict[str, _Reduced] = {}
        self._read_at = 0.0
        self._reading: asyncio.Task[None] | None = None
        metrics.observe_responses(dispatcher.device, self.answered)

    def served(
        self, model: str, batch_size: int, service_time: float, longest: float = 0.0, cpu_time: float | None = None
    ) -> None:
        """Evaluate a served batch.

        Args:
            model: of the batch.
            batch_size: number of requests.
            service_time: s, as profiles measure it.
            longest: length of its longest request; 0 where requests do not differ.
            cpu_time: user and system time that it took, s; None where it is not counted.
        """
        monitored = self._state(model)
        monitored.served.batches += 1
        monitored.rate.observe(self._dispatcher.clock(), self._dispatcher.queue.arrival_rate(model))
        by_length = monitored.current.profile.varies_by_length
        if batch_size > monitored.drift.profile.max_batch_size:  # launched before the maximum was reduced
            monitored.drift.discard_window()
        else:
            monitored.drift.observe_batch(batch_size, service_time, longest if by_length else None)
            if cpu_time:
                monitored.drift.observe_cpu_time(batch_size, cpu_time)
        if by_length:
            monitored.drift.discard_window()  # energies are known by size alone
        else:
            self._read_meter(monitored)
        if monitored.solving is not None:
            return
        solve_for = (self._solve_for_sizes, self._solve_for_shares, self._solve_for_rate)
        if any(each(model, monitored) for each in solve_for):
            return
        refit = monitored.drift.refit(monitored.current.weighs_costs)
        if refit is not None:
            reason = "; ".join(map(str, refit.drifts))
            self._solve(model, refit.profile, "drift", reason)

    def learned(self, model: str) -> Profile:
        """The profile of a model as it is known now, which need not be the one that its policy was solved for."""
        return self._state(model).drift.learned

    def latest_ratio(self, model: str) -> float:
        """The service times of a model's latest batches over those of the profile that its policy was solved for."""
        return self._state(model).drift.latest_ratio

    def mean_rate(self, model: str) -> float:
        """The mean arrival rate of a model over about ten seconds of serving, 1/s; 0 while it is not known."""
        rate = self._state(model).rate
        return rate.value if rate.weight >= _RATE_KNOWN else 0.0

    def _solve_for_sizes(self, model: str, monitored: _Monitored) -> bool:
        """Solve the policy if it depends on the sizes of requests, and those that arrive are known or have changed."""
        bins = monitored.current.bins
        if bins is None or bins.updates == monitored.bins_updates:
            return False
        monitored.bins_updates = bins.updates
        sizes = monitored.current.unsolved_sizes()
        if sizes:
            known = {"solved_sizes": tuple(sizes)}
            self._solve(model, monitored.current.profile, "sizes", f"{len(sizes)} sizes are known", known)
        return bool(sizes)

    def _solve_for_shares(self, model: str, monitored: _Monitored) -> bool:
        """Solve the policy if it depends on the shares of the levels, and those are known or have changed."""
        now = self._dispatcher.clock()
        if monitored.current.solve_for_shares is None or now < monitored.solve_shares_from:
            return False
        shares = monitored.current.unsolved_shares(self._dispatcher.queue.level_shares(model))
        if shares:
            monitored.solve_shares_from = now + _SOLVED_AGAIN
            reason = f"level 1 has {shares[0]:.1%} of the arrivals"
            self._solve(model, monitored.current.profile, "levels", reason, {"solved_shares": tuple(shares)})
        return bool(shares)

    def _solve_for_rate(self, model: str, monitored: _Monitored) -> bool:
        """Solve the policy if it is not yet solved for loads near the mean arrival rate."""
        now, rate = self._dispatcher.clock(), monitored.rate
        if rate.weight < _RATE_KNOWN or now < monitored.solve_rate_from:
            return False
        unsolved = monitored.current.unsolved_rate(rate.value)
        if unsolved:
            monitored.solve_rate_from = now + _SOLVED_AGAIN  # unless it succeeds
            self._solve(model, monitored.current.profile, "rate", f"{rate.value:.3g} requests arrive a second")
        return unsolved

    def answered(self, model: str, response: float, requests: int) -> None:
        """Evaluate the response time of a call for each of its requests.

        Args:
            model: of the call.
            response: from the end of its body to its answer, s.
            requests: of the call.
        """
        monitored = self._state(model)
        if monitored.objective is None or monitored.solving is not None or self._dispatcher.accounting.shared:
            return
        if monitored.current.slo == inf:  # greedy, until a policy is solved for the reduced maximum batch size
            return
        monitored.served.add(response, requests, monitored.objective.bound)
        try:
            self._evaluate_objective(model, monitored, monitored.objective)
        except Exception:  # noqa: BLE001  (a bug here must not fail the call)
            _log.exception("%s: the controller failed; the objective is not adapted any more", model)
            monitored.objective = None

    def unprofiled_work(self, model: str) -> None:
        """Record that the device ran single stages or failed attempts, whose energy the profile does not predict."""
        monitored = self._state(model)
        monitored.drift.discard_window()
        if monitored.solving is None:
            self._solve_for_sizes(model, monitored)

    def batch_size_reduced(self, model: str, before: ModelPolicy) -> None:
        """Solve the policy `before` again for a reduced maximum batch size; the dispatcher serves greedily meanwhile.

        The current profile of the dispatcher has the reduced size.
        """
        last, greedy = self._monitored[model], self._dispatcher.chosen[model]
        monitored = self._monitored[model] = self._monitor(model, greedy, last)
        monitored.margins = last.margins
        if before is last.current:
            monitored.configured, monitored.objective = last.configured, last.objective
        else:
            monitored.configured, monitored.objective = before, _objective_of(before)
        self._solve(model, greedy.profile, "memory", f"batches of at most {greedy.profile.max_batch_size} fit")
        reduced = self._reduced.get(model)
        if reduced is None:
            full, wait = before.profile, _FIRST_RETRY
        else:
            reduced.retry.cancel()
            full, wait = reduced.full, min(2 * reduced.wait, _LAST_RETRY)
        self._reduced[model] = _Reduced(full, wait, self._retry_after(wait, model))

    def _retry_after(self, wait: float, model: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(wait, self._increase_batch_size, model)

    def _increase_batch_size(self, model: str) -> None:
        """Double the maximum batch size, because the lack of memory may have passed.

        The larger sizes have the times of the profile before the reduction, which the drift detector corrects. If they
        still run out of memory, the batch is recovered by halves, and the next attempt comes after twice the time.
        """
        monitored, reduced = self._state(model), self._reduced.get(model)
        if reduced is None:
            return
        profile, full = monitored.current.profile, reduced.full
        if profile.max_batch_size >= full.max_batch_size:
            del self._reduced[model]  # the next time it is out of memory, retries start from _FIRST_RETRY
            return
        if monitored.solving is None:
            larger = full.truncated(min(2 * profile.max_batch_size, full.max_batch_size))
            self._solve(model, larger, "memory", f"batches of up to {larger.max_batch_size} are tried again")
        reduced.retry = self._retry_after(reduced.wait, model)

    def _state(self, model: str) -> _Monitored:
        """Return the state of a model; a new one after a policy swap, or for another loaded model and its profile."""
        monitored, chosen = self._monitored[model], self._dispatcher.chosen[model]
        if chosen.profile is not monitored.current.profile and (reduced := self._reduced.pop(model, None)):
            reduced.retry.cancel()
        if chosen is not monitored.current:
            monitored = self._monitored[model] = self._monitor(model, chosen, monitored)
        return monitored

    def _monitor(self, model: str, chosen: ModelPolicy, before: _Monitored | None = None) -> _Monitored:
        drift, margins, rate = self._detector(chosen.profile), dict[tuple[float, float], AgeMargin](), _MeanRate()
        if before is not None:
            rate = before.rate
            if before.drift.profile is chosen.profile:
                drift = before.drift
            if chosen.profile in (before.drift.profile, before.current.profile):  # else a model was loaded
                margins = before.margins
        objective = _objective_of(chosen)
        if objective is not None or before is not None:
            self._metrics.objective_level(model, self._dispatcher.device, 0)
            self._metrics.objective_margin(model, self._dispatcher.device, chosen.margin)
        if isinstance(objective, AgeMargin):
            objective = margins.get((objective.bound, objective.share), objective)
        return _Monitored(chosen, chosen, drift, objective, margins=margins, rate=rate)

    def _detector(self, profile: Profile) -> DriftDetector:
        return DriftDetector(profile, (profile.idle_power or 0.0) if self._counts_idle else 0.0)

    def _evaluate_objective(self, model: str, monitored: _Monitored, objective: Objective | AgeMargin) -> None:
        after: Objective | AgeMargin
        if isinstance(objective, AgeMargin) and not monitored.begun:
            after, reason = objective, "the margin of this bound is known"
            monitored.begun = True
        else:
            answers = monitored.served
            after = objective.after(answers)
            if after is objective:
                return
            if isinstance(after, AgeMargin) and not self._may_follow(monitored, after, model):
                monitored.served = ResponseCounts()
                return
            late = 1.0 - answers.within / answers.served
            reason = f"{late:.1%} of {answers.served} answers took longer than {1e3 * after.bound:g} ms"
        monitored.served = ResponseCounts()
        monitored.objective = after
        if isinstance(after, AgeMargin):
            monitored.margins[after.bound, after.share] = after
            if not isclose(after.in_use, monitored.current.margin, abs_tol=1e-9):
                reason = f"{reason}: solved for {1e3 * (after.bound - after.in_use):.4g} ms"
                self._solve(model, monitored.current.profile, "objective", reason)
            return
        self._metrics.objective_level(model, self._dispatcher.device, after.level)
        if isinstance(objective, Objective) and after.level != objective.level:
            self._solve(model, monitored.current.profile, "objective", f"{reason}: weight of power x {after.factor:g}")

    def _may_follow(self, monitored: _Monitored, after: AgeMargin, model: str) -> bool:
        """Whether a margin may change; it shrinks only where that may save, and where the present one is in use."""
        rate, current = self._dispatcher.queue.arrival_rate(model), monitored.current
        return after.in_use > current.margin - 1e-9 or (not current.unsolved_rate(rate) and current.may_save(rate))

    def _solve(
        self, model: str, profile: Profile, kind: str, reason: str, known: Mapping[str, Any] | None = None
    ) -> None:
        """Start solving; `known` are fields of the policy that it is solved for, where they have changed."""
        monitored = self._monitored[model]
        before = monitored.current.profile
        configured = monitored.current if monitored.current.takes_margin else monitored.configured
        if profile.varies_by_length and configured.solved_sizes:
            rescaled = [profile.time_alone(before.length_alone(size)) for size in configured.solved_sizes]
            configured = replace(configured, solved_sizes=tuple(rescaled))
        configured = replace(configured, **(known or {}))
        current = monitored.current

        def again() -> None:
            """Solve the policy after a failure, unless another one was set meanwhile."""
            if self._monitored[model] is monitored and monitored.current is current and monitored.solving is None:
                self._solve(model, monitored.drift.profile if kind == "drift" else profile, kind, reason, known)

        swap = self._swap(model, monitored, configured, profile, kind, reason, again)
        monitored.solving = asyncio.get_running_loop().create_task(swap)

    async def _swap(
        self,
        model: str,
        monitored: _Monitored,
        configured: ModelPolicy,
        profile: Profile,
        kind: str,
        reason: str,
        again: Callable[[], None],
    ) -> None:
        """Solve a policy and set it; `again` is called later if solving failed."""
        factor = monitored.objective.factor if isinstance(monitored.objective, Objective) else 1.0
        margin = monitored.objective.in_use if isinstance(monitored.objective, AgeMargin) else 0.0
        near = monitored.rate.value if kind in ("rate", "drift", "objective") else None  # sizes change all rows
        try:
            chosen = await self._run_in_thread(lambda: self._solver(configured, profile, factor, margin, near))
        except SpecError as error:
            _log.warning("%s: %s, but the policy cannot be solved again and stays: %s", model, reason, error)
            return
        except Exception:  # noqa: BLE001  (a bug in the solver must not end the monitoring)
            _log.exception("%s: %s, but solving the policy again failed; it stays", model, reason)
            asyncio.get_running_loop().call_later(_SOLVED_AGAIN, again)
            return
        finally:
            monitored.solving = None
        if self._dispatcher.chosen[model] is not monitored.current:
            return  # an operator set another policy meanwhile
        if chosen.bins is not None and profile.varies_by_length and profile is not monitored.current.profile:
            before = monitored.current.profile
            chosen.bins.rescale(lambda size: profile.time_alone(before.length_alone(size)))
        monitored.configured = configured
        monitored.current = self._dispatcher.policies.set(model, chosen)
        monitored.served, monitored.solve_rate_from = ResponseCounts(), 0.0
        if chosen.profile.max_batch_size != monitored.drift.profile.max_batch_size:  # larger batches are tried again
            monitored.drift = self._detector(chosen.profile)
        self._metrics.objective_margin(model, self._dispatcher.device, margin)
        if isinstance(monitored.objective, Objective):
            self._metrics.objective_level(model, self._dispatcher.device, monitored.objective.level)
        self._metrics.policy(model, self._dispatcher.device, chosen.name, chosen.spec)
        self._metrics.adapted(model, kind)
        _log.info("%s: %s; policy %s is set", model, reason, chosen.spec)

    def _read_meter(self, monitored: _Monitored) -> None:
        """Start a reading of the energy counter, at most one per interval, where it can be compared with the profile.

        This requires that no other model is served, that the profile has energies, and that the idle power is known if
        the counter includes it, since a measured profile's energies are above idle.
        """
        now, drift = self._dispatcher.clock(), monitored.drift
        single_model = len(self._monitored) == 1 and drift.profile.energies is not None
        idle_known = drift.profile.idle_power is not None or not self._counts_idle
        busy = self._reading is not None and not self._reading.done()
        if busy or now < self._read_at + self._interval or not (single_model and idle_known):
            return
        self._read_at = now
        self._reading = asyncio.get_running_loop().create_task(self._add_reading(drift, drift.discarded_windows))

    async def _add_reading(self, drift: DriftDetector, discarded: int) -> None:
        """Add a reading, unless a window was discarded since it was started."""
        try:
            joules = await self._run_in_thread(self._meter.read)
        except Exception:  # noqa: BLE001  (a broken sensor must not end the monitoring)
            _log.exception("the energy counter cannot be read; it is not read again")
            self._interval = inf
            return
        if joules is not None and drift.discarded_windows == discarded:
            drift.observe_energy(self._dispatcher.clock(), joules)

    def _run_in_thread(self, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        return asyncio.get_running_loop().run_in_executor(self._pool, work)


def _objective_of(chosen: ModelPolicy) -> Objective | AgeMargin | None:
    if chosen.takes_margin:
        return AgeMargin(chosen.slo, chosen.share, chosen.margin)
    if chosen.bounds_share and chosen.table is not None and any(row.w2 for row in chosen.table.rows):
        return Objective(chosen.slo, chosen.share)
    return None
