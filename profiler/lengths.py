"""Service times by batch size and length; all samples of a measured batch have one length."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from policies.profile import Profile, interpolate
from profiler.back_to_back import Rotation
from profiler.measure import OnProgress, Subject
from server.backends.executor import Batch

_SAMPLES = 16  # synthetic samples per length
_MAX_REPEAT_FACTOR = 5


async def with_lengths(
    profile: Profile, subject: Subject, sizes: Sequence[int], repeats: int, on_progress: OnProgress
) -> Profile:
    """Return the profile with service times by batch size and length; each is the median of its repeats.

    Sizes and lengths are visited in random order, so that a drift of the machine affects all of them alike. Short
    lengths, which take less time and vary more, are repeated up to five times as often.

    Args:
        profile: profile of samples of the middle length, which its note then states.
        subject: the model under measurement, whose codec has lengths.
        sizes: batch sizes, ascending from 1 to the profile's largest; other sizes are interpolated.
        repeats: number of repeats of the longest length.
        on_progress: called with the share of the work done.
    """
    codec = subject.by_length
    assert codec is not None
    rng = np.random.default_rng(0)
    seen: dict[tuple[int, int], list[float]] = {visit: [] for visit in product(sizes, codec.lengths)}
    lengths = {visit: codec.length_within(*visit) for visit in seen}  # of what may share a batch
    samples = {each: Rotation(codec.synthetic_samples(_SAMPLES, rng, each)) for each in dict.fromkeys(lengths.values())}
    visits = [visit for visit in seen for _ in range(repeats * min(_MAX_REPEAT_FACTOR, codec.lengths[-1] // visit[1]))]
    for done, at in enumerate(rng.permutation(len(visits)).tolist(), 1):
        size, length = visits[at]
        completion = await subject.executor.run(Batch(subject.model, samples[lengths[size, length]].take(size)))
        seen[size, length].append(completion.finished - completion.started)
        on_progress(done / len(visits))
    columns = [interpolate(list(sizes), [float(np.median(seen[b, length])) for b in sizes]) for length in codec.lengths]
    return replace(
        profile,
        note=f"{profile.note}; service_time_s is of samples of {codec.synthetic_length_note}",
        lengths=tuple(codec.lengths),
        length_service_times=tuple(zip(*columns, strict=True)),
    )


def power_of_two_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The powers of two below the largest batch size, and the largest."""
    return (*(2**n for n in range(max_batch_size.bit_length()) if 2**n < max_batch_size), max_batch_size)
