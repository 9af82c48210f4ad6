"""The policies of a device's models while it serves: swaps, models that take over a name, smaller batches, draining."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from policies.catalog import ModelPolicy, choose, combine
from policies.profile import Profile
from policies.queue.batcher import Batcher
from policies.queue.monitor import inherit_rates
from policies.rules.finish_first import FinishRetired
from policies.types import BatchKey, Request
from server.telemetry.metrics import Metrics

_log = logging.getLogger("batchwright.dispatcher")


class PoliciesInUse:
    """Sets the policy of the batcher.

    Attributes:
        chosen: by model, the current policy, its profile, and its spec.
        batcher: decides by them.
        by_shape: models whose inputs vary in shape.
        retiring: ids of models that were replaced, and still have calls.
        draining: whether what waits is served without waiting for more.
        on_batch_size_reduced: called with a model whose maximum batch size was reduced, and its policy before.
    """

    on_batch_size_reduced: Callable[[str, ModelPolicy], None] | None = None

    def __init__(
        self,
        device: str,
        chosen: Mapping[str, ModelPolicy],
        by_shape: Collection[str],
        metrics: Metrics,
        on_change: Callable[[], None],
        levels: Mapping[str, int] | None = None,
    ) -> None:
        """`on_change` is called after each change of the policy; `device` is its name in the metrics.

        `levels` are the numbers of priority levels by model; 1 for others.
        """
        self.chosen = dict(chosen)
        self.by_shape = set(by_shape)
        self.retiring = set[str]()
        self.draining = False
        self._device = device
        self._metrics = metrics
        self._on_change = on_change
        self._loaded: dict[str, str | None] = {model: model for model in chosen}  # ids by name; None: unloaded
        policy, monitor = combine(self.chosen, self.by_shape)
        largest = {model: each.profile.max_batch_size for model, each in chosen.items()}
        tokens = {model: each.profile.max_batch_tokens for model, each in chosen.items()}
        self.batcher = Batcher(policy, largest, monitor, tokens, levels)

    def set(self, model: str, chosen: ModelPolicy) -> ModelPolicy:
        """Set the policy of `model`, and the limits of batches to those of its profile, from the next decision on.

        Queued requests and the rate estimate survive the swap.

        Returns:
            The policy as set, with a monitor that continues from the current rate estimate.
        """
        self.chosen[model] = replace(chosen, monitor=inherit_rates(self.chosen[model].monitor, chosen.monitor))
        self.batcher.set_limits(model, chosen.profile.max_batch_size, chosen.profile.max_batch_tokens)
        self._apply()
        return self.chosen[model]

    def switch(self, model: str, id: str | None, chosen: ModelPolicy | None = None, by_shape: bool = False) -> None:
        """Give the name `model` to another loaded model, for the calls that are made from now on, with its policy.

        The calls of the former one are served by that, without waiting for more, until `forget`.

        Args:
            model: one of `chosen`.
            id: of the loaded model; the executor has it. None: the name has none any more.
            chosen: its policy and profile.
            by_shape: whether its inputs vary in shape.
        """
        former, self._loaded[model] = self._loaded[model], id
        if former is not None:
            self.retiring.add(former)
        if chosen is None:
            self._apply()
            return
        (self.by_shape.add if by_shape else self.by_shape.discard)(model)
        self.set(model, chosen)

    def forget(self, id: str) -> None:
        """Launch by the policy alone again, since a model that was replaced has no calls any more."""
        self.retiring.discard(id)
        self._apply()

    def drain(self) -> None:
        """Serve what waits without waiting for more."""
        self.draining = True
        self.batcher.drain()
        self._on_change()

    def resume(self) -> None:
        """Launch by the policies again."""
        self.draining = False
        self._apply()

    def serve_greedily(self, model: str, profile: Profile) -> None:
        """Set a greedy policy on this profile, which keeps the promise of the one before."""
        before = self.chosen[model]
        self.set(model, replace(choose("greedy", profile, before.defaults), promised=before.objective))
        self._metrics.policy(model, self._device, "greedy", "greedy")

    def reduce_batch_size(self, model: str, max_batch_size: int) -> None:
        """Reduce the maximum batch size, and serve greedily until the controller has solved a policy for it."""
        before = self.chosen[model]
        if max_batch_size >= before.profile.max_batch_size:
            return
        _log.error("%s: out of memory; the maximum batch size is %d from now on", model, max_batch_size)
        self.serve_greedily(model, before.profile.truncated(max_batch_size))
        if self.on_batch_size_reduced is not None:
            try:
                self.on_batch_size_reduced(model, before)
            except Exception:  # noqa: BLE001  (a bug in the controller must not end the dispatcher)
                _log.exception("no policy is solved for the smaller batches; they are served greedily")

    def key_of(self, request: Request) -> BatchKey:
        """The key of a queued request by the present policy; its size becomes that of the present profile."""
        model, loaded = request.kind.model, request.payload.call.id
        request.size = self.chosen[model].profile.time_alone(request.payload.length)
        key = self.chosen[model].kind(model, request.size, request.kind.shape)
        return key if loaded == self._loaded[model] else key._replace(retired=loaded)

    def _apply(self) -> None:
        self.batcher.set_kinds(self.key_of)
        if not self.draining:
            policy, self.batcher.monitor = combine(self.chosen, self.by_shape)
            self.batcher.policy = FinishRetired(policy, self.batcher.drain_policy()) if self.retiring else policy
        self._on_change()
