"""The emulated device: a profile's service times in real time, with outputs that identify their inputs."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from policies.profile import Profile
from server.backends.executor import Batch
from server.energy.meters import CountingMeter
from server.models.images.codec import ImageCodec
from server.models.model import Codec

_WAKE_UP = 3e-4  # s; about the delay of a sleeping thread's wake-up
_OUTPUT = 5e-5  # s; about the time to make an output from an input that is in no cache


class EmulatedDevice:
    """Takes the profile's service time for each batch and counts its energy.

    An output depends only on its own input, so that answers given to the wrong request can be detected. The service
    time includes making the outputs, and excludes the delay of the thread's wake-up.
    """

    def __init__(
        self, profiles: Mapping[str, Profile], meter: CountingMeter, codecs: Mapping[str, Codec] | None = None
    ) -> None:
        """`profiles` and `codecs` are by model name, images by default; `meter` counts the batches' energy, J."""
        self._profiles = profiles
        self._codecs = codecs or dict.fromkeys(profiles, ImageCodec())
        self._meter = meter

    def serve(self, batch: Batch, /) -> Sequence[Any]:
        """Sleep for l(b), or the time of the batch's stages, and return an output for each input.

        Before the last stage the outputs are the inputs.
        """
        profile, size = self._profiles[batch.model], len(batch.inputs)
        span = (size, batch.first_stage, batch.last_stage)
        end = time.monotonic() + profile.launch_time(*span)
        is_last = batch.last_stage is None or batch.last_stage >= profile.stages
        # like a GPU it leaves the interpreter to the event loop at first
        if (idle := end - time.monotonic() - _WAKE_UP - _OUTPUT * size) > 0:
            time.sleep(idle)
        outputs = [*map(self._codecs[batch.model].emulate, batch.inputs)] if is_last else batch.inputs
        self._meter.add(profile.launch_energy(*span) or 0.0)
        while (left := end - time.monotonic()) > 0:
            time.sleep(max(0.0, left - _WAKE_UP))  # the rest is spent yielding, since a sleep would end late
        return outputs
