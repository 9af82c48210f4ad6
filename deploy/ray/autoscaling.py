"""Autoscaling policy for Ray Serve: the number of replicas from their backlog and load. Pure functions."""

from collections.abc import Mapping
from typing import Any, Protocol


class Context(Protocol):
    """The used part of Ray's AutoscalingContext.

    Attributes:
        aggregated_metrics: values of `record_autoscaling_stats` by name and replica, averaged over the look-back
            period; None or empty before the first values.
        target_num_replicas: target of the last decision.
    """

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...  # noqa: D102  (as above)

    @property
    def target_num_replicas(self) -> int: ...  # noqa: D102  (as above)


class ByBacklog:
    """Number of replicas that keeps both backlog and load of each replica within bounds.

    The backlog shows an overload at once, but stays near 0 below it, so it cannot show how many replicas are enough.
    The load (arrival rate over maximum service rate) shows how many a steady rate needs.
    """

    def __init__(self, backlog_s: float = 0.5, load: float = 0.8) -> None:
        """Ray passes policy_kwargs of the configuration.

        Args:
            backlog_s: target of the minimum time in which a replica can serve all its requests, s.
            load: target of a replica's arrival rate over its maximum service rate.
        """
        self._bounds = {"backlog_s": backlog_s, "load": load}

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, which Ray rounds up and clips to its bounds, and an empty policy state."""
        metrics = context.aggregated_metrics or {}
        if not all(metrics.get(name) for name in self._bounds):
            return context.target_num_replicas, {}
        return max(sum(metrics[name].values()) / bound for name, bound in self._bounds.items()), {}
