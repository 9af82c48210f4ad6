"""BentoML with a model of benchmarks/servers/real_models.py: POST /predict with {"bodies": [in base64]}.

BentoML's processes import this file again: the settings are in the environment.
"""

import argparse
import base64
import os
import sys
from typing import Any

import bentoml

from benchmarks.servers.real_models import MODELS, serve_alike

_BATCH, _WAIT = int(os.environ.get("BATCH", "16")), int(os.environ.get("WAIT", "10"))  # ms
_BATCHES: dict[str, Any] = {"batchable": True, "batch_dim": 0, "max_batch_size": _BATCH, "max_latency_ms": _WAIT}


@bentoml.service(workers=1, traffic={"timeout": 600})
class Served:
    """One model, whose batches BentoML collects."""

    def __init__(self) -> None:
        self._model: Any = MODELS[os.environ["MODEL"]]()
        self._model.load("cpu")

    @bentoml.api(**(_BATCHES if _BATCH > 1 else {}))
    def predict(self, bodies: list[str]) -> list[dict[str, Any]]:
        """Decode, run and render a batch."""
        samples = [self._model.decode(base64.b64decode(body), "") for body in bodies]
        return [self._model.render(output) for output in serve_alike(self._model, samples)]


def main() -> None:
    """Serve one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", required=True)
    parser.add_argument("--batch", default="16")
    parser.add_argument("--wait", default="10", help="max_latency_ms")
    chosen = parser.parse_args()
    os.environ |= {"MODEL": chosen.model, "BATCH": chosen.batch, "WAIT": chosen.wait, "BENTOML_DO_NOT_TRACK": "True"}
    service = "benchmarks.peer_servers.real_bentoml_server:Served"
    line = ["-m", "bentoml", "serve", service, "--host", "127.0.0.1", "--port", chosen.port]
    os.execv(sys.executable, [sys.executable, *line])  # noqa: S606


if __name__ == "__main__":
    main()
