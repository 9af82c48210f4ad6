"""Write docs/benchmarks.md and benchmarks/records.md from the records.

Every number of these pages is in a record under benchmarks/records/, which one of the scripts wrote. A test renders the
pages again and compares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.faults import table as faults_table
from benchmarks.real_models import marked_loss, means_table, shares_table
from benchmarks.support.harness import RECORDS, ROOT, argument_parser, load_record, markdown_table, record_file
from benchmarks.watched_page import table as watched_page_table

_FROM_RECORDS = """This page is written from the [records]({records}) by `python -m {module}`. Each section names the
script that measured it. All of them ran on a machine of two shared cores without a GPU, on an emulated Tesla P4 that is
ten times slower than the real one (`googlenet-tesla-p4-x10`), unless the section says otherwise. Such a machine is
noisy: compare what was measured side by side in one run. A record is of the code of its commit:
`git log -- {folder}/NAME.json`."""


def recorded(name: str) -> str:
    """The text of a record that is a Markdown page already, without its heading."""
    lines = record_file(f"{name}.md").read_text().strip().splitlines()
    return "\n".join(lines[1:] if lines[0].startswith("# ") else lines).strip()


@dataclass(frozen=True)
class Section:
    """One part of the page.

    Attributes:
        title: its heading.
        script: the module that measures it; its record, or its folder of records, has the same name.
        about: what is measured, in a sentence or two.
        render: makes the section's text; None: the record's own Markdown.
        package: of the script.
    """

    title: str
    script: str
    about: str
    render: Callable[[], str] | None = None
    package: str = "benchmarks"

    def __str__(self) -> str:
        return f"## {self.title}\n\n{self.about} (`python -m {self.package}.{self.script}`)\n\n{self._text()}\n"

    def _text(self) -> str:
        if not (record_file(f"{self.script}.json").is_file() or (RECORDS / self.script / "report.md").is_file()):
            return "Not measured yet."
        return recorded(self.script) if self.render is None else self.render()


@dataclass(frozen=True)
class Page:
    """A page that is written from records.

    Attributes:
        path: its file, relative to the repository.
        title: its heading.
        about: what follows the heading.
        sections: its parts.
    """

    path: str
    title: str
    about: str
    sections: Sequence[Section]

    def __str__(self) -> str:
        return "\n".join([f"# {self.title}\n\n{self.about}\n", *map(str, self.sections)])

    def write(self) -> None:
        """Write the page."""
        (ROOT / self.path).write_text(str(self))


def from_records(path: str, module: str, records: str) -> str:
    """The paragraph that says where the numbers of the page at `path` come from."""
    up = "../" * path.count("/")
    relative = records.removeprefix(f"{path.rpartition('/')[0]}/") if up else records
    link = relative if relative != records else f"{up}{records}"
    return _FROM_RECORDS.format(records=link, module=module, folder=records)


def real_models_summary() -> str:
    """The README's table: mean response times, ms, of real models, each server with its best setting for each load.

    Beside the model is the rate of load 1, in requests a second; the last line of a model is the highest throughput.
    Our losses are marked.
    """
    rows, peers = list[list[str]](), ("LitServe", "mosec", "BentoML", "Ray Serve", "Triton", "FastAPI")
    titles = {"Classifier": "EfficientNet-Lite0", "Encoder": "MiniLM", "Pages": "OCR"}
    record = load_record("real_models")
    for model, title in titles.items():
        found = record[model]
        runs = found["runs"]
        whole = [name for name in runs if name not in found["left_out"]]
        names = [["Batchwright"], *([name for name in whole if name.startswith(peer)] for peer in peers)]
        named = f"{title} ({found['load_1_hz']:.0f})"
        for load in sorted({run["load"] for run in runs["Batchwright"]}):
            best = [min((_mean_ms(runs[name], load) for name in each), default=None) for each in names]
            shown = ["-" if mean is None else f"{mean:.0f}" for mean in best]
            if best[0] is not None:
                shown[0] += marked_loss(best[0], min(mean for mean in best if mean is not None))
            rows.append([named, f"{load:g}", *shown])
        most = [max((fmean(found["saturation"][name]) for name in each), default=None) for each in names]
        assert most[0] is not None
        shown = ["-" if rate is None else f"{rate:.3g}" for rate in most]
        shown[0] += marked_loss(max(rate for rate in most if rate is not None), most[0])
        rows.append([named, "throughput", *shown])
    return markdown_table(["model", "load", "Batchwright", *peers], rows)


_REAL_MODELS = (
    "- Classifier, on 9adf98d: Batchwright has the least mean at 0.6, 0.9 and 1.5. LitServe 8, 0 ms answers sooner at "
    "0.3, by a fifth, with nearly twice the CPU time. Batchwright keeps the bound, 109 ms for 95 per cent, at 0.3 with "
    "the least CPU time of the servers that keep it. At 0.6 no server keeps it; with the bound fewer requests are "
    "within it than without.\n"
    "- Pages of 1 to 12 lines, on 9adf98d, are read by the pipeline of examples/read_text, and by the other servers "
    "with both models in one class. The pipeline answers soonest at all loads, with half of the CPU time. Triton has "
    "the highest throughput, by 30 per cent. None of the pipeline's answers equals the library's: they have boxes, and "
    "lines are recognised in other batches, which changes spaces. BentoML was measured after the others. Without a "
    "cached profile the first answer took 34 s.\n"
    "- Encoder, on d2a8e95, with the bound on 9adf98d: batches gain nothing on this CPU. LitServe answers sooner at "
    "0.3, by a fifth, and without batching also at 0.9, by a tenth. LitServe 8, 0 ms has the highest throughput, by a "
    "tenth. Ray Serve takes three times as long at 0.3.\n"
    "- Voice detector: Batchwright has the highest throughput, and at 0.9 a sixth of the former code's mean, and "
    "less than a tenth of any other server's. LitServe 8, 0 ms answers sooner at 0.3 and 0.6; at 0.3 all but "
    "LitServe 8, 10 ms do.\n"
    "- The first answer takes up to twice as long as that of LitServe.\n"
    "- Embeddings, called by OpenAI's interface, were measured on 0fa1563: Batchwright answers sooner than "
    "Infinity, and later than batches in order of arrival."
)


def _real_models() -> str:
    return f"{_REAL_MODELS}\n\n{means_table(load_record('real_models'))}"


def _mean_ms(runs: Sequence[dict[str, Any]], load: float) -> float:
    return fmean(run["mean_ms"] for run in runs if run["load"] == load)


def _gpu_report() -> str:
    return (RECORDS / "gpu" / "report.md").read_text().strip()


def _gpu() -> str:
    return f"![Service times, energies, response times and power](records/gpu/gpu.png)\n\n{_gpu_report()}"


_GPU_COLUMNS = (
    *("model", "server", "policy", "offered, 1/s", "throughput, 1/s", "mean, ms", "p95, ms", "W", "mJ a request"),
)


def _gpu_servers() -> str:
    """The GPU report's table of servers of ResNet-50 as CUDA graphs, without the policies that weigh power."""
    lines = _gpu_report().split("| model | server |")[1].splitlines()
    head = ["model", "server", *(cell.strip() for cell in lines[0].split("|") if cell.strip())]
    rows = [dict(zip(head, (cell.strip() for cell in line.split("|")[1:-1]), strict=True)) for line in lines[2:]]
    of_peers = [row for row in rows if row["model"] == "resnet50" and row["network"] == "captured graphs"]
    shown = [row for row in of_peers if not row["policy"].startswith("smdp:w2")]
    return markdown_table(_GPU_COLUMNS, [[row[name] for name in _GPU_COLUMNS] for row in shown])


def _ceiling() -> str:
    record = load_record("ceiling")
    names = {"ours": "Batchwright", "bare": "bare FastAPI", "four_floats": "Batchwright, a model of four floats"}
    base = median(run["requests_per_s"] for run in record["bare"])
    rates = {names[key]: median(run["requests_per_s"] for run in record[key]) for key in names if key in record}
    rows = [(name, f"{rate:.0f}", f"{rate / base:.2f}") for name, rate in rates.items()]
    return markdown_table(("server", "calls/s, median of three", "of bare FastAPI"), rows)


def _objective() -> str:
    rows = []
    for name, found in load_record("objective").items():
        load, policy = name.split(", ")
        if load == "steady":
            steps = found.values() if isinstance(found, dict) else found
            rows += [(s["load"], policy, s["share"], s["p95_ms"], s["mean_ms"], s["power_w"]) for s in steps]
    rows.sort(key=lambda row: row[0])
    return markdown_table(("load", "policy", "share within", "p95, ms", "mean, ms", "power, W"), rows)


def _soak() -> str:
    return markdown_table(("", ""), _soak_facts(load_record("soak")).items())


def _soak_facts(record: dict[str, Any]) -> dict[str, object]:
    memory = record["rss_mb"]
    return {
        "minutes": record["minutes"],
        "calls": record["calls"],
        **{f"requests counted as {key}": count for key, count in record["counted_by_the_server"].items()},
        "policies swapped": sum(record["swaps"].values()),
        "faults ordered": sum(record["faults"].values()),
        "memory in the first calm half minute after minute 2, MB": memory["early"],
        "memory in the last calm half minute, MB": memory["end"],
        "memory when all was over, MB": memory["idle after"],
        "wrong answers, and contradictions in the counts": record["wrong_in_all"],
    }


def _identity() -> str:
    record = load_record("identity")
    network, mixed = record["network"], record["mixed"]
    seen = mixed["samples_seen_by_clients"]
    rows = [
        ("images answered by a network", network["pictures"] - network["others"]),
        ("batch sizes", network["batch_sizes"]),
        ("calls of every kind", mixed["calls"]),
        *(
            (name, seen[status])
            for name, status in (("samples answered", "200"), ("rejected", "503"), ("expired", "504"))
        ),
        ("calls abandoned", mixed["abandoned"]["calls"]),
        ("policies swapped", mixed["swaps"]),
        ("models loaded", mixed["loads"]),
        ("wrong", mixed["wrong_in_all"]),
    ]
    return markdown_table(("", ""), rows)


def _fuzz() -> str:
    record = load_record("fuzz")
    rows = [("hostile inputs of the parsers", record["parser"]["cases"], record["parser"]["failures"])]
    routes = record["routes"]
    rows.append(("calls drawn from the OpenAPI document", routes["calls"], routes["failures"]))
    return markdown_table(("", "number", "failures"), rows)


def _user_models() -> str:
    record = load_record("user_models")
    sources = record["sources"].values()
    samples, wrong = (sum(source[key] for source in sources) for key in ("samples", "wrong"))
    rows = [
        ("samples through FILE.py, FILE.pt2, FILE.onnx", samples, "wrong answers", wrong),
        ("damaged bodies for two inputs", record["hostile"]["bodies"], "5xx", record["hostile"]["failures"]),
    ]
    rows += [
        (f"requests beside {about}", fault["innocent"], "lost", fault["innocent_lost"])
        for about, fault in record["faults"].items()
    ]
    return markdown_table(("", "number", "failure", "failures"), rows)


def _reload() -> str:
    record = load_record("reload")
    rows = []
    for about, part in (("measured meanwhile", record["measured_profile"]), ("given", record["given_profile"])):
        sent, answered = (sum(part[key].values()) for key in ("sent", "answered"))
        seconds, p95 = sorted(part["load_seconds"]), part["other_p95_ms"]
        loading = part["other_p95_ms_while_loading"]
        rows.append(
            (
                *(about, part["loads"], f"{seconds[0]:.1f} to {seconds[-1]:.1f}", f"{answered} of {sent}"),
                *(part["old_after_new"], p95, loading, f"{loading / p95 - 1:+.0%}"),
            )
        )
    columns = ("profile of the new version", "loads", "s per load", "answered", "old answers after new ones")
    return markdown_table((*columns, "other model's p95, ms", "while loading, ms", "rise"), rows)


def _faults() -> str:
    return faults_table(load_record("faults"))


def _decision() -> str:
    return markdown_table(("policy", "us"), load_record("decision").items())


def _mutations() -> str:
    record: list[dict[str, Any]] = load_record("mutations")
    rows = ((one["mutation"], "<br>".join(f"`{name}`" for name in one["caught_by"])) for one in record)
    return markdown_table(("safeguard that is removed", "test that fails"), rows)


def _upstream() -> str:
    record = load_record("upstream")
    load, added, killed, answers = (record[key] for key in ("load", "added", "killed", "answers"))
    rows = [
        (name, *(f"{run[key]:.1f}" for key in ("mean_ms", "p95_ms", "mean_batch_size")))
        for name, run in load["mean"].items()
    ]
    statuses = ", ".join(f"{count} x {status}" for status, count in killed["statuses"].items())
    back = ", ".join(f"{seconds:.2f}" for seconds in killed["answered_after_triton_was_ready_s"])
    facts = [
        ("samples compared with Triton's own answers", answers["samples"]),
        ("calls with a wrong answer", answers["wrong_calls"]),
        ("a call of one sample to Triton, median, ms", f"{added['direct_ms']:.2f}"),
        ("added to a batch of one, ms", f"{added['batch_added_ms']:.2f}"),
        ("added to a call of one sample, ms", f"{added['call_added_ms']:.2f}"),
        (f"answers while Triton was killed {killed['kills']} times", statuses),
        ("first answer after Triton was ready again, s", back),
    ]
    head = ("batching", "mean response time, ms", "p95, ms", "mean batch size")
    return f"{markdown_table(head, rows)}\n\n{markdown_table(('', ''), facts)}"


def _graph_like() -> str:
    record = load_record("graph_like")
    row = [record[key] for key in ("requests_per_s", "mean_batch_size", "idle_gap_median_us", "loop_us_per_request")]
    head = ("answers/s", "mean batch size", "idle gap, median, us", "CPU of the event loop, us/request")
    return markdown_table(head, [row])


def _watched_page() -> str:
    return watched_page_table(load_record("watched_page"))


def _peers() -> str:
    figure = "![Response time, idle gap and requests a second of each server](../docs/figures/peers.png)"
    return f"{figure}\n\n{recorded('peers')}"


def _overload() -> str:
    """The record's rows at twice the capacity."""
    head, rule, *rows = recorded("overload").splitlines()
    return "\n".join([head, rule, *(row for row in rows if "| 2.0 |" in row)])


OPERATION = (
    Section(
        "Real models on a CPU",
        "real_models",
        "Models with trained weights from packages, on two cores beside the client. Mean ± half of the 95 % interval "
        "over the rounds (p95) of the response times in ms: three rounds, one of the classifier, pages and encoder. "
        "† is a mean more than 3 per cent above another server's. "
        "Load 1 is near Batchwright's saturation. Each server has the same class, is started anew in each round, and "
        "has a few seconds to warm up. `Batchwright, before` is 60af9a7. mosec, BentoML, Ray Serve and Triton have "
        "their default settings. LitServe's are max_batch_size and batch_timeout; with 0 ms it is busy while it waits. "
        "Near saturation, and between two starts of the same server, means differ by a factor of two, so that only "
        "large differences count.",
        _real_models,
    ),
    Section(
        "Predicted and measured",
        "predictions",
        "The encoder under Poisson arrivals of texts with the lengths of a production trace: what the server predicts, "
        "and measures in the last minute, as means over the time after the first minute. It starts without a profile, "
        "or with one that is wrong by a factor; then another process takes one of the two cores for a third of the "
        "time, at half the rate, once with a bound; then texts become twice as long. While the device does not change, "
        "predictions are 11 to 17 per cent below what is measured. In the first 25 s after the core was taken the "
        "learned time of one request was up to 19 times as long, and with the bound, which the first minute missed for "
        "9 per cent of the requests, 90 per cent missed it; then the model used fewer threads. The prediction was of "
        "no use in that time. In the last minute no request missed the bound. Measured on 4dca5a8.",
        lambda: f"![Predicted and measured response times](figures/predictions.png)\n\n{recorded('predictions')}",
    ),
    Section(
        "Saving CPU time within a bound",
        "resources",
        "A 95th percentile of two, four and eight times the learned time of one request, at loads 0.2, 0.5 and 0.7 of "
        "the learned capacity, for three models on two cores beside the client: greedy, the fixed timeout of least CPU "
        "time by simulation, and the policy solved for the bound, three rounds in turns. Rounds of 100 requests, 60 of "
        "the encoder, are short, so that rounds differ more than policies do. At eight times and loads 0.2 and 0.5 the "
        "classifier's batches took 28 and 11 per cent less CPU time than greedy's (predicted 29 and 28), and 7 per "
        "cent less and 8 per cent more than with the timeout; elsewhere 7 per cent less to 3 "
        "per cent more than greedy's. Solving again adds up to a fifth. The others saved nothing beyond the "
        "intervals: times grow with the batch. At load 0.5 the voice detector took a third more than "
        "with the timeout. Of 14 bounds that can be kept seven were missed, four by greedy, too. Measured on 7967165; "
        "on 0073319 all of the classifier's were kept. [All "
        "cells](../benchmarks/records.md#saving-cpu-time-within-a-bound).",
        lambda: "",
    ),
    Section(
        "On a GPU",
        "gpu",
        "ResNet-50 with random weights on one H100: the server beside its peers on the same CUDA graphs, all with the "
        "clients on one machine of 16 cores. This was version 0.2.0, with "
        "six processes for HTTP, which are gone since; no GPU has run the present version. At the highest rate HTTP "
        "limited it, far below what the GPU computes: the bound was missed by far, and greedy had the smaller mean. It "
        "took more CPU time than mosec. LitServe takes images as base64 in JSON, the others as bytes. Other "
        "networks, and times, energies and outputs by batch size, are in [all "
        "records](../benchmarks/records.md#on-a-gpu).",
        _gpu_servers,
    ),
    Section(
        "Keeping a percentile",
        "objective",
        "95 per cent within 100 ms, as clients see it. Each policy is for 98 ms, which leaves 2 ms for HTTP and the "
        "clients: `smdp:slo_p95_ms=98`, the same with `policy_form=batch-size`, and the fixed timeout of least power; "
        "greedy has no objective. Power is by the profile. The best timeout takes up to 0.6 per cent less power than "
        "maximum ages, and misses the bound at loads 0.3 and 0.7. Maximum ages were measured on 4d2e338, the others on "
        "0b60889.",
        _objective,
    ),
    Section(
        "Overload",
        "overload",
        "More requests than the device can serve, from clients with a timeout of 1 s. Goodput counts answers in time. "
        "Other servers are as they are started by default, and with the bound of the queue that a careful operator "
        "sets: as many requests as are answered within 0.8 of the timeout. LitServe's is uvicorn's, which counts "
        "connections, idle ones too. Above the capacity and without a bound, other servers answer less than a fifth of "
        "what ours answers in time. With it mosec answers as much within 2 per cent, and sooner, since its queue is "
        "shorter; LitServe 6 to 8 per cent less. Ours has no such setting: the bound follows from the profile and the "
        "clients' timeouts. Here at twice the capacity; [all loads](../benchmarks/records.md#overload).",
        _overload,
    ),
)

CHECKS = (
    Section(
        "Real models: shares within a bound",
        "real_models",
        "The servers and cells of [benchmarks](../docs/benchmarks.md#real-models-on-a-cpu). Lines of code are "
        "those of the server's script, without the model's class and docstrings. Batchwright needs none.",
        lambda: shares_table(load_record("real_models")),
    ),
    Section(
        "Beside other servers",
        "peers",
        "A FastAPI batcher of 60 lines, mosec, and our server, on the same emulated devices with greedy batching, in "
        "turns. An open loop of Poisson arrivals of 150,528-byte images, then wrk. Each server decodes JPEGs itself. "
        "The idle gap is the time between two batches when a request waited. Where one process of ours loses by more "
        "than 5 per cent: the bare batcher is faster at load 0.3, answers more JPEGs and needs less memory; mosec "
        "answers more bodies of 1 KB and takes less CPU time.",
        _peers,
    ),
    Section(
        "Saving CPU time within a bound",
        "resources",
        "All cells of [benchmarks](../docs/benchmarks.md#saving-cpu-time-within-a-bound): measured, ± half of the 95 % "
        "interval over three rounds, and predicted in brackets. Where there is no solved policy, no policy keeps the "
        "bound, by the model. The lower bound is that of any policy.",
    ),
    Section(
        "Overload",
        "overload",
        "The servers of [benchmarks](../docs/benchmarks.md#overload) at all loads.",
    ),
    Section(
        "Measured against simulated",
        "live_against_simulated",
        "One minute of Poisson arrivals over HTTP with 150,528-byte bodies, and the same arrivals in the simulator. "
        "The difference is what HTTP and the interpreter cost; `bare` is the shortest batcher that FastAPI allows.",
    ),
    Section(
        "Priority levels",
        "priorities",
        "An image classifier on two cores beside the client: bulk from 64 clients, each with its next call after the "
        "last answer, and interactive calls at a twentieth of the capacity. Strict priority fills batches with "
        "interactive calls first. The bound is 0.6 of the 95th percentile that it gave them. Mean ± half of the 95 % "
        "interval over three rounds of a minute, in turns. The prediction is for bulk that always waits, from the "
        "times as learned in the same round. The bound was kept in all rounds. Bulk got as much as under strict "
        "priority, within the intervals, and 0.85, 0.93 and 1.08 of what is predicted. Measured on 36d19e6.",
        lambda: f"![Throughput of bulk by the bound](../docs/figures/priorities.png)\n\n{recorded('priorities')}",
    ),
    Section(
        "Gateway throughput",
        "ceiling",
        "wrk on 32 connections sends images of 150,528 bytes to a device that takes a microsecond for each batch. An "
        "earlier record, of a machine more than twice as fast and of the code before one protocol served every "
        "request, had 1.71 and 2.20 of bare FastAPI. In turns on one machine, 50c3ba6 answered about a tenth fewer "
        "calls than 0dd40f0, and took a third more CPU time for each in an open loop of batches of 1.3; b128e57 "
        "answered a fifth fewer, and took an eighth more.",
        _ceiling,
    ),
    Section(
        "Adapting to a device that changes",
        "closed_loop",
        "The energy of a batch beyond that of its requests becomes four times as large while the device serves under "
        "`smdp:w2=16`. Cost is the mean response time in ms plus 16 times the mean power in W, over 40 s that begin "
        "10 s after the change.",
    ),
    Section(
        "On a GPU",
        "gpu",
        "Implementations of the network, outputs beside the CPU's, service times and energies, and the server beside "
        "its peers on the same network, from one call of 470 s and one of 180 s. Batchwright had six processes for "
        "HTTP then, which are gone since. LitServe takes images as base64 in JSON, the others as bytes.",
        _gpu,
    ),
    Section(
        "A device as fast as captured graphs",
        "graph_like",
        "wrk on 64 connections sends images of 150,528 bytes to an emulated device that takes 0.2 + 0.018 b ms, and so "
        "could serve 51,000 a second. The two processors also ran wrk, the device, which spins, and other work, so "
        "that the CPU time of a request says more than the rate.",
        _graph_like,
    ),
    Section(
        "gRPC beside HTTP",
        "grpc_calls",
        "The Open Inference Protocol by NVIDIA's clients for asyncio, 32 calls at once, with a device that takes a "
        "microsecond for each batch; the client takes most of the CPU time. Medians of three runs in turns.",
    ),
    Section(
        "HTTP servers",
        "http_servers",
        "The same batcher, which runs its batches in no time, behind uvicorn, granian, and a minimal protocol under "
        "uvicorn that receives the body in place (no limits, ids, logs or metrics).",
    ),
    Section(
        "A decision",
        "decision",
        "Time to decide and to take the batch out of a queue with 1,000 waiting requests.",
        _decision,
    ),
    Section(
        "A watched dashboard",
        "watched_page",
        "CPU time of a server of ten models on four emulated devices, as a share of one processor, without its page "
        "and with it open in a browser, in turns. Shares are medians. The last two columns are what the page fetches.",
        _watched_page,
    ),
    Section(
        "Attacks on the HTTP interface",
        "attacks",
        "Attacks on a server with a memory budget of 64 MiB, beside a normal load of 0.5 (`honest`) "
        "and a liveness probe every 50 ms. All bounds hold. The longest gap of 5b was 0.1 s when a server stopped "
        "reading pipelined requests beyond a number of them; now all are served, one after another.",
    ),
    Section(
        "Identity",
        "identity",
        "Every answer is compared with that of its own input: images for a network on the CPU, and calls of every kind "
        "to two models of an emulated device, with timeouts, clients that leave, policy swaps, and loads of one of the "
        "models. `wrong` counts wrong and lost answers, contradictions between the counts of the server and of the "
        "clients, and memory that is not free at the end.",
        _identity,
    ),
    Section(
        "Soak",
        "soak",
        "Bursts, corrupt images, abandoned calls, timeouts, policy swaps, and a fault of the device every 30 s.",
        _soak,
    ),
    Section("Hostile input", "fuzz", "Randomly invalid bodies, headers and images.", _fuzz),
    Section(
        "Models of users",
        "user_models",
        "One function from three sources, every sample identified; faults of one request in fifty; damaged bodies.",
        _user_models,
    ),
    Section(
        "Models loaded again",
        "reload",
        "Two models share a device at load 0.5, and one of them is replaced ten times by another version of its file. "
        "Batches take 10 + b ms. The other model's p95 is that of calls that were sent while a version was loaded, or "
        "in the first second after that began, and of all others.",
        _reload,
    ),
    Section(
        "Faults of a model's process",
        "faults",
        "A Python model on the CPU at load 0.5, and beside it a model of another server, on a device of its own. "
        "Every 5 s the process is killed, or an input makes it die, hang beyond the batch timeout of 1 s, or need too "
        "much memory.",
        _faults,
    ),
    Section(
        "In front of Triton",
        "upstream",
        "A real Triton (nvidia-pytriton) whose model takes 8 + 1.6 b ms: our solved policy in front of it, without its "
        "dynamic batching, and its own dynamic batching at two delays, on the same Poisson arrivals at load 0.7.",
        _upstream,
    ),
    Section(
        "Mutations",
        "mutations",
        "Each safeguard is removed from a copy of the code; a test has to fail.",
        _mutations,
    ),
    Section(
        "A bound on a pipeline",
        "pipeline_bound",
        "95 per cent of the calls within the bound, split over two models on emulated devices: one request of the "
        "first, then 1 to 6 at once of the second. One round of 25 s a cell. The split bound is kept with 25, 19 and "
        "11 per cent less power than greedy, and its mean response times are 4.4, 2.8 and 1.8 times as long.",
    ),
    Section("Two devices", "fleet", "One server with two emulated devices, measured and simulated."),
    Section("Planning", "planning", "Fleets as `solve-policy --plan` sizes them, checked by simulation."),
    Section("Ray Serve", "ray_serve", "Two replicas on emulated devices behind Ray's proxies."),
    Section(
        "Text lines of different widths",
        "ocr",
        "examples/ocr with ONNX Runtime on one core, at 1.5 times the rate that it can serve; accuracy is 1 - edit "
        "distance / characters. The network loses characters of a line that is padded far beyond its end, so that bins "
        "raise the accuracy, too. One line alone takes less time than its share of a batch on this CPU, so that "
        "`serial` is the fastest policy.",
    ),
)

PAGES = (
    Page(
        "docs/benchmarks.md",
        "Benchmarks",
        from_records("docs/benchmarks.md", "benchmarks.page", "benchmarks/records")
        + """ The parts of the server, attacks, faults and other checks are in [all records](../benchmarks/records.md),
policies by simulation in [studies](../research/studies.md).""",
        OPERATION,
    ),
    Page(
        "benchmarks/records.md",
        "All records",
        from_records("benchmarks/records.md", "benchmarks.page", "benchmarks/records")
        + " What compares servers and policies is in [benchmarks](../docs/benchmarks.md).",
        CHECKS,
    ),
)


def main() -> None:
    """Write the pages."""
    argument_parser(__doc__).parse_args()
    for page in PAGES:
        page.write()


if __name__ == "__main__":
    main()
