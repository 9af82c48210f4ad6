"""Bounds of pipelines, split over their models."""

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.planning.pipeline_bounds import PipelineModel, _least_sum, split_bound
from policies.profile import Profile
from policies.types import SpecError

FIXED = Profile("fixed", tuple(0.010 + 0.001 * b for b in range(1, 9)))  # batches pay
LINEAR = Profile("linear", tuple(0.002 * b for b in range(1, 9)))  # they do not
USES = st.lists(st.lists(st.sampled_from([inf, 1.0, 2.0, 3.0, 5.0]), min_size=4, max_size=4), min_size=1, max_size=3)


def test_the_model_that_gains_from_waiting_gets_the_time() -> None:
    found = split_bound({"a": PipelineModel(FIXED, 1.0), "b": PipelineModel(LINEAR, 1.0)}, 0.2, 0.95)
    assert found["a"].response_time > 2 * found["b"].response_time
    assert sum(each.response_time for each in found.values()) <= 15 / 16 * 0.2 + 1e-12, "one part is left"
    assert [each.share for each in found.values()] == pytest.approx([0.975, 0.975])


def test_the_probability_of_a_late_call_is_that_of_the_bound_for_any_numbers_of_requests() -> None:
    models = {"a": PipelineModel(FIXED, 1.0), "b": PipelineModel(LINEAR, 6.0)}
    found = split_bound(models, 0.3, 0.95)
    late = sum(models[name].requests * (1.0 - each.share) for name, each in found.items())
    assert late == pytest.approx(0.05)


def test_a_longer_bound_uses_no_more() -> None:
    models = {"a": PipelineModel(FIXED, 1.0), "b": PipelineModel(FIXED, 2.0)}
    uses = [sum(each.cost for each in split_bound(models, t, 0.95).values()) for t in (0.12, 0.24, 0.48)]
    assert uses == sorted(uses, reverse=True)
    assert uses[0] > uses[-1]


def test_two_devices_keep_a_shorter_bound_at_the_same_number_of_calls() -> None:
    one, two = (split_bound({"a": PipelineModel(FIXED, 4.0, n)}, 0.08, 0.95)["a"] for n in (1, 2))
    assert two.cost == pytest.approx(2 * one.cost, rel=0.01), "each has half of the calls"


def test_a_bound_that_cannot_be_kept_names_what_the_models_need() -> None:
    with pytest.raises(SpecError, match=r"no bounds of a and b keep 95% of the calls within 20 ms .* a .*, b .*raise"):
        split_bound({"a": PipelineModel(FIXED, 1.0), "b": PipelineModel(LINEAR, 1.0)}, 0.02, 0.95)


@given(USES)
def test_the_parts_are_those_of_the_least_sum(used: list[list[float]]) -> None:
    found = _least_sum(used, 6)
    sums = {
        counts: sum(each[count - 1] for each, count in zip(used, counts, strict=True))
        for counts in product(range(1, 5), repeat=len(used))
        if sum(counts) <= 6
    }
    least = min(sums.values(), default=inf)
    if found is None:
        assert least == inf
    else:
        assert np.isfinite(least)
        assert sums[tuple(found)] == least
