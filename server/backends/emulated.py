"""An emulated device: a profile played in real time, with outputs by which a mixed-up answer is noticed."""

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policies.profile import Profile
from server.backends.executor import Batch, Logits
from server.energy.meters import CountingMeter

CLASSES = 1000
_WAKE_UP = 3e-4  # s; a sleeping thread wakes up so late, give or take


class EmulatedDevice:
    """Takes each batch its profile's service time, meters its energy, and answers from each input alone.

    The service ends at an absolute instant: making the outputs is part of it, and waking up late is not added to it.
    """

    def __init__(self, profiles: Mapping[str, Profile], meter: CountingMeter) -> None:
        """`profiles` by model name; `meter` counts the batches' energy, J."""
        self._profiles = profiles
        self._meter = meter
        self._wheel = np.random.default_rng(0).normal(0.0, 2.0, 2 * CLASSES).astype(np.float32)

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Sleep for l(b), or the time of some stages, and return logits, float32 [1000], for each input.

        Before the last stage it returns the inputs as they are, for the next stage.
        """
        profile, size = self._profiles[batch.model], len(batch.inputs)
        span = (size, batch.first_stage, batch.last_stage)
        end = time.monotonic() + profile.launch_time(*span)
        is_last = batch.last_stage is None or batch.last_stage >= profile.stages
        outputs = [self._logits(sample) for sample in batch.inputs] if is_last else batch.inputs
        self._meter.add(profile.launch_energy(*span) or 0.0)
        while (left := end - time.monotonic()) > 0:
            time.sleep(max(0.0, left - _WAKE_UP))  # the last stretch is yielded away, turn by turn
        return outputs

    def _logits(self, sample: Any) -> Logits:
        """Noise turned and scaled by a checksum of every 61st byte: nearly every other sample gives other logits.

        So few bytes, because this thread shares the interpreter with the gateway, which is answering just then.
        """
        checksum = zlib.crc32(sample.reshape(-1)[::61].tobytes())
        turn, scale = checksum % CLASSES, 1.0 + checksum // CLASSES % 997 / 997
        return self._wheel[turn : turn + CLASSES] * np.float32(scale)
