"""Models of users: the same function from three sources, faults of the code, and hostile bodies.

- 2,000 concurrent calls of 1 to 32 samples each go to one function as FILE.py, FILE.pt2 and FILE.onnx. Every sample is
  different, and every output is compared with the function.
- One request in 50 makes the model's code fail; the others must be answered correctly.
- Damaged bodies go to a model with two inputs. None may be answered with a 5xx.

Needs the extra onnx and onnxscript.
"""

import asyncio
import json
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.servers.user_models import FAULTS, WEIGHT
from benchmarks.support.harness import ROOT, Server, argument_parser, load_record, save_record, serving

_SOURCE = ROOT / "benchmarks" / "servers" / "user_models.py"
_LARGEST_CALL = 32  # samples
_ONE_IN = 50  # requests
_CONNECTIONS = 64
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 33, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "\ud800", "FP32", "INT64", "BYTES", "shift", [], [[]], [[1], [2, 3]], {}, {"a": {"b": []}}),
    *([1] * 4, [1] * 8, [[1] * 4] * 2, "9" * 400),
)


def _export(folder: Path) -> tuple[Path, Path]:
    """Export the function of `Linear` with torch, and to ONNX."""
    import torch

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": x @ torch.from_numpy(WEIGHT) + 2 * shift, "sum": x.sum(1, keepdim=True)}

    batch = torch.export.Dim("batch", max=64)
    example, shapes = (torch.zeros(2, 4), torch.zeros(2, 2)), {"x": {0: batch}, "shift": {0: batch}}
    program, onnx = folder / "linear.pt2", folder / "linear.onnx"
    torch.export.save(torch.export.export(Net().eval(), example, dynamic_shapes=shapes), program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Net().eval(), example, onnx, dynamic_shapes=shapes, output_names=["y", "sum"], verbose=False)
    return program, onnx


async def _call(session: aiohttp.ClientSession, url: str, tensors: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send binary tensors; return the status, and the outputs as arrays, or the error."""
    entries = [
        {"name": name, "datatype": "FP32", "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, array in tensors.items()
    ]
    document = json.dumps({"inputs": entries}).encode()
    body = document + b"".join(array.tobytes() for array in tensors.values())
    headers = {"Inference-Header-Content-Length": str(len(document))}
    async with session.post(url, data=body, headers=headers) as response:
        answer = await response.json()
    if response.status != 200:
        return response.status, answer
    return 200, {out["name"]: np.reshape(out["data"], out["shape"]) for out in answer["outputs"]}


def _session(connections: int = 0) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections), timeout=aiohttp.ClientTimeout(total=120)
    )


async def _identify(url: str, seed: int, calls: int) -> dict[str, Any]:
    """Make all calls at once, and compare each output with the function."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, _LARGEST_CALL + 1, calls)
    inputs = [
        {name: rng.normal(size=(size, width)).astype(np.float32) for name, width in (("x", 4), ("shift", 2))}
        for size in sizes
    ]
    async with _session() as session:
        answers = await asyncio.gather(*(_call(session, url, tensors) for tensors in inputs))
    worst, wrong = 0.0, 0
    for tensors, (status, outputs) in zip(inputs, answers, strict=True):
        if status != 200:
            wrong += 1
            continue
        y = tensors["x"] @ WEIGHT + 2 * tensors["shift"]
        error = max(np.abs(outputs["y"] - y).max(), np.abs(outputs["sum"][:, 0] - tensors["x"].sum(1)).max())
        worst, wrong = max(worst, float(error)), wrong + bool(error > 1e-5)
    return {"calls": calls, "samples": int(sizes.sum()), "wrong": wrong, "largest_error": worst}


def same_from_three_sources(calls: int = 2000) -> dict[str, Any]:
    """Serve one function from three sources, and check all answers."""
    with tempfile.TemporaryDirectory() as name:
        program, onnx = _export(Path(name))
        models = (f"python={_SOURCE}:Linear", f"exported={program}", f"onnx={onnx}")
        with serving(*models, "--device", "cpu", "--queue-capacity", "200000") as server:
            return {
                model: asyncio.run(_identify(f"{server.url}/v2/models/{model}/infer", seed, calls))
                for seed, model in enumerate(("python", "exported", "onnx"))
            }


async def _load_with_fault(url: str, code: int, requests: int) -> dict[str, Any]:
    async with _session() as session:

        async def one(index: int) -> tuple[bool, int, str]:
            poisoned = index % _ONE_IN == _ONE_IN // 2
            await asyncio.sleep(0.004 * index)
            x = np.array([[code if poisoned else 1, index]], np.float32)
            status, outputs = await _call(session, url, {"x": x})
            right = status == 200 and np.array_equal(outputs["y"], 2 * x)
            return poisoned, status if right or status != 200 else -1, outputs.get("error", "")

        answers = await asyncio.gather(*map(one, range(requests)))
    innocent = [status for poisoned, status, _ in answers if not poisoned]
    failed = Counter((status, error) for poisoned, status, error in answers if poisoned)
    return {
        "innocent": len(innocent),
        "innocent_lost": sum(status != 200 for status in innocent),
        "poisoned": [{"status": status, "error": error, "count": n} for (status, error), n in failed.items()],
    }


def faults(codes: Iterable[int] = FAULTS, requests: int = 500) -> dict[str, Any]:
    """Let the model's code fail in every way, one way after the other, on one server."""
    arguments = ("--device", "cpu", "--policy", "timeout:20", "--hung-after-s", "0.3")
    with serving(f"faulty={_SOURCE}:Faulty", *arguments) as server:
        url = f"{server.url}/v2/models/faulty/infer"
        return {FAULTS[code]: asyncio.run(_load_with_fault(url, code, requests)) for code in codes}


def _bodies(count: int) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Damaged calls: path, body and headers."""
    rng = random.Random(0)
    for _ in range(count):
        document: dict[str, Any] = {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
                {"name": "shift", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]},
            ]
        }
        if rng.random() < 0.3:
            yield "/predict", _damaged(rng, {"inputs": {"x": [1, 2, 3, 4], "shift": [1, 2]}}, b""), {}
            continue
        blob = b""
        if rng.random() < 0.5:
            for entry, size in zip(document["inputs"], (16, 8), strict=True):
                del entry["data"]
                entry["parameters"] = {"binary_data_size": size}
            blob = bytes(rng.randrange(256) for _ in range(24))
        if rng.random() < 0.3:
            document["outputs"] = [{"name": rng.choice(["y", "sum", "z"]), "parameters": {"classification": 1}}]
        body = _damaged(rng, document, blob)
        length = len(body) - len(blob) if rng.random() < 0.8 else rng.choice([0, 1, -1, 7, len(body) + 1, 10**18])
        headers = {"Inference-Header-Content-Length": str(length)} if blob or rng.random() < 0.1 else {}
        yield "/v2/models/linear/infer", body, headers


def _damaged(rng: random.Random, document: Any, blob: bytes) -> bytes:
    """The document with up to three values, keys, bytes or ends changed."""
    for _ in range(rng.randrange(3)):
        holder: Any = document
        while True:
            key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            inner = holder[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
                break
            holder = inner
        if rng.random() < 0.2:
            del holder[key]
        elif rng.random() < 0.2 and isinstance(holder, list):
            holder *= rng.choice([2, 9])
        else:
            holder[key] = deepcopy(rng.choice(_ODD))
        if not document:
            break
    body = json.dumps(document).encode()
    if rng.random() < 0.3 and body:
        at = rng.randrange(len(body))
        body = rng.choice([body[:at], body[at:], body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :], body * 2])
    return body + (blob if rng.random() < 0.8 else blob[: rng.randrange(len(blob) + 1)])


def hostile(count: int) -> dict[str, Any]:
    """Send damaged bodies to a model with two inputs, and count the statuses."""

    async def send_all(server: Server) -> tuple[Counter[int], list[str]]:
        statuses: Counter[int] = Counter()
        failures: list[str] = []
        bodies = _bodies(count)

        async def sender(session: aiohttp.ClientSession) -> None:
            for path, body, headers in bodies:
                async with session.post(server.url + path, data=body, headers=headers) as response:
                    answer = await response.read()
                statuses[response.status] += 1
                if response.status >= 500 or (response.status != 200 and b"\n" in answer):
                    failures.append(f"{response.status} {answer[:200]!r} for {path} {body[:500]!r} {headers}")

        async with _session(_CONNECTIONS) as session:
            await asyncio.gather(*(sender(session) for _ in range(_CONNECTIONS)))
        return statuses, failures

    with serving(f"linear={_SOURCE}:Linear", "--device", "cpu") as server:
        statuses, failures = asyncio.run(send_all(server))
    return {
        "bodies": sum(statuses.values()),
        "statuses": {str(status): n for status, n in sorted(statuses.items())},
        "failures": len(failures),
        "first_failures": failures[:5],
    }


def main() -> None:
    """Run all parts, print and record; exit code 1 if an answer was wrong or lost."""
    parser = argument_parser(__doc__)
    parser.add_argument("--bodies", type=int, default=50_000, help="damaged bodies")
    chosen = parser.parse_args()
    record = load_record("user_models")
    record["sources"] = same_from_three_sources()
    record["faults"] = faults()
    record["hostile"] = hostile(chosen.bodies)
    save_record("user_models", record)
    print(json.dumps(record, indent=1))
    wrong = sum(each["wrong"] for each in record["sources"].values())
    lost = sum(each["innocent_lost"] for each in record["faults"].values())
    raise SystemExit(1 if wrong or lost or record["hostile"]["failures"] else 0)


if __name__ == "__main__":
    main()
