"""Exceptions of a worker in the main process."""

import pickle
from typing import Any

import pytest

from policies.types import SpecError
from server.errors import BadInputError, OutOfMemoryError, RowsError, ServerError
from server.workers.errors import received, sent


class OwnError(ValueError):
    pass


class NotFoundError(Exception):
    """Not ours."""


def across(error: BaseException) -> Exception:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001  (SystemExit is one of them)
        return received(pickle.loads(pickle.dumps(sent(raised, "model.py line 3"))))


def undecodable() -> Exception:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "kind", "name", "text"),
    [
        (BadInputError("send less"), BadInputError, "BadInputError", "send less"),
        (RowsError("3 rows"), RowsError, "RowsError", "3 rows"),
        (OutOfMemoryError("full"), OutOfMemoryError, "OutOfMemoryError", "full"),
        (SpecError("no file"), SpecError, "SpecError", "no file"),
        (NotFoundError("a row"), Exception, "NotFoundError", "a row"),
        (KeyError("k"), KeyError, "KeyError", "'k'"),
        (undecodable(), ValueError, "UnicodeDecodeError", str(undecodable())),
        (OwnError("mine"), ValueError, "OwnError", "mine"),
        (ZeroDivisionError(), ZeroDivisionError, "ZeroDivisionError", ""),
        (SystemExit(3), RuntimeError, "RuntimeError", "the model raised SystemExit"),
        (StopIteration(), Exception, "StopIteration", ""),
    ],
)
def test_an_exception_has_its_class_and_text(error: BaseException, kind: type, name: str, text: str) -> None:
    found: Any = across(error)
    assert isinstance(found, kind)
    assert not isinstance(found, StopIteration), "a future cannot have it"
    assert (type(found).__name__, str(found), vars(found)["place"]) == (name, text, "model.py line 3")


def test_the_traceback_is_the_cause_unless_the_message_says_all() -> None:
    assert "raise error" in str(across(ValueError("x")).__cause__)
    assert across(BadInputError("x")).__cause__ is None


def test_an_exception_with_the_name_of_one_of_ours_is_none_of_ours() -> None:
    assert not isinstance(across(NotFoundError("a row")), ServerError)
