"""API keys: the file, and who may call."""

from hashlib import sha256
from pathlib import Path

import pytest

from policies.types import SpecError
from server.errors import ForbiddenError, ServerError, TooManyError, UnauthorizedError
from server.transport.auth import load_keys, parse_keys

ALICE, ROOT = sha256(b"alice's").hexdigest(), sha256(b"root's").hexdigest()
FILE = f"""
# who           scope
alice           predict  {ALICE}  2
root            admin    {ROOT}   # the operator
root            predict  {ROOT.upper()}
"""


def test_a_key_opens_what_it_is_for_and_nothing_else() -> None:
    keys = parse_keys(FILE, "f")
    assert keys.admit(b"Bearer alice's", "predict", 0.0) == "alice"
    assert keys.admit(b"bearer  root's ", "admin", 0.0) == "root"
    assert keys.admit(b"Bearer root's", "predict", 0.0) == "root", "one key on two lines is for both"
    with pytest.raises(ForbiddenError, match=r"alice is for predict.*needs admin"):
        keys.admit(b"Bearer alice's", "admin", 0.0)


@pytest.mark.parametrize(
    "header",
    [
        *(None, b"", b"Bearer", b"Bearer ", b"alice's", b"Basic alice's", b"Bearer alice", b"Bearer " + b"x" * 10**5),
        *(b"Bearer " + ALICE.encode(), b"Bearer \xff\x00"),
    ],
)
def test_whatever_is_no_known_key_is_401(header: bytes | None) -> None:
    with pytest.raises(UnauthorizedError):
        parse_keys(FILE, "f").admit(header, "predict", 0.0)


def test_a_rate_allows_one_second_at_once_and_then_so_many_per_second() -> None:
    keys = parse_keys(FILE, "f")

    def admitted(now: float) -> bool:
        try:
            return keys.admit(b"Bearer alice's", "predict", now) == "alice"
        except TooManyError:
            return False

    assert [admitted(100.0) for _ in range(3)] == [True, True, False]
    assert [admitted(100.5) for _ in range(2)] == [True, False]
    assert [admitted(200.0) for _ in range(3)] == [True, True, False]


def test_a_rate_below_one_still_allows_one_and_says_how_long_to_wait() -> None:
    keys = parse_keys(f"a predict {ALICE} 0.01", "f")
    keys.admit(b"Bearer alice's", "predict", 0.0)
    with pytest.raises(TooManyError) as caught:
        keys.admit(b"Bearer alice's", "predict", 1.0)
    assert caught.value.retry_after == 99
    assert "0.01 calls/s" in str(caught.value), "whatever the number of their samples"
    assert isinstance(caught.value, ServerError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        ("a predict", "line 1: 2 words"),
        (f"a predict {ALICE} 1 2", "line 1: 5 words"),
        (f"\na write {ALICE}", "line 2: the scope is not predict or admin"),
        (f"a;b predict {ALICE}", "line 1: the name"),
        ("a predict secret", "line 1: the third word"),
        (f"a predict {ALICE}0", "line 1: the third word"),
        *((f"a predict {ALICE} {rate}", "line 1: the rate") for rate in ("0", "-1", "nan", "inf", "x")),
        (f"a predict {ALICE}\nb predict {ALICE}", "line 2: the key stands here a second time for predict"),
        (f"a predict x\nb admin {ALICE}\nc x {ALICE}", "line 1: .*; line 3: "),
    ],
)
def test_every_mistake_is_told_in_one_line_with_its_number(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        parse_keys(text, "f")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value), "somebody may have put the key itself there"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "binary"):
        with pytest.raises(SpecError, match=str(path)):
            load_keys(path)


def test_a_file_that_is_read_again_revokes_keys_and_keeps_rate_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)
    keys = load_keys(file)
    for _ in range(2):
        keys.admit(b"Bearer alice's", "predict", 0.0)
    file.write_text(f"alice predict {ALICE} 2\nnew predict {sha256(b'n').hexdigest()}\n")
    keys.reload()
    with pytest.raises(UnauthorizedError):
        keys.admit(b"Bearer root's", "admin", 0.0)
    assert keys.admit(b"Bearer n", "predict", 0.0) == "new"
    with pytest.raises(TooManyError):
        keys.admit(b"Bearer alice's", "predict", 0.0)
    file.write_text("nonsense")
    with pytest.raises(SpecError, match="1 words"):
        keys.reload()
    assert keys.admit(b"Bearer n", "predict", 0.0) == "new", "they stay as they were"
