"""Service times by batch size and longest length, for texts: measured through the same executor, all of one length."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from policies.profile import Profile, interpolate
from profiler.feed import take
from profiler.measure import OnProgress, Subject
from server.backends.executor import Batch

_TEXTS = 16  # of each length
_MOST_OFTEN = 5


async def with_lengths(
    profile: Profile, subject: Subject, sizes: Sequence[int], repeats: int, on_progress: OnProgress
) -> Profile:
    """The profile with the times of every size by length; a time is the median of its repeats.

    Sizes and lengths are visited in random order, so that a drift of the machine falls on all of them; short ones,
    which take little time and vary more, up to five times as often.

    Args:
        profile: of texts of the middle length; its note will say so.
        subject: what is measured, with the codec of its texts.
        sizes: batch sizes, ascending from 1 to the profile's largest; the others lie between them.
        repeats: of the longest.
        on_progress: hears the share of the work done.
    """
    codec = subject.texts
    assert codec is not None
    rng = np.random.default_rng(0)
    texts = {length: codec.synthetic_samples(_TEXTS, rng, length) for length in codec.lengths}
    seen: dict[tuple[int, int], list[float]] = {visit: [] for visit in product(sizes, texts)}
    visits = [visit for visit in seen for _ in range(repeats * min(_MOST_OFTEN, codec.lengths[-1] // visit[1]))]
    for done, at in enumerate(rng.permutation(len(visits)).tolist(), 1):
        size, length = visits[at]
        completion = await subject.executor.run(Batch(subject.model, take(texts[length], size)))
        seen[size, length].append(completion.finished - completion.started)
        on_progress(done / len(visits))
    columns = [interpolate(list(sizes), [float(np.median(seen[b, length])) for b in sizes]) for length in texts]
    return replace(
        profile,
        note=f"{profile.note}; service_time_s is of texts of {codec.middle_length}",
        lengths=tuple(texts),
        length_service_times=tuple(zip(*columns, strict=True)),
        generates=codec.generates,
    )


def rungs(max_batch_size: int) -> tuple[int, ...]:
    """One batch size an octave, and the largest: lengths are many, and what lies between is nearly straight."""
    return (*(2**n for n in range(max_batch_size.bit_length()) if 2**n < max_batch_size), max_batch_size)
