"""Names of torchvision's models, read from its source files."""

import pytest

from server.models.images import torchvision_names as names
from server.models.images.torchvision_source import import_torchvision_models


def test_the_names_are_those_that_torchvision_lists() -> None:
    models = import_torchvision_models()
    assert names.torchvision_names() == sorted(models.list_models(module=models))


def test_without_torchvision_no_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "find_spec", lambda _: None)
    assert names.torchvision_names() == []
