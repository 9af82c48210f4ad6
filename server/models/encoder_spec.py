"""The spec of an encoder: hf:ID_OR_FOLDER[,task=embed|classify|rerank]."""

import os
from dataclasses import dataclass

from policies.types import SpecError

PREFIX = "hf:"
TASKS = ("embed", "classify", "rerank")


@dataclass(frozen=True)
class EncoderSpec:
    """A parsed spec.

    Attributes:
        source: id on the hub, or folder.
        task: one of `TASKS`; empty: by the network.
    """

    source: str
    task: str = ""

    @classmethod
    def parse(cls, spec: str) -> "EncoderSpec":
        """Parse a spec.

        Raises:
            SpecError: a key or a task is unknown, or there is no source.
        """
        source, *options = spec.removeprefix(PREFIX).split(",")
        task = ""
        for option in options:
            key, _, task = option.partition("=")
            if key != "task" or task not in TASKS:
                raise SpecError(f"{spec!r} has {option!r}; give task={'|'.join(TASKS)}, or leave it out")
        if not source:
            raise SpecError(f"{spec!r} names no model; give hf:FOLDER, or hf:ID of a model on the hub of Hugging Face")
        return cls(source, task)

    def __str__(self) -> str:
        """The spec, with an absolute path if its source is a folder."""
        source = os.path.abspath(self.source) if os.path.isdir(self.source) else self.source
        return f"{PREFIX}{source}" + (f",task={self.task}" if self.task else "")
