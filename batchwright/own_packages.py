"""Import of our own packages, whose names are common, from where `batchwright` itself is."""

from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).parent.parent)
_NAMES = frozenset({"batchwright", "policies", "server", "profiler", "loadgen"})


class OwnPackages:
    """A finder for `sys.meta_path` that finds our packages and nothing else.

    First in `sys.meta_path` it keeps a `server.py` in the current directory or on PYTHONPATH from shadowing ours.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find one of our packages; None for other modules, and for modules within packages."""
        return PathFinder.find_spec(name, [_FOLDER], target) if name in _NAMES else None
