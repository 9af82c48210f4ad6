"""Policies for the measured variation of service times."""

from dataclasses import replace

import pytest

from policies.catalog import parse_spec
from policies.objectives.solving import solved_table
from policies.profile import load_profile
from policies.solver.distributions import DETERMINISTIC, Gamma, measured_service
from policies.solver.model import Problem
from policies.solver.solver import solve

PROFILE = load_profile("googlenet-tesla-p4").truncated(8)


def varying(cv: float) -> Gamma:
    return Gamma((cv,) * 8)


def test_service_times_that_vary_little_or_unknown_are_deterministic() -> None:
    assert measured_service(PROFILE) is DETERMINISTIC
    assert measured_service(replace(PROFILE, cvs=(0.05,) * 8)) is DETERMINISTIC
    assert measured_service(replace(PROFILE, cvs=(0.3,) * 8)) == varying(0.3)


def test_the_table_of_a_spec_is_solved_for_the_variation_of_the_profile() -> None:
    table = solved_table(parse_spec("smdp"), replace(PROFILE, cvs=(0.4,) * 8))
    for row in table.rows[::12]:
        varied, fixed = (
            solve(Problem(PROFILE, row.arrival_rate, service=service)) for service in (varying(0.4), DETERMINISTIC)
        )
        assert row.mean_response_time == pytest.approx(varied.mean_response_time)
        assert varied.mean_response_time > 1.001 * fixed.mean_response_time
