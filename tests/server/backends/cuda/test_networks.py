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

from policies.types import SpecError
from server.backends.cuda import networks
from server.backends.cuda.fused_epilogues import FusedConv, fuse_epilogues
from server.backends.cuda.networks import ChoiceKey, choose, makers, optimised, reference_batches, seconds_per_batch
from server.backends.torch_device import Optimise
from server.models.images.codec import synthetic_images
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


def constant(value: float) -> Callable[[], Callable[[Tensor], Tensor]]:
    return lambda: lambda pixels: torch.full((len(pixels), 2), value)


def test_the_fastest_implementation_that_works_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise ValueError("no compiler")

    stuck = threading.Event()
    times = {1.0: 0.003, 2.0: 0.001, 3.0: 0.002}

    def measure(network: Callable[[Tensor], Tensor]) -> float:
        return times[float(network(torch.zeros(1))[0, 0])]

    known = {
        "eager": constant(1.0),
        "broken": broken,
        "hung": lambda: stuck.wait() and None,
        "fast": constant(2.0),
        "fair": constant(3.0),
    }
    with caplog.at_level(logging.WARNING):
        choice = choose(known, measure, 0.5)
    stuck.set()
    assert choice is not None
    assert (choice.name, choice.times) == ("fast", {"eager": 0.003, "fast": 0.001, "fair": 0.002})
    assert "'broken' of the network is left out: no compiler" in caplog.text
    assert "'hung' of the network is left out: it took over 0.5 s" in caplog.text
    assert choose({"broken": broken}, measure) is None


def test_an_implementation_that_took_too_long_does_not_run_any_more() -> None:
    late, ended = threading.Event(), threading.Event()

    def measure(network: Callable[[Tensor], Tensor]) -> float:
        network(torch.zeros(1))
        late.wait(10)
        try:
            network(torch.zeros(1))
        except TimeoutError:
            ended.set()
        return 1.0

    assert choose({"slow": constant(1.0)}, measure, 0.1) is None
    late.set()
    assert ended.wait(10)


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
    assert [*makers(net)] == ["eager", "compile"]
    assert [type(each) for each in net.seen] == [Tensor]


class Tiny(PixelNet):
    """Logits are the sums of a sample's channels."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), (0.5,) * 3, (0.5,) * 3)


def test_an_implementation_with_other_logits_is_refused() -> None:
    net, runtime = Tiny(), FakeRuntime()
    batches = reference_batches(net, runtime, (4, 4, 3), 20)
    assert [len(pixels) for pixels, _ in batches] == [20, 16, 1]
    assert seconds_per_batch(net, runtime, batches, 1e-3) > 0
    assert runtime.captured == 3
    with pytest.raises(RuntimeError, match="its logits differ by"):
        seconds_per_batch(lambda pixels: 1.01 * net(pixels), runtime, batches, 1e-3)
    with pytest.raises(RuntimeError, match="its logits differ by nan"):
        seconds_per_batch(lambda pixels: torch.nan * net(pixels), runtime, batches, 1e-3)


def optimised_tiny(monkeypatch: pytest.MonkeyPatch, optimise: Optimise = "auto", **delays: float | None) -> str:
    """The implementation that is chosen among some with these delays, s; None: it fails."""
    net, runs = Tiny(), list[str]()

    def maker(name: str, delay: float | None) -> Callable[[], Any]:
        def network(pixels: Tensor) -> Tensor:
            runs.append(name)
            if delay is None:
                raise RuntimeError("it fails")
            time.sleep(delay)
            logits: Tensor = net(pixels)
            return logits

        return lambda: network

    monkeypatch.setattr(networks, "makers", lambda _: {name: maker(name, each) for name, each in delays.items()})
    chosen = optimised(net, FakeRuntime(), optimise, (4, 4, 3), 1, KEY)
    optimised_tiny.runs = {*runs}  # type: ignore[attr-defined]
    if chosen is net:
        return "the network as it is"
    runs.clear()
    chosen(torch.zeros(1, 4, 4, 3, dtype=torch.uint8))
    return runs[0]


def test_the_choice_is_kept_and_only_checked_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert optimised_tiny(monkeypatch, eager=0.002, compile=0.0) == "compile"
    assert KEY.load() == "compile"
    assert optimised_tiny(monkeypatch, eager=0.0, compile=0.002) == "compile"
    assert optimised_tiny.runs == {"compile"}  # type: ignore[attr-defined]
    assert optimised_tiny(monkeypatch, eager=0.0, compile=None) == "eager", "it does not work any more"
    assert KEY.load() == "eager"
    assert optimised_tiny(monkeypatch, eager=None, compile=None) == "the network as it is"


def test_compile_is_an_error_where_it_fails_and_measures_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert optimised_tiny(monkeypatch, "compile", eager=0.0, compile=0.001) == "compile"
    assert optimised_tiny.runs == {"compile"}  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="give --optimise auto"):
        optimised_tiny(monkeypatch, "compile", eager=0.0, compile=None)


def test_a_network_without_convolutions_has_no_fused_implementation() -> None:
    assert [*makers(Tiny())] == ["eager", "compile"]
    assert [*makers(load_image_model("squeezenet1_1", "random")[1])] == ["eager", "fused", "compile"]
