"""Texts in the dispatcher and over HTTP, on a virtual clock: bins, continuous batching, metrics, answers."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from starlette.types import Message

from policies.catalog import Chosen, choose
from policies.profile import Profile
from policies.rules.multi_bin import Bins
from server.api.inference import Inference
from server.api.open_inference.infer import Infer
from server.api.predict import Predict
from server.backends.executor import Batch, Completion
from server.errors import ServerError, TooLateError, UnavailableError
from server.models.model import ServedModel
from server.models.texts.codec import ByteTokenizer, TextCodec
from server.models.texts.samples import DecodeState, GeneratedTokens, TextSample
from server.scheduling.admission import Limits
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.memory_budget import MemoryBudget
from tests.server.api.test_inference import sends, settle
from tests.support.asgi import serve_asgi
from tests.support.fakes import FakeExecutor, run_scenario

# a decode step takes 1 ms at every batch size; the service time without a length is that of 50 tokens
PROFILE = Profile("texts", (0.050,) * 4, lengths=(1, 100), length_service_times=((0.001, 0.100),) * 4)
GENERATOR = TextCodec(
    vocab_size=259, max_prompt_tokens=40, max_new_tokens=100, pad_token_id=0, tokenizer=ByteTokenizer()
)
CLASSIFIER = TextCodec(
    vocab_size=259, max_prompt_tokens=40, max_new_tokens=0, pad_token_id=0, tokenizer=ByteTokenizer()
)


@dataclass(frozen=True)
class Begun(DecodeState):
    text: TextSample
    tokens: tuple[int, ...]


class Iterating(FakeExecutor):
    """Generates 7, 8, 9, ...; a text that is not forced ends after as many tokens as its first token id."""

    async def _run(self, batch: Batch) -> Completion:
        start = asyncio.get_running_loop().time()
        rows = [x if isinstance(x, Begun) else Begun(x, ()) for x in batch.inputs]
        assert not any(self._ended(row) for row in rows), "a finished text is not run again"
        done = 0
        while done != batch.stages and not all(map(self._ended, rows)):
            rows = [replace(row, tokens=(*row.tokens, len(row.tokens) + 7)) for row in rows]
            done += 1
        await asyncio.sleep(0.001 * done)
        self.log.append((start, start + 0.001 * done, [row.text.max_new_tokens for row in rows]))
        outputs: list[Any] = [
            GeneratedTokens(row.tokens[: self._most(row)]) if self._ended(row) else row for row in rows
        ]
        return Completion(self.fault(outputs), start, start + 0.001 * done)

    @staticmethod
    def _most(row: Begun) -> int:
        return row.text.max_new_tokens if row.text.ignore_eos else min(row.text.max_new_tokens, row.text.tokens[0])

    def _ended(self, row: Begun) -> bool:
        return len(row.tokens) >= self._most(row)


class Inline(Executor):
    """Runs each job at once, in the caller."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:  # noqa: BLE001  (as a pool does)
            future.set_exception(error)
        return future


def text(limit: int, ends: int = 100) -> TextSample:
    return TextSample([ends, 3], limit)


def two_bins(spec: str = "multi-bin:2,batch_size=2,max_wait_ms=inf") -> Chosen:
    """Bins of texts below and above 10 ms."""
    return replace(choose(spec, PROFILE), bins=Bins(2, lambda _: (0.010,)).with_edges_of([0.0]))


def limits(executor: FakeExecutor) -> list[list[int]]:
    return [batch for _, _, batch in executor.log]


def test_texts_of_different_bins_share_no_batch() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        samples = [text(n) for n in (4, 40, 50, 5)]
        answers = await dispatcher.submit("m", samples, sizes=[0.004, 0.040, 0.050, 0.005])
        assert limits(executor) == [[40, 50], [4, 5]], "the batch that was formed first is served first"
        assert [len(answer.output.tokens) for answer in answers] == [4, 40, 50, 5]

    run_scenario(scenario, {"m": two_bins()}, Iterating())


def test_waiting_requests_get_the_bins_of_a_new_policy() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        calls = [dispatcher.submit("m", [text(n) for n in (4, 40, 5)], sizes=[0.004, 0.040, 0.005])]
        await settle()
        dispatcher.set_policy("m", two_bins())
        await settle()
        calls.append(dispatcher.submit("m", [text(n) for n in (50, 6, 60)], sizes=[0.050, 0.006, 0.060]))
        await asyncio.sleep(1.0)
        assert limits(executor) == [[4, 5], [40, 50]], "6 and 60 wait for another request of their bin"
        dispatcher.set_policy("m", choose("greedy", PROFILE))
        await asyncio.gather(*calls)
        assert limits(executor)[2:] == [[6, 60]]

    run_scenario(scenario, {"m": choose("static:4,max_wait_ms=inf", PROFILE)}, Iterating())


@pytest.mark.parametrize("spec", ["joining", "multi-bin:2,inner=joining"])
def test_continuous_batching_replaces_finished_texts_at_the_next_decode_step(spec: str) -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        loop, answered = asyncio.get_running_loop(), dict[int, float]()

        async def ask(limit: int, ends: int, at: float) -> None:
            await asyncio.sleep(at)
            (answer,) = await dispatcher.submit("m", [text(limit, ends)], sizes=[0.02])
            answered[limit] = round(1e3 * (loop.time() - began), 6)
            assert len(answer.output.tokens) == min(limit, ends)
            assert answer.service == pytest.approx(1e-3 * min(limit, ends))

        began = loop.time()
        await asyncio.gather(ask(20, 100, 0.0), ask(30, 3, 0.0), ask(5, 100, 0.0042), ask(1, 100, 0.010))
        assert answered == {20: 20.0, 30: 3.0, 5: 10.0, 1: 11.0}
        sizes = [len(batch) for batch in limits(executor)]
        assert sizes == [2] * 3 + [1] * 2 + [2] * 6 + [1] * 9

    run_scenario(scenario, {"m": choose(spec, PROFILE)}, Iterating())


def test_without_continuous_batching_all_texts_stay_until_the_longest_is_done() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> str:
        answers = await dispatcher.submit("m", [text(20), text(30, ends=3), text(5)])
        assert [len(answer.output.tokens) for answer in answers] == [20, 3, 5]
        assert {round(answer.service, 6) for answer in answers} == {0.020}
        await settle()
        return dispatcher._metrics.render().decode()

    metrics = run_scenario(scenario, {"m": choose("greedy", PROFILE)}, Iterating())
    assert 'batchwright_tokens_total{model="m",use="needed"} 34.0' in metrics  # and 2 of each prompt
    assert 'batchwright_tokens_total{model="m",use="padding"} 32.0' in metrics


def test_a_failed_decode_step_keeps_the_progress_of_all_texts() -> None:
    async def scenario(dispatcher: Dispatcher, executor: FakeExecutor) -> None:
        faults = iter([False, True])

        def fault(outputs: list[Any]) -> list[Any]:
            if next(faults, False):
                raise RuntimeError("once")
            return outputs

        executor.fault = fault
        answers = await dispatcher.submit("m", [text(4), text(6), text(2)])
        assert [list(answer.output.tokens) for answer in answers] == [[*range(7, 7 + n)] for n in (4, 6, 2)]

    run_scenario(scenario, {"m": choose("joining", PROFILE)}, Iterating())


def test_a_text_is_rejected_only_if_one_decode_step_takes_longer_than_its_time_out() -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        assert len(await dispatcher.submit("m", [text(3)], timeout=0.010)) == 1, "though 50 tokens take 50 ms"
        with pytest.raises(TooLateError):
            await dispatcher.submit("m", [text(1)], timeout=0.0009)

    run_scenario(scenario, {"m": choose("greedy", PROFILE)}, Iterating())


@pytest.mark.parametrize("spec", ["greedy", "joining", "lazy:slo_ms=1000,timesteps=9"])
def test_the_batch_timeout_depends_on_the_longest_text_not_on_a_decode_step(spec: str) -> None:
    class Shielded(Iterating):
        def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
            return asyncio.shield(super().run(batch))  # unlike a task, it takes an exception from outside

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        begun = dispatcher.submit("m", [text(100), text(3)])
        await asyncio.sleep(0.05)
        await dispatcher.drain()  # texts between decode steps run to their end in one launch
        assert [len(answer.output.tokens) for answer in await begun] == [100, 3]

    run_scenario(scenario, {"m": choose(spec, PROFILE)}, Shielded(), Limits(batch_timeout=0.0))


def test_the_batch_timeout_of_short_texts_is_short() -> None:
    class Hung(FakeExecutor):
        def run(self, batch: Batch, /) -> "asyncio.Future[Completion]":
            return asyncio.get_running_loop().create_future()

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        with pytest.raises(UnavailableError):
            await dispatcher.submit("m", [text(4), text(2)])
        assert asyncio.get_running_loop().time() == pytest.approx(20 * 0.004)

    run_scenario(scenario, {"m": choose("greedy", PROFILE)}, Hung(), Limits(batch_timeout=0.0))


def goodput(spec: str, profile: Profile, executor: FakeExecutor, sample: Callable[[int], Any]) -> int:
    """Count the answers within half a second, of 100 arrivals/s for ten seconds at twice the capacity."""
    rng = np.random.default_rng(0)

    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> int:
        async def ask(limit: int) -> bool:
            try:
                await dispatcher.submit("m", [sample(limit)], 0.5, [0.001 * limit])
            except ServerError:
                return False
            return True

        calls = []
        for limit in rng.integers(1, 101, 1000).tolist():
            await asyncio.sleep(rng.exponential(0.01))
            calls.append(asyncio.ensure_future(ask(limit)))
        return sum(await asyncio.gather(*calls))

    answered: int = run_scenario(scenario, {"m": choose(spec, profile)}, executor)
    return answered


@pytest.mark.parametrize("spec", ["greedy", "multi-bin:2"])
def test_texts_that_would_be_late_are_rejected_under_a_backlog_like_images(spec: str) -> None:
    mean = Profile("images", (0.080,) * 4)  # of four lengths, uniform to 100, the longest is 80 in the mean
    images = goodput("greedy", mean, FakeExecutor(mean), float)
    assert goodput(spec, PROFILE, Iterating(), text) > 0.65 * images > 300


@pytest.mark.parametrize(
    "spec",
    ["greedy", "joining", "multi-bin:2,inner=joining", "lazy:slo_ms=500,timesteps=20", "catch-up:slo_ms=500"],
)
def test_each_text_is_counted_once_however_its_decode_steps_are_batched(spec: str) -> None:
    async def scenario(dispatcher: Dispatcher, _: FakeExecutor) -> None:
        rng = np.random.default_rng(1)
        calls = []
        for limit in rng.integers(1, 30, 100).tolist():
            calls.append(dispatcher.submit("m", [text(limit)], sizes=[0.001 * limit]))
            await asyncio.sleep(0.006)
        await asyncio.gather(*calls)
        await settle()
        statistics = dispatcher._metrics.statistics.of("m")
        assert statistics.inference_count == 100
        sizes = {batch.batch_size: batch.compute_infer.count for batch in statistics.batches}
        assert sum(size * count for size, count in sizes.items()) <= 100
        assert 'generated_tokens_count{model="m"} 100.0' in dispatcher._metrics.render().decode()

    run_scenario(scenario, {"m": choose(spec, PROFILE)}, Iterating())


def run_server(
    codec: TextCodec, scenario: Callable[["Client"], Coroutine[Any, Any, None]], executor: FakeExecutor | None = None
) -> None:
    """Run a scenario against a server of one text model, whose lengths are learned online."""

    async def build(dispatcher: Dispatcher, _: Any) -> None:
        labels = () if codec.generates else ("bad", "good")
        model: ServedModel = ServedModel(
            "m", codec, labels, "random", 4, size_predictor=codec.make_size_predictor(PROFILE, "online")
        )
        parts = (Fleet([dispatcher]), Metrics(), Inline(), 100, MemoryBudget(2**30, lambda: 1))
        await scenario(Client(Inference({"m": model}, *parts), model))

    run_scenario(build, {"m": choose("greedy", PROFILE)}, executor or Iterating())


@dataclass
class Client:
    inference: Inference
    model: ServedModel

    async def __call__(self, path: str, document: Any) -> tuple[int, Any]:
        """Post a document; return the status and the JSON of the response."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        body = json.dumps(document).encode()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "state": {}}
        app = Predict(self.inference) if path.startswith("/predict") else Infer(self.inference)
        await serve_asgi(app.find, scope, sends(body), send)
        return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_text_is_answered_with_a_text() -> None:
    async def scenario(client: Client) -> None:
        status, response = await client("/predict/m", {"text": "ab", "max_new_tokens": 60, "ignore_eos": True})
        assert status == 200
        assert list(response) == [
            *("model", "text", "new_tokens", "batch_size", "waiting_ms", "service_ms", "energy_mj", "energy_source")
        ]
        assert response["text"] == bytes(range(4, 64)).decode()
        assert response["new_tokens"] == 60
        assert response["service_ms"] == pytest.approx(60.0)
        status, response = await client("/predict/m", {"text": "ab", "max_new_tokens": 101})
        assert (status, response) == (400, {"error": "max_new_tokens is 101; send 1 to 100"})

    run_server(GENERATOR, scenario)


def test_ids_are_answered_with_ids_padded_at_the_end() -> None:
    async def scenario(client: Client) -> None:
        ids = {"name": "input_ids", "datatype": "INT64", "shape": [2, 2], "data": [[100, 0], [2, 50]]}
        most = {"name": "max_new_tokens", "datatype": "INT32", "shape": [2], "data": [3, 9]}
        status, response = await client("/v2/models/m/infer", {"inputs": [ids, most]})
        assert status == 200
        (output,) = response["outputs"]
        assert output == {"name": "output_ids", "datatype": "INT64", "shape": [2, 3], "data": [7, 8, 9, 7, 8, 0]}
        assert response["parameters"]["batch_size"] == 2
        status, response = await client("/v2/models/m/infer", {"inputs": [ids | {"data": [[300, 0], [2, 50]]}]})
        assert (status, response["error"][:12]) == (400, "token id 300")

    run_server(GENERATOR, scenario)


def test_lengths_are_learned_from_answers() -> None:
    async def scenario(client: Client) -> None:
        predictor, asked = client.model.size_predictor, TextSample([50, 7], 90)
        assert predictor is not None
        before = predictor.predict(asked)
        for _ in range(3):
            await client("/predict/m", {"text": "/", "max_new_tokens": 90})  # whose byte, 47, is id 50
        assert before == pytest.approx(0.090)
        assert predictor.predict(asked) == pytest.approx(0.050)

    run_server(GENERATOR, scenario)


def test_a_text_is_answered_with_classes() -> None:
    class Classes(FakeExecutor):
        async def _run(self, batch: Batch) -> Completion:
            assert batch.inputs == [TextSample([100, 101])]
            return Completion([np.array([1.0, 3.0], np.float32)], 0.0, 0.001)

    async def scenario(client: Client) -> None:
        status, response = await client("/predict/m", {"text": "ab"})
        assert status == 200
        assert [each["label"] for each in response["predictions"]] == ["good", "bad"]
        ids = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [100, 101, 0]}
        status, response = await client("/v2/models/m/infer", {"inputs": [ids]})
        assert response["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 3.0]}]

    run_server(CLASSIFIER, scenario, Classes())
