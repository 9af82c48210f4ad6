"""The computations of benchmarks/lazy_texts.py, without its measurements."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.lazy import timesteps
from benchmarks.lazy_texts import COVERAGES, capacity, policies, table
from benchmarks.text_live import NO_TIME, Workload
from policies.catalog import choose
from policies.profile import Profile

TEXTS = Profile("texts", (1.0,) * 8, lengths=(1, 8), length_service_times=((0.1, 0.8),) * 8)  # 0.1 s a token


@pytest.mark.parametrize(("coverage", "steps"), [(0.1, 1), (0.5, 5), (0.51, 6), (0.9, 9), (1.0, 30)])
def test_time_steps_cover_a_share_of_the_lengths(coverage: float, steps: int) -> None:
    assert timesteps([30, 9, 8, 7, 6, 5, 4, 3, 2, 1], coverage) == steps


def test_capacity_is_of_full_batches_in_order_of_arrival() -> None:
    work = Workload(Path("nowhere"), NO_TIME, np.array([*[10.0] * 8, *[20.0] * 7, 30.0, 99.0]), 0.1)
    assert capacity(TEXTS, work) == pytest.approx(16 / (0.1 + 0.3)), "requests that fill no batch do not count"


def test_every_policy_can_serve_texts() -> None:
    steps = dict(zip(COVERAGES, (2, 5, 8), strict=True))
    specs = policies(400, steps)
    chosen = {name: choose(spec, TEXTS) for name, spec in specs.items()}
    assert chosen["lazy, 16% covered"].policy.predicted == 2  # type: ignore[attr-defined]
    assert chosen["catch-up, 90% covered"].slo == 0.4


def test_a_row_has_the_measured_and_the_simulated_values() -> None:
    measured = {"mean_ms": 10.4, "p99_ms": 20.0, "mean_batch_size": 2.0, "slo_attainment": 0.75}
    simulated = {"mean_ms": 9.0, "p99_ms": 18.0, "mean_batch_size": 2.5, "slo_attainment": 1.0}
    cell = {"load": 0.3, "policy": "greedy", "measured": measured, "simulated": simulated}
    record = {
        "device": "CPU",
        "requests": 8,
        "mean_tokens": 3.0,
        "slo_ms": 40,
        "overhead": 1.1,
        "timesteps": {"0.9": 5},
        "cells": [cell],
    }
    assert "| 0.3, greedy | 10 (9) | 20 (18) | 2.00 (2.50) | 25.0% (0.0%) |" in table(record)
    assert "5 steps cover 90%" in table(record)
