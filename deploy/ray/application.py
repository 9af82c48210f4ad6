"""The Ray Serve application, for `serve deploy deploy/ray/serve.yaml` or Ray's `serve.run(build({...}))`."""

from collections.abc import Mapping
from typing import Any

from ray import serve

from deploy.ray.replica import Replica


class Batchwright(Replica):
    """A replica that collects the metrics of all replicas through Ray."""

    async def metrics_by_replica(self) -> Mapping[str, str]:
        """Metrics in Prometheus' text format, by replica; a replica that does not respond is left out."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        results = await handle.broadcast("named_metrics").results_async(timeout_s=5.0, return_exceptions=True)
        return dict(result for result in results if not isinstance(result, BaseException))

    async def named_metrics(self) -> tuple[str, str]:
        """Ray's id of this replica, and its metrics in Prometheus' text format."""
        return serve.get_replica_context().replica_id.unique_id, await self.render_metrics()


def build(settings: dict[str, Any]) -> Any:
    """Build the application; `settings` have the keys of serve-model's configuration file (see serve.yaml).

    The deployment's entry in serve.yaml overrides the options set here.
    """
    deployment = serve.deployment(
        serve.ingress()(Batchwright),
        name="Batchwright",
        max_ongoing_requests=4096,  # large, so that calls wait in the dispatcher's queue, where admission control works
    )
    return deployment.bind(settings)
