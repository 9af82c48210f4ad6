"""The action table of a policy agrees with its decisions."""

import pytest

from policies.catalog import CATALOG, choose
from policies.charts.action_table import actions, depends_on_mean_rate, describe_policy
from policies.profile import Profile, load_profile
from policies.types import BatchKey, Launch, Request, State

P4 = load_profile("googlenet-tesla-p4").truncated(8)


def test_a_solved_table_is_shown_row_by_row() -> None:
    chosen = choose("smdp:w2=1.6", P4)
    assert chosen.table is not None
    shown = actions(chosen, "m")
    assert list(shown.rates) == [row.arrival_rate for row in chosen.table.rows]
    for row, line in zip(chosen.table.rows, shown.batch_size, strict=True):
        assert list(line) == [row.batch_size[min(n, len(row.batch_size) - 1)] for n in shown.queue_lengths]


def test_a_mean_rate_selects_the_rows_that_decide() -> None:
    chosen = choose("smdp:w2=1.6", P4)
    low, rate = 0.05 * P4.capacity, 0.0
    shown = actions(chosen, "m", low)
    rate, row = next(
        (rate, row)
        for rate, row, plain in zip(shown.rates, shown.batch_size, actions(chosen, "m").batch_size, strict=True)
        if row != plain
    )
    kind = BatchKey("m")
    for n, size in list(zip(shown.queue_lengths, row, strict=True))[1:]:
        waiting = [Request(i, 0.0, kind) for i in range(n)]
        answer = chosen.policy.decide(State(0.0, waiting, (), {kind: rate}, {kind: low}))
        assert size == (len(answer.requests) if isinstance(answer, Launch) else 0)


@pytest.mark.parametrize("spec", ["smdp", "smdp:w2=1.6", "smdp:slo_mean_ms=50", "greedy", "rate-matching"])
def test_depends_on_mean_rate_agrees_with_the_actions(spec: str) -> None:
    chosen = choose(spec, P4)
    moves = actions(chosen, "m", 0.05 * P4.capacity) != actions(chosen, "m")
    assert depends_on_mean_rate(chosen) == moves


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        ("greedy", (0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8)),
        ("serial", (0, *[1] * 10)),
        ("static:4", (0, 0, 0, 0, *[4] * 7)),
        ("timeout:5", (*[0] * 8, 8, 8, 8)),
    ],
)
def test_a_policy_independent_of_the_rate_has_one_row(spec: str, row: tuple[int, ...]) -> None:
    shown = actions(choose(spec, P4), "m")
    assert (shown.queue_lengths, shown.rates, shown.batch_size) == (list(range(11)), (), [row])


def test_rate_matching_has_rows_without_a_table() -> None:
    shown = actions(choose("rate-matching", P4), "m")
    assert len(shown.rates) == len(shown.batch_size) == 19
    assert len(set(shown.batch_size)) > 1


def test_the_likelier_table_of_a_mix_is_shown() -> None:
    chosen = choose("smdp:power_cap_w=40", P4)
    assert chosen.table is not None
    mixed = [(i, row) for i, row in enumerate(chosen.table.rows) if row.mix]
    assert mixed
    shown = actions(chosen, "m")
    for i, row in mixed:
        assert row.mix is not None
        sizes = row.mix.batch_size if row.mix.probability > 0.5 else row.batch_size
        assert list(shown.batch_size[i]) == [sizes[min(n, len(sizes) - 1)] for n in shown.queue_lengths]


def test_many_queue_lengths_are_thinned() -> None:
    shown = actions(choose("greedy", load_profile("googlenet-tesla-p4")), "m")
    assert len(shown.queue_lengths) == 35
    many = choose("greedy", Profile("many", tuple(0.001 * b for b in range(1, 1025))))
    assert len(actions(many, "m").queue_lengths) <= 131


@pytest.mark.parametrize("name", CATALOG)
def test_every_policy_is_described(name: str) -> None:
    text = describe_policy(choose(CATALOG[name].example, P4))
    assert text.endswith("Launches at the latest when the oldest request has waited 1000 ms.")
    assert "{" not in text


def test_a_description_has_the_weight_and_no_infinite_wait() -> None:
    assert describe_policy(choose("smdp:w2=3,max_wait_ms=inf", P4)).endswith("with w2 = 3.")
