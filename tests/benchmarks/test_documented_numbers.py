"""Numbers in the documentation against the records, or the models, that they come from."""

import json
import re
from dataclasses import replace
from itertools import product, takewhile
from typing import Any

from benchmarks.closed_loop import NEW, OLD, model_costs
from benchmarks.page import real_models_summary
from benchmarks.support.harness import ROOT, record_file
from benchmarks.support.peer_tables import BARE, BODIES, CONNECTIONS, MOSEC, tables
from policies.profile import load_profile
from policies.solver.model import Problem
from policies.solver.solver import evaluate, solve
from research.batchmonitor import PRINTED_MS

LOADS = (0.3, 0.6)


def page(name: str) -> str:
    """A page in one line."""
    return " ".join((ROOT / name).read_text().split())


def record(name: str) -> Any:
    return json.loads(record_file(f"{name}.json").read_text())


def test_the_readme_quotes_no_measured_number_but_those_of_its_table() -> None:
    """Numbers are in docs/benchmarks.md, which is generated; an indented block shows what a command prints."""
    readme, measured = (ROOT / "README.md").read_text(), real_models_summary()
    assert measured in readme, "the table is of the record"
    text = "\n".join(line for line in readme.replace(measured, "").splitlines() if not line.startswith("    "))
    unit = r"(?:ms|s|W|mW|J|mJ|MB|GB|%|per cent|times|x|/s|requests|calls)"
    assert re.findall(rf"(?<![\w.:])\d[\d.,]*\s?{unit}(?!\w)", text) == []


def test_what_a_change_of_the_device_costs_the_old_policy() -> None:
    old = load_profile("googlenet-tesla-p4-x10")
    assert old.energies is not None
    slower = replace(
        old,
        service_times=tuple(1.5 * seconds for seconds in old.service_times),
        energies=tuple(1.5 * joules for joules in old.energies),
    )
    for load in LOADS:
        rate = load * old.capacity
        believed, true = Problem(old, rate, 1.0, 16.0), Problem(slower, rate, 1.0, 16.0)
        scaled = evaluate(true, solve(believed).batch_size).gain / solve(true).gain - 1.0
        fixed = model_costs(load)[OLD] / model_costs(load)[NEW] - 1.0
        documented = {0.3: ("0.0 %", "8.4 %"), 0.6: ("0.2 %", "6.0 %")}[load]
        assert (f"{scaled:.1%}", f"{fixed:.1%}") == tuple(text.replace(" ", "") for text in documented)
    text = page("docs/how-it-decides.md")
    assert "| service times and energies 1.5 times as large | 0.0 % | 0.2 % |" in text
    assert "| energy of a batch beyond that of its requests 4 times as large | 8.4 % | 6.0 % |" in text


def test_the_table_of_batchmonitor_is_that_of_the_record() -> None:
    found = record("batchmonitor")
    assert found["printed_ms"] == PRINTED_MS
    cells = found["cells"].values()
    matching = [cell["rate matching"] for cell in cells]

    def against(names: tuple[str, str], keys: tuple[str, ...] = ("mean_ms", "requests_per_joule")) -> str:
        """A row: one policy's relative differences from another one."""
        entries = (
            "; ".join(f"{100 * (cell[names[0]][key] / cell[names[1]][key] - 1.0):+.0f} %" for key in keys)
            for cell in cells
        )
        return " | ".join(entry.replace("+0 %", "0 %").replace("-0 %", "0 %") for entry in entries)

    printed = (f"{m['mean_ms']:.2f} ({ms})" for m, ms in zip(matching, found["printed_ms"].values(), strict=True))
    factors = (f"{cell['max under deadline']['mean_ms'] / cell['rate matching']['mean_ms']:.1f}" for cell in cells)
    rows = {
        "rate matching, ms (printed)": " | ".join(printed),
        "largest batch under the deadline, times rate matching's mean": " | ".join(factors),
        "rate matching, against greedy": against(("rate matching", "ad hoc (greedy)")),
        "solved with w2 = 0.5, against rate matching": against(("smdp, w2 = 0.5", "rate matching")),
        "Algorithm 1 as printed, against rate matching": against(("rate matching, literal", "rate matching")),
    }
    text = page("research/batchmonitor.md")
    for name, cells_of_row in rows.items():
        assert f"| {name} | {cells_of_row} |" in text
    live = found["ResNet-50, live"]["rate matching"]["mean_ms"] / matching[0]["mean_ms"] - 1.0
    assert f"{live:.0%} above its simulation".replace("%", " per cent") in text


def test_the_gain_of_catch_up_is_that_of_the_record() -> None:
    text, grid = page("research/lazy-batching.md"), record("lazy")["grid"]
    for ratio, loads in product((0.01, 0.1, 0.3, 1, 2), ((0.05, 0.2), (0.5,), (0.7, 0.9))):
        mine = [
            round(cell["catch_up_percent"])
            for cell in grid
            if cell["shape"] == f"a/c = {ratio:g}" and cell["stage_overhead"] == 1 and cell["load"] in loads
        ]
        entry = f"{min(mine)} to {max(mine)} %" if min(mine) != max(mine) else f"{min(mine)} %"
        row = re.search(rf"\| {ratio:g} \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", text)
        assert row is not None
        assert row.group({0.05: 1, 0.5: 2, 0.7: 3}[loads[0]]) == entry
    assert all(cell["lazy_percent"] > 0 for cell in grid)  # slower than greedy in every cell
    assert all(cell["catch_up_percent"] > -1 for cell in grid if cell["stage_overhead"] > 1.04)


def test_the_differences_from_lazybatching_are_those_of_the_record() -> None:
    text, found = page("research/lazy-batching.md"), record("lazy")
    lazy, window = (found["paper"]["cells"][name] for name in ("lazy", "GraphB(5)"))
    p99, mean = (
        f"{lazy['by_rate'][rate][key][1]:.1f} ({window['by_rate'][rate][key][1]:.1f})"
        for rate, key in (("1000", "p99_ms"), ("2000", "mean_ms"))
    )
    late = [f"{100 * share[1]:.1f} %" for share in lazy["violations"]["2000"]]
    by_coverage = {c["coverage"]: c["violations"][1] for c in found["coverage"] if c["slack"] == "printed"}
    for row in (
        f'"consistently much smaller" | {p99} |',
        f"over all rates | {mean} |",
        f"SLO 20 and 100 ms | falls as the SLO grows | {late[0]}, {late[-1]} |",
        f"`dec_timesteps` covers 90 % of the sentences | 0 % | {100 * by_coverage[0.9]:.1f} % |",
        f"`dec_timesteps` covers 16 % of the sentences | 36 % | {100 * by_coverage[0.16]:.1f} % |",
    ):
        assert row in text
    assert found["paper"]["slos_ms"] == [20, 40, 60, 80, 100]


def test_the_page_names_all_losses_to_other_servers_of_more_than_5_per_cent() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables(record("peers")).splitlines()]
    head = next(row for row in rows if row and " / " in row[-1])
    lost = set()
    for name, *ratios in takewhile(len, rows[rows.index(head) + 2 :]):
        larger_is_better = name.startswith(BODIES)
        for other in (BARE, MOSEC):
            ratio = float(ratios[head.index(f"Batchwright, one process / {other}") - 1])
            if (ratio < 0.95) if larger_is_better else (ratio > 1.05):
                lost.add((other, name))
    assert lost == {
        (BARE, "above ideal at 0.3"),
        (BARE, "RSS, MB"),
        *((BARE, f"JPEG, {connections}") for connections in CONNECTIONS),
        *((MOSEC, f"1 KB, {connections}") for connections in CONNECTIONS),
        (MOSEC, "CPU at 0.7"),
    }
    text = page("benchmarks/records.md")
    assert "the bare batcher is faster at load 0.3, answers more JPEGs and needs less memory" in text
    assert "mosec answers more bodies of 1 KB and takes less CPU time" in text
