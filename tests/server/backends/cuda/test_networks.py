"""Implementations of a network: the same logits, and the choice of the fastest that works."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from server.backends.cuda import networks
from server.backends.cuda.fused_epilogues import FusedConv, fuse_epilogues
from server.backends.cuda.networks import (
    ChoiceKey,
    choose,
    compare,
    implementations,
    optimised,
    reference_batches,
    seconds_per_batch,
)
from server.models.images.codec import ImageCodec, synthetic_images
from server.models.images.torchvision_source import PixelNet, fold_batch_norm, load_image_model
from tests.support.fake_graphs import FakeRuntime

KEY = ChoiceKey("m", "a GPU", "fp16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "fused"), [("resnet18", 17), ("resnet50", 49), ("googlenet", 57), ("squeezenet1_1", 26)]
)
@pytest.mark.usefixtures("few_calibration_images", "small_images")
def test_fused_convolutions_give_the_same_logits(name: str, fused: int) -> None:
    model, net = load_image_model(name, "random")
    pixels = torch.from_numpy(synthetic_images(model.codec, 2, np.random.default_rng(0)))
    with torch.inference_mode():
        expected = net(pixels)
        found = fuse_epilogues(fx.symbolic_trace(net))
        assert found is not None
        assert sum(isinstance(module, FusedConv) for module in found.modules()) == fused
        assert not any(isinstance(module, nn.ReLU) for module in found.modules())
        torch.testing.assert_close(found(pixels), expected, rtol=1e-4, atol=1e-4)


class Blocks(nn.Module):
    """Blocks of which only the first and the last can be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.circular = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(x))
        used_twice = self.two(x)
        x = torch.relu(used_twice) + used_twice
        x = torch.relu(self.three(x) + 1.0)
        x = torch.relu(self.circular(x))
        y: Tensor = x + self.four(x)
        return y.relu()


def test_only_what_is_used_nowhere_else_and_is_of_one_shape_is_fused() -> None:
    torch.manual_seed(0)
    net, x = Blocks().eval(), torch.randn(2, 3, 5, 5)
    fused = fuse_epilogues(fx.symbolic_trace(net))
    assert fused is not None
    assert sum(isinstance(module, FusedConv) for module in fused.modules()) == 2
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), net(x))
    assert fuse_epilogues(fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 3, 3)))) is None


def test_folded_normalisation_gives_the_same_logits() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(4, 3, 9, 9)
    with torch.inference_mode():
        expected = net(x)
        torch.testing.assert_close(fold_batch_norm(net)(x), expected, rtol=1e-4, atol=1e-4)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda pixels: torch.full((len(pixels), 2), value)


def test_the_fastest_implementation_that_works_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Tensor) -> Tensor:
        raise ValueError("no engine\nfound")

    times = {1.0: 0.003, 2.0: 0.001, 3.0: 0.002}

    def measure(network: Callable[[Tensor], Tensor]) -> float:
        return times[float(network(torch.zeros(1))[0, 0])]

    known = {"eager": constant(1.0), "broken": broken, "fast": constant(2.0), "fair": constant(3.0)}
    with caplog.at_level(logging.WARNING):
        choice = choose(known, measure)
    assert choice is not None
    assert (choice.name, choice.times) == ("fast", {"eager": 0.003, "fast": 0.001, "fair": 0.002})
    assert choice.network is known["fast"]
    assert "'broken' of the network is left out: no engine found" in caplog.text
    assert choose({"broken": broken}, measure) is None


class WhileTraced(PixelNet):
    """Runs another network in another thread whenever it is called or traced."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), (0.5,) * 3, (0.5,) * 3)
        self.seen: list[Any] = []

    def forward(self, pixels: Tensor) -> Tensor:
        other = threading.Thread(target=lambda: self.seen.append(nn.ReLU()(torch.ones(1))))
        other.start()
        other.join()
        return pixels


def test_other_threads_run_networks_while_one_is_traced() -> None:
    net = WhileTraced()
    assert [*implementations(net)] == ["eager"]
    assert [type(each) for each in net.seen] == [Tensor]


class Tiny(PixelNet):
    """Logits are the sums of a sample's channels."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), (0.5,) * 3, (0.5,) * 3)


def samples(count: int) -> list[Any]:
    return [*synthetic_images(ImageCodec(4, 4, 4), count, np.random.default_rng(0))]


def test_an_implementation_with_other_logits_is_refused() -> None:
    net, runtime = Tiny(), FakeRuntime()
    batches = reference_batches(net, runtime, samples(20))
    assert [len(pixels) for pixels, _ in batches] == [20, 16, 1]
    assert seconds_per_batch(net, runtime, batches, 1e-3) > 0
    assert runtime.captured == 3
    with pytest.raises(RuntimeError, match="its logits differ by"):
        seconds_per_batch(lambda pixels: 1.01 * net(pixels), runtime, batches, 1e-3)
    with pytest.raises(RuntimeError, match="its logits differ by nan"):
        seconds_per_batch(lambda pixels: torch.nan * net(pixels), runtime, batches, 1e-3)


def test_an_implementation_that_reads_memory_that_it_has_not_written_is_refused() -> None:
    net, runtime = Tiny(), FakeRuntime()

    def reads_its_output(pixels: Tensor) -> Tensor:
        """As a convolution that adds 0 times its output, which has what was left in memory."""
        left = torch.nan if runtime.poisoned else 1.0
        logits: Tensor = net(pixels) + 0.0 * left
        return logits

    batches = reference_batches(net, runtime, samples(1))
    with pytest.raises(RuntimeError, match="its logits differ by nan"):
        seconds_per_batch(reads_its_output, runtime, batches, 1e-3)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


@pytest.mark.slow
@pytest.mark.usefixtures("search")
def test_a_search_that_would_take_too_long_for_all_buckets_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, runtime, searched = Tiny(), FakeRuntime(), list[bool]()

    def searches(pixels: Tensor) -> Tensor:
        searched.append(torch.backends.cudnn.benchmark)
        time.sleep(0.02 if searched[-1] else 0.0)
        logits: Tensor = net(pixels)
        return logits

    monkeypatch.setattr(networks, "FIRST_BATCHES", 0.1)
    batches = reference_batches(net, runtime, samples(20))
    assert torch.backends.cudnn.benchmark, "the reference is computed without it, and leaves the setting"
    seconds_per_batch(searches, runtime, batches, 1e-3, buckets=1)
    assert all(searched)
    seconds_per_batch(searches, runtime, batches, 1e-3, buckets=20)
    assert searched.count(False) > 3
    assert not searched[-1]
    assert caplog.text.count("does not search for the fastest convolutions any more") == 1


@pytest.mark.usefixtures("search")
def test_each_comparison_begins_in_a_thread_without_plans_and_is_repeated_without_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As cuDNN, whose plans a thread keeps: the first run of a size in a thread searches, if the search is on."""
    net, runtime, plans, searches = Tiny(), FakeRuntime(), threading.local(), list[tuple[str, int]]()

    def implementation(name: str) -> Callable[[Tensor], Tensor]:
        def network(pixels: Tensor) -> Tensor:
            known = plans.__dict__.setdefault(name, set())
            if len(pixels) not in known and torch.backends.cudnn.benchmark:
                searches.append((name, len(pixels)))
                time.sleep(0.02)
            known.add(len(pixels))
            logits: Tensor = net(pixels)
            return logits

        return network

    known = {name: implementation(name) for name in ("eager", "fused")}
    batches = reference_batches(known["eager"], runtime, samples(20))  # type: ignore[arg-type]  # only called
    assert searches == []
    compare(known, lambda network: seconds_per_batch(network, runtime, batches, 1e-3))
    assert searches == [(name, size) for name in known for size in (20, 16, 1)], "also the network of the reference"
    searches.clear()
    monkeypatch.setattr(networks, "FIRST_BATCHES", 0.1)
    measured: list[str] = []

    def measure(network: Callable[[Tensor], Tensor]) -> float:
        measured.append(next(name for name, each in known.items() if each is network))
        return seconds_per_batch(network, runtime, batches, 1e-3, buckets=20)

    assert compare(known, measure) is not None
    assert searches == [("eager", 20)]
    assert measured == ["eager", "fused"] * 2


@pytest.mark.usefixtures("search")
def test_an_implementation_whose_first_batches_are_slow_without_a_search_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, runtime, sizes = Tiny(), FakeRuntime(), set[int]()

    def compiles(pixels: Tensor) -> Tensor:
        time.sleep(0.0 if len(pixels) in sizes else 0.02)
        sizes.add(len(pixels))
        logits: Tensor = net(pixels)
        return logits

    monkeypatch.setattr(networks, "FIRST_BATCHES", 0.1)
    batches = reference_batches(net, runtime, samples(20))
    with pytest.raises(RuntimeError, match="its first batch of a size takes"):
        seconds_per_batch(compiles, runtime, batches, 1e-3, buckets=20)
    assert sizes == {20, 16}


def optimised_tiny(monkeypatch: pytest.MonkeyPatch, **delays: float | None) -> str:
    """The implementation that is chosen among some with these delays, s; None: it fails."""
    net, runs = Tiny(), list[str]()

    def implementation(name: str, delay: float | None) -> Callable[[Tensor], Tensor]:
        def network(pixels: Tensor) -> Tensor:
            runs.append(name)
            if delay is None:
                raise RuntimeError("it fails")
            time.sleep(delay)
            logits: Tensor = net(pixels)
            return logits

        return network

    monkeypatch.setattr(
        networks, "implementations", lambda _: {name: implementation(name, each) for name, each in delays.items()}
    )
    chosen = optimised(net, FakeRuntime(), samples(1), KEY)
    optimised_tiny.runs = {*runs}  # type: ignore[attr-defined]
    if chosen is net:
        return "the network as it is"
    runs.clear()
    chosen(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
    return runs[0]


def test_the_choice_is_kept_and_only_checked_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert optimised_tiny(monkeypatch, eager=0.002, fused=0.0) == "fused"
    assert KEY.load() == ("fused", False)
    assert optimised_tiny(monkeypatch, eager=0.0, fused=0.002) == "fused"
    assert optimised_tiny.runs == {"fused"}  # type: ignore[attr-defined]
    assert optimised_tiny(monkeypatch, eager=0.0, fused=None) == "eager", "it does not work any more"
    assert KEY.load() == ("eager", False)
    assert optimised_tiny(monkeypatch, eager=None, fused=None) == "the network as it is"


def test_cudnn_searches_only_if_it_did_when_the_implementation_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for searched in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", searched)
        KEY.store("fused", {"fused": 0.001})
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        assert optimised_tiny(monkeypatch, eager=0.0, fused=0.002) == "fused"
        assert torch.backends.cudnn.benchmark == searched, "the profile was measured with its kernels"


@pytest.mark.usefixtures("few_calibration_images", "small_images")
def test_the_stem_is_fused_in_one_implementation_and_not_in_the_other() -> None:
    assert [*implementations(Tiny())] == ["eager"]
    known = implementations(load_image_model("squeezenet1_1", "random")[1])
    fused = {
        name: sum(isinstance(module, FusedConv) for module in net.modules())
        for name, net in known.items()
        if isinstance(net, nn.Module)
    }
    assert fused == {"eager": 0, "fused": 26, "fused-but-stem": 25}
