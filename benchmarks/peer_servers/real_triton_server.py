"""Triton's Python backend, as nvidia-pytriton starts it, with a model of benchmarks/servers/real_models.py.

The model `model` takes the input `body`, BYTES [1], and returns `answer`, BYTES [1], as JSON.
"""

import argparse
import json
import tempfile
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.servers.real_models import MODELS, serve_alike
from benchmarks.support.harness import free_port


def main() -> None:
    """Serve one model until terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--wait", type=int, default=0, help="maximum queue delay, ms")
    chosen = parser.parse_args()
    model: Any = MODELS[chosen.model]()
    model.load("cpu")

    @batch
    def answer(body: np.ndarray) -> dict[str, np.ndarray]:
        samples = [model.decode(each, "") for (each,) in body.tolist()]
        answers = [json.dumps(model.render(output)).encode() for output in serve_alike(model, samples)]
        return {"answer": np.array(answers, np.object_)[:, None]}

    config = TritonConfig(
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        metrics_address="127.0.0.1",
        http_port=chosen.port,
        grpc_port=free_port(),
        metrics_port=free_port(),
        allow_gpu_metrics=False,
    )
    with tempfile.TemporaryDirectory() as folder, Triton(config=config, workspace=f"{folder}/workspace") as triton:
        triton.bind(
            model_name="model",
            infer_func=answer,
            inputs=[Tensor(name="body", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name="answer", dtype=bytes, shape=(1,))],
            config=ModelConfig(
                max_batch_size=chosen.batch, batcher=DynamicBatcher(max_queue_delay_microseconds=1000 * chosen.wait)
            ),
        )
        triton.serve()


if __name__ == "__main__":
    main()
