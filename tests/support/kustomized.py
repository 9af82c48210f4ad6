"""What kustomize makes of a folder, of the four words that ours use: for machines without kubectl."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_KNOWN = {"namespace", "bases", "resources", "patchesStrategicMerge"}


def render(folder: Path) -> list[dict[str, Any]]:
    """The objects that `kubectl apply -k` would apply, in no particular order.

    Raises:
        ValueError: the folder's kustomization.yaml says what is not understood here, or patches what is not there.
    """
    told = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if not told.keys() <= _KNOWN:
        raise ValueError(f"{folder.name}: only {', '.join(sorted(_KNOWN))} are understood, not {sorted(told)}")
    objects = [each for base in told.get("bases", []) for each in render((folder / base).resolve())]
    objects += _read(folder, told.get("resources", []))
    for patch in _read(folder, told.get("patchesStrategicMerge", [])):
        where = [at for at, each in enumerate(objects) if _identity(each) == _identity(patch)]
        if not where:
            raise ValueError(f"{folder.name}: there is no {_identity(patch)} to patch")
        objects[where[0]] = _merged(objects[where[0]], patch)
    for each in objects:
        if "namespace" in told and each["kind"] != "Namespace":
            each["metadata"]["namespace"] = told["namespace"]
    return objects


def _read(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        yield from yaml.safe_load_all((folder / name).read_text())


def _identity(each: dict[str, Any]) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


def _merged(value: Any, patch: Any) -> Any:
    """A strategic merge: maps by key, lists of named things by name; all else is replaced."""
    if isinstance(value, dict) and isinstance(patch, dict):
        return {**value, **{key: _merged(value.get(key), new) for key, new in patch.items()}}
    if _named(value) and _named(patch):
        theirs = {each["name"]: each for each in patch}
        mine = [_merged(each, theirs.pop(each["name"], {})) for each in value]
        return [*mine, *theirs.values()]
    return patch


def _named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and "name" in each for each in value)
