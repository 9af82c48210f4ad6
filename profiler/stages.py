"""Service time of each stage by batch size: NodeLatency(n) of the LazyBatching paper, measured through the executor."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from policies.profile import Profile, interpolate
from profiler.back_to_back import Rotation
from profiler.measure import OnProgress, Subject
from server.backends.executor import Batch

QUICK_REPEATS = 5  # of a quick profile


async def with_stages(
    profile: Profile, subject: Subject, sizes: Sequence[int], repeats: int, on_progress: OnProgress
) -> Profile:
    """Return the profile with the service time of each stage, the median of its repeats.

    Each batch runs stage by stage without preemption. Sizes are visited in random order, so that a drift of the
    machine affects all of them alike. The first pass is a warm-up.

    Args:
        profile: profile of the whole model, with its number of stages.
        subject: the model under measurement, split into that many stages.
        sizes: batch sizes, ascending from 1 to the profile's largest; other sizes are interpolated.
        repeats: number of passes over all sizes.
        on_progress: called with the share of the work done.
    """
    rng, stages, samples = np.random.default_rng(0), profile.stages, Rotation(subject.samples)
    seen: dict[int, list[list[float]]] = {size: [] for size in sizes}
    steps = (repeats + 1) * len(sizes)
    for repeat in range(repeats + 1):
        for done, size in enumerate(rng.permutation(sizes).tolist()):
            times = await _stage_times(subject, samples.take(size), stages)
            if repeat:
                seen[size].append(times)
            on_progress((repeat * len(sizes) + done + 1) / steps)
    medians = np.array([np.median(seen[size], axis=0) for size in sizes])
    by_stage = [interpolate(list(sizes), medians[:, stage].tolist()) for stage in range(stages)]
    return replace(profile, stage_service_times=tuple(zip(*by_stage, strict=True)))


async def _stage_times(subject: Subject, inputs: Sequence[object], stages: int) -> list[float]:
    """Run one batch and return the time of each stage, s."""
    times = []
    for stage in range(stages):
        completion = await subject.executor.run(Batch(subject.model, inputs, stage, 1))
        inputs = completion.outputs
        times.append(completion.finished - completion.started)
    return times
