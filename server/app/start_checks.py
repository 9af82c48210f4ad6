"""Plan of a server: settings, profiles and policies checked before anything is loaded, downloaded or measured."""

import difflib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeVar

from policies.adaptation.objective import FIRST_MARGIN
from policies.catalog import ModelPolicy, by_stages, check_spec, choose, has_goal, ignored_keys, in_stages
from policies.command_line.common import as_given
from policies.profile import Profile, load_profile
from policies.rules.by_level import parse_weights
from policies.types import SpecError
from server.app.http_server import bind
from server.backends.buckets import LARGEST, pads_to_buckets
from server.backends.real_device import find_device
from server.config import Settings, SettingsResult, by_model
from server.models.images.torchvision_names import torchvision_names
from server.models.sources import TensorSource, TorchvisionSource, UpstreamSource, source_of
from server.models.upstream_spec import is_upstream
from server.models.weights import check_weights
from server.scheduling.levels import Levels

DEFAULT_MAX_BATCH_SIZE = 32  # where neither a flag nor a profile sets it
_EMULATED = "emulated:"
_log = logging.getLogger("batchwright")
_T = TypeVar("_T")

CachedProfile = Callable[[Settings, str, int], Profile | None]


@dataclass(frozen=True)
class DevicePlan:
    """Plan of one device.

    Attributes:
        settings: the server's settings with this device alone.
        emulated: the profile whose service times an emulated device takes; None for a real device.
        profiles: by model, the profiles known without a measurement.
        chosen: by model, the policy for each of these profiles.
        bounded: models that get a bound from that of a pipeline.
    """

    settings: Settings
    emulated: Profile | None
    profiles: Mapping[str, Profile]
    chosen: Mapping[str, ModelPolicy]
    bounded: frozenset[str] = frozenset()

    def choose(self, model: str, profile: Profile) -> ModelPolicy:
        """The policy of a model for its final profile, which may have been measured or truncated after planning.

        Raises:
            SpecError: the policy is not possible with that profile.
        """
        known = self.chosen.get(model)
        if known is not None and known.profile is profile:
            return known
        return policy_of(self.settings, model, profile)

    def has_goal(self, model: str) -> bool:
        """Whether the policy of a model is solved for a goal, or has to keep deadlines."""
        given = model in self.bounded or bool(_defaults(self.settings, model))
        return given or has_goal(_spec(self.settings, model))

    def max_batch_size(self, model: str) -> int:
        """The largest batch size of a model."""
        return _max_batch_size(self.settings, model, self.profiles.get(model))


@dataclass(frozen=True)
class ServerPlan:
    """Plan of a server whose checks have all passed.

    Attributes:
        settings: as given, without the pipelines among the models.
        bound: socket bound to the address of the server.
        devices: at least one.
        pipelines: by name, each after those that it calls.
        bounds: of pipelines on the 95th percentile of the response time, s.
    """

    settings: Settings
    bound: socket.socket
    devices: Sequence[DevicePlan]
    pipelines: Mapping[str, TensorSource]
    bounds: Mapping[str, float]


def policy_of(settings: Settings, model: str, profile: Profile) -> ModelPolicy:
    """The policy that the settings give a model, on a device with this profile.

    Raises:
        SpecError: the policy is not possible with that profile.
    """
    own, keys = limited(settings, model, profile), _open_keys(settings, model)
    return choose(_spec(settings, model), own, keys, margin_share=FIRST_MARGIN)


def limited(settings: Settings, model: str, profile: Profile) -> Profile:
    """The profile with the model's limit of tokens and the resource to save; the same object if nothing changes.

    Raises:
        SpecError: the profile does not have that resource.
    """
    if settings.resource not in (None, profile.resource):
        profile = profile.saving(settings.resource)
    limit = max_batch_tokens(settings, model)
    changes = profile.varies_by_length and profile.max_batch_tokens != limit
    return replace(profile, max_batch_tokens=limit) if changes else profile


def max_batch_tokens(settings: Settings, model: str) -> int | None:
    """The largest product of batch size and longest length of a model's batches; None for no limit."""
    given = settings.of(model).max_batch_tokens, source_of(settings.specs[model]).max_batch_tokens
    return min((each for each in given if each is not None), default=None)


class _Errors:
    """Messages of failed checks, collected to be reported together."""

    def __init__(self, messages: Iterable[str] = ()) -> None:
        self.messages = list(messages)

    def check(self, step: Callable[[], _T]) -> _T | None:
        """The result of a step; None, and its message collected, if it raises SpecError."""
        try:
            return step()
        except SpecError as error:
            self.messages.append(as_given(error))
            return None

    def raise_any(self) -> None:
        """Raise one SpecError with all messages, if there are any."""
        if self.messages:
            raise SpecError("; ".join(dict.fromkeys(self.messages)))


def make_plan(
    result: SettingsResult,
    cached_profile: CachedProfile,
    checks: Sequence[Callable[[Settings], object]] = (),
    bind: Callable[[str, int], socket.socket] = bind,
) -> ServerPlan:
    """Check settings, devices, profiles, policies and the address, and bind the address.

    Args:
        result: the settings, and the errors found in their sources.
        cached_profile: returns the cached profile of a model, by its name, on a real device for batches up to a size;
            None without one.
        checks: further checks of the settings; each raises SpecError.
        bind: binds the address.

    Raises:
        SpecError: something is wrong; all messages in one line.
    """
    errors = _Errors(result.errors)
    settings = result.settings
    if settings is None:
        raise SpecError("; ".join(errors.messages))
    found = _find_pipelines(settings)
    pipelines = errors.check(partial(_ordered, found, settings)) or {}
    given = {name: settings.of(name).slo_p95_ms for name in found if settings.is_own(name, "slo_p95_ms")}
    bounds = {name: bound / 1e3 for name, bound in given.items() if bound is not None}
    settings = settings.without(found)
    bounded = errors.check(partial(_bounded, {name: found[name].calls() for name in bounds}, settings)) or frozenset()
    for check in (_check_devices, _check_weights, check_objectives, *checks):
        errors.check(partial(check, settings))
    devices = [_device_plan(one, cached_profile, errors, bounded) for one in settings.by_device()]
    bound = errors.check(partial(bind, settings.host, settings.port))
    if bound is not None and errors.messages:
        bound.close()
    errors.raise_any()
    assert bound is not None
    _warn_of_unknown_names(settings)
    return ServerPlan(settings, bound, devices, pipelines, bounds)


def _find_pipelines(settings: Settings) -> dict[str, TensorSource]:
    """The pipelines among the models; what cannot be read is taken for a model, whose check says why."""
    found = {}
    for name, spec in settings.specs.items():
        with suppress(SpecError):
            source = source_of(spec)
            if ".py:" in spec and isinstance(source, TensorSource) and source.calls():
                found[name] = source
    return found


def _ordered(pipelines: Mapping[str, TensorSource], settings: Settings) -> dict[str, TensorSource]:
    """The pipelines, each after those that it calls.

    Raises:
        SpecError: one calls what is not served, or itself by way of others, or has settings of a model.
    """
    for name, source in pipelines.items():
        missing = [called for called in source.calls() if called not in settings.specs]
        if missing:
            raise SpecError(
                f"pipeline {name} calls {missing[0]}, which is not served; serve it, too, as {missing[0]}=SPEC"
            )
        if keys := [key for key in settings.own_settings(name) if key != "slo_p95_ms"]:
            raise SpecError(f"{name} is a pipeline, which has no {keys[0]}; set it for the models that it calls")
    try:
        order = TopologicalSorter({name: each.calls() for name, each in pipelines.items()}).static_order()
        return {name: pipelines[name] for name in order if name in pipelines}
    except CycleError as error:
        raise SpecError(f"pipelines call each other in a cycle: {' -> '.join(error.args[1])}; break it") from error


def _bounded(pipelines: Mapping[str, Mapping[str, int | None]], settings: Settings) -> frozenset[str]:
    """The models that get a bound from that of a pipeline; `pipelines` have bounds, and call these so often.

    Raises:
        SpecError: one of them cannot get a bound.
    """
    bounded = dict[str, str]()
    for name, calls in pipelines.items():
        for model, number in calls.items():
            if model not in settings.specs:
                raise SpecError(
                    f"{name} calls the pipeline {model}, so its bound is not split; bound the models instead"
                )
            if not number:
                raise SpecError(
                    f"{name} has a bound, and no `steps` of {model}; write steps = {{{model!r}: NUMBER, ...}}"
                )
            if _spec(settings, model) != "auto" or _defaults(settings, model):
                raise SpecError(f"{model} gets its bound from {name}; leave out its own policy, w2 and slo_p95_ms")
            if model in bounded:
                raise SpecError(f"{name} and {bounded[model]} both bound {model}; bound one of them, or the models")
            bounded[model] = name
    return frozenset(bounded)


def _device_plan(
    settings: Settings, cached_profile: CachedProfile, errors: _Errors, bounded: frozenset[str]
) -> DevicePlan:
    emulated = errors.check(partial(_emulated_profile, settings))
    errors.check(partial(_check_stages, settings))
    profiles = _profiles(settings, emulated, cached_profile, errors)
    own = frozenset(settings.specs) & bounded
    return DevicePlan(settings, emulated, profiles, _choices(settings, profiles, errors), own)


def plan_model(plan: DevicePlan, model: str, cached_profile: CachedProfile) -> DevicePlan:
    """Plan one model of a device again, as `make_plan` does, since its files may have changed.

    Raises:
        SpecError: the model cannot be served; all messages in one line.
    """
    settings, errors = plan.settings.only(model), _Errors()
    for check in (_check_device, _check_weights):
        errors.check(partial(check, settings))
    errors.raise_any()
    emulated = errors.check(partial(_emulated_profile, settings))
    errors.check(partial(_check_stages, settings))
    profiles = _profiles(settings, emulated, cached_profile, errors)
    errors.raise_any()
    return DevicePlan(settings, emulated, profiles, {}, plan.bounded)


def is_emulated(settings: Settings) -> bool:
    """Whether the device is emulated, in the settings of one device."""
    return settings.device.startswith(_EMULATED)


def _warn_of_unknown_names(settings: Settings) -> None:
    """Warn of names that torchvision does not have: an emulated device serves any name, and so a misspelt one, too."""
    specs = {  # by model, which several emulated devices may serve
        model: spec
        for one in settings.by_device()
        for model, spec in one.specs.items()
        if is_emulated(one) and isinstance(source_of(spec), TorchvisionSource)
    }
    known = torchvision_names() if specs else []
    for model, spec in specs.items():
        if spec in known or not known:
            continue
        similar = difflib.get_close_matches(spec, known, 3)
        _log.warning(
            "%s: there is no torchvision classification model %r%s; the emulated device serves it as a model of "
            "images, with the service times of its profile",
            model,
            spec,
            f", but {', '.join(similar)}" if similar else "",
        )


def _check_weights(settings: Settings) -> None:
    """Check that a weights file exists, on an emulated device too, although that needs no weights."""
    for model in settings.specs:
        check_weights(settings.of(model).weights)


def check_objectives(settings: Settings) -> None:
    """Check that each model's policy uses the objective, slo_p95_ms or w2, that the settings give it.

    Raises:
        SpecError: a policy ignores it; the message names policies and models, and how to set it for the others alone.
    """
    messages = [message for key in ("slo_p95_ms", "w2") for message in _ignored(settings, key)]
    if messages:
        raise SpecError("; ".join(messages))


def _ignored(settings: Settings, key: str) -> Iterator[str]:
    """Yield a message for each model that ignores its own value of this key, and one for all that ignore the flag."""
    given = [model for model in settings.specs if key in _defaults(settings, model)]
    ignoring = {model: _spec(settings, model) for model in given if ignored_keys(_spec(settings, model), {key})}
    for model in [model for model in ignoring if settings.is_own(model, key)]:
        yield (
            f"{model}: policy {ignoring.pop(model)!r} ignores {key} {getattr(settings.of(model), key):g} of its entry "
            "in the configuration file; leave it out, or give a policy that uses it, such as smdp"
        )
    if not ignoring:
        return
    flag, value = f"--{key.replace('_', '-')}", f"{getattr(settings, key):g}"
    policies = " and ".join(f"policy {spec!r} of {model}" for model, spec in ignoring.items())
    ignores = f"{policies} {'ignores' if len(ignoring) == 1 else 'ignore'} {flag} {value}; leave {flag} out"
    using = next((model for model in given if model not in ignoring and not settings.is_own(model, key)), None)
    if using is None:
        yield f"{ignores}, or give a policy that uses it, such as smdp"
    else:
        own = f"--policy {using}=smdp:{key}={value}"
        yield f"{ignores} and set it for {using} alone, by {own} or {key} in its entry of the configuration file"


def _check_devices(settings: Settings) -> None:
    """Check the devices, and the models that a real device or another server needs."""
    all_devices = settings.by_device()
    upstreams = [one for one in all_devices if is_upstream(one.device)]
    devices = [one for one in all_devices if not is_upstream(one.device)]
    if settings.meter != "none" and not upstreams:
        raise SpecError(
            f"--meter {settings.meter} is for models of other servers, oip:URL, and there are none; leave it out"
        )
    emulated = [is_emulated(one) for one in devices]
    if any(emulated) and not all(emulated):
        raise SpecError(
            f"device {settings.device!r} mixes emulated and real ones, whose outputs would differ; give one kind"
        )
    errors = _Errors()
    for one in all_devices:
        errors.check(partial(_check_device, one))
    if not errors.messages and not all(emulated):
        errors.check(partial(_check_distinct, devices))
    if not errors.messages:
        errors.check(partial(check_upstreams, upstreams))
    errors.raise_any()


def check_upstreams(devices: Sequence[Settings]) -> None:
    """Check that each server is named once, that a model is the same on all, and that each has a meter of its own.

    Raises:
        SpecError: one of these does not hold, or a server does not answer.
    """
    names = [one.device for one in devices]
    if len(set(names)) < len(names):
        raise SpecError(f"a server is named twice for a model: {', '.join(names)}; name each once")
    first: dict[str, UpstreamSource] = {}
    for one in devices:
        for model, spec in one.specs.items():
            source = source_of(spec)
            assert isinstance(source, UpstreamSource)
            before = first.setdefault(model, source)
            difference = before.description().difference(source.description())
            if difference is not None:
                raise SpecError(f"{model} differs between {before.spec} and {spec}: {difference}; serve one model")
    meters = [meter for meter in map(meter_of, devices) if meter != "none"]
    if len(set(meters)) < len(meters):
        raise SpecError(
            f"a meter is read for several servers, each of which would count all its energy: {', '.join(meters)}; give "
            "one to each, or none"
        )


def meter_of(settings: Settings) -> str:
    """The meter of another server: none, cpu or cuda:N.

    Raises:
        SpecError: its models have different ones.
    """
    meters = {settings.of(model).meter for model in settings.specs}
    if len(meters) > 1:
        raise SpecError(f"the models of {settings.device} have the meters {' and '.join(sorted(meters))}; give one")
    return meters.pop()


def _check_distinct(devices: Sequence[Settings]) -> None:
    resolved = [find_device(one.device).place for one in devices]
    if len(set(resolved)) < len(resolved):
        raise SpecError(f"a device is named twice: {','.join(map(str, resolved))}; name each once")


def _check_device(settings: Settings) -> None:
    """Check one device, and its models unless it is emulated."""
    if is_emulated(settings):
        for name, spec in settings.specs.items():
            source_of(spec).emulate(name, 1)
        return
    errors = _Errors()
    if not is_upstream(settings.device):
        errors.check(partial(find_device, settings.device))
    for name, spec in settings.specs.items():
        errors.check(partial(source_of(spec).check, name, settings.of(name).weights, settings.stages))
        errors.check(partial(settings.labels, name))
    for name, file in (errors.check(partial(by_model, settings.sample, settings.specs)) or {}).items():
        errors.check(partial(source_of(settings.specs[name]).read_sample, Path(file)))
    errors.raise_any()


def _emulated_profile(settings: Settings) -> Profile | None:
    if not is_emulated(settings):
        return None
    profile = _load_profile(settings.device.removeprefix(_EMULATED), settings.max_batch_size)
    for model in settings.specs:
        profile = in_stages(_spec(settings, model), profile, settings.stages)
    return profile


def _check_stages(settings: Settings) -> None:
    """Check that policies that decide between stages have a network with stages."""
    for model, spec in settings.specs.items():
        if is_emulated(settings) or settings.stages is not None or not by_stages(_spec(settings, model)):
            continue
        remedy = "; give --stages K, such as 4" if source_of(spec).splits else f", but {model} has none; give another"
        raise SpecError(f"policy {_spec(settings, model)!r} decides between stages{remedy}")


def _in_device_stages(settings: Settings, model: str, profile: Profile, emulated: Profile | None) -> Profile:
    """The profile in as many stages as the device has, if it can be used for the model on that device."""
    if emulated is not None:
        return profile if profile.stages == emulated.stages else profile.in_stages(emulated.stages)
    if source_of(settings.specs[model]).has_lengths and not profile.varies_by_length:
        raise SpecError(
            f"profile {profile.name!r} has no service times by length, which {model} needs; measure one with "
            "profile-model"
        )
    if profile.stages != (settings.stages or 1):
        raise SpecError(
            f"profile {profile.name!r} has {profile.stages} stages, the network of {model} {settings.stages or 1}; "
            f"measure it with profile-model --stages, or give --stages {profile.stages}"
        )
    return profile


def _load_profile(name: str, max_batch_size: int | None) -> Profile:
    return load_profile(name).truncated(max_batch_size)


def _max_batch_size(settings: Settings, model: str, profile: Profile | None) -> int:
    own = settings.of(model).max_batch_size
    source = source_of(settings.specs[model])
    if profile is not None:
        largest = profile.max_batch_size
    elif own is None and pads_to_buckets(settings.device, source, settings.stages, settings.optimise):
        largest = min(LARGEST, settings.queue_capacity)
    else:
        largest = own or DEFAULT_MAX_BATCH_SIZE
    return min(largest, own or largest, source.max_batch_size or largest)


def _profiles(
    settings: Settings, emulated: Profile | None, cached_profile: CachedProfile, errors: _Errors
) -> dict[str, Profile]:
    """By model, the profile of --profile, else the emulated device's, else the cached one.

    Profiles are truncated to the largest batch of the device. A model whose profile has to be measured is left out.
    """
    names = errors.check(partial(by_model, settings.profile, settings.specs)) or {}
    loaded = {
        name: errors.check(partial(_load_profile, name, settings.max_batch_size))
        for name in dict.fromkeys(names.values())
    }
    found: dict[str, Profile] = {}
    for model in settings.specs:
        profile = loaded[names[model]] if model in names else emulated
        if profile is None and model not in names and not is_emulated(settings) and not errors.messages:
            profile = cached_profile(settings, model, _max_batch_size(settings, model, None))
            if profile is not None and settings.resource == "cpu_time" and profile.cpu_times is None:
                profile = None  # it was measured before CPU times were counted
        if profile is not None:
            largest = profile.max_batch_size if emulated is None else emulated.max_batch_size
            staged = errors.check(partial(_in_device_stages, settings, model, profile, emulated))
            largest = _max_batch_size(settings, model, profile.truncated(min(largest, profile.max_batch_size)))
            truncated = (staged or profile).truncated(largest)
            found[model] = errors.check(partial(limited, settings, model, truncated)) or truncated
    return found


def _choices(settings: Settings, profiles: Mapping[str, Profile], errors: _Errors) -> dict[str, ModelPolicy]:
    """By model with a known profile, its policy; the specs of other models are checked as far as possible."""
    if errors.check(partial(by_model, settings.policy, settings.specs)) is None:
        return {}
    if errors.check(partial(model_levels, settings)) is None:
        return {}
    found: dict[str, ModelPolicy | None] = {}
    for model in settings.specs:
        profile = profiles.get(model)
        found[model] = errors.check(partial(_choice, settings, model, profile))
        errors.check(partial(_check_capacity, settings, model, _max_batch_size(settings, model, profile)))
    return {model: choice for model, choice in found.items() if choice is not None}


def _choice(settings: Settings, model: str, profile: Profile | None) -> ModelPolicy | None:
    if profile is not None:
        return policy_of(settings, model, profile)
    largest, source = _max_batch_size(settings, model, None), source_of(settings.specs[model])
    check_spec(_spec(settings, model), largest, _open_keys(settings, model), source.has_lengths)
    return None


def _check_capacity(settings: Settings, model: str, largest: int) -> None:
    if settings.queue_capacity < largest:
        raise SpecError(
            f"queue_capacity {settings.queue_capacity} is below the largest batch of {model}, {largest}, which could "
            f"never be full; give --queue-capacity {largest} or more, or --max-batch-size {settings.queue_capacity}"
        )


def _spec(settings: Settings, model: str) -> str:
    return by_model(settings.policy, settings.specs).get(model, "auto")


def model_levels(settings: Settings) -> dict[str, Levels]:
    """The priority levels of the models that have several.

    Raises:
        SpecError: weights or longest waits are malformed, or do not belong together.
    """
    given = by_model(settings.priority_weights, settings.specs)
    waits = by_model(settings.priority_max_wait_ms, settings.specs)
    found = {}
    for model, text in given.items():
        count = len(parse_weights(text))
        found[model] = Levels(count, settings.reserved_share, _max_waits(waits.pop(model, ""), count))
    if waits:
        raise SpecError(
            f"--priority-max-wait-ms {next(iter(waits.values()))} is for levels, and {next(iter(waits))} has one; add "
            "--priority-weights W1,W2"
        )
    return found


def _max_waits(text: str, count: int) -> tuple[float, ...]:
    if not text:
        return ()
    try:
        waits = tuple(float(word) / 1e3 for word in text.split(","))
    except ValueError:
        waits = ()
    if len(waits) != count or not all(wait > 0.0 for wait in waits):
        raise SpecError(f"--priority-max-wait-ms {text}: give a time above 0, or inf, for each of {count} levels")
    return waits


def _open_keys(settings: Settings, model: str) -> dict[str, str]:
    """Values for keys that a model's policy takes and its spec leaves open."""
    weights = by_model(settings.priority_weights, settings.specs).get(model)
    if weights is None or ignored_keys(_spec(settings, model), {"priority_weights"}):
        return _defaults(settings, model)
    return {**_defaults(settings, model), "priority_weights": weights.replace(",", ":")}


def _defaults(settings: Settings, model: str) -> dict[str, str]:
    """The goals that the settings give a model."""
    own = settings.of(model)
    flags = {"w2": own.w2, "slo_p95_ms": own.slo_p95_ms}
    return {key: repr(value) for key, value in flags.items() if value is not None}
