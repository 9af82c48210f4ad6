"""Several models on one simulated device."""

import numpy as np
import pytest

from research.lazy import arrivals, resnet
from research.lazy_sensitivity import figures, shared, spec_of


def test_one_copy_is_the_model_alone() -> None:
    instants = arrivals(500, 200, 0)
    one = shared(spec_of("GraphB(5)"), resnet(), instants, 1)
    assert len(one.responses) == len(instants)


@pytest.mark.parametrize("name", ["Serial", "GraphB(5)", "greedy", "lazy", "catch-up"])
def test_four_copies_serve_every_request(name: str) -> None:
    instants = arrivals(1000, 300, 1)
    run = shared(spec_of(name), resnet(), instants, 4)
    assert len(run.responses) == len(instants)
    assert run.responses.min() >= resnet().service_time(1) - 1e-12


def test_requests_of_two_copies_share_no_batch() -> None:
    instants = np.zeros(128) + 1e-9 * np.arange(128)
    together, apart = (shared(spec_of("greedy"), resnet(), instants, models) for models in (1, 4))
    assert apart.batch_sizes.max() < together.batch_sizes.max()


def test_figures_are_means_over_runs() -> None:
    runs = [shared("serial", resnet(), arrivals(10, 20, seed), 1) for seed in range(2)]
    expected = np.mean([1e3 * run.responses.mean() for run in runs])
    assert figures(runs)["mean_ms"] == pytest.approx(expected, abs=1e-4)
