"""Rows of the papers on multi-bin batching, LazyBatching and BatchMonitor, computed from the records."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.support.harness import load_record
from policies.profile import Profile
from policies.queue.central import serve
from policies.rules.lazy_batching import LazyBatching
from policies.types import Request, State
from research.batchmonitor import PRINTED_MS
from research.lazy_sensitivity import GRAPH
from research.lazy_sensitivity import PRINTED as PRINTED_GAINS
from research.multi_bin_figures import least_means
from research.papers.overview import Paper, Row, judged
from research.papers.setting import Claim
from research.predicted_bins import PRINTED as PRINTED_ACCURACY
from research.predicted_bins import more_accurate

_A100 = "needs an A100 and the model's weights"
_NPU = "needs the authors' NPU simulator, which is not published"


def multi_bin() -> Paper:
    """The 11 figures and the table of the paper on multi-bin batching."""
    record, predicted = load_record("multi_bin"), load_record("predicted_bins")
    gains = record["lengths"]["gains"]
    cell = predicted["predictors"][more_accurate(predicted)]["4"]
    with_predictor, with_lengths = (f"{cell[key] - 1.0:.0%}" for key in ("gain_equal", "gain_of_true_lengths_equal"))
    rows = [
        Row("Figure 1(a)", "not possible here", "throughput by batch size, Phi-3.5", "-", _A100),
        _figure_1b(),
        Row("Figure 2", "no numbers", "drawing", "-"),
        _throughput(record["uniform"]),
        _latency(record["uniform"]),
        Row("Figure 5", "not possible here", "time by tokens, Phi-3.5", "-", _A100),
        _servers(record["lengths"]["by_rate"]),
        Row(
            "Figure 7",
            "not possible here",
            "+70 per cent at 32 bins, Phi-3.5",
            f"{gains['32']['theory_equal'] - 1.0:+.0%} by equation 2 for Azure's lengths",
            _A100,
        ),
        _errors(record["errors"]["uniform"]["cells"]),
        _exponential(record),
        *_predictor(predicted),
        Row(
            "Figure 11",
            "not possible here",
            "4 bins: +8 per cent, +45 with true lengths, Vicuna 13B",
            f"+{with_predictor}, +{with_lengths} simulated for Azure's lengths",
            _A100,
        ),
    ]
    return Paper("Guldogan, Kunde, Lee and Pedarsani (multi-bin batching)", rows)


def _figure_1b() -> Row:
    times, at_once = np.array([1.0, 5.0, 2.0, 6.0]), np.zeros(4)
    one, two = (serve(at_once, times, bins, 2).elapsed for bins in (np.zeros(4, dtype=int), (times > 3.0).astype(int)))
    claims = [Claim("11 s with one bin and 8 s with two", (one, two) == (11.0, 8.0))]
    return judged("Figure 1(b)", "11 s, 8 s", f"{one:g} s, {two:g} s", claims, "0")


def _throughput(record: Mapping[str, Any]) -> Row:
    cells = record["overloaded"].values()
    apart = max(abs(cell["simulated"][0] / cell["equation_4"] - 1.0) for cell in cells)
    rising = all(a["simulated"][0] < b["simulated"][0] for a, b in pairwise(cells))
    claims = [
        Claim("the throughput rises with the bins", rising),
        Claim("it is that of equation 4", apart < 0.01),
        Claim("the limit, 128 / 10.5, is about 12.3", abs(record["limit"] / 12.3 - 1.0) < 4e-3),
    ]
    ours = f"limit {record['limit']:.2f}; {', '.join(format(cell['simulated'][0], '.2f') for cell in cells)}"
    return judged("Figure 3", "limit 12.3, throughput rises with 1 to 5 bins", ours, claims, f"equation 4: {apart:.2%}")


def _latency(record: Mapping[str, Any]) -> Row:
    low = [record["by_rate"][str(bins)][1] for bins in (1, 2, 3)]
    apart = max(abs(cell["mean_s"][0] / cell["equation_7_s"] - 1.0) for cell in low)
    claims = [
        Claim("lemma 5.1 is close at low rates", apart < 0.03),
        Claim("the mean rises with the bins", all(a["mean_s"][0] < b["mean_s"][0] for a, b in pairwise(low))),
    ]
    ours = ", ".join(f"{cell['mean_s'][0]:.1f}" for cell in low)
    return judged("Figure 4", "lemma 5.1 close at low rates", f"{ours} s at 1/s", claims, f"lemma 5.1: {apart:.1%}")


def _servers(by_rate: Mapping[str, Sequence[Mapping[str, Any]]]) -> Row:
    least = [min(cell["mean_s"][0] for cell in cells) for cells in by_rate.values()]
    most = [max(cell["throughput"][0] for cell in cells) for cells in by_rate.values()]
    claims = [
        Claim("throughput rises with the bins", all(a < b for a, b in pairwise(most))),
        Claim("with 2 and 4 bins the least mean is below one bin's", max(least[1:3]) < least[0]),
        Claim("then it rises", least[-1] > least[0]),
    ]
    ours = f"least means {', '.join(f'{x:.1f}' for x in least)} s for {', '.join(by_rate)} bins"
    note = "Azure's lengths, since the paper's answers to GSM8K are not published"
    return judged("Figure 6", "least mean falls, then rises with the bins", ours, claims, note)


def _errors(cells: Mapping[str, Sequence[Sequence[float]]]) -> Row:
    means = {bins: [mean for mean, _, _ in row] for bins, row in cells.items()}
    losses = [1.0 - means[bins][1] / means[bins][0] for bins in ("2", "4", "8")]
    one = means["1"][0]
    claims = [
        Claim(
            "more bins, more throughput at every error", bool((np.diff([means[b] for b in "248"], axis=0) > 0).all())
        ),
        Claim("more bins lose less", losses[0] > losses[1] > losses[2]),
    ]
    gains = " to ".join(f"{means['2'][i] / one:.2f}" for i in (0, 1))
    note = f"p_e = 0.01 cuts two bins' gain from {gains}"
    ours = f"p_e = 0.01 costs {', '.join(f'{loss:.0%}' for loss in losses)} with 2, 4, 8 bins"
    return judged("Figure 8", "rises with the bins at every p_e", ours, claims, note)


def _exponential(record: Mapping[str, Any]) -> Row:
    found = least_means(record["exponential_by_rate"])
    values, best = list(found.values()), min(found, key=lambda bins: found[bins])
    most = [cell["simulated"][0] for cell in record["exponential"]["cells"].values()]
    claims = [
        Claim("(a) the throughput rises with the bins", all(a < b for a, b in pairwise(most))),
        Claim("(b) the least mean falls, then rises", falls_then_rises(values)),
    ]
    ours = f"least means {', '.join(f'{x:.1f}' for x in values)} s for {', '.join(map(str, found))} bins"
    return judged("Figure 9", "(b) the mean falls, then rises with the bins", ours, claims, f"least with {best} bins")


def falls_then_rises(values: Sequence[float]) -> bool:
    """Whether each value is below the one before, up to the least, and each later one above; both at least once."""
    place = values.index(min(values))
    falls = all(a > b for a, b in pairwise(values[: place + 1]))
    rises = all(a < b for a, b in pairwise(values[place:]))
    return falls and rises and 0 < place < len(values) - 1


def _predictor(record: Mapping[str, Any]) -> list[Row]:
    cells = record["predictors"][more_accurate(record)]
    right = {bins: 100 * cells[str(bins)]["accuracy"] for bins in PRINTED_ACCURACY}
    near = {bins: 100 * cells[str(bins)]["within_one_bin"] for bins in PRINTED_ACCURACY}
    printed = {bins: first for bins, (first, _) in PRINTED_ACCURACY.items()}
    within = {bins: second for bins, (_, second) in PRINTED_ACCURACY.items() if second is not None}
    reason = "needs BERT and LMSYS-Chat-1M; ours knows the length of the prompt only"
    trace = "of Azure's trace"
    return [
        Row("Table 1", "not possible here", _per_cent(printed), f"{_per_cent(right)} {trace}", reason),
        Row(
            "Figure 10",
            "not possible here",
            f"within one bin {_per_cent(within)}",
            f"{_per_cent({bins: near[bins] for bins in within})} {trace}",
            reason,
        ),
    ]


def _per_cent(values: Mapping[int, float]) -> str:
    return f"{', '.join(f'{value:.1f}' for value in values.values())} % for {', '.join(map(str, values))} bins"


def lazy_batching() -> Paper:
    """The 17 figures and 2 tables of LazyBatching, and section VI-C's numbers."""
    record, sensitivity = load_record("lazy"), load_record("lazy_sensitivity")
    cells = record["paper"]["cells"]
    drawings = (1, 2, 4, 6, 7, 8, 9)
    by_number = {
        **{n: Row(f"Figure {n}", "no numbers", "drawing", "-") for n in drawings},
        3: Row("Figure 3", "not possible here", "throughput by batch size, ResNet", "-", _NPU),
        5: _windows(cells),
        10: _slack(),
        11: Row(
            "Figure 11",
            "not possible here",
            "lengths of WMT-2019",
            "a log-normal with two of its points",
            "needs WMT-2019",
        ),
        12: _mean(cells),
        13: _saturated(sensitivity["saturated"]["64"]["policies"]),
        14: _tail(cells),
        15: _late(cells),
        16: Row("Figure 16", "not possible here", "VGG, MobileNet, LAS, BERT", "-", f"no times are printed: {_NPU}"),
        17: Row("Figure 17", "not possible here", "Transformer on a Titan Xp", "-", "needs that GPU and cuDNN 7"),
    }
    rows = [by_number[n] for n in sorted(by_number)]
    tables = [
        Row("Table I", "no numbers", "setting of the simulator", "-"),
        Row("Table II", "not possible here", "1.1, 7.2, 2.4 ms alone", "used as given", _NPU),
    ]
    section = [_coverage(record["coverage"]), *_gains(sensitivity)]
    return Paper("Choi, Kim and Rhu, HPCA 2021 (LazyBatching)", [*rows, *tables, *section])


def _of(cells: Mapping[str, Any], name: str, key: str, rate: int) -> float:
    return float(cells[name]["by_rate"][str(rate)][key][1])


def _windows(cells: Mapping[str, Any]) -> Row:
    low = [_of(cells, name, "mean_ms", 16) for name in GRAPH]
    high = [_of(cells, name, "mean_ms", 2000) for name in GRAPH]
    serial = _of(cells, "Serial", "mean_ms", 2000)
    claims = [
        Claim("at 16/s a longer window only adds latency", low[0] < low[1] < low[2]),
        Claim("at 2000/s batching lowers the mean", max(high) < serial),
    ]
    ours = f"{', '.join(f'{x:.1f}' for x in low)} ms at 16/s; {max(high):.0f} and {serial:.0f} without at 2000/s"
    return judged("Figure 5", "long windows: harm at 16/s, help at 2000/s", ours, claims)


def _slack() -> Row:
    profile = Profile("nodes", (8.0, 16.0)).in_stages(8)
    request = Request(0, 0.0, deadline=30.0, stages=8, stage=1, started=2.0)
    claim = LazyBatching(profile).claim(State(3.0, (), (request,)))
    slack = claim.budget - claim.work
    return judged("Figure 10", "slack 20", f"{slack:g}", [Claim("equation 1 gives 20", slack == 20.0)], "0")


def _mean(cells: Mapping[str, Any]) -> Row:
    rates = (16, 500, 1000, 2000)
    ratios = [min(_of(cells, g, "mean_ms", r) for g in GRAPH) / _of(cells, "lazy", "mean_ms", r) for r in rates]
    claims = [
        Claim(
            "faster than Serial at high load",
            _of(cells, "lazy", "mean_ms", 2000) < _of(cells, "Serial", "mean_ms", 2000),
        ),
        Claim(
            "faster than the best graph batching at every rate",
            min(ratios) > 1.0,
            f"{1 / ratios[-1]:.1f} times slower at 2000/s",
        ),
    ]
    ours = f"{', '.join(f'{x:.1f}' for x in ratios)} times at 16, 500, 1000, 2000/s"
    note = "times of batches and of GNMT, Transformer are not printed: ours are assumed"
    return judged("Figure 12", "ResNet: 5.3 times faster than the best graph batching", ours, claims, note)


def _saturated(policies: Mapping[str, Mapping[str, float]]) -> Row:
    ratio = policies["lazy"]["throughput_hz"] / max(policies[name]["throughput_hz"] for name in GRAPH)
    claims = [Claim("similar or better throughput than the best graph batching", ratio > 0.99)]
    claims.append(Claim("1.1 times as much", ratio > 1.05))
    note = f"at 1.2 times the capacity {full_batches(policies, 64)}"
    return judged("Figure 13", "ResNet: 1.1 times the best graph batching", f"{ratio:.3f} times", claims, note)


def full_batches(policies: Mapping[str, Mapping[str, float]], largest: int) -> str:
    """A statement on the policies whose mean batch is at least nine tenths of the largest, and on the others."""
    shares = {name: cell["mean_batch_size"] / largest for name, cell in policies.items()}
    others = [name for name, share in shares.items() if share < 0.9]
    least = min(share for share in shares.values() if share >= 0.9)
    every = f"every policy but {', '.join(others)}" if others else "every policy"
    return f"{every} launches full batches (in the mean at least {least:.0%} of the largest)"


def _tail(cells: Mapping[str, Any]) -> Row:
    graph, lazy = min(_of(cells, name, "p99_ms", 1000) for name in GRAPH), _of(cells, "lazy", "p99_ms", 1000)
    claims = [Claim("a much smaller 99th percentile than the best graph batching", lazy < 0.8 * graph)]
    return judged("Figure 14", "smaller 99th percentile at 1000/s", f"{lazy:.1f} against {graph:.1f} ms", claims)


def _late(cells: Mapping[str, Any]) -> Row:
    late = {name: [mean for _, mean, _ in cells[name]["violations"]["1000"]] for name in (*GRAPH, "lazy")}
    worse = sum(late[name][-1] > 0.5 for name in GRAPH)
    claims = [
        Claim("LazyBatching answers none late", max(late["lazy"]) == 0.0),
        Claim("two of three time-windows answer more than half late at 100 ms", worse >= 2, f"{worse} of 3 do"),
    ]
    ours = f"lazy {max(late['lazy']):.0%}; GraphB(5), (25), (95) {', '.join(f'{late[n][-1]:.1%}' for n in GRAPH)}"
    return judged("Figure 15", "none late from 20 ms on; two thirds of GraphB over 50 % at 100 ms", ours, claims)


def _coverage(cells: Sequence[Mapping[str, Any]]) -> Row:
    found = {c["coverage"]: 100 * c["violations"][1] for c in cells if c["slack"] == "printed"}
    claims = [
        Claim("fewer late with more time steps", found[0.9] < found[0.16]),
        Claim("none late with 32 time steps", found[0.9] < 0.1),
        Claim("36 per cent late with 10", abs(found[0.16] - 36.0) < 3.0),
    ]
    ours = f"{found[0.9]:.1f} and {found[0.16]:.1f} %"
    note = "times of the Transformer's batches are not printed: ours are assumed"
    return judged("Section VI-C: dec_timesteps", "0 and 36 % late at 60 ms", ours, claims, note)


def _gains(record: Mapping[str, Any]) -> list[Row]:
    named = {f"maximum batch {n}": (PRINTED_GAINS[n], record["batch_sizes"][n]) for n in ("16", "32", "64")}
    rows = []
    for name, ((latency, throughput), cell) in named.items():
        ours = cell["latency_gain"], cell["throughput_gain"]
        claims = [
            Claim("the mean response time is as many times lower, within a fifth", abs(ours[0] / latency - 1.0) < 0.2),
            Claim("the throughput is as many times higher", abs(ours[1] / throughput - 1.0) < 0.1),
        ]
        printed, found = _times(latency, throughput), _times(*ours)
        note = "the rates are below the capacity, so that the throughput is that of the arrivals"
        rows.append(judged(f"Section VI-C: {name}", printed, found, claims, note))
    four = record["co_located"]
    printed, found = _times(*PRINTED_GAINS["co_located"]), _times(four["latency_gain"], four["throughput_gain"])
    note = "the paper does not name its four models: ours are four copies of ResNet"
    rows.append(Row("Section VI-C: four models", "not possible here", printed, found, note))
    return rows


def _times(latency: float, throughput: float) -> str:
    return f"{latency:.1f} and {throughput:.2f} times"


def batch_monitor() -> Paper:
    """BatchMonitor's two figures."""
    cells = load_record("batchmonitor")["cells"]
    means = {name: cells[name]["rate matching"]["mean_ms"] for name in PRINTED_MS}
    slower = [cells[n]["max under deadline"]["mean_ms"] / cells[n]["rate matching"]["mean_ms"] for n in PRINTED_MS]
    energy = [
        100
        * (cells[n]["rate matching"]["requests_per_joule"] / cells[n]["ad hoc (greedy)"]["requests_per_joule"] - 1.0)
        for n in PRINTED_MS
    ]
    claims = [
        Claim("the means", all(abs(means[name] / printed - 1.0) < 0.1 for name, printed in PRINTED_MS.items())),
        Claim("14 times faster than the largest batch under the deadline", all(10 < x < 20 for x in slower)),
        Claim("5 per cent more per joule than ad hoc", all(2 < x < 8 for x in energy)),
    ]
    ours = (
        f"{', '.join(f'{x:.2f}' for x in means.values())} ms; {', '.join(f'{x:.0f}' for x in slower)} times; "
        f"{', '.join(f'{x:.1f}' for x in energy)} %"
    )
    printed = f"{', '.join(f'{x:.2f}' for x in PRINTED_MS.values())} ms; 14 times; 5 %"
    note = (
        "BERT's 45.78 ms is left out; rates, deadline and service times are not printed: ours are assumed, and the "
        "200 ms chosen to give about 14"
    )
    rows = [Row("Figure 1", "no numbers", "drawing", "-"), judged("Figure 2", printed, ours, claims, note)]
    return Paper("Khan et al. (BatchMonitor)", rows)
