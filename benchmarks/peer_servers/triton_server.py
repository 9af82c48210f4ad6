"""Triton, as nvidia-pytriton starts it, with a model whose batch takes the time of an accelerator's.

Run by an interpreter that has nvidia-pytriton. SERVICE_TIMES in the environment is l(b), s, from b = 1, as JSON. The
model doubles its input x, FP32 [4], and adds 1. It is served as `plain`, without dynamic batching, and as `delay_D` for
each maximum queue delay of D ms.
"""

import argparse
import json
import os
import time

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

TIMES = json.loads(os.environ["SERVICE_TIMES"])
_WAKE_UP = 3e-4  # s; about the delay of a sleeping thread's wake-up


@batch
def double(x: np.ndarray) -> dict[str, np.ndarray]:
    """Take the service time of the batch."""
    end = time.monotonic() + TIMES[len(x) - 1]
    while (left := end - time.monotonic()) > 0:
        time.sleep(max(0.0, left - _WAKE_UP))
    return {"y": 2 * x + 1}


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, nargs=3, required=True, help="HTTP, gRPC, metrics")
    parser.add_argument("--workspace", required=True, help="a folder that does not exist yet")
    parser.add_argument("--delays-ms", type=int, nargs="*", default=[], help="maximum queue delays")
    chosen = parser.parse_args()
    http, grpc, metrics = chosen.ports
    batchers = {f"delay_{ms}": DynamicBatcher(max_queue_delay_microseconds=1000 * ms) for ms in chosen.delays_ms}
    config = TritonConfig(
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        metrics_address="127.0.0.1",
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        allow_gpu_metrics=False,
    )
    open_to_all = TritonSecurityConfig(restricted_endpoints=[])
    with Triton(config=config, workspace=chosen.workspace, security_config=open_to_all) as triton:
        for name, batcher in {"plain": None, **batchers}.items():
            triton.bind(
                model_name=name,
                infer_func=double,
                inputs=[Tensor(name="x", dtype=np.float32, shape=(4,))],
                outputs=[Tensor(name="y", dtype=np.float32, shape=(4,))],
                config=ModelConfig(max_batch_size=len(TIMES), batcher=batcher),
            )
        triton.serve()


if __name__ == "__main__":
    main()
