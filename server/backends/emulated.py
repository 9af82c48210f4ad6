"""The emulated device: a profile's service times in real time, with outputs that identify their inputs."""

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policies.profile import Profile
from server.backends.executor import Batch, Logits
from server.energy.meters import CountingMeter
from server.models.images import EMULATED_CLASSES as CLASSES

_WAKE_UP = 3e-4  # s; about the delay of a sleeping thread's wake-up


class EmulatedDevice:
    """Takes the profile's service time for each batch and counts its energy.

    An output depends only on its own input, so that answers given to the wrong request can be detected. The service
    time includes making the outputs, and excludes the delay of the thread's wake-up.
    """

    def __init__(self, profiles: Mapping[str, Profile], meter: CountingMeter) -> None:
        """`profiles` are by model name; `meter` counts the batches' energy, J."""
        self._profiles = profiles
        self._meter = meter
        self._noise = np.random.default_rng(0).normal(0.0, 2.0, 2 * CLASSES).astype(np.float32)

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Sleep for l(b), or the time of the batch's stages, and return logits, float32 [1000], for each input.

        Before the last stage the outputs are the inputs.
        """
        profile, size = self._profiles[batch.model], len(batch.inputs)
        span = (size, batch.first_stage, batch.last_stage)
        end = time.monotonic() + profile.launch_time(*span)
        is_last = batch.last_stage is None or batch.last_stage >= profile.stages
        outputs = [self._logits(sample) for sample in batch.inputs] if is_last else batch.inputs
        self._meter.add(profile.launch_energy(*span) or 0.0)
        while (left := end - time.monotonic()) > 0:
            time.sleep(max(0.0, left - _WAKE_UP))  # the rest is spent yielding, since a sleep would end late
        return outputs

    def _logits(self, sample: Any) -> Logits:
        """Noise, rotated and scaled by a checksum of every 61st byte, which differs between nearly all samples.

        Only some bytes are read because this thread shares the interpreter with the event loop.
        """
        checksum = zlib.crc32(sample.reshape(-1)[::61].tobytes())
        offset, scale = checksum % CLASSES, 1.0 + checksum // CLASSES % 997 / 997
        return self._noise[offset : offset + CLASSES] * np.float32(scale)
