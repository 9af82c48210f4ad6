"""Tests of the names of the package `batchwright`, and of its import."""

import subprocess
import sys
from pathlib import Path

import pytest

import batchwright
from policies import types

ROOT = Path(__file__).parents[2]


def test_every_name_of_the_interface_is_there() -> None:
    of_models, of_policies = {"Model", "Tensor", "BadInput", "Answer", "Kept"}, {"Policy", "State", "Launch", "Wait"}
    of_models |= {"Pipeline", "InferenceError"}
    names = of_models | of_policies | {"Profile", "solve", "evaluate", "simulate"}
    assert set(batchwright.__all__) == names <= set(dir(batchwright))
    assert all(callable(getattr(batchwright, name)) for name in names)
    assert batchwright.State is types.State


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'batchwright' has no attribute 'optimise'"):
        batchwright.optimise  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_finder_is_gone_after_the_first_use() -> None:
    program = (
        "import sys; before = list(sys.meta_path); from batchwright import State; assert sys.meta_path == before; "
        "assert 'policies.types' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
