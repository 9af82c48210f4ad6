"""Attacks on a server: the record supports the sentence of its page."""

from benchmarks.attacks import ATTACKS, Outcome
from benchmarks.support.harness import load_record


def test_every_attack_was_made_and_every_bound_holds() -> None:
    outcomes = [Outcome(**row) for row in load_record("attacks")]
    assert [outcome.attack for outcome in outcomes] == [attack.name for attack in ATTACKS]
    assert [outcome.broken for outcome in outcomes] == [[] for _ in outcomes]
