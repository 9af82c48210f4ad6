"""What benchmarks/http_servers.py reads from wrk, and its table."""

from benchmarks.http_servers import BASE, table
from benchmarks.support.wrk import WrkRun, parse

_OUTPUT = """  1 threads and 32 connections
  5000 requests in 2.00s, 1.00MB read
  Socket errors: connect 1, read 2, write 0, timeout 3
  Non-2xx or 3xx responses: 7
Requests/sec:   2499.50
"""


def test_all_kinds_of_failed_calls_are_counted() -> None:
    assert parse(_OUTPUT) == WrkRun(2499.5, 5000, 13)


def test_the_table_has_medians_over_the_rounds_and_their_ratios_to_the_base() -> None:
    cells = [(body, connections) for body in ("1 KB", "150,528 bytes") for connections in (32, 128)]
    runs = {
        name: [
            {"body": body, "connections": connections, "requests_per_s": factor * rate, "cpu_s_per_1000": 1 / factor}
            for rate in (9e3, 1e3, 2e3)
            for body, connections in cells
        ]
        for name, factor in ((BASE, 1), ("other", 0.5))
    }
    rates, times = (line for line in table(runs).splitlines() if line.startswith("| other"))
    assert rates == "| other | 1000 (0.50) | 1000 (0.50) | 1000 (0.50) | 1000 (0.50) |"
    assert times == "| other | 2.000 (2.00) | 2.000 (2.00) | 2.000 (2.00) | 2.000 (2.00) |"
