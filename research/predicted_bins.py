"""Multi-bin batching by predicted lengths: the paper's Table 1 and figure 10 for our predictors, and what errors cost.

Takes a few seconds. The paper fine-tunes BERT on prompts of LMSYS-Chat-1M; our predictors see the length of
the prompt only, since Azure's trace of conversations (2023) has no texts, and learn request by request, in its order.

predictors: bins of equal probability. Accuracy, share within one bin and confusion matrix over all requests; the gain
  over one bin on the second half of the trace, batches of 8, by edges of equal probability, and by edges between
  predictions that are optimised on the first half for what was predicted and what was generated there. The gain of true
  lengths stands beside.
errors: the paper's section 6.2 in theory, uniform sizes, batches of 128: the gain by edges of equal probability, and by
  edges optimised for the confusion matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.support.harness import (
    add_trace_argument,
    argument_parser,
    new_figure,
    require_trace,
    save_figure,
    save_record,
)
from policies.queue.arrivals import trace_column
from policies.queue.central import serve
from policies.sizing.bins import equal_edges, optimised_edges
from research import FIGURES
from research.length_predictors import Affine, Estimator, Learned, Lengths, Online
from research.multi_bin import LARGE, SMALL, UNIFORM, binned
from research.papers.multi_bin_errors import (
    confused_batch_time,
    edges_of_predictions,
    edges_under_errors,
    neighbour_errors,
)

BINS = (2, 4, 8)
ERRORS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3)
PREDICTORS: Mapping[str, Callable[[Affine], Estimator]] = {"online": Online, "learned": Learned}
PRINTED = {2: (86.14, None), 4: (62.97, 95.91), 8: (42.29, 79.42)}  # per cent: accuracy, within one bin
_TOKENS = Affine(0.0, 0.0, 1.0)  # predictions are numbers of tokens
_Floats = NDArray[np.float64]


def predictions(predictor: Estimator, prompts: _Floats, generated: _Floats) -> _Floats:
    """Predict each request's tokens before observing it."""
    limit, found = int(generated.max()), []
    for prompt, tokens in zip(prompts.astype(int).tolist(), generated.astype(int).tolist(), strict=True):
        lengths = Lengths(prompt, limit)
        found.append(predictor.size(lengths))
        predictor.observe(lengths, tokens)
    return np.array(found)


def confusion_matrix(true: NDArray[np.int64], predicted: NDArray[np.int64], bins: int) -> _Floats:
    """The share of each true bin (row) that is predicted as each bin (column); rows sum to 1."""
    counts = np.zeros((bins, bins))
    np.add.at(counts, (true, predicted), 1.0)
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def accuracy(true: NDArray[np.int64], predicted: NDArray[np.int64], within: int = 0) -> float:
    """The share of requests whose predicted bin is at most `within` bins from the true one."""
    return float(np.mean(np.abs(true - predicted) <= within))


def predictors(prompts: _Floats, generated: _Floats) -> dict[str, Any]:
    """Accuracy, confusion and gains of each predictor, by number of bins."""
    found: dict[str, Any] = {"requests": len(generated), "batch_size": SMALL}
    for name, make in PREDICTORS.items():
        predicted = predictions(make(_TOKENS), prompts, generated)
        found[name] = {str(bins): _by_bins(predicted, generated, bins) for bins in BINS}
        print(name, {bins: {k: v for k, v in c.items() if k != "confusion"} for bins, c in found[name].items()})
    return found


def _by_bins(predicted: _Floats, generated: _Floats, bins: int) -> dict[str, Any]:
    equal = equal_edges(generated, bins)
    true, guessed = binned(equal, generated), binned(equal, predicted)
    half = len(generated) // 2
    early, late = (predicted[:half], generated[:half]), (predicted[half:], generated[half:])
    between = edges_of_predictions(*early, bins, SMALL)
    by_size = optimised_edges(early[1], bins, SMALL)
    return {
        "accuracy": round(accuracy(true, guessed), 4),
        "within_one_bin": round(accuracy(true, guessed, 1), 4),
        "confusion": [[round(x, 4) for x in row] for row in confusion_matrix(true, guessed, bins).tolist()],
        "gain_equal": round(_gain(late[1], binned(equal_edges(early[1], bins), late[0])), 4),
        "gain_optimised_for_errors": round(_gain(late[1], binned(between, late[0])), 4),
        "gain_optimised_for_true_lengths": round(_gain(late[1], binned(by_size, late[0])), 4),
        "gain_of_true_lengths": round(_gain(late[1], binned(by_size, late[1])), 4),
        "gain_of_true_lengths_equal": round(_gain(late[1], binned(equal_edges(early[1], bins), late[1])), 4),
    }


def _gain(sizes: _Floats, bins: NDArray[np.int64]) -> float:
    """Throughput of a backlog over one bin's."""
    at_once, one = np.zeros(len(sizes)), np.zeros(len(sizes), dtype=np.int64)
    return serve(at_once, sizes, bins, SMALL).throughput / serve(at_once, sizes, one, SMALL).throughput


def errors() -> dict[str, Any]:
    """Gains under section 6.2's errors, with both kinds of edges."""
    one = UNIFORM.batch_time(1, LARGE)
    found: dict[str, Any] = {"batch_size": LARGE, "errors": ERRORS}
    for bins in BINS:
        cells = []
        for error in ERRORS:
            confusion = neighbour_errors(bins, error)
            edges = edges_under_errors(UNIFORM, confusion, LARGE)
            equal, best = (
                confused_batch_time(UNIFORM, each, confusion, LARGE) for each in (UNIFORM.edges(bins), edges)
            )
            gains = {"gain_equal": round(one / equal, 4), "gain_optimised": round(one / best, 4)}
            cells.append({**gains, "edges": [round(edge, 3) for edge in edges]})
        found[str(bins)] = cells
        print(bins, cells)
    return found


def draw(record: Mapping[str, Any]) -> None:
    """The confusion matrices of the better predictor: figure 10."""
    figure = new_figure(13, 4.6)
    for axes, bins in zip(figure.subplots(1, len(BINS)), BINS, strict=True):
        cell = record["predictors"][more_accurate(record)][str(bins)]
        _matrix(axes, cell["confusion"])
        axes.set_title(
            f"{bins} bins: {cell['accuracy']:.1%} right, {cell['within_one_bin']:.1%} within one bin", fontsize=10
        )
    save_figure(figure, FIGURES / "multi-bin-confusion.png")


def more_accurate(record: Mapping[str, Any]) -> str:
    """The predictor of the larger accuracy with two bins."""
    return max(PREDICTORS, key=lambda name: float(record["predictors"][name]["2"]["accuracy"]))


def _matrix(axes: Any, shares: Sequence[Sequence[float]]) -> None:
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    numbers = range(1, len(shares) + 1)
    axes.set_xticks(range(len(shares)), numbers)
    axes.set_yticks(range(len(shares)), numbers)
    axes.set(xlabel="predicted bin", ylabel="true bin")
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            color = "white" if share > 0.55 else "black"
            axes.text(j, i, f"{share:.2f}", ha="center", va="center", fontsize=8, color=color)


def measure(trace: Path) -> dict[str, Any]:
    """Both parts; the trace has columns ContextTokens and GeneratedTokens."""
    require_trace(trace)
    columns = (trace_column(str(trace), name) for name in ("ContextTokens", "GeneratedTokens"))
    return {"predictors": predictors(*columns), "errors": errors()}


def main() -> None:
    """Measure, record and draw."""
    parser = argument_parser(__doc__)
    add_trace_argument(parser)
    record = measure(parser.parse_args().trace)
    save_record("predicted_bins", record)
    draw(record)


if __name__ == "__main__":
    main()
