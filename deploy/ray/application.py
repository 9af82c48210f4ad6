"""The Ray Serve application: `serve deploy deploy/ray/serve.yaml`, or Ray's own `serve.run(build({...}))`."""

from collections.abc import Mapping
from typing import Any

from ray import serve

from deploy.ray.replica import Replica


class Batchwright(Replica):
    """A replica that knows the others, through Ray."""

    async def everybodys_metrics(self) -> Mapping[str, str]:
        """By replica, the text that Prometheus scrapes; one that ends just now is left out."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        told = await handle.broadcast("metrics_by_name").results_async(timeout_s=5.0, return_exceptions=True)
        return dict(pair for pair in told if not isinstance(pair, BaseException))

    async def metrics_by_name(self) -> tuple[str, str]:
        """Ray's name of this replica, and what it tells Prometheus."""
        return serve.get_replica_context().replica_id.unique_id, await self.render_metrics()


def build(settings: dict[str, Any]) -> Any:
    """The application for these settings, by their names in a configuration file of serve-model; see serve.yaml.

    What is said here of a deployment, its entry in serve.yaml may say otherwise.
    """
    deployment = serve.deployment(
        serve.ingress()(Batchwright),
        name="Batchwright",
        max_ongoing_requests=4096,  # the dispatcher's own queue is to be the only one: it refuses what comes too late
    )
    return deployment.bind(settings)
