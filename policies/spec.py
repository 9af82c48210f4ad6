"""A parsed policy spec, NAME[:ARG][,KEY=VALUE]..., whose parameters are checked when they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.types import SpecError


@dataclass(frozen=True)
class Spec:
    """A parsed spec.

    Attributes:
        text: as given.
        name: of the rule, or the path of a policy file.
        arg: the text after the colon, unless it is KEY=VALUE.
        parameters: the KEY=VALUE pairs.
        defaults: values for keys that this spec, or a spec within it, leaves open.
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
            raise SpecError(f"policy {self.text!r}: {text} is below {low:g}, the minimum of {self._usage(key)}")
        return value

    def whole(self, key: str, low: int, high: int) -> int:
        """The parameter `key` (or "ARG") as an integer within low..high.

        Raises:
            SpecError: absent, not an integer, or out of range.
        """
        value = self.number(key, low=low)
        if value > high or value != int(value):
            raise SpecError(f"policy {self.text!r}: {value:g} is not a whole number within {low}..{high}")
        return int(value)

    def conflict(self, key: str, default: str) -> SpecError:
        """Return the error of `key`, which conflicts with the value that a flag of the server gives for `default`."""
        flag, value = f"--{default.replace('_', '-')}", _short(self.defaults[default])
        return SpecError(
            f"policy {self.text!r} has {key}={self.parameters[key]}, but {flag} is {value}; give one: "
            f"leave {key} out of the policy, or start the server without {flag} and with the value in --policy, "
            f"such as {self.name}:{default}={value}, which can be changed while serving"
        )

    def _usage(self, key: str) -> str:
        return f"{self.name}:VALUE" if key == "ARG" else f"{self.name}:{key}=VALUE"


def _short(value: str) -> str:
    try:
        return f"{float(value):g}"
    except ValueError:
        return value


def is_file(name: str) -> bool:
    """Whether `name` is the path of a policy file."""
    return name.endswith(".json")


def split_name(text: str) -> tuple[str, str]:
    """The name, and the text after its colon or comma."""
    cuts = [i for i in (text.find(":"), text.find(",")) if i >= 0]
    cut = min(cuts, default=len(text))
    return text[:cut].strip(), text[cut + 1 :]
