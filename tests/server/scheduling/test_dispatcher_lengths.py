"""Samples of different lengths in the dispatcher, on a virtual clock: bins, rejections, batch timeouts, counts."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies.catalog import ModelPolicy, choose
from policies.profile import Profile
from policies.rules.multi_bin import Bins
from server.backends.executor import Batch, Completion
from server.errors import ServerError, TooLateError, UnavailableError
from server.scheduling.admission import Limits
from server.scheduling.dispatcher import Dispatcher
from tests.server.api.test_inference import settle
from tests.support.fakes import FakeExecutor, run_scenario, submit

# a batch takes 1 ms for each unit of its longest sample; the service time without a length is that of 50 units
PROFILE = Profile("lines", (0.050,) * 4, lengths=(1, 100), length_service_times=((0.001, 0.100),) * 4)


class Padding(FakeExecutor):
    """Serves a batch in the time of its longest sample; samples are their lengths."""

    async def serve(self, batch: Batch) -> Completion:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(0.001 * max(batch.inputs))
        self.log.append((start, loop.time(), list(batch.inputs)))
        return Completion(list(batch.inputs), start, loop.time())


def two_bins(spec: str = "multi-bin:2,batch_size=2,max_wait_ms=inf") -> ModelPolicy:
    """Bins of samples below and above 10 ms."""
    return replace(choose(spec, PROFILE), bins=Bins(2, lambda _: (0.010,)).with_edges_of([0.0]))


def launched(executor: FakeExecutor) -> list[list[int]]:
    return [batch for _, _, batch in executor.log]


def test_samples_of_different_bins_share_no_batch() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        lengths = [4, 40, 50, 5]
        answers = await submit(dispatcher, "m", lengths, lengths=lengths)
        assert launched(executor) == [[40, 50], [4, 5]], "the batch that was formed first is served first"
        assert [answer.output for answer in answers] == lengths

    run_scenario(scenario, {"m": two_bins()}, Padding())


def test_waiting_requests_get_the_bins_of_a_new_policy() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        calls = [submit(dispatcher, "m", [4, 40, 5], lengths=[4, 40, 5])]
        await settle()
        dispatcher.policies.set("m", two_bins())
        await settle()
        calls.append(submit(dispatcher, "m", [50, 6, 60], lengths=[50, 6, 60]))
        await asyncio.sleep(1.0)
        assert launched(executor) == [[4, 5], [40, 50]], "6 and 60 wait for another request of their bin"
        dispatcher.policies.set("m", choose("greedy", PROFILE))
        await asyncio.gather(*calls)
        assert launched(executor)[2:] == [[6, 60]]

    run_scenario(scenario, {"m": choose("static:4,max_wait_ms=inf", PROFILE)}, Padding())


def test_waiting_requests_get_the_sizes_of_a_new_profile() -> None:
    slower = replace(PROFILE, length_service_times=((0.002, 0.200),) * 4)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        call = submit(dispatcher, "m", [40], lengths=[40])
        await settle()
        dispatcher.policies.set("m", choose("static:4,max_wait_ms=inf", slower))
        (request,) = dispatcher.policies.batcher.state(0.0).waiting
        assert request.size == pytest.approx(0.080)
        call.cancel()

    run_scenario(scenario, {"m": choose("static:4,max_wait_ms=inf", PROFILE)}, Padding())


def test_a_request_is_rejected_only_if_the_least_length_takes_longer_than_its_time_out() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        assert len(await submit(dispatcher, "m", [3], timeout=0.010)) == 1, "though a middle length takes 50 ms"
        with pytest.raises(TooLateError):
            await submit(dispatcher, "m", [1], timeout=0.0009)

    run_scenario(scenario, {"m": choose("greedy", PROFILE)}, Padding())


def test_the_batch_timeout_is_twenty_times_the_service_time_of_the_greatest_length() -> None:
    class Hung(FakeExecutor):
        def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
            return asyncio.get_running_loop().create_future()

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        with pytest.raises(UnavailableError):
            await submit(dispatcher, "m", [4, 2])
        assert asyncio.get_running_loop().time() == pytest.approx(20 * 0.100)

    run_scenario(scenario, {"m": choose("greedy", PROFILE)}, Hung(), Limits(batch_timeout=0.0))


def goodput(spec: str, profile: Profile, executor: FakeExecutor, sample: Callable[[int], Any]) -> int:
    """Count the answers within half a second, of 100 arrivals/s for ten seconds at twice the capacity."""
    rng = np.random.default_rng(0)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> int:
        async def ask(length: int) -> bool:
            try:
                await submit(dispatcher, "m", [sample(length)], 0.5, [length])
            except ServerError:
                return False
            return True

        calls = []
        for length in rng.integers(1, 101, 1000).tolist():
            await asyncio.sleep(rng.exponential(0.01))
            calls.append(asyncio.ensure_future(ask(length)))
        return sum(await asyncio.gather(*calls))

    answered: int = run_scenario(scenario, {"m": choose(spec, profile)}, executor)
    return answered


@pytest.mark.parametrize("spec", ["greedy", "multi-bin:2"])
def test_requests_that_would_be_late_are_rejected_under_a_backlog_as_without_lengths(spec: str) -> None:
    mean = Profile("images", (0.080,) * 4)  # of four lengths, uniform to 100, the longest is 80 in the mean
    images = goodput("greedy", mean, FakeExecutor(mean), float)
    assert goodput(spec, PROFILE, Padding(), int) > 0.65 * images > 300


@pytest.mark.parametrize("spec", ["greedy", "multi-bin:2,inner=greedy", "smdp-bins:2"])
def test_each_request_is_counted_once_however_the_lengths_are_batched(spec: str) -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        rng = np.random.default_rng(1)
        calls = []
        for length in rng.integers(1, 30, 100).tolist():
            calls.append(submit(dispatcher, "m", [length], lengths=[length]))
            await asyncio.sleep(0.006)
        await asyncio.gather(*calls)
        await settle()
        statistics = dispatcher._metrics.statistics.of("m")
        assert statistics.inference_count == 100
        sizes = {batch.batch_size: batch.compute_infer.count for batch in statistics.batches}
        assert sum(size * count for size, count in sizes.items()) == 100

    run_scenario(scenario, {"m": choose(spec, PROFILE)}, Padding())
