"""Properties of every rule in the catalog: its example can be parsed, it is pure, its action table is what it does."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.catalog import CATALOG, by_stages, check_spec, choose, combine, parse_spec
from policies.profile import Profile, load_profile
from policies.rules.rule import Rule
from policies.traits import QueueLengthPolicy
from policies.types import BatchKey, Launch, Request, SpecError, State, Wait

P4 = load_profile("googlenet-tesla-p4").truncated(8)
M = BatchKey("m")
EVERY_RULE = pytest.mark.parametrize("rule", CATALOG.values(), ids=lambda rule: rule.name)
AGES = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=20).map(lambda ages: sorted(ages, reverse=True))
RATES = st.none() | st.floats(1.0, 1e4)


def profile_for(rule: Rule) -> Profile:
    return P4.in_stages(4) if rule.needs_stages else P4


UNBOUNDED = {rule.name: choose(rule.example, profile_for(rule), max_wait=inf) for rule in CATALOG.values()}
BY_QUEUE_LENGTH = [name for name, chosen in UNBOUNDED.items() if isinstance(chosen.policy, QueueLengthPolicy)]


def state_of(ages: list[float], rate: float | None) -> State:
    waiting = [Request(i, 1000.0 - age, M, deadline=1000.0 - age + 0.06, stages=4) for i, age in enumerate(ages)]
    return State(1000.0, waiting, rates={} if rate is None else {M: rate})


@EVERY_RULE
def test_the_example_is_a_spec_of_the_rule_and_can_be_checked(rule: Rule) -> None:
    assert CATALOG[rule.name] is rule
    assert parse_spec(rule.example).name == rule.name
    assert by_stages(rule.example) == rule.needs_stages
    check_spec(rule.example, 8)


@EVERY_RULE
def test_a_rule_decides_within_bins_or_is_an_error_there(rule: Rule) -> None:
    spec = f"multi-bin:2,inner={rule.example}"
    if rule.per_bin:
        check_spec(spec, 8)
    else:
        with pytest.raises(SpecError, match="cannot be used within a bin"):
            check_spec(spec, 8)


@EVERY_RULE
@settings(max_examples=40)
@given(ages=AGES, rate=RATES)
def test_a_rule_is_pure(rule: Rule, ages: list[float], rate: float | None) -> None:
    policy = combine({"m": UNBOUNDED[rule.name]})[0]
    first, second = state_of(ages, rate), state_of(ages, rate)
    before = repr((policy, first))
    actions = [policy.decide(state) for state in (first, second, first)]
    assert len(set(map(repr, actions))) == 1
    assert repr((policy, first)) == before


def test_some_rules_decide_by_the_queue_length() -> None:
    assert {"greedy", "static", "rate-matching", "smdp"} <= set(BY_QUEUE_LENGTH)


@pytest.mark.parametrize("name", BY_QUEUE_LENGTH)
@settings(max_examples=60)
@given(ages=AGES, rate=RATES)
def test_the_action_table_is_what_the_policy_does(name: str, ages: list[float], rate: float | None) -> None:
    policy = UNBOUNDED[name].policy
    assert isinstance(policy, QueueLengthPolicy)
    table = policy.action_table(rate)
    if table is None:  # a time-out
        assert UNBOUNDED[name].action_table(rate or 1.0) is None
        return
    assert table.mix is None
    size = min(table.batch_size[min(len(ages), len(table.batch_size) - 1)], table.max_batch_size)
    match policy.decide(state_of(ages, rate)):
        case Launch(requests):
            assert len(requests) == size
        case Wait():
            assert size == 0
    if not policy.depends_on_rate:
        assert policy.action_table(None) == table
