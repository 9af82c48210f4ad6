"""Buckets: the batch sizes for which a graph is captured. A batch is padded to the next bucket. Without torch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from policies.profile import Profile
from policies.types import SpecError
from server.backends.real_device import find_device
from server.models.sources import ModelSource
from server.models.upstream_spec import is_upstream

LARGEST = 128  # the batch size up to which a device is measured where no setting gives one
_DENSE = 16  # batch size from which each doubling has four buckets
_LEAST_GAIN = 0.02  # of throughput, for which larger batches are worth their time
_T = TypeVar("_T")


def pads_to_buckets(device: str, source: ModelSource, stages: int | None, optimise: str) -> bool:
    """Whether a real device, by its name in the settings, pads the batches of a model to buckets."""
    if device.startswith("emulated:") or is_upstream(device):
        return False
    if not source.has_graphs or (stages or 1) > 1 or optimise == "none":
        return False
    try:
        return find_device(device).is_cuda
    except SpecError:  # it is reported where the device is checked
        return False


def bucket_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The buckets up to `max_batch_size`, which is one, in ascending order.

    They are 1 to 4, two for each doubling up to 16, and four above: 6, 8, 12, 16, 20, 24, 28, 32, 40, ... The first
    batches of each take time at every start, for the search and the capture; up to 16 a batch of a GPU takes little
    longer for more samples.
    """
    sizes, size = [1, 2, 3, 4], 4
    while size < max_batch_size:
        octave = 1 << (size.bit_length() - 1)
        size += octave // (2 if octave < _DENSE else 4)
        sizes.append(size)
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


def padded(profile: Profile) -> Profile:
    """The profile of a device that pads each batch to its bucket: all values of a size are those of its bucket."""
    sizes = bucket_sizes(profile.max_batch_size)

    def pad(values: Sequence[_T]) -> tuple[_T, ...]:
        return tuple(values[size - 1] for below, size in pairwise((0, *sizes)) for _ in range(below, size))

    return replace(
        profile,
        service_times=pad(profile.service_times),
        cvs=profile.cvs and pad(profile.cvs),
        energies=profile.energies and pad(profile.energies),
        cpu_times=profile.cpu_times and pad(profile.cpu_times),
        total_energies=profile.total_energies and pad(profile.total_energies),
    )


def earned_batch_size(profile: Profile) -> int:
    """The smallest bucket whose throughput is within 2 percent of the largest: a larger one gains less than that."""
    sizes = bucket_sizes(profile.max_batch_size)
    throughput = {size: size / profile.service_time(size) for size in sizes}
    return next(size for size in sizes if throughput[size] * (1.0 + _LEAST_GAIN) >= max(throughput.values()))
