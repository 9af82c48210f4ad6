"""API keys: the key file, scopes and rate limits."""

from hashlib import sha256
from pathlib import Path

import pytest

from policies.types import SpecError
from server.errors import ForbiddenError, ServerError, TooManyError, UnauthorizedError
from server.transport.auth import Keys, load_keys, parse_keys

ALICE, ROOT = sha256(b"alice's").hexdigest(), sha256(b"root's").hexdigest()
FILE = f"""
# name          scope
alice           predict  {ALICE}  2
root            admin    {ROOT}   # the operator
root            predict  {ROOT.upper()}
"""


def test_a_key_is_valid_for_its_scope_only() -> None:
    keys = Keys(parse_keys(FILE, "f"))
    assert keys.admit(b"Bearer alice's", "predict", 0.0).name == "alice"
    assert keys.admit(b"bearer  root's ", "admin", 0.0).name == "root"
    assert keys.admit(b"Bearer root's", "predict", 0.0).name == "root", "a key on two lines has both scopes"
    with pytest.raises(ForbiddenError, match=r"alice has the scope predict.*needs admin"):
        keys.admit(b"Bearer alice's", "admin", 0.0)


@pytest.mark.parametrize(
    "header",
    [
        *(None, b"", b"Bearer", b"Bearer ", b"alice's", b"Basic alice's", b"Bearer alice", b"Bearer " + b"x" * 10**5),
        *(b"Bearer " + ALICE.encode(), b"Bearer \xff\x00"),
    ],
)
def test_a_missing_malformed_or_unknown_key_is_401(header: bytes | None) -> None:
    with pytest.raises(UnauthorizedError):
        Keys(parse_keys(FILE, "f")).admit(header, "predict", 0.0)


def test_a_token_bucket_holds_the_calls_of_one_second() -> None:
    keys = Keys(parse_keys(FILE, "f"))

    def admitted(now: float) -> bool:
        try:
            return keys.admit(b"Bearer alice's", "predict", now).name == "alice"
        except TooManyError:
            return False

    assert [admitted(100.0) for _ in range(3)] == [True, True, False]
    assert [admitted(100.5) for _ in range(2)] == [True, False]
    assert [admitted(200.0) for _ in range(3)] == [True, True, False]


def test_a_rate_limit_below_one_allows_one_call_and_its_error_has_the_time_until_the_next() -> None:
    keys = Keys(parse_keys(f"a predict {ALICE} 0.01", "f"))
    keys.admit(b"Bearer alice's", "predict", 0.0)
    with pytest.raises(TooManyError) as caught:
        keys.admit(b"Bearer alice's", "predict", 1.0)
    assert caught.value.retry_after == 99
    assert "0.01 calls/s; retry in 99 s" in str(caught.value)
    assert isinstance(caught.value, ServerError)


def test_a_yaml_list_has_the_same_keys_as_lines() -> None:
    """A hash of decimal digits alone is a string, too."""
    digits = "0" * 64
    yaml = f"""
- {{name: alice, scope: predict, sha256: {ALICE}, calls_per_second: 0.5}}  # comment: with a colon
- name: "1"
  scope: admin
  sha256: {digits}
"""
    entries = parse_keys(yaml, "f")
    assert entries == parse_keys(f"alice predict {ALICE} 0.5\n1 admin {digits}", "f")
    keys = Keys(entries)
    keys.admit(b"Bearer alice's", "predict", 0.0)
    with pytest.raises(TooManyError):
        keys.admit(b"Bearer alice's", "predict", 1.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        ("a predict", "line 1: the sha256 is missing"),
        (f"a predict {ALICE} 1 2", "line 1: there are fields other than name, scope, sha256, calls_per_second"),
        (f"\na write {ALICE}", "line 2: the scope is not predict or admin"),
        (f"a;b predict {ALICE}", "line 1: the name"),
        ("a predict secret", "line 1: the sha256 is not 64 hexadecimal digits"),
        (f"a predict {ALICE}0", "line 1: the sha256"),
        *((f"a predict {ALICE} {rate}", "line 1: the calls_per_second") for rate in ("0", "-1", "nan", "inf", "x")),
        *(
            (f"a predict {ALICE} max_level={n}", "line 1: the max_level is not a whole number")
            for n in ("0", "9", "x", "")
        ),
        (f"a predict {ALICE} max_level=1 max_level=2", "line 1: there are fields other than name"),
        (f"a predict {ALICE}\nb predict {ALICE}", "line 2: the key is listed a second time for predict"),
        (f"a predict x\nb admin {ALICE}\nc x {ALICE}", "line 1: .*; line 3: "),
        ("keys: secret", "not a YAML list of keys with name, scope, sha256, calls_per_second"),
        ("- name: a\n  *secret", "not valid YAML at line 2"),
        ("- name: \x01secret", "not valid YAML"),
        (
            "- secret\n- {name: a, scope: predict, sha256: secret}",
            "key 1: there are fields other .*; key 2: the sha256 is not",
        ),
        (f"- {{name: a, scope: predict, sha256: {ALICE}, secret: 1}}", "key 1: there are fields other than name"),
        (f"- {{name: a, scope: predict, sha256: {ALICE}, calls_per_second: 0}}", "key 1: the calls_per_second"),
        ("- {scope: predict}", "key 1: the name is missing"),
    ],
)
def test_all_errors_are_in_one_line_with_their_place_and_without_a_key(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        parse_keys(text, "f")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value), "the file may hold a key in plain text by mistake"


def test_the_error_for_an_unreadable_file_has_its_path(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "binary"):
        with pytest.raises(SpecError, match=str(path)):
            load_keys(path)


def test_reloading_a_file_revokes_keys_and_keeps_token_buckets(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)
    keys = load_keys(file)
    for _ in range(2):
        keys.admit(b"Bearer alice's", "predict", 0.0)
    file.write_text(f"alice predict {ALICE} 2\nnew predict {sha256(b'n').hexdigest()}\n")
    keys.reload()
    with pytest.raises(UnauthorizedError):
        keys.admit(b"Bearer root's", "admin", 0.0)
    assert keys.admit(b"Bearer n", "predict", 0.0).name == "new"
    with pytest.raises(TooManyError):
        keys.admit(b"Bearer alice's", "predict", 0.0)
    file.write_text("nonsense")
    with pytest.raises(SpecError, match="the scope is missing"):
        keys.reload()
    assert keys.admit(b"Bearer n", "predict", 0.0).name == "new", "the last keys stay in use"


@pytest.mark.parametrize("line", ["max_level=2", "max_level=2 50", "50 max_level=2"])
def test_a_key_may_have_a_first_level(line: str) -> None:
    (key,) = parse_keys(f"a predict {ALICE} {line}", "f")
    assert key.max_level == 2
    assert key.calls_per_second == (50.0 if "50" in line else None)
    (plain,) = parse_keys(f"a predict {ALICE}", "f")
    assert plain.max_level == 1
