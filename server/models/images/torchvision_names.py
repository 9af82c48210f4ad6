"""Names of torchvision's classification models, without its import, which takes seconds."""

import re
from importlib.util import find_spec
from pathlib import Path

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
