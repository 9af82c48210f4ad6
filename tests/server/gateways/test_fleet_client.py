"""Calls of a gateway: inputs in slots, their own answers, cancellations and time-outs."""

import asyncio
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
import pytest
import uvloop

from policies.rules.control_limit import static
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch
from server.energy.meters import CountingMeter
from server.errors import (
    ExpiredError,
    QueueFullError,
    ServerError,
    TooLargeError,
    UnavailableError,
)
from server.gateways.fleet_client import MAX_INLINE, Answer, FleetClient
from server.gateways.state_page import StatePage, create_page
from server.models.images.codec import ImageCodec
from server.models.texts.samples import GeneratedTokens, TextSample
from server.scheduling.calls import Sample
from server.scheduling.fleet import Fleet
from server.scheduling.interface import FleetInterface
from tests.support.gateways import (
    QUICK,
    ROOT,
    SLOT,
    ForgetfulExecutor,
    Processes,
    image,
    received,
    run_device,
    run_scenario,
)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_each_call_gets_its_own_answers_from_two_gateways_with_cancellations(run: Callable[..., None]) -> None:
    async def scenario(processes: Processes) -> None:
        clients = [await processes.start_gateway() for _ in range(2)]
        rng, codec = np.random.default_rng(1), ImageCodec()

        async def call(number: int) -> bool:
            client, count = clients[number % 2], 1 + number % 3
            numbers = [1000 * number + n for n in range(count)]
            slot = None
            if number % 4:  # received in place, and otherwise decoded elsewhere
                slot, first = received(client, numbers[0])
                inputs = [first, *(image(n) for n in numbers[1:])]
            else:
                inputs = [image(n) for n in numbers]
            try:
                future = client.submit("m", inputs, 10.0)
                if number % 5 == 0:
                    await asyncio.sleep(float(rng.uniform(0.0, 0.004)))
                    if future.cancel():
                        return False
                answers = await future
            finally:
                if slot is not None:
                    slot.release()
            for n, answer in zip(numbers, answers, strict=True):
                assert np.array_equal(answer.output, codec.emulate(image(n)))
                assert (answer.device, answer.energy_source) == ("device", QUICK.energy_source)
                assert answer.energy == pytest.approx(0.1)
                assert 1 <= answer.batch_size <= 8
            return True

        for first in range(0, 300, 6):
            done = await asyncio.gather(*(call(n) for n in range(first, first + 6)))
            assert sum(done) >= 4
        await processes.all_free()
        assert processes.fleet.open_calls == 0

    run_device(scenario, EmulatedDevice({"m": QUICK}, CountingMeter()), run)


def test_an_image_in_a_held_slot_is_not_copied_and_the_device_cannot_write_to_it() -> None:
    writable: list[bool] = []

    def look(inputs: list[Any]) -> list[Any]:
        writable.extend(each.flags.writeable for each in inputs)
        return [each.sum() for each in inputs]

    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        slot, pixels = received(client, 1)
        call = client.submit("m", [pixels])
        assert client.take_slot() is None
        ((output, *_),) = await call
        assert output == image(1).sum()
        assert client.take_slot() is None, "the gateway still holds it"
        slot.release()
        assert client.take_slot() is not None
        assert writable == [False]

    executor = ForgetfulExecutor()
    executor.fault = look
    run_scenario(scenario, executor=executor)


def test_samples_behind_a_header_in_one_slot_are_not_copied() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        slot = client.take_slot()
        assert slot is not None
        rows = np.arange(6000, dtype=np.float32).reshape(2, 3000)
        slot.view[101 : 101 + rows.nbytes] = rows.tobytes()
        tensor = np.frombuffer(slot.view[101 : 101 + rows.nbytes], np.float32).reshape(2, 3000)
        answers = await client.submit("m", [{"x": row} for row in tensor])
        assert [answer.output["x"][0] for answer in answers] == [0.0, 3000.0]
        slot.release()
        await processes.all_free()

    run_scenario(scenario)


def test_arrays_of_one_call_share_a_slot_and_other_values_are_sent_as_they_are() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=1)
        arrays = [np.full(4001, n, np.uint8) for n in range(30)]
        call = client.submit("m", arrays)
        assert processes.slots[0].free == 0
        assert all((answer.output == n).all() for n, answer in enumerate(await call))
        text, tokens = TextSample([1, 2, 3]), GeneratedTokens([4])
        answers = await client.submit("m", [text, tokens, np.zeros(3), 1.5])
        assert answers[0].output == text
        assert answers[1].output == tokens
        assert answers[2].output.tolist() == [0.0] * 3
        await processes.all_free()

    run_scenario(scenario)


def test_large_inputs_without_a_slot_are_part_of_the_message_up_to_a_limit() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=2)
        large = np.arange(SLOT, dtype=np.float32)
        (answer,) = await client.submit("m", [large])
        assert np.array_equal(answer.output, large)
        with pytest.raises(TooLargeError, match=f"maximum of {MAX_INLINE}"):
            client.submit("m", [np.zeros(MAX_INLINE + 1, np.uint8)])
        with pytest.raises(TooLargeError, match=f"maximum of {MAX_INLINE}"):
            client.submit("m", [image(0), b"x" * MAX_INLINE])
        with pytest.raises(TooLargeError, match="send fewer samples"):
            client.submit("m", [image(n) for n in range(2 + MAX_INLINE // SLOT + 1)])
        await processes.all_free()

    run_scenario(scenario)


def test_calls_beside_large_messages_are_admitted() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        calls = [client.submit("m", [np.zeros(MAX_INLINE - 1000, np.uint8)]) for _ in range(4)]
        await asyncio.sleep(0)  # they are being sent
        calls.append(client.submit("m", [1.0]))
        await asyncio.gather(*calls)

    run_scenario(scenario)


def test_when_the_slots_are_used_up_calls_that_fit_into_a_message_are_served() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=3)
        uploads = [client.take_slot() for _ in range(2)]  # bodies that are still being received
        many = [image(n) for n in range(MAX_INLINE // SLOT + 2)]
        with pytest.raises(QueueFullError, match="all 3 slots") as caught:
            client.submit("m", many)
        assert caught.value.retry_after == 1
        assert processes.slots[0].free == 1
        answers = await client.submit("m", many[:5])
        assert all(np.array_equal(answer.output, image(n)) for n, answer in enumerate(answers))
        for upload in uploads:
            assert upload is not None
            upload.release()
        await processes.all_free()

    run_scenario(scenario)


def test_a_cancelled_call_leaves_the_queue_and_its_slots_are_free_again() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        call = client.submit("m", [image(0)])
        await asyncio.sleep(0.001)
        assert processes.fleet.waiting == 1
        call.cancel()
        await asyncio.sleep(0.001)
        assert processes.fleet.waiting == 0
        await processes.all_free()

    run_scenario(scenario, static(8))


def test_a_call_that_is_cancelled_before_it_is_sent_frees_its_slots() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        client.submit("m", [image(0)]).cancel()
        await processes.all_free()
        assert processes.fleet.open_calls == 0

    run_scenario(scenario)


def test_an_image_that_another_call_uses_is_copied() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=4)
        slot, pixels = received(client, 0)
        calls = [client.submit("m", [pixels]) for _ in range(2)]
        assert processes.slots[0].free == 2
        slot.release()
        await asyncio.gather(*calls)
        calls.append(client.submit("m", [pixels]))
        assert processes.slots[0].free == 3, "its slot is free, so that it is copied to be safe"
        for call in calls:
            assert np.array_equal((await call)[0].output, image(0))
        await processes.all_free()

    run_scenario(scenario)


def test_a_failed_call_frees_its_slots(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def serve(self, batch: Batch, /) -> Sequence[Any]:
            raise ValueError(f"broken for {len(batch.inputs)}")

    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway(count=2)
        calls = [client.submit("m", [image(n)]) for n in range(2)]
        for call in calls:
            with pytest.raises(ServerError, match="failed on this input alone, with ValueError"):
                await call
        await processes.all_free()

    caplog.set_level(logging.CRITICAL, "batchwright")  # kept records have the tracebacks, and so the inputs
    gc.disable()  # nothing may be left to it: it may run late
    try:
        run_device(scenario, Broken())
    finally:
        gc.enable()


def test_timeouts_are_instants_of_the_common_clock() -> None:
    async def scenario(processes: Processes) -> None:
        client = await processes.start_gateway()
        await asyncio.sleep(2.0)
        call = client.submit("m", [image(0)], 0.5)
        with pytest.raises(ExpiredError, match="timeout pass") as caught:
            await call
        assert caught.value.status == 504
        assert processes.clock() == pytest.approx(2.5, abs=0.02)
        await processes.all_free()

    run_scenario(scenario, static(8))


def test_before_the_first_state_and_without_a_serving_process_calls_are_unavailable() -> None:
    async def scenario() -> None:
        client = FleetClient(StatePage(create_page(1)))
        for check in (lambda: client.check_room("m", 1), lambda: client.submit("m", [1.0]), client.backlog):
            with pytest.raises(UnavailableError, match="the serving process does not answer") as caught:
                check()
            assert caught.value.retry_after == 1
        assert client.take_slot() is None
        assert not client.ready
        assert not client.alive
        assert not client.shutting_down

    asyncio.run(scenario())


def test_fleet_and_client_have_one_interface() -> None:
    def takes(_: type[FleetInterface]) -> None: ...

    takes(Fleet)
    takes(FleetClient)
    sample = Sample(None, None, np.zeros(1), batch_size=2, waiting=1.0, service=2.0)  # type: ignore[arg-type]
    assert {*Answer._fields} < {*Sample.__slots__}
    assert sample.energy_source == ""
    assert inf == float("inf")


def test_a_gateway_imports_neither_torch_nor_the_solver() -> None:
    modules = ("fleet_client", "slots", "state_page", "shared_buckets", "channel")
    imports = ", ".join(f"server.gateways.{name}" for name in modules)
    program = f"import sys, {imports}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "matplotlib", "scipy", "pandas", "plotly", "server.scheduling.fleet", "server.backends.executor"}
    assert not heavy & set(done.stdout.split())
