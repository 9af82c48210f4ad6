"""A server on an emulated device whose batches take more energy after a while: the part that is the same for all sizes.

The parts are the server's own, with the controller (--adapt) or without it.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from policies.catalog import choose
from policies.profile import Profile, load_profile
from server.api.inference import Inference
from server.app.application import Application
from server.app.http_server import bind
from server.app.lifecycle import serve
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch, Logits, ThreadExecutor
from server.energy.meters import CountingMeter, LastReading
from server.models.images.codec import emulated_model
from server.scheduling.controller import Controller
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.connection import Listener
from server.transport.memory_budget import MemoryBudget
from server.transport.middleware import RequestMiddleware

PROFILE = "googlenet-tesla-p4-x10"
FIXED_ENERGY = 4.0  # times the energy of a batch beyond that of its requests
W2 = 16.0
CHANGE_AFTER = 10.0  # s


def changed(profile: Profile) -> Profile:
    """The profile after the change, for a profile whose energies are affine in the batch size.

    The best policy then waits for larger batches. Scaling times and energies would leave it nearly as it is, so that
    adapting or not would cost the same.
    """
    assert profile.energies is not None
    first, second = profile.energies[:2]
    more = (FIXED_ENERGY - 1.0) * (2.0 * first - second)
    return replace(profile, name=f"{profile.name}-changed", energies=tuple(e + more for e in profile.energies))


class ChangingDevice:
    """Plays one profile for some seconds from its first batch on, then another one."""

    def __init__(self, before: Profile, after: Profile, seconds: float, meter: CountingMeter) -> None:
        """Change `seconds` after the first batch."""
        self._devices = [EmulatedDevice({"demo": profile}, meter) for profile in (before, after)]
        self._seconds = seconds
        self._change_at = float("inf")

    def serve(self, batch: Batch, /) -> list[Logits]:
        """Serve by the profile of the moment."""
        self._change_at = min(self._change_at, time.monotonic() + self._seconds)
        return list(self._devices[time.monotonic() >= self._change_at].serve(batch))


def serve_changing(port: int, believed: Profile, played: tuple[Profile, Profile], adapt: bool) -> None:
    """Serve until SIGTERM.

    Args:
        port: on 127.0.0.1.
        believed: the profile that the policy is solved for.
        played: the device's profiles before and after the change.
        adapt: whether the controller solves again when it detects the drift.
    """
    meter = CountingMeter()
    device = ChangingDevice(*played, CHANGE_AFTER, meter)
    chosen = {"demo": choose(f"smdp:w2={W2}", believed)}
    metrics, pool = Metrics(), ThreadPoolExecutor()
    dispatcher = Dispatcher(ThreadExecutor(device, "changing"), chosen, metrics, time.monotonic)
    metrics.watch_meter("changing", meter.source, LastReading(meter))
    if adapt:
        dispatcher.accounting.on_served = Controller(dispatcher, metrics, meter, pool).served
    fleet = Fleet([dispatcher])
    inference = Inference({"demo": emulated_model("demo", 32)}, fleet, metrics, pool, 1024, MemoryBudget(2**30))
    app = Application(inference, "benchmark")
    with bind("127.0.0.1", port) as bound:
        serve(RequestMiddleware(app, find_inference=app.find_inference), fleet, bound, 0.0, Listener(), {})


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--solved-for", choices=("old", "new"), default="old", help="the device before or after")
    parser.add_argument("--adapt", action="store_true", help="solve again when the device has changed")
    chosen = parser.parse_args()
    old = load_profile(PROFILE)
    new = changed(old)
    serve_changing(chosen.port, old if chosen.solved_for == "old" else new, (old, new), chosen.adapt)


if __name__ == "__main__":
    main()
