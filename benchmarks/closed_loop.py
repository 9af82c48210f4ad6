"""The closed loop, live over HTTP: a device that becomes half as slow again mid-run is noticed, and solved for anew.

The server runs on an emulated device whose service times and energies jump after a while. Beside it in the table: the
policy that is solved for the old device throughout, and the one solved for the new device, both on that same device.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.serving import Server, command_line, run_json, running, save
from policies.catalog import choose
from policies.profile import Profile, load_profile
from server.api.inference import Inference
from server.app.application import create_app
from server.app.lifecycle import bind, serve
from server.backends.emulated import EmulatedDevice
from server.backends.executor import Batch, Logits, ThreadExecutor
from server.energy.meters import CountingMeter, LastReading
from server.models.images import emulated_model
from server.scheduling.controller import Controller
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.fleet import Fleet
from server.telemetry.metrics import Metrics
from server.transport.connection import Listener
from server.transport.memory_budget import MemoryBudget

BASE = "googlenet-tesla-p4-x10"
JUMP = 1.5
W2 = 16.0
BEFORE, SETTLING, AFTER = 10.0, 10.0, 40.0  # s


def jumped(profile: Profile) -> Profile:
    """Half as slow again, and half as much energy again."""
    return replace(
        profile,
        name=f"{profile.name}-jumped",
        service_times=tuple(JUMP * t for t in profile.service_times),
        energies=None if profile.energies is None else tuple(JUMP * e for e in profile.energies),
    )


class JumpingDevice:
    """Plays one profile for the first batches of `seconds`, then the other."""

    def __init__(self, before: Profile, after: Profile, seconds: float, meter: CountingMeter) -> None:
        """The time counts from the first batch."""
        self._devices = [EmulatedDevice({"demo": profile}, meter) for profile in (before, after)]
        self._seconds = seconds
        self._jump_at = float("inf")

    def serve(self, batch: Batch, /) -> "list[Logits]":
        """Serve by the profile of the moment."""
        self._jump_at = min(self._jump_at, time.monotonic() + self._seconds)
        return list(self._devices[time.monotonic() >= self._jump_at].serve(batch))


def serve_jumping(port: int, believed: Profile, played: tuple[Profile, Profile], adapt: bool) -> None:
    """The server's own parts around such a device; `believed` is the profile it starts with."""
    meter = CountingMeter()
    device = JumpingDevice(*played, BEFORE, meter)
    chosen = {"demo": choose(f"smdp:w2={W2}", believed)}
    metrics, pool = Metrics(), ThreadPoolExecutor()
    dispatcher = Dispatcher(ThreadExecutor(device, "jumping"), chosen, metrics, time.monotonic)
    metrics.watch_meter("jumping", meter.source, LastReading(meter))
    if adapt:
        dispatcher.delivery.on_served = Controller(dispatcher, metrics, meter, pool).served
    fleet = Fleet([dispatcher])
    inference = Inference({"demo": emulated_model("demo", 32)}, fleet, metrics, pool, 1024, MemoryBudget(2**30))
    with bind("127.0.0.1", port) as bound:
        serve(create_app(inference, "benchmark"), fleet, bound, 0.0, Listener())


def measured(server: Server, rate: float) -> dict[str, Any]:
    """What the load generator saw while the device had jumped, and the cost w1 x ms + w2 x W with measured joules."""
    load = ["--rate", str(rate), "--pixels", "--json"]
    began = time.monotonic()
    first = subprocess.Popen(
        [*command_line("generate-load"), server.url, *load, "--duration", str(BEFORE + SETTLING), "--seed", "1"],
        stdout=subprocess.DEVNULL,
    )
    noticed = None
    while first.poll() is None:
        if noticed is None and any(server.metric("batchwright_policy_changes_total").values()):
            noticed = round(time.monotonic() - began - BEFORE, 2)
        time.sleep(0.05)
    joules = sum(server.metric("batchwright_device_energy_joules_total").values())
    report = run_json("generate-load", server.url, *load[:-1], "--duration", str(AFTER), "--seed", "2")
    elapsed = report["ok"] / report["throughput_hz"]  # first arrival to last answer
    watts = (sum(server.metric("batchwright_device_energy_joules_total").values()) - joules) / elapsed
    changes = server.metric("batchwright_policy_changes_total")
    return {
        "noticed_after_s": noticed,
        "changes": sum(changes.values()),
        "mean_ms": round(report["mean_ms"], 2),
        "mean_power_w": round(watts, 3),
        "cost": round(report["mean_ms"] + W2 * watts, 2),
        "mean_batch_size": round(report["mean_batch_size"], 3),
        "errors": report["errors"],
    }


def main() -> None:
    """Measure the three servers one after the other, print the table and record it."""
    base = load_profile(BASE)
    cases = {
        "solved for the old device": ("old", "no"),
        "closed loop": ("old", "yes"),
        "solved for the new device": ("new", "no"),
    }
    record: dict[str, dict[str, Any]] = {}
    for load in (0.3, 0.6):
        for name, options in cases.items():
            with running(sys.executable, "-m", "benchmarks.closed_loop", *options) as server:
                found = measured(server, load * base.capacity)
            record[f"{name}, load {load}, then {JUMP * load:.2f}"] = found
            print(f"{name:28s} load {load}: {found}", flush=True)
    save("closed_loop", record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", nargs="*", help="internal: believed profile, whether to adapt")
    parser.add_argument("--port", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.port is None:
        main()
    else:
        old = load_profile(BASE)
        believes, adapts = arguments.options
        serve_jumping(arguments.port, old if believes == "old" else jumped(old), (old, jumped(old)), adapts == "yes")
