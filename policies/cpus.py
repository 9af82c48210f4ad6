"""How many processors this process may use: by its affinity, and by the quota of its control group."""

import os
from math import ceil
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_cpus(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the number of processors that this process may keep busy, at least 1.

    `os.cpu_count` and the affinity do not know the quota of a container (`docker run --cpus 2`, a Kubernetes limit):
    more threads than that are throttled together. A part of a processor counts as one.

    Args:
        cgroups: where the control groups' file system is mounted.
        own: the file that tells this process's own control groups.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _folders(cgroups, own) if (quota := _quota(folder)) is not None]
    return max(1, min([affinity, *map(ceil, quotas)]))


def _folders(cgroups: Path, own: Path) -> list[Path]:
    """The folders of this process's control group and of all above it; limits of each apply."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups  # version 1 mounts each group of controllers apart
        folder = root / path.lstrip("/")
        # in a container the path may be the host's, which is not mounted: what is mounted at the root is our own
        found += [place for place in (folder, *folder.parents) if place.is_relative_to(root)]
    return found


def _quota(folder: Path) -> float | None:
    """Processors that a control group may use, by version 2 or version 1; None: no limit, or not known."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0.0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
