"""The console scripts.

This module puts our packages before those of the user when it is imported. A child process that multiprocessing spawns
imports the console script again, and so the same holds there.
"""

import sys

from batchwright.own_packages import OwnPackages

sys.meta_path.insert(0, OwnPackages)


def serve_model() -> None:
    """Run serve-model."""
    from server.cli import main

    main()


def profile_model() -> None:
    """Run profile-model."""
    from profiler.cli import main

    main()


def solve_policy() -> None:
    """Run solve-policy."""
    from policies.command_line.cli import main

    main()


def generate_load() -> None:
    """Run generate-load."""
    from loadgen.cli import main

    main()
