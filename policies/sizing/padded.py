"""The service times of padded batches whose requests differ in length, as a distribution for each batch size.

A batch takes as long as its longest request. With independent lengths the longest of b is at most L with the
probability F(L)^b, so the service time G_b has the mean and the variance

    E[G_b] = sum_L l(b, L) (F(L)^b - F(L-)^b),    Var[G_b] = E[l(b, L)^2] (1 + cv^2) - E[G_b]^2,

with cv the variation of batches of one size and length. A batch takes the profile's power, so that its energy grows
with its time. The policies of one queue are solved for these. In service their batches are of requests of similar sizes
(policies/sizing/length_aware.py), which have less padding.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from policies.profile import Profile
from policies.sizing.bins import lengths_of

_ATOMS = 64  # of the lengths


def of_mixed_lengths(profile: Profile, sizes: Sequence[float] = ()) -> Profile:
    """Return the profile of batches by size alone, with the variation that the lengths cause.

    Args:
        profile: with lengths; one without is returned as it is.
        sizes: of observed requests, service times alone, s; empty: each of the profile's lengths is as likely.
    """
    if not profile.varies_by_length:
        return profile
    lengths = np.sort(lengths_of(np.array(sizes), profile) if len(sizes) else np.array(profile.lengths, float))
    parts = min(_ATOMS, len(lengths))
    atoms = [float(part.mean()) for part in np.array_split(lengths, parts)]
    below = np.arange(parts + 1) / parts
    means, cvs = [], []
    for size in range(1, profile.max_batch_size + 1):
        times, weights = np.array([profile.service_time(size, each) for each in atoms]), np.diff(below**size)
        cv = profile.cvs[size - 1] if profile.cvs else 0.0
        mean = float(weights @ times)
        means.append(mean)
        cvs.append(float(np.sqrt(max(float(weights @ times**2) * (1.0 + cv**2) / mean**2 - 1.0, 0.0))))
    times = np.maximum.accumulate(means)
    energies = profile.energies and tuple((np.array(profile.energies) * times / profile.service_times).tolist())
    plain = profile.without_lengths()
    return replace(plain, service_times=tuple(times.tolist()), cvs=tuple(cvs), energies=energies)
