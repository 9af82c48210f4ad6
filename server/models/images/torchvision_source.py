"""torchvision's classification models by name, with pretrained, own or random weights, ready for inference.

Imported in workers, since torch and torchvision take seconds to import.
"""

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from policies.types import SpecError
from server.models.images.codec import ImageCodec, synthetic_images
from server.models.images.torchvision_names import check_torchvision_name
from server.models.images.torchvision_stages import split_into_stages
from server.models.model import ServedModel
from server.models.weights import WeightsError, fetch_weights, is_weights_file

_log = logging.getLogger(__name__)

_SEED = 20_260_121
_CALIBRATION_IMAGES = 8
_LOGIT_STD = 2.0  # standard deviation of random weights' logits: predictions are neither uniform nor certain

# GoogLeNet and Inception: their own initialisation takes seconds, the auxiliary heads are only used in training, and
# their input transform x -> p/127.5 - 1 equals the normalisation that every model has with mean = std = 0.5.
_INCEPTION = {"init_weights": False, "aux_logits": False, "transform_input": False}
_OPTIONS: dict[str, dict[str, Any]] = {"googlenet": _INCEPTION, "inception_v3": _INCEPTION}
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
# DenseNet's published weights have the names of an older version
_DENSENET_KEY = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)")


class PixelNet(nn.Module):
    """A network on pixels: uint8 [n, H, W, 3] -> logits [n, classes] in the network's dtype, in one or several stages.

    Normalisation is one scale and shift in float32, whatever the network's dtype: 16-bit scales would lose differences
    between 8-bit pixels.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """`net` takes (p / 255 - mean) / std as [n, 3, H, W]; mean and std are by channel."""
        super().__init__()
        self.net = net
        self.dtype = torch.float32
        deviation = torch.tensor(std).reshape(3, 1, 1)
        self.register_buffer("scale", 1.0 / (255.0 * deviation))
        self.register_buffer("shift", -torch.tensor(mean).reshape(3, 1, 1) / deviation)

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to the device, and convert the network, but not the normalisation, to `dtype` and channels last."""
        self.dtype = dtype
        self.to(device)
        self.net.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> Tensor:
        """Run all stages."""
        logits: Tensor = self.net(self.normalise(pixels))
        return logits

    def normalise(self, pixels: Tensor) -> Tensor:
        """The network's input. NHWC in memory is NCHW with channels last, so that the permutation copies nothing."""
        return (pixels.permute(0, 3, 1, 2) * self.scale + self.shift).to(self.dtype)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.net) if isinstance(self.net, Stages) else 1

    def run_stages(self, x: Tensor, first: int, stages: int | None) -> Tensor:
        """Run stages from `first` on, all if `stages` is None; x is the previous stage's output, or normalised."""
        parts = list(self.net) if isinstance(self.net, Stages) else [self.net]
        for part in parts[first : None if stages is None else first + stages]:
            x = part(x)
        return x


class Stages(nn.Sequential):
    """A network split into stages, one module each."""


@dataclass(frozen=True)
class _Metadata:
    """Metadata of a model's default weights, which torchvision has without downloading them."""

    name: str
    url: str
    codec: ImageCodec
    labels: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_image_model(
    name: str, weights: str = "pretrained", max_batch_size: int = 32, stages: int = 1
) -> tuple[ServedModel[ImageCodec], PixelNet]:
    """Load a torchvision classification model in eval mode, float32, on the CPU, with batch normalisation folded.

    Args:
        name: torchvision's name of the model.
        weights: "pretrained", "auto" (pretrained if available, else random), "random", or the file of a state dict,
            whose number of classes may differ; preprocessing is always that of the default weights.
        max_batch_size: of the served model.
        stages: number of stages to split it into.

    Raises:
        SpecError: there is no such model, it cannot be split, it has no pretrained weights and the download failed, or
            the file is not a state dict of it.
    """
    metadata = _metadata(name)
    origin, state = _load_state(metadata, weights)
    labels = metadata.labels if state is None else _labels(metadata, state)
    with torch.random.fork_rng(devices=[]):  # the same weights at every start, and the global generator is unchanged
        torch.manual_seed(_SEED)
        net = import_torchvision_models().get_model(name, num_classes=len(labels), **_OPTIONS.get(name, {})).eval()
        net.requires_grad_(False)
        model = PixelNet(net, metadata.mean, metadata.std)
        if state is None:
            _randomise(model, metadata.codec)
    if state is not None:
        _load_weights(net, state, f"weights {weights!r} do not fit {name}")
    # split before folding, which loses the blocks
    parts = [fold_batch_norm(part) for part in split_into_stages(name, net, stages, metadata.codec.shape)]
    model.net = parts[0] if stages == 1 else Stages(*parts)
    return ServedModel(name, metadata.codec, labels, origin, max_batch_size), model.eval()


def import_torchvision_models() -> ModuleType:
    """Import torchvision.models; torchvision is imported nowhere else."""
    _define_missing_operators()
    from torchvision import models

    module: ModuleType = models
    return module


def _define_missing_operators() -> None:
    """Make `import torchvision` succeed where its extension cannot load, such as a CUDA build on a CPU-only torch.

    The import registers shapes for two detection operators, which then have to exist; no classifier uses them.
    """
    spec = find_spec("torchvision")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for library in (file for folder in folders for file in Path(folder).glob("_C*.*")):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            continue
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def _metadata(name: str) -> _Metadata:
    check_torchvision_name(name)
    models = import_torchvision_models()
    weights = models.get_model_weights(name).DEFAULT
    preset = weights.transforms()
    (crop,), (resize,) = preset.crop_size, preset.resize_size
    codec = ImageCodec(crop, crop, max(crop, resize), preset.interpolation.value)
    half = (0.5, 0.5, 0.5)
    mean, std = (half, half) if name in _OPTIONS else (tuple(preset.mean), tuple(preset.std))
    return _Metadata(name, weights.url, codec, tuple(weights.meta["categories"]), mean, std)


def _load_state(metadata: _Metadata, weights: str) -> tuple[str, Mapping[str, Tensor] | None]:
    """The origin of the weights and their state dict, which is None for random weights.

    Raises:
        SpecError: there are no such weights; "auto" falls back to random weights instead.
    """
    if weights == "random":
        return "random", None
    if is_weights_file(weights):
        try:
            return Path(weights).name, _read_state(Path(weights))
        except WeightsError as error:
            raise SpecError(f"{error}; give a readable file of model.state_dict()") from error
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    try:
        return "pretrained", _read_state(fetch_weights(metadata.url, folder))
    except WeightsError as error:
        remedy = f"put {metadata.url} into {folder}, or give --weights FILE"
        if weights == "pretrained":
            raise SpecError(
                f"no weights for {metadata.name}: {error}; {remedy}, or --weights random to try it out"
            ) from error
        _log.warning("%s runs with RANDOM weights: its predictions mean nothing; %s; %s", metadata.name, error, remedy)
    return "random", None


def _read_state(path: Path) -> Mapping[str, Tensor]:
    """Read a file's state dict, without auxiliary heads; only tensors are unpickled.

    Raises:
        WeightsError: the file is missing, damaged or not a state dict.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler may raise anything on a damaged file
        reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
        raise WeightsError(f"weights {str(path)!r} cannot be read ({reason})") from error
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"weights {str(path)!r} are not a state dict of tensors")
    return {_DENSENET_KEY.sub(r"\1\2", k): v for k, v in state.items() if not k.startswith(_AUXILIARY)}


def _labels(metadata: _Metadata, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The labels of the classes, which are the rows of a model's last tensor, its classifier's."""
    last = list(state.values())[-1]
    classes = last.shape[0] if last.ndim else 0
    return metadata.labels if classes == len(metadata.labels) else tuple(f"class {index}" for index in range(classes))


def _load_weights(net: nn.Module, state: Mapping[str, Tensor], problem: str) -> None:
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        detail = " ".join(str(error).partition("\n")[2].split())[:160]
        raise SpecError(f"{problem}: {detail}; give a state dict of that model") from error


def _randomise(model: PixelNet, codec: ImageCodec) -> None:
    """Initialise a network so that signals keep their magnitude and logits differ between images.

    Kaiming weights; the statistics of each batch normalisation are those of one pass over synthetic images; the
    classifier is scaled and centred on them. Otherwise activations vanish or overflow, which also changes the energy.
    """
    for module in model.net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    images = synthetic_images(codec, _CALIBRATION_IMAGES, np.random.default_rng(_SEED))
    logits = _calibrate(model, torch.from_numpy(images))
    classifier = [m for m in model.net.modules() if isinstance(m, nn.Linear)][-1:]
    for last in classifier:
        gain = _LOGIT_STD / float(logits.std(0).mean())
        last.weight.mul_(gain)
        if last.bias is not None:
            last.bias.sub_(logits.mean(0)).mul_(gain)


@torch.no_grad()
def _calibrate(model: PixelNet, images: Tensor) -> Tensor:
    """Set the statistics of every batch normalisation to those of this batch, and return the batch's logits."""
    norms = [m for m in model.net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    logits: Tensor = model(images)
    for norm in norms:
        norm.eval()
    return logits


class _OneThreadTracer(fx.Tracer):
    """Traces modules that its own thread calls. While it traces, torch.fx also gives it the calls of other threads."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module, or trace the call."""
        if get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def trace(net: nn.Module) -> fx.GraphModule:
    """Trace a network, while other threads may run theirs; raises whatever its code raises on proxies."""
    return fx.GraphModule(net, _OneThreadTracer().trace(net))


def fold_batch_norm(net: nn.Module) -> nn.Module:
    """Fold batch normalisation into the convolutions; a network that torch.fx cannot trace is returned unchanged."""
    with warnings.catch_warnings():  # the import triggers a deprecation warning within torch
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.fx.experimental.optimization import fuse
    try:
        return fuse(trace(net), inplace=True, no_trace=True)
    except Exception as error:  # noqa: BLE001  (tracing runs the model's code on proxies, which may raise anything)
        _log.info("batch normalisation is not folded: %s", error)
        return net
