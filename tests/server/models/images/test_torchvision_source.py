"""Loading of torchvision models: names, weights and folding, without downloads: hub folder and URLs are local."""

import hashlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from policies.types import SpecError
from server.models.images import torchvision_source
from server.models.images.codec import ImageCodec, synthetic_images
from server.models.images.torchvision_source import (
    PixelNet,
    fold_batch_norm,
    import_torchvision_models,
    load_image_model,
)
from server.models.weights import WeightsError, fetch_weights

CPU = torch.device("cpu")
URL = import_torchvision_models().get_model_weights("squeezenet1_1").DEFAULT.url


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache without downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torchvision_source, "fetch_weights", _cached_weights)
    return tmp_path / "hub" / "checkpoints"


def _cached_weights(url: str, folder: Path) -> Path:
    path = folder / url.rpartition("/")[2]
    if not path.is_file():
        raise WeightsError("the download failed (no network)")
    return path


def images(codec: ImageCodec, count: int) -> Tensor:
    return torch.from_numpy(synthetic_images(codec, count, np.random.default_rng(11)))


@torch.inference_mode()
def logits_of(net: PixelNet, pixels: Tensor) -> Tensor:
    net.move_to(CPU, torch.float32)
    logits: Tensor = net(pixels)
    return logits


@pytest.mark.usefixtures("small_images")
@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_random_weights_are_reproducible_and_logits_differ_between_images(name: str) -> None:
    (model, first), (_, again) = load_image_model(name, "random"), load_image_model(name, "random")
    logits = logits_of(first, images(model.codec, 4))
    assert model.weights == "random"
    assert len(model.labels) == 1000
    assert "goldfish" in model.labels
    # sums of the calibration may be split between threads differently, which changes the last digits
    assert torch.allclose(logits, logits_of(again, images(model.codec, 4)), atol=1e-3)
    assert 0.5 < float(logits.std(0).mean()) < 8.0
    assert len(set(logits.argmax(1).tolist())) > 1


@pytest.mark.usefixtures("small_images")
@pytest.mark.parametrize("name", ["squeezenet1_0", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5"])
def test_logits_of_other_architectures_neither_vanish_nor_overflow(name: str) -> None:
    model, net = load_image_model(name, "random")
    logits = logits_of(net, images(model.codec, 2))
    assert torch.isfinite(logits).all()
    assert 0.1 < float(logits.abs().max()) < 200.0
    assert float((logits[0] - logits[1]).abs().max()) > 1e-2 * float(logits.abs().max())


def test_loading_leaves_the_global_random_generator_unchanged() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    load_image_model("squeezenet1_1", "random")
    assert torch.equal(torch.rand(1), expected)


def test_an_unknown_name_lists_similar_ones() -> None:
    with pytest.raises(SpecError, match=r"no torchvision classification model 'googlnet'; there is googlenet"):
        load_image_model("googlnet", "random")


def test_detection_models_are_not_classifiers() -> None:
    with pytest.raises(SpecError):
        load_image_model("fasterrcnn_resnet50_fpn", "random")


def test_crop_and_normalisation_come_from_the_metadata() -> None:
    model, net = load_image_model("squeezenet1_1", "random")
    assert model.codec == ImageCodec(224, 224, 256)
    pixel = torch.tensor([0.0, 128.0, 255.0])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(pixel * net.scale.flatten() + net.shift.flatten(), (pixel / 255 - mean) / std, atol=1e-6)


@pytest.mark.usefixtures("few_calibration_images", "small_images")
def test_googlenet_has_its_own_input_range_and_no_auxiliary_heads() -> None:
    _, net = load_image_model("googlenet", "random")
    assert torch.allclose(net.scale.flatten(), torch.full((3,), 1 / 127.5))
    assert torch.allclose(net.shift.flatten(), torch.full((3,), -1.0))
    assert not any("aux" in name for name, _ in net.named_modules())


@pytest.mark.usefixtures("few_calibration_images", "small_images")
@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_folding_removes_batch_normalisation_and_keeps_the_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folded = load_image_model(name, "random")
    monkeypatch.setattr(torchvision_source, "fold_batch_norm", lambda net: net)
    _, plain = load_image_model(name, "random")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    expected = logits_of(plain, images(model.codec, 2))
    error = (logits_of(folded, images(model.codec, 2)) - expected).abs().max()
    assert float(error) < 1e-4 * float(expected.abs().max())  # float32 in another order: about 1e-6 per layer


def test_a_network_that_cannot_be_traced_is_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    net = Branching()
    with caplog.at_level(logging.INFO):
        assert fold_batch_norm(net) is net
    assert "not folded" in caplog.text


def test_other_threads_run_models_while_one_is_traced() -> None:
    other, outputs = nn.Linear(2, 2), list[Tensor]()

    class Loaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            serving = threading.Thread(target=lambda: outputs.append(other(torch.ones(1, 2))))
            serving.start()
            serving.join()
            y: Tensor = self.layer(x)
            return y

    net = Loaded()
    traced = fold_batch_norm(net)
    assert traced is not net
    assert torch.equal(outputs[0], other(torch.ones(1, 2)))
    assert torch.equal(traced(torch.ones(1, 2)), net(torch.ones(1, 2)))


def saved(path: Path, name: str = "squeezenet1_1", classes: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(import_torchvision_models().get_model(name, num_classes=classes).state_dict(), path)
    return path


def test_weights_come_from_a_file_with_its_own_number_of_classes(tmp_path: Path) -> None:
    path = saved(tmp_path / "mine.pt", classes=7)
    model, net = load_image_model("squeezenet1_1", str(path))
    assert (model.weights, model.labels[-1]) == ("mine.pt", "class 6")
    assert logits_of(net, images(model.codec, 1)).shape == (1, 7)


def test_auxiliary_heads_in_a_file_are_ignored(tmp_path: Path) -> None:
    net = import_torchvision_models().googlenet(init_weights=False)
    assert any(name.startswith("aux1.") for name in net.state_dict())
    torch.save(net.state_dict(), tmp_path / "whole.pt")
    assert load_image_model("googlenet", str(tmp_path / "whole.pt"))[0].weights == "whole.pt"


def test_files_that_do_not_fit_are_rejected_with_a_message_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no weights")
    torch.save({"epoch": 3}, tmp_path / "checkpoint.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "little.pt")
    saved(tmp_path / "other.pt", "shufflenet_v2_x0_5")
    for name in ("missing.pt", "text.pt", "checkpoint.pt", "tensor.pt", "little.pt", "other.pt"):
        with pytest.raises(SpecError, match=name) as caught:
            load_image_model("squeezenet1_1", str(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_code_in_a_weights_file_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.mkdir, (tmp_path / "sprung",)  # type: ignore[return-value]

    torch.save({"weight": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(SpecError, match="cannot be read"):
        load_image_model("squeezenet1_1", str(tmp_path / "trap.pt"))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("weights", ["pretrained", "auto"])
def test_pretrained_weights_come_from_the_cache(hub: Path, weights: str) -> None:
    saved(hub / URL.rpartition("/")[2])
    assert load_image_model("squeezenet1_1", weights)[0].weights == "pretrained"


def test_pretrained_weights_that_are_missing_or_damaged_are_an_error_with_the_url_and_the_folder(hub: Path) -> None:
    for problem in ("the download failed (no network)", "cannot be read"):
        with pytest.raises(SpecError, match=r"^no weights for squeezenet1_1: ") as caught:
            load_image_model("squeezenet1_1")
        assert problem in str(caught.value)
        assert f"put {URL} into {hub}, or give --weights FILE, or --weights random" in str(caught.value)
        hub.mkdir(parents=True, exist_ok=True)
        (hub / URL.rpartition("/")[2]).write_bytes(b"half a download")


def test_auto_warns_of_random_weights(caplog: pytest.LogCaptureFixture) -> None:
    assert load_image_model("squeezenet1_1", "auto")[0].weights == "random"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "RANDOM" in caplog.text
    assert URL in caplog.text


def test_auto_takes_random_weights_if_the_cached_file_is_damaged(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.mkdir(parents=True)
    (hub / URL.rpartition("/")[2]).write_bytes(b"half a download")
    assert load_image_model("squeezenet1_1", "auto")[0].weights == "random"
    assert "cannot be read" in caplog.text


def test_a_download_is_kept_only_with_the_digest_in_its_name(tmp_path: Path) -> None:
    content, folder = b"weights", tmp_path / "cache"
    good = tmp_path / f"net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    bad = tmp_path / "net-00000000.pth"
    for source in (good, bad):
        source.write_bytes(content)
    path = fetch_weights(good.as_uri(), folder)
    assert path.read_bytes() == content
    with pytest.raises(WeightsError, match="does not match its name"):
        fetch_weights(bad.as_uri(), folder)
    with pytest.raises(WeightsError, match=r"the download failed \(\[Errno 2\] No such file"):
        fetch_weights((tmp_path / "none-00000000.pth").as_uri(), folder)
    assert list(folder.iterdir()) == [path]  # no partial download is left


def test_a_cached_file_is_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / "net-12345678.pth").write_bytes(b"here")
    assert fetch_weights("http://nowhere.invalid/net-12345678.pth", tmp_path) == tmp_path / "net-12345678.pth"
