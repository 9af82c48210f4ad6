"""A pipeline of two models, for emulated devices: one request of the first, then some of the second at once."""

import asyncio
from typing import Any

from batchwright import Model, Pipeline, Tensor

MOST = 6  # requests of the second model in a call


class Floats(Model):
    """Twice its input."""

    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"y": Tensor("FP32", [4])}

    def run(self, x: Any) -> dict[str, Any]:
        """Double the batch."""
        return {"y": 2 * x}


class Chain(Pipeline):
    """As many requests of the second model as the input's first value says."""

    inputs = {"x": Tensor("FP32", [4])}
    outputs = {"count": Tensor("INT64", [1])}
    models = ("first", "second")
    steps = {"first": 1, "second": MOST}

    async def run(self, models: Any, x: Any) -> dict[str, Any]:
        """Call both models."""
        await models.first(x=x)
        found = await asyncio.gather(*(models.second(x=x) for _ in range(int(x[0]))))
        return {"count": [len(found)]}
