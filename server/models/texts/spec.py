"""Specs of text models (NAME=SPEC), checked without importing torch or transformers."""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from policies.types import SpecError
from server.models.weights import is_weights_file

BUILT_IN = ("text-classifier", "translator", "text-generator")  # small configurations with random weights
_CONFIG = "config.json"


def is_text(spec: str) -> bool:
    """Whether SPEC of NAME=SPEC is a text model: one of `BUILT_IN`, a folder or a configuration file.

    A folder needs a slash, so that one with the name of a torchvision model is not taken for it.
    """
    return spec in BUILT_IN or "/" in spec or spec.endswith(".json")


def config_file(spec: str) -> Path:
    """The configuration file of a folder, or the one that the spec names."""
    path = Path(spec)
    return path if path.suffix == ".json" else path / _CONFIG


def check_text(name: str, spec: str, weights: str, stages: int | None) -> None:
    """Check what can be checked of a text model without loading it; other models are skipped.

    Raises:
        SpecError: transformers, the folder or its weights are missing, or an option does not apply to text models.
    """
    if not is_text(spec):
        return
    if stages is not None:
        raise SpecError(f"{name} is a text model, whose stages are its decode steps; leave out --stages")
    if find_spec("transformers") is None:
        raise SpecError(
            f"{name} is a text model and needs transformers; install the extra text: pip install transformers"
        )
    if spec not in BUILT_IN and not config_file(spec).is_file():
        raise SpecError(
            f"{name}: no {str(config_file(spec))!r}; give a folder with it, or one of {', '.join(BUILT_IN)}"
        )
    if is_weights_file(weights):
        raise SpecError(f"{name} takes its weights from its folder, not from {weights!r}; leave out --weights")
    if weights == "pretrained" and (spec in BUILT_IN or Path(spec).suffix == ".json"):
        raise SpecError(
            f"no weights for {name}: {spec!r} is only a configuration; give a folder with weights, or --weights random "
            "to try it out"
        )


def model_settings(name: str, spec: str) -> str:
    """Settings of a model that change service times, for a profile's note and its key in the cache."""
    if not is_text(spec):
        return "" if spec == name else spec
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = "none"
    configuration = spec
    if spec not in BUILT_IN:
        try:
            content = json.loads(config_file(spec).read_text())
        except (OSError, ValueError):
            content = None
        configuration = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return f"{configuration}, transformers {installed}"
