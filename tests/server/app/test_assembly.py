"""What is logged, and exported, of objectives when a server is assembled."""

import logging

import pytest

from profiler.first_profile import FirstProfiles
from server.app.assembly import assemble
from server.app.start_checks import make_plan
from server.config import read_settings


@pytest.mark.usefixtures("few_loads")
@pytest.mark.parametrize(
    ("objective", "logged"),
    [
        (5.0, "googlenet: the objective, 95% within 5 ms, cannot be kept at any arrival rate, since one request alone"),
        (60.0, "googlenet: the objective, 95% within 60 ms, can be kept only up to "),
        (9000.0, None),
    ],
)
def test_an_objective_that_cannot_be_kept_is_logged_and_every_objective_exported(
    objective: float, logged: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"models": ["googlenet"], "device": "emulated:googlenet-tesla-p4-x10", "port": 0, "max_batch_size": 4}
    plan = make_plan(read_settings({**flags, "slo_p95_ms": objective}, None), lambda *_: None)
    plan.bound.close()
    with caplog.at_level(logging.WARNING, "batchwright"):
        server = assemble(plan, FirstProfiles())
    warnings = [record.getMessage() for record in caplog.records if "objective" in record.getMessage()]
    assert [warning[: len(logged or "")] for warning in warnings] == ([] if logged is None else [logged])
    text = server.metrics.render().decode()
    assert f'batchwright_objective_seconds{{model="googlenet"}} {objective / 1e3}' in text
    assert 'batchwright_objective_share{model="googlenet"} 0.95' in text
