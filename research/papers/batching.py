"""Sections on multi-bin batching and LazyBatching, from the records of their scripts."""

from benchmarks.support.harness import load_record
from research.lazy_sensitivity import COMPARED, GRAPH, PRINTED
from research.multi_bin_figures import least_means
from research.papers.overview_batching import falls_then_rises, full_batches
from research.papers.setting import Claim, Section, agreement, table
from research.predicted_bins import BINS, PREDICTORS
from research.predicted_bins import PRINTED as PRINTED_ACCURACY


def multi_bin_figure_9() -> Section:
    """Exponential sizes: response time by arrival rate and number of bins."""
    record = load_record("multi_bin")["exponential_by_rate"]
    found = least_means(record)
    means, best = list(found.values()), min(found, key=lambda bins: found[bins])
    rates = {
        bins: min(cells, key=lambda cell: float(cell["mean_s"][0]))["rate"] for bins, cells in record["by_rate"].items()
    }
    rows = [[str(bins), f"{value:.1f}", str(rates[str(bins)])] for bins, value in found.items()]
    claims = [Claim(f"with more bins the mean first falls and then rises (least with {best})", falls_then_rises(means))]
    text = f"""\
![Figure 9 of multi-bin batching](figures/multi-bin-exponential.png)

Exponential sizes of mean 10 s, batches of 200, {record["requests"]} requests, {record["seeds"]} runs; the edges of
equation 28. The least mean response time over the arrival rates:

{table(["bins", "mean, s", "at a rate of, 1/s"], rows)}

{agreement(claims)}"""
    return Section("Multi-bin batching, figure 9: exponential sizes", text)


def predicted_lengths() -> Section:
    """Table 1 and figure 10 for our predictors, and edges under errors."""
    record = load_record("predicted_bins")
    found = record["predictors"]
    accuracy = []
    for bins in BINS:
        cells = [found[name][str(bins)] for name in PREDICTORS]
        right, near = ([f"{cell[key]:.1%}" for cell in cells] for key in ("accuracy", "within_one_bin"))
        accuracy.append([f"{bins} bins", _printed(bins, 0), *right, _printed(bins, 1), *near])
    keys = ("gain_equal", "gain_optimised_for_errors", "gain_optimised_for_true_lengths")
    truth = ("gain_of_true_lengths_equal", "gain_of_true_lengths")
    gains = [[f"{bins} bins", *(f"{found['online'][str(bins)][key]:.2f}" for key in (*keys, *truth))] for bins in BINS]
    changes = [cell[keys[1]] / cell[keys[2]] - 1.0 for name in PREDICTORS for cell in found[name].values()]
    known = record["errors"]
    edges = [
        [
            f"{error:g}",
            *(f"{known[str(bins)][i][key]:.2f}" for bins in BINS for key in ("gain_equal", "gain_optimised")),
        ]
        for i, error in enumerate(known["errors"])
    ]
    text = f"""\
![Figure 10 of multi-bin batching](figures/multi-bin-confusion.png)

Our predictors, `online` and `learned` (research/length_predictors.py), know the length of the prompt and learn request
by request; {found["requests"]} requests of Azure's trace, bins of equal probability. The paper's is BERT, fine-tuned on
the prompts of LMSYS-Chat-1M. Share of requests in their bin, and at most one bin away:

{table(["", "printed", *PREDICTORS, "within one, printed", *PREDICTORS], accuracy)}

Throughput over one bin's by the predictions of `online`, batches of {found["batch_size"]}, on the second half of the
trace. Edges between predictions are of equal probability, optimised for the errors that were seen on the first half,
or optimised as if predictions were exact. At the right are bins of true lengths. To allow for the errors changes
the gain by {min(changes):+.1%} to {max(changes):+.1%} (both predictors).

{table(["", "equal", "for the errors", "as if exact", "true, equal", "true, optimised"], gains)}

The paper's model of errors, where each neighbouring bin has the probability p_e: throughput over one bin's by equation
2, uniform sizes, batches of {known["batch_size"]}. With large batches few errors suffice: nearly every batch has a long
request. Edges that are optimised for known errors recover a part. Some of their bins are nearly empty and keep the
others apart.

{table(["p_e", *(f"{bins} bins, {name}" for bins in BINS for name in ("equal", "optimised"))], edges)}"""
    return Section("Multi-bin batching, Table 1 and figure 10: predicted lengths", text)


def _printed(bins: int, which: int) -> str:
    value = PRINTED_ACCURACY[bins][which]
    return "-" if value is None else f"{value:.1f}%"


def lazy_sensitivity() -> Section:
    """Section VI-C: maximum batches, four models, and throughput beyond the capacity."""
    record = load_record("lazy_sensitivity")
    cells = {f"maximum batch {n}": (PRINTED[n], cell) for n, cell in record["batch_sizes"].items()}
    cells["four models"] = PRINTED["co_located"], record["co_located"]
    gains = [
        [
            name,
            f"{printed[0]:.1f}",
            f"{cell['latency_gain']:.1f}",
            f"{printed[1]:.1f}",
            f"{cell['throughput_gain']:.2f}",
        ]
        for name, (printed, cell) in cells.items()
    ]
    saturated = [
        [name, *(f"{cell['policies'][name]['throughput_hz']:.0f}" for cell in record["saturated"].values())]
        for name in COMPARED
    ]
    saturated.append(["capacity", *(f"{cell['capacity_hz']:.0f}" for cell in record["saturated"].values())])
    shared = record["co_located"]["cells"]
    means = [[name, *(f"{cell['mean_ms']:.2f}" for cell in shared[name].values())] for name in COMPARED]
    full = record["saturated"]["64"]["policies"]
    ratio = full["lazy"]["throughput_hz"] / max(full[name]["throughput_hz"] for name in GRAPH)
    apart = max(abs(cell["latency_gain"] / PRINTED[n][0] - 1.0) for n, cell in record["batch_sizes"].items())
    text = f"""\
ResNet with the times that research/lazy.py assumes, an SLO of 100 ms. How many times lower LazyBatching's mean
response time is than graph batching's, and how many times higher its throughput, on average over time-windows of 5, 25
and 95 ms and rates of 16, 500, 1000 and 2000 a second. The paper does not say over what it averages.

{table(["", "latency, printed", "ours", "throughput, printed", "ours"], gains)}

The latency gains of a single model are at most {apart:.0%} from the printed ones. Most of the gain is that graph
batching waits for its window when little arrives. At these rates every policy but Serial serves what arrives. Beyond
the capacity {full_batches(full, 64)}: LazyBatching's throughput is {ratio:.3f} times that of the best graph batching.
Requests a second at 1.2 times the capacity (figure 13 with saturated static policies):

{table(["", *(f"maximum batch {n}" for n in record["saturated"])], saturated)}

Four copies of the model on one device, each with a quarter of the arrivals; requests of two copies share no batch. Mean
response time, ms, by the rate of all arrivals:

{table(["", *(f"{rate}/s" for rate in shared["lazy"])], means)}"""
    return Section("LazyBatching, section VI-C and figure 13: batch sizes, four models, saturation", text)
