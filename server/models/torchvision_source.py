"""torchvision's classification models by name: weights (pretrained, a file, or random), folded for inference.

Imported only when a real device is asked for: torch and torchvision take seconds.
"""

import difflib
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.types import SpecError
from server.models.images import ImageCodec, smooth_pictures
from server.models.model import ServedModel
from server.models.torchvision_stages import cut
from server.models.weights import cached_or_downloaded

_log = logging.getLogger(__name__)

_SEED = 20_260_121
_CALIBRATION_PICTURES = 8
_LOGIT_SPREAD = 2.0  # standard deviation of random weights' logits from picture to picture: sure, but not certain

# GoogLeNet and Inception: their own initialisation takes seconds, the auxiliary heads only serve training, and their
# input transform is x -> p/127.5 - 1, which is mean = std = 0.5 in the normalisation that every model has.
_INCEPTION = {"init_weights": False, "aux_logits": False, "transform_input": False}
_OPTIONS: dict[str, dict[str, Any]] = {"googlenet": _INCEPTION, "inception_v3": _INCEPTION}
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
_DENSENET_KEY = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)")  # its published weights keep names of long ago


class PixelNet(nn.Module):
    """A network that takes pixels: uint8 [n, H, W, 3] -> logits [n, classes] in the network's dtype; in stages, if cut.

    Normalisation is one scale and shift of the pixel, in float32 whatever the network computes in: 8-bit pixels times
    a 16-bit scale would lose what the pictures differ by.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """`net` takes (p / 255 - mean) / std as [n, 3, H, W]; mean and std by channel."""
        super().__init__()
        self.net = net
        self.dtype = torch.float32
        deviation = torch.tensor(std).reshape(3, 1, 1)
        self.register_buffer("scale", 1.0 / (255.0 * deviation))
        self.register_buffer("shift", -torch.tensor(mean).reshape(3, 1, 1) / deviation)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to the device; the network alone is converted to `dtype`, channels last."""
        self.dtype = dtype
        self.to(device)
        self.net.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> Tensor:
        """All of it."""
        logits: Tensor = self.net(self.normalised(pixels))
        return logits

    def normalised(self, pixels: Tensor) -> Tensor:
        """What the network takes. NHWC in memory is NCHW with channels last: the permutation moves nothing."""
        return (pixels.permute(0, 3, 1, 2) * self.scale + self.shift).to(self.dtype)

    @property
    def stages(self) -> int:
        """Into how many it is cut."""
        return len(self.net) if isinstance(self.net, Stages) else 1

    def part(self, x: Tensor, first: int, stages: int | None) -> Tensor:
        """Run so many stages from `first` on, to the end if None; x is what the stage before gave, or `normalised`."""
        parts = list(self.net) if isinstance(self.net, Stages) else [self.net]
        for part in parts[first : None if stages is None else first + stages]:
            x = part(x)
        return x


class Stages(nn.Sequential):
    """A network cut into stages, each of them a module."""


@dataclass(frozen=True)
class _Recipe:
    """What the default weights' metadata say about a model, available without downloading them."""

    name: str
    url: str
    codec: ImageCodec
    labels: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(
    name: str, weights: str = "auto", max_batch_size: int = 32, stages: int = 1
) -> tuple[ServedModel[ImageCodec], PixelNet]:
    """A torchvision classification model, in eval mode, batch normalisation folded, float32 on the CPU.

    Args:
        name: as torchvision names it.
        weights: "auto" (pretrained if they can be had, else random), "random", or a state dict's file. A file's
            network is fed as the default weights' is; its number of classes may differ.
        max_batch_size: what the served model announces.
        stages: into how many it is cut.

    Raises:
        SpecError: no such model, it cannot be cut so, or the file is no state dict of it.
    """
    recipe = _recipe(name)
    origin, state = _state(recipe, weights)
    labels = recipe.labels if state is None else _labels(recipe, state)
    with torch.random.fork_rng(devices=[]):  # every start draws the same weights, and nobody else's numbers change
        torch.manual_seed(_SEED)
        net = torchvision_models().get_model(name, num_classes=len(labels), **_OPTIONS.get(name, {})).eval()
        net.requires_grad_(False)
        model = PixelNet(net, recipe.mean, recipe.std)
        if state is None:
            _randomise(model, recipe.codec)
    if state is not None:
        _fill(net, state, f"weights {weights!r} do not fit {name}")
    parts = [fold(part) for part in cut(name, net, stages, recipe.codec.shape)]  # folding loses the blocks
    model.net = parts[0] if stages == 1 else Stages(*parts)
    return ServedModel(name, recipe.codec, labels, origin, max_batch_size), model.eval()


def torchvision_models() -> ModuleType:
    """The module torchvision.models; the one place where torchvision is imported."""
    _define_missing_operators()
    from torchvision import models

    module: ModuleType = models
    return module


def _define_missing_operators() -> None:
    """Let `import torchvision` succeed where its extension cannot load, as a CUDA build on a CPU-only torch.

    On import it registers shapes for two detection operators, which then have to exist. No classifier uses them.
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


def check_name(name: str) -> None:
    """Whether torchvision has a classification model of that name.

    Raises:
        SpecError: it has not; the line names those that come near.
    """
    models = torchvision_models()
    known = models.list_models(module=models)
    if name not in known:
        folder = f"; for the text model in the folder of that name give ./{name}" if Path(name).is_dir() else ""
        near = difflib.get_close_matches(name, known, 5, 0.4) or known[::16]
        raise SpecError(f"no torchvision classification model {name!r}; there is {', '.join(near)}, ...{folder}")


def _recipe(name: str) -> _Recipe:
    check_name(name)
    models = torchvision_models()
    weights = models.get_model_weights(name).DEFAULT
    preset = weights.transforms()
    (crop,), (resize,) = preset.crop_size, preset.resize_size
    codec = ImageCodec(crop, crop, max(crop, resize), preset.interpolation.value)
    half = (0.5, 0.5, 0.5)
    mean, std = (half, half) if name in _OPTIONS else (tuple(preset.mean), tuple(preset.std))
    return _Recipe(name, weights.url, codec, tuple(weights.meta["categories"]), mean, std)


def _state(recipe: _Recipe, weights: str) -> tuple[str, Mapping[str, Tensor] | None]:
    """Where the weights come from, and their state dict; None means random ones."""
    if weights == "random":
        return "random", None
    if weights != "auto":
        return Path(weights).name, _read_state(Path(weights))
    path = cached_or_downloaded(recipe.url, Path(torch.hub.get_dir()) / "checkpoints")
    try:
        if path is not None:
            return "pretrained", _read_state(path)
    except SpecError as error:
        _log.warning("%s", error)
    _log.warning(
        "%s runs with RANDOM weights: its predictions mean nothing; put %s into %s, or give --weights FILE",
        recipe.name,
        recipe.url,
        Path(torch.hub.get_dir()) / "checkpoints",
    )
    return "random", None


def _read_state(path: Path) -> Mapping[str, Tensor]:
    """A file's state dict, without auxiliary heads; nothing but tensors is unpickled.

    Raises:
        SpecError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise SpecError(f"no weights file {str(path)!r}; give auto, random, or a file of model.state_dict()")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make the unpickler raise nearly anything
        raise SpecError(
            f"weights {str(path)!r} cannot be read ({type(error).__name__}); save model.state_dict()"
        ) from error
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise SpecError(f"weights {str(path)!r} hold no state dict of tensors; save model.state_dict()")
    return {_DENSENET_KEY.sub(r"\1\2", k): v for k, v in state.items() if not k.startswith(_AUXILIARY)}


def _labels(recipe: _Recipe, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The classifier comes last in every model: its rows are the classes."""
    last = list(state.values())[-1]
    classes = last.shape[0] if last.ndim else 0
    return recipe.labels if classes == len(recipe.labels) else tuple(f"class {index}" for index in range(classes))


def _fill(net: nn.Module, state: Mapping[str, Tensor], problem: str) -> None:
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        detail = " ".join(str(error).partition("\n")[2].split())[:160]
        raise SpecError(f"{problem}: {detail}; give a state dict of that model") from error


def _randomise(model: PixelNet, codec: ImageCodec) -> None:
    """Bring a freshly drawn network to life: signals keep their size, and pictures differ in their logits.

    Each batch normalisation takes the statistics of one pass over smooth pictures; then the classifier is scaled and
    centred on them. Without that activations vanish or blow up, which also falsifies the energy.
    """
    for module in model.net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    pictures = smooth_pictures(codec, _CALIBRATION_PICTURES, np.random.default_rng(_SEED))
    logits = _calibrate(model, torch.from_numpy(pictures))
    classifier = [m for m in model.net.modules() if isinstance(m, nn.Linear)][-1:]
    for last in classifier:
        gain = _LOGIT_SPREAD / float(logits.std(0).mean())
        last.weight.mul_(gain)
        if last.bias is not None:
            last.bias.sub_(logits.mean(0)).mul_(gain)


@torch.no_grad()
def _calibrate(model: PixelNet, pictures: Tensor) -> Tensor:
    """One pass in which every batch normalisation keeps its batch's statistics; the logits that came out."""
    norms = [m for m in model.net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    logits: Tensor = model(pictures)
    for norm in norms:
        norm.eval()
    return logits


def fold(net: nn.Module) -> nn.Module:
    """The network with batch normalisation folded into its convolutions; itself where torch.fx cannot trace it."""
    with warnings.catch_warnings():  # on import the module meets a deprecation of torch's own
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.fx.experimental.optimization import fuse
    try:
        return fuse(net, inplace=True)
    except Exception as error:  # noqa: BLE001  (tracing runs the model's own code on proxies; unfolded also works)
        _log.info("batch normalisation is not folded: %s", error)
        return net
