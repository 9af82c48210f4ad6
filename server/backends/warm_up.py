"""The warm-up of models on a device, which also finds the largest batch that fits. Without torch."""

import asyncio
import logging
from collections.abc import Iterable

import numpy as np

from policies.profile import Profile
from policies.types import SpecError
from server.backends import real_device
from server.backends.buckets import bucket_sizes
from server.backends.executor import Batch, Executor
from server.errors import OutOfMemoryError
from server.models.model import ServedModel
from server.models.tensors.python_source import SAMPLE_HINT, one_line_errors
from server.models.upstream_spec import is_upstream

_log = logging.getLogger("batchwright")


def autotunes(device: str, model: ServedModel) -> bool:
    """Whether the first batch of each size is slow on a device, by its name in the settings."""
    return not is_upstream(device) and real_device.autotunes(real_device.find_device(device), model)


async def warm_up(executor: Executor, model: ServedModel, batch_sizes: Iterable[int]) -> None:
    """Serve synthetic batches, largest first, in the executor's thread: cuDNN keeps its plans by thread."""
    for size in sorted(batch_sizes, reverse=True):
        length = model.codec.length_within(size, model.codec.middle_length)
        (sample,) = model.codec.synthetic_samples(1, np.random.default_rng(0), length)
        with one_line_errors(f"{model.name}: a batch of {size}", SAMPLE_HINT):
            await executor.run(Batch(model.name, [sample] * size))


def warm_up_and_fit(
    executor: Executor, model: ServedModel, profile: Profile, every_size: bool, pads: bool = False
) -> Profile:
    """Warm a model up for all batch sizes of its profile, or all buckets, or for the first two and the last.

    Args:
        executor: of the device.
        model: the model.
        profile: its profile.
        every_size: whether the first batch of each size is slow.
        pads: whether the device pads batches to buckets.

    Returns:
        The profile; its largest batch is halved until it fits the memory.

    Raises:
        SpecError: a batch of one sample does not fit.
    """
    largest = profile.max_batch_size
    sizes: Iterable[int] = range(1, largest + 1) if every_size else (1, min(2, largest), largest)
    try:
        asyncio.run(warm_up(executor, model, bucket_sizes(largest) if pads else sizes))
    except OutOfMemoryError as error:
        if largest == 1:
            raise SpecError(f"{model.name} does not fit the memory that is free on {executor.name}: {error}") from error
        _log.warning("%s: a batch of %d does not fit the memory; trying half of it", model.name, largest)
        return warm_up_and_fit(executor, model, profile.truncated(largest // 2), every_size, pads)
    return profile
