"""A policy spec, NAME[:ARG][,KEY=VALUE]..., taken apart; its parameters check themselves as they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.types import SpecError


@dataclass(frozen=True)
class Spec:
    """A parsed spec; reading a parameter checks it.

    Attributes:
        text: as given.
        name: of the policy, or the path of a policy file.
        arg: what follows the colon, if it is no KEY=VALUE.
        parameters: the KEY=VALUE pairs.
        defaults: what fills the keys that a spec leaves open, this one or one within it.
    """

    text: str
    name: str
    arg: str | None
    parameters: Mapping[str, str]
    defaults: Mapping[str, str] = field(default_factory=dict)

    def number(self, key: str, default: float | None = None, low: float = 0.0) -> float:
        """The parameter `key` (or "ARG") as a number of at least `low`.

        Raises:
            SpecError: absent without a default, not a number, or below the bound.
        """
        text = self.arg if key == "ARG" else self.parameters.get(key)
        if text is None:
            if default is None:
                raise SpecError(f"policy {self.text!r} needs {self._usage(key)}")
            return default
        try:
            value = float(text)
        except ValueError:
            raise SpecError(f"policy {self.text!r}: {text!r} is not a number; write {self._usage(key)}") from None
        if not value >= low:
            raise SpecError(f"policy {self.text!r}: {text} is below {low:g}, the least that makes sense for {key}")
        return value

    def whole(self, key: str, low: int, high: int) -> int:
        """The parameter `key` (or "ARG") as a whole number within low..high."""
        value = self.number(key, low=low)
        if value > high or value != int(value):
            raise SpecError(f"policy {self.text!r}: {value:g} is not a whole number within {low}..{high}")
        return int(value)

    def _usage(self, key: str) -> str:
        return f"{self.name}:VALUE" if key == "ARG" else f"{self.name}:{key}=VALUE"


def is_file(name: str) -> bool:
    """Whether that is the path of a policy file."""
    return name.endswith(".json")


def split_name(text: str) -> tuple[str, str]:
    """The name, and what follows its colon or comma."""
    cuts = [i for i in (text.find(":"), text.find(",")) if i >= 0]
    cut = min(cuts, default=len(text))
    return text[:cut].strip(), text[cut + 1 :]
