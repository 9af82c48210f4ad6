"""Pipelines of users: a coroutine that calls models of the same server, each call a request of that model's queue."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from batchwright.model import Model


class InferenceError(Exception):
    """A step of a pipeline failed; if `run` does not catch it, the call is answered with its status.

    Attributes:
        status: HTTP status that a client of the model would get.
    """

    def __init__(self, status: int, text: str) -> None:
        """`text` is one line, which the client of the pipeline gets, too.

        Raises:
            ValueError: the status is not that of an error.
        """
        if type(status) is not int or not 400 <= status < 600:
            raise ValueError(f"the status is {status!r}; give one from 400 to 599, and then the text")
        super().__init__(text)
        self.status = status


class Pipeline(Model):
    """Base class of pipelines, served by `serve-model MODEL... NAME=FILE.py:CLASS`.

    A pipeline has a process of its own, where `run` is called on an event loop. `decode` and `render` are those of a
    `Model`, and are called on threads.

    Attributes:
        models: names of the models and pipelines that it calls, which the same server serves.
        steps: typical number of requests of each in one call. A call whose timeout is shorter than the least time of
            these is rejected at once. The numbers are learned while serving; without any, from the first call on.
    """

    models: ClassVar[Sequence[str]]
    steps: ClassVar[Mapping[str, int]] = {}

    async def run(self, *_: Any, **inputs: Any) -> Mapping[str, Any]:
        """Serve one sample: arrays by input name in, arrays by output name out, without a batch dimension.

        The first argument has the models as attributes and by [name]. `await models.NAME(**inputs)` is one request of a
        model: arrays, or what NumPy makes arrays of, in, and arrays by output name out. `await
        models.NAME.predict(body, content_type)` serves a body of POST /predict, such as an encoded image or a text.

        Raises:
            BadInput: the sample is wrong; its text is the client's error message.
            InferenceError: a step failed.
        """
        raise NotImplementedError
