"""The spec of an encoder: hf:ID_OR_FOLDER[,task=embed|classify|rerank][,max_batch_tokens=N]."""

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
        max_batch_tokens: of a batch; None for no limit.
    """

    source: str
    task: str = ""
    max_batch_tokens: int | None = None

    @classmethod
    def parse(cls, spec: str) -> "EncoderSpec":
        """Parse a spec.

        Raises:
            SpecError: a key or a task is unknown, or there is no source.
        """
        source, *options = spec.removeprefix(PREFIX).split(",")
        task, tokens = "", None
        for option in options:
            key, _, value = option.partition("=")
            if key == "task" and value in TASKS:
                task = value
            elif key == "max_batch_tokens" and value.isdecimal() and int(value):
                tokens = int(value)
            else:
                known = f"task={'|'.join(TASKS)}, or max_batch_tokens=N"
                raise SpecError(f"{spec!r} has {option!r}; give {known}, or leave it out")
        if not source:
            raise SpecError(f"{spec!r} names no model; give hf:FOLDER, or hf:ID of a model on the hub of Hugging Face")
        return cls(source, task, tokens)

    def __str__(self) -> str:
        """The spec, with an absolute path if its source is a folder."""
        source = os.path.abspath(self.source) if os.path.isdir(self.source) else self.source
        options = {"task": self.task, "max_batch_tokens": self.max_batch_tokens}
        return PREFIX + ",".join([source, *(f"{key}={value}" for key, value in options.items() if value)])
