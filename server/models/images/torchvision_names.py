"""Names of torchvision's classification models, without its import, which takes seconds."""

import difflib
import re
from importlib.util import find_spec
from pathlib import Path

from policies.types import SpecError

_REGISTERED = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


def torchvision_names() -> list[str]:
    """The names in the source files of torchvision.models, sorted; empty where these cannot be read."""
    found = find_spec("torchvision")
    folders = [] if found is None else found.submodule_search_locations or []
    names: list[str] = []
    for file in (file for folder in folders for file in Path(folder).glob("models/*.py")):
        try:
            names += _REGISTERED.findall(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
    return sorted(names)


def check_torchvision_name(name: str) -> None:
    """Check that torchvision has a classification model of that name, as far as its source files can be read.

    Raises:
        SpecError: it has none; the message lists similar names.
    """
    known = torchvision_names()
    if known and name not in known:
        folder = ""
        if Path(name).is_dir():
            folder = "; a folder cannot be served: write a FILE.py:CLASS that loads it (docs/your-own-model.md)"
        similar = difflib.get_close_matches(name, known, 5, 0.4) or known[::16]
        raise SpecError(f"no torchvision classification model {name!r}; there is {', '.join(similar)}, ...{folder}")
