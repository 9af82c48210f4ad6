"""How many replicas there should be, from what they say of themselves. Pure: Ray gathers, starts and ends."""

from collections.abc import Mapping
from typing import Any, Protocol


class Context(Protocol):
    """What is used of Ray's AutoscalingContext.

    Attributes:
        aggregated_metrics: by name and replica, what `record_autoscaling_stats` said, its mean over the look-back
            period; None, or without a replica, where nothing was said yet.
        target_num_replicas: how many there should be by the last decision.
    """

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...  # noqa: D102  (as above)

    @property
    def target_num_replicas(self) -> int: ...  # noqa: D102  (as above)


class ByBacklog:
    """As many replicas as keep both the backlog and the load of each within bounds.

    The backlog says that there are too few now. It cannot say that there are too many: it is nearly nothing until there
    is one too few. The load, arrival rate over the largest service rate, says that, and what a steady rate needs.
    """

    def __init__(self, backlog_s: float = 0.5, load: float = 0.8) -> None:
        """Ray gives what stands in the configuration under policy_kwargs.

        Args:
            backlog_s: least time in which a replica should be able to serve everybody who is there, s.
            load: arrival rate over largest service rate that a replica should have.
        """
        self._bounds = {"backlog_s": backlog_s, "load": load}

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """The number of replicas, rounded up and kept within its bounds by Ray; and no memory."""
        said = context.aggregated_metrics or {}
        if not all(said.get(name) for name in self._bounds):
            return context.target_num_replicas, {}
        return max(sum(said[name].values()) / bound for name, bound in self._bounds.items()), {}
