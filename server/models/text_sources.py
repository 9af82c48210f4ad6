"""Which models are texts', and what they need; nothing heavy is imported."""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from policies.types import SpecError

SMALL = ("text-classifier", "translator", "text-generator")  # small configurations of our own, with random weights
_CONFIG = "config.json"


def is_text(spec: str) -> bool:
    """Whether the second part of NAME=SPEC means a text model: one of `SMALL`, a folder or a configuration file.

    A folder is told by a slash: one that happens to be named as torchvision's networks are is not meant.
    """
    return spec in SMALL or "/" in spec or spec.endswith(".json")


def config_file(spec: str) -> Path:
    """The configuration of a folder, or the file that the spec names."""
    path = Path(spec)
    return path if path.suffix == ".json" else path / _CONFIG


def check_text(name: str, spec: str, weights: str, stages: int | None) -> None:
    """Whether what NAME=SPEC says can be had, as far as that shows without loading it; torchvision's names are not.

    Raises:
        SpecError: the extra is not installed, there is no such folder, its weights are looked for elsewhere, or a text
            model is to be cut.
    """
    if not is_text(spec):
        return
    if stages is not None:
        raise SpecError(f"{name} is a text model, whose stages are its iterations; leave out --stages")
    if find_spec("transformers") is None:
        raise SpecError(f'{name} is a text model, which needs transformers; in the clone pip install ".[text]"')
    if spec not in SMALL and not config_file(spec).is_file():
        raise SpecError(f"{name}: no {str(config_file(spec))!r}; give a folder with it, or one of {', '.join(SMALL)}")
    if weights not in ("auto", "random"):
        raise SpecError(f"{name} takes its weights from its folder, not from {weights!r}; give auto or random")


def identity(name: str, spec: str) -> str:
    """What of a model changes its service times, beside its name, for a profile's note and its place in the cache."""
    if not is_text(spec):
        return "" if spec == name else spec
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = "none"
    shape = spec
    if spec not in SMALL:
        try:
            content = json.loads(config_file(spec).read_text())
        except (OSError, ValueError):
            content = None
        shape = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return f"{shape}, transformers {installed}"
