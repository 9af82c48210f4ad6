"""The number of processors available to this process, by CPU affinity and cgroup quota."""

import os
from math import ceil
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")

# s, of sys.setswitchinterval; with the default of 5 ms a device's thread waits that long for a busy event loop
SWITCH_INTERVAL = 5e-4


def available_cpus(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Return the number of processors that this process may keep busy, at least 1.

    `os.cpu_count` and the affinity do not include the quota of a container (`docker run --cpus 2`, a Kubernetes
    limit). Threads beyond the quota are throttled. A fractional quota is rounded up.

    Args:
        cgroups: mount point of the cgroup file system.
        own: file that lists the cgroups of this process.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _folders(cgroups, own) if (quota := _quota(folder)) is not None]
    return max(1, min([affinity, *map(ceil, quotas)]))


def _folders(cgroups: Path, own: Path) -> list[Path]:
    """Folders of this process's cgroup and of all its ancestors; the limits of each apply."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups  # version 1: one mount for each group of controllers
        folder = root / path.lstrip("/")
        # in a container the path may be the host's, which is not mounted; the mounted root is then the container's own
        found += [each for each in (folder, *folder.parents) if each.is_relative_to(root)]
    return found


def _quota(folder: Path) -> float | None:
    """Processors that a cgroup (version 2 or 1) may use; None without a limit, or if it cannot be read."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0.0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
