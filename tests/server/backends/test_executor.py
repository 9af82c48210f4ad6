"""The thread between the event loop and a device."""

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from server.backends.executor import Batch, ThreadExecutor


class Doubling:
    def serve(self, batch: Batch, /) -> Sequence[Any]:
        return [2.0 * sample for sample in batch.inputs]


def test_the_thread_keeps_no_reference_to_a_finished_batch() -> None:
    async def scenario() -> list[Any]:
        body = np.ones(1000)
        samples = list(body.reshape(10, 100))
        kept = [weakref.ref(body), *map(weakref.ref, samples)]
        completion = await executor.run(Batch("m", samples))
        kept += map(weakref.ref, completion.outputs)
        del body, samples, completion
        await asyncio.sleep(0.1)
        return [one() for one in kept]

    executor = ThreadExecutor(Doubling(), "d")
    try:
        assert asyncio.run(scenario()) == [None] * 21
    finally:
        executor.close()
