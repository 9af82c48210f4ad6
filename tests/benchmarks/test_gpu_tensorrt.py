"""ONNX Runtime's TensorRT provider in stage A of benchmarks/gpu.py, with a fake provider and with the one for CPUs."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.support import gpu_kernels, gpu_tensorrt
from benchmarks.support.gpu_kernels import Rehearsal, measure_kernels
from benchmarks.support.gpu_tensorrt import PROVIDER, UnavailableProviderError, find_runtime, make_tensorrt
from server.models.images.torchvision_source import PixelNet
from tests.benchmarks.test_gpu_kernels import results

CPU = torch.device("cpu")


def small_net() -> PixelNet:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return PixelNet(layers, (0.5,) * 3, (0.25,) * 3).eval().requires_grad_(False)


def installed(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__="1.30", **attributes))


@pytest.mark.usefixtures("few_repeats")
def test_without_the_package_or_the_provider_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, get_available_providers=lambda: ["CPUExecutionProvider"])
    with pytest.raises(UnavailableProviderError, match=r"ONNX Runtime 1\.30 has only CPUExecutionProvider"):
        find_runtime()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    measure_kernels("squeezenet1_1", Rehearsal(), (1,), compile_too=False, until=1e12)
    found = results(capsys)
    assert found["tensorrt"] == "not compared: ONNX Runtime is not installed"
    assert {cell["variant"] for cell in found["cells"]} == {"eager", "fused"}


@pytest.mark.usefixtures("few_repeats")
def test_it_is_measured_after_the_others_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, get_available_providers=lambda: [PROVIDER])
    monkeypatch.setattr(gpu_kernels, "make_tensorrt", lambda net, place, stream, runtime: net)
    monkeypatch.setattr(gpu_kernels, "makers", lambda net: {"eager": lambda: net})
    measure_kernels("squeezenet1_1", Rehearsal(), (2, 1), compile_too=False, until=1e12)
    cells = [cell for cell in results(capsys)["cells"] if cell["variant"] == "tensorrt"]
    assert [cell["batch_size"] for cell in cells] == [2, 1]
    for cell in cells:
        assert cell["relative_l2"] < 1e-6
        assert cell["eager_ms"] > 0
        assert cell["graph"] == "not captured: it launches by itself"


class Session:
    """A session of a fake provider, which computes what `net` does."""

    made: list[Any]
    net: PixelNet
    works = True

    def __init__(self, file: str, providers: list[Any]) -> None:
        self.made.append(providers)

    def get_providers(self) -> list[str]:
        return [PROVIDER] if self.works else ["CUDAExecutionProvider"]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(shape=[1, 4])]

    def io_binding(self) -> Any:
        self.bound: dict[str, tuple[Any, ...]] = {}

        def bind(name: str, *rest: Any) -> None:
            self.bound[name] = rest

        return SimpleNamespace(bind_input=bind, bind_output=bind)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        assert options.entries == {"disable_synchronize_execution_providers": "1"}
        assert self.bound["pixels"][:4] == ("cpu", 0, 2, [len(self.pixels), 6, 6, 3])
        assert self.bound["logits"][:4] == ("cpu", 0, 1, [len(self.pixels), 4])

    pixels: Tensor


class Options:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


def test_a_session_is_made_for_each_batch_size_with_the_stream_of_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Made(Session):
        made: list[Any] = []

    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: None)
    runtime = SimpleNamespace(InferenceSession=Made, RunOptions=Options)
    network = make_tensorrt(small_net(), CPU, 7, runtime)
    for size in (2, 1, 2):
        Session.pixels = torch.zeros(size, 6, 6, 3, dtype=torch.uint8)
        assert network(Session.pixels).shape == (size, 4)
    assert Made.made == [[PROVIDER]] * 2
    (tensorrt, options), (fallback, _) = gpu_tensorrt._providers(PROVIDER, torch.device("cuda:1"), 7)
    assert (tensorrt, fallback) == (PROVIDER, "CUDAExecutionProvider")
    assert options == {"device_id": 1, "user_compute_stream": "7", "trt_fp16_enable": True}
    Made.works = False
    with pytest.raises(UnavailableProviderError, match="does not work here"):
        make_tensorrt(small_net(), CPU, 7, runtime)(Session.pixels)


def test_the_exported_network_has_the_same_logits() -> None:
    runtime = pytest.importorskip("onnxruntime")
    net, pixels = small_net(), torch.randint(256, (2, 6, 6, 3), dtype=torch.uint8)
    network = make_tensorrt(net, CPU, 0, runtime, "CPUExecutionProvider")
    with torch.inference_mode():
        torch.testing.assert_close(network(pixels), net(pixels), rtol=1e-4, atol=1e-5)
