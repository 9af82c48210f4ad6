"""Exceptions that cross the border between two processes: class, text, and where in a model's file they arose."""

import builtins
from dataclasses import dataclass
from traceback import format_exception

from policies import types
from policies.types import SpecError
from server import errors


class RemoteTraceback(Exception):  # noqa: N818  (no error of its own: the cause of one)
    """The traceback of an exception in a worker, as text."""

    def __str__(self) -> str:
        """The text, on lines of its own."""
        return f"\n{self.args[0]}"


_MODULES = {module.__name__: module for module in (errors, types, builtins)}


@dataclass(frozen=True)
class SentError:
    """An exception as it is sent.

    Attributes:
        names: of its class and of the classes that this derives from, with their modules.
        text: its message.
        place: the last line of the model's file that it passed, such as model.py line 3; empty if it passed none.
        trace: the traceback; empty where the message says all.
    """

    names: tuple[str, ...]
    text: str
    place: str
    trace: str


def sent(error: BaseException, place: str) -> SentError:
    """Make an exception ready to be sent; `place` as in `SentError`."""
    says_all = isinstance(error, errors.ServerError | SpecError) and error.__cause__ is None
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (a user's exception)
        text = ""
    trace = "" if says_all else "".join(format_exception(error))
    return SentError(
        tuple(f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__), text, place, trace
    )


def received(found: SentError) -> Exception:
    """The exception again: of a class of its name, derived from the first of its classes that exists here."""
    error: Exception | None = None
    last = found.names[0].rpartition(".")[2]
    for name in found.names:
        module, _, kind_name = name.rpartition(".")
        base = getattr(_MODULES.get(module), kind_name, None)
        if isinstance(base, type) and issubclass(base, Exception) and not issubclass(base, StopIteration):
            own = module != "builtins" and name == found.names[0]
            kind = base if own else type(last, (base,), {"__str__": lambda _: found.text})
            try:
                error = kind(found.text)
            except TypeError:  # it takes other arguments
                continue
            break
    error = error or RuntimeError(f"the model raised {last}")  # such as SystemExit
    error.place = found.place  # type: ignore[attr-defined]
    if found.trace:
        error.__cause__ = RemoteTraceback(found.trace)
    return error
