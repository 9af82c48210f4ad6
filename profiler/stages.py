"""NodeLatency(n): the service time of each stage by batch size, measured stage by stage through the same executor."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from policies.profile import Profile, interpolate
from profiler.feed import take
from profiler.measure import OnProgress, Subject
from server.backends.executor import Batch


async def with_stages(
    profile: Profile, subject: Subject, sizes: Sequence[int], repeats: int, on_progress: OnProgress
) -> Profile:
    """The profile with the times of the stages into which the subject's model is cut.

    Batches pass stage by stage as they do when nobody preempts; sizes in random order, so that a drift of the machine
    falls on all of them. A stage's time is the median of its repeats; the first pass warms up and does not count.

    Args:
        profile: of the whole; its `stages` says into how many the model is cut.
        subject: what is measured.
        sizes: batch sizes, ascending from 1 to the profile's largest; the others lie between them.
        repeats: passes through every size.
        on_progress: hears the share of the work done.
    """
    rng, stages = np.random.default_rng(0), profile.stages
    seen: dict[int, list[list[float]]] = {size: [] for size in sizes}
    steps = (repeats + 1) * len(sizes)
    for turn in range(repeats + 1):
        for done, size in enumerate(rng.permutation(sizes).tolist()):
            times = await _stage_by_stage(subject, size, stages)
            if turn:
                seen[size].append(times)
            on_progress((turn * len(sizes) + done + 1) / steps)
    medians = np.array([np.median(seen[size], axis=0) for size in sizes])
    by_stage = [interpolate(list(sizes), medians[:, stage].tolist()) for stage in range(stages)]
    return replace(profile, stage_service_times=tuple(zip(*by_stage, strict=True)))


async def _stage_by_stage(subject: Subject, size: int, stages: int) -> list[float]:
    """Times of one batch's stages, s."""
    inputs: Sequence[object] = take(subject.samples, size)
    times = []
    for stage in range(stages):
        completion = await subject.executor.run(Batch(subject.model, inputs, stage, 1))
        inputs = completion.outputs
        times.append(completion.finished - completion.started)
    return times
