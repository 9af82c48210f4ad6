"""Tests of request sizes, and of simulations with them."""

import re
from pathlib import Path

import numpy as np
import pytest

from loadgen.report import make_report, outcome_from_records, outcome_from_run, simulated_records
from loadgen.schedule import make_schedule
from loadgen.sizes import draw_request_lengths, simulated_profile
from policies.planning.simulation import RequestSizes, Simulation
from policies.profile import Profile
from policies.sizing.size_distributions import longest_request_profile
from policies.types import SpecError
from tests.loadgen.test_cli import Shell, shell

__all__ = ["shell"]
FIXED = ["--simulate", "longest", "--rate", "2", "--duration", "2000"]
LINES = Profile("lines", (0.5, 0.6), lengths=(10, 20), length_service_times=((1.0, 1.5), (1.2, 1.9)))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,Tokens,Word\n0,3,a\n2,5,b\n1,4,c\n9,6,d\n")
    return f"trace:{path}"


def test_the_lengths_of_a_trace_are_in_order_of_arrival(trace: str) -> None:
    assert draw_request_lengths("trace:Tokens", trace, 4, 0).tolist() == [3.0, 4.0, 5.0, 6.0]
    cut = make_schedule(trace, None, 5.0, 0).instants
    assert draw_request_lengths("trace:Tokens", trace, len(cut), 0).tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trace:Length", "no column 'Length': name one of TIMESTAMP, Tokens, Word"),
        ("trace:Word", "column Word is not numeric"),
        ("trace:TIMESTAMP", "not above 0"),
        ("gamma:2", "gamma:2"),
        ("uniform:5:1", "above"),
    ],
)
def test_an_invalid_distribution_is_an_error_of_one_line(words: str, message: str, trace: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        draw_request_lengths(words, trace, 4, 0)
    assert "\n" not in str(caught.value)


def test_the_same_seed_draws_the_same_lengths() -> None:
    first, again, other = (draw_request_lengths("uniform:1:20", "poisson", 100, seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.min() >= 1.0
    assert first.max() <= 20.0


def test_a_batch_on_longest_takes_the_length_of_its_longest_request() -> None:
    lengths = np.array([3.0, 0.25, 7.0, 2.0])
    run = Simulation(longest_request_profile(lengths, 2), "greedy,max_wait_ms=inf", sizes=RequestSizes(lengths)).run(
        np.zeros(4)
    )
    assert run.responses.tolist() == [3.0, 3.0, 10.0, 10.0]
    assert run.energies is None


def test_the_service_time_of_longest_by_batch_size_is_the_mean_over_batches() -> None:
    times = longest_request_profile(np.array([1.0, 3.0]), 3).service_times
    assert times == pytest.approx((2.0, 2.5, 2.75))  # 3 - 2 / 2^b


def test_a_profile_with_lengths_gives_the_service_time_of_the_longest_request() -> None:
    run = Simulation(LINES, "greedy,max_wait_ms=inf", sizes=RequestSizes(np.array([10.0, 15.0, 20.0]))).run(np.zeros(3))
    assert run.responses.tolist() == pytest.approx([1.55, 1.55, 3.05])


def test_the_records_of_requests_with_sizes_give_the_same_report() -> None:
    instants = make_schedule("poisson", 0.5, 400.0, 3).instants
    lengths = draw_request_lengths("uniform:1:20", "poisson", len(instants), 3)
    simulation = Simulation(
        longest_request_profile(lengths, 8), "multi-bin:3,max_wait_ms=inf", "m", sizes=RequestSizes(lengths)
    )
    from_each = make_report(outcome_from_records(list(simulated_records(simulation.services(instants)))), 400.0)
    from_whole = make_report(outcome_from_run(simulation.run(instants)), 400.0)
    for key in ("mean_ms", "p99_ms", "throughput_hz", "mean_batch_size"):
        assert from_each[key] == pytest.approx(from_whole[key])


def test_errors_of_the_size_prediction_lower_throughput() -> None:
    instants = np.zeros(4000)
    lengths = draw_request_lengths("uniform:1:20", "backlog", 4000, 1)

    def throughput(bin_error: float) -> float:
        spec = "multi-bin:4,batch_size=16,max_wait_ms=inf"
        return (
            4000
            / Simulation(longest_request_profile(lengths, 16), spec, sizes=RequestSizes(lengths, bin_error))
            .run(instants)
            .elapsed
        )

    # equation 2 for 4 bins of width 4.75 and B = 16 gives 1.54 without errors; with errors batches are longer
    exact = throughput(0.0)
    assert exact == pytest.approx(16 / (10.5 + (20 * 16 / 17 + 1 / 17 - 10.5) / 4), rel=0.02)
    assert exact > 1.1 * throughput(0.2) > 1.1 * throughput(0.5)


def test_two_bins_raise_throughput_on_the_command_line(shell: Shell) -> None:
    specs = [f"multi-bin:{bins},batch_size=128,max_wait_ms=inf" for bins in (1, 2)]
    content = shell.report(
        *FIXED, "--rate", "10", "--sizes", "uniform:1:20", *(w for s in specs for w in ("--compare", s))
    )
    one, two = (row["throughput_hz"] for row in content["rows"])
    assert 1.2 < two / one < 1.35
    assert content["rows"][0]["mean_power_w"] is None


def test_the_size_scale_multiplies_service_times(shell: Shell) -> None:
    sized = [*FIXED, "--policy", "greedy", "--sizes", "uniform:1:20"]
    plain = shell.report(*sized)["max_ms"]
    halved = shell.report(*sized, "--rate", "4", "--duration", "1000", "--size-scale", "0.5")["max_ms"]
    assert halved == pytest.approx(plain / 2)


def test_longest_goes_up_to_the_largest_batch_size_of_the_specs() -> None:
    sizes = RequestSizes(np.array([1.0, 2.0]))
    for specs, largest in (
        (["multi-bin:2,batch_size=8"], 8),
        (["multi-bin:2,batch_size=8", "static:300,max_wait_ms=inf"], 300),
        (["static:6", "greedy"], 6),
        (["greedy", "timeout:2000"], 128),
    ):
        assert simulated_profile("longest", sizes, specs).max_batch_size == largest
    assert simulated_profile("googlenet-tesla-p4", None, ["greedy"]).max_batch_size == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*FIXED, "--policy", "greedy"], "add --sizes uniform:LO:HI"),
        (
            [*FIXED, "--policy", "lazy:slo_ms=9", "--sizes", "uniform:1:2"],
            "profile 'longest' has service times by length, but none by stage; use greedy or multi-bin",
        ),
        ([*FIXED, "--policy", "static:5000", "--sizes", "uniform:1:2"], r"within 1\.\.4096"),
        ([*FIXED, "--policy", "greedy", "--sizes", "uniform:1:2", "--stages", "4"], "leave --stages or --sizes out"),
        ([*FIXED, "--policy", "greedy", "--bin-error", "0.1"], "are for --sizes"),
        ([*FIXED, "--policy", "greedy", "--sizes", "uniform:1:2", "--bin-error", "0.6"], "0 to 0.5"),
        (
            ["http://127.0.0.1:1", "--rate", "1", "--duration", "1", "--sizes", "uniform:1:2", "--bin-error", "0.1"],
            "--bin-error is for --simulate",
        ),
        (
            ["--simulate", "googlenet-tesla-p4", *FIXED[2:], "--policy", "greedy", "--sizes", "uniform:1:2"],
            "has no lengths; simulate longest",
        ),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_and_exit_code_2(shell: Shell, arguments: list[str], message: str) -> None:
    code, out, err = shell.run(*arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert err.count("\n") == 1
