"""Attacks on a server: the record supports the sentence of its page."""

from benchmarks.attacks import ATTACKS, Outcome
from benchmarks.support.harness import load_record


def test_every_attack_was_made_without_and_with_gateways_and_every_bound_holds() -> None:
    outcomes = [Outcome(**row) for row in load_record("attacks")]
    made = [(outcome.gateways, outcome.attack) for outcome in outcomes]
    assert made == [(gateways, attack.name) for gateways in (0, 2) for attack in ATTACKS]
    assert [outcome.broken for outcome in outcomes] == [[] for _ in outcomes]
