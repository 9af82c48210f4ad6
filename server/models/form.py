"""How POST /predict takes a sample: the fields of the dashboard's form, and the call for a shell."""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MAX_EXAMPLE = 64  # values that an example shows; a larger input shows one, which is repeated


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of the form.

    Attributes:
        name: key in the JSON body; of a file, only its label.
        control: a file is the whole body, and then the only field; the others are values of a JSON body.
        note: what the field takes.
        example: the content to begin with: a number, a text or JSON; of a file, its name.
        shape: a number or a text is nested to this shape; so is the example of an input with over `MAX_EXAMPLE` values.
        accept: media types of a file, separated by commas; empty for any.
    """

    name: str
    control: Literal["file", "text", "number", "json"]
    note: str
    example: str
    shape: tuple[int, ...] = ()
    accept: str = ""

    @property
    def value(self) -> str:
        """The example as JSON, not yet repeated."""
        return json.dumps(self.example, ensure_ascii=False) if self.control == "text" else self.example


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a model.

    Attributes:
        fields: at least one.
        nested_in: key of the JSON body with the fields; empty if the body itself has them.
        outputs: datatype by output name if the response has them as nested lists under `outputs`.
    """

    fields: tuple[FormField, ...]
    nested_in: str = ""
    outputs: Mapping[str, str] = field(default_factory=dict)

    def curl(self, url: str) -> str:
        """A line for a shell that sends the example to this URL; a large one is made by Python."""
        url, first = shlex.quote(url), self.fields[0]
        if first.control == "file":
            content_type = "" if first.accept else "-H 'Content-Type: application/octet-stream' "
            return f"curl {content_type}--data-binary @{first.example} {url}"
        if all(math.prod(each.shape) <= MAX_EXAMPLE for each in self.fields):
            body = self._document({each.name: _nest(each.value, each.shape) for each in self.fields})
            return f"curl -d {shlex.quote(body)} {url}"
        document = self._document({each.name: _expression(each) for each in self.fields})
        program = shlex.quote(f'import json; print(json.dumps({document}, separators=(",", ":")))')
        return f"python3 -c {program} | curl -d @- {url}"

    def _document(self, values: Mapping[str, str]) -> str:
        items = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items())
        return f'{{"{self.nested_in}": {{{items}}}}}' if self.nested_in else f"{{{items}}}"


def _nest(value: str, shape: tuple[int, ...]) -> str:
    """JSON: the value repeated to this shape."""
    for size in reversed(shape):
        value = f"[{', '.join([value] * size)}]"
    return value


def _expression(each: FormField) -> str:
    """Python: the value of the field, repeated to its shape."""
    value = repr(json.loads(each.value))
    for size in reversed(each.shape):
        value = f"[{value}] * {size}" if size > 1 else f"[{value}]"
    return value
