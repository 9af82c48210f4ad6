"""What a server is going to do, checked as a whole before anything is loaded, downloaded, measured or served."""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from policies.catalog import Chosen, by_stages, check_spec, choose, in_stages
from policies.profile import Profile, load_profile
from policies.types import SpecError
from server.app.lifecycle import bind
from server.config import Reading, Settings, by_model
from server.models.text_model_spec import check_text, is_text

MEASURED_UP_TO = 32  # largest batch where neither a flag nor a profile says
_EMULATED = "emulated:"
_T = TypeVar("_T")

Kept = Callable[[Settings, str, int], Profile | None]


@dataclass(frozen=True)
class DevicePlan:
    """What one device is going to do.

    Attributes:
        settings: as given, with this device alone.
        played: what an emulated device plays; None for a real one.
        profiles: by model, those known without measuring.
        chosen: by model, the policy of each of those.
    """

    settings: Settings
    played: Profile | None
    profiles: Mapping[str, Profile]
    chosen: Mapping[str, Chosen]

    def choose(self, model: str, profile: Profile) -> Chosen:
        """The policy of a model, for the profile that it has in the end: measured first, or cut to what fits.

        Raises:
            SpecError: the policy cannot be had with that profile.
        """
        known = self.chosen.get(model)
        if known is not None and known.profile is profile:
            return known
        return policy_of(self.settings, model, profile)

    def largest(self, model: str) -> int:
        """The largest batch of a model."""
        known = self.profiles.get(model)
        return known.max_batch_size if known else self.settings.max_batch_size or MEASURED_UP_TO


@dataclass(frozen=True)
class Plan:
    """Settings without a mistake, and what followed from them already.

    Attributes:
        settings: as given.
        bound: socket at the address to serve.
        devices: at least one.
    """

    settings: Settings
    bound: socket.socket
    devices: Sequence[DevicePlan]


def policy_of(settings: Settings, model: str, profile: Profile) -> Chosen:
    """What the settings want a model to be served by, on a device with this profile.

    Raises:
        SpecError: it cannot be had with that profile.
    """
    return choose(_spec(settings, model), profile, _defaults(settings))


class _Mistakes:
    """Gathers what is wrong, so that all of it is told at once."""

    def __init__(self, told: Iterable[str]) -> None:
        self.told = list(told)

    def of(self, step: Callable[[], _T]) -> _T | None:
        """What the step gives; None where it complains."""
        try:
            return step()
        except SpecError as error:
            self.told.append(str(error))
            return None


def make_plan(reading: Reading, kept: Kept, checks: Sequence[Callable[[Settings], object]] = ()) -> Plan:
    """Check everything that can be checked before the work begins.

    Args:
        reading: of the settings.
        kept: the profile kept of a model on a real device, for batches up to a size; None where there is none.
        checks: of what else the settings name; each complains with a SpecError.

    Raises:
        SpecError: there are mistakes; one line tells all of them.
    """
    mistakes = _Mistakes(reading.mistakes)
    settings = reading.settings
    if settings is None:
        raise SpecError("; ".join(mistakes.told))
    for check in (_devices, *checks):
        mistakes.of(partial(check, settings))
    devices = [_device_plan(one, kept, mistakes) for one in _each(settings)]
    bound = mistakes.of(partial(bind, settings.host, settings.port))
    if bound is None or mistakes.told:
        if bound is not None:
            bound.close()
        raise SpecError("; ".join(dict.fromkeys(mistakes.told)))
    return Plan(settings, bound, devices)


def _each(settings: Settings) -> list[Settings]:
    """The settings for each device alone."""
    return [settings.model_copy(update={"device": device.strip()}) for device in settings.device.split(",")]


def _device_plan(settings: Settings, kept: Kept, mistakes: _Mistakes) -> DevicePlan:
    played = mistakes.of(partial(_played, settings))
    mistakes.of(partial(_stages, settings))
    profiles = _profiles(settings, played, kept, mistakes)
    return DevicePlan(settings, played, profiles, _choices(settings, profiles, mistakes))


def is_emulated(settings: Settings) -> bool:
    """Whether no real device is asked for."""
    return settings.device.startswith(_EMULATED)


def _devices(settings: Settings) -> None:
    """The devices, and the models and weights that only a real one needs."""
    each = _each(settings)
    emulated = [is_emulated(one) for one in each]
    if any(emulated) and not all(emulated):
        raise SpecError(
            f"device {settings.device!r} mixes emulated and real ones, whose answers would differ; give one kind"
        )
    mistakes = _Mistakes(())
    for one in each:
        mistakes.of(partial(_device, one))
    if not mistakes.told and not all(emulated):
        mistakes.of(partial(_distinct, each))
    if mistakes.told:
        raise SpecError("; ".join(dict.fromkeys(mistakes.told)))


def _distinct(each: Sequence[Settings]) -> None:
    from server.backends import torch_images

    places = [torch_images.resolve_device(one.device)[0] for one in each]
    if len(set(places)) < len(places):
        raise SpecError(f"a device is named twice: {','.join(map(str, places))}; name each once")


def _device(settings: Settings) -> None:
    """One device, and the models and weights that only a real one needs."""
    texts = {name: spec for name, spec in settings.specs.items() if is_text(spec)}
    if is_emulated(settings):
        if texts:
            raise SpecError(
                f"{next(iter(texts))} is a text model, an emulated device takes pictures; give --device cpu"
            )
        return
    # torch takes seconds to import, which an emulated device should not cost
    from server.backends import torch_images
    from server.models import torchvision_source

    mistakes = _Mistakes(())
    mistakes.of(partial(torch_images.resolve_device, settings.device))
    for name, spec in settings.specs.items():
        mistakes.of(partial(check_text, name, spec, settings.weights, settings.stages))
        if name not in texts:
            mistakes.of(partial(torchvision_source.check_name, spec))
    if settings.weights not in ("auto", "random") and not Path(settings.weights).is_file():
        mistakes.told.append(
            f"no weights file {settings.weights!r}; give auto, random, or a file of model.state_dict()"
        )
    if mistakes.told:
        raise SpecError("; ".join(mistakes.told))


def _played(settings: Settings) -> Profile | None:
    if not is_emulated(settings):
        return None
    played = _loaded(settings.device.removeprefix(_EMULATED), settings.max_batch_size)
    for model in settings.specs:
        played = in_stages(_spec(settings, model), played, settings.stages)
    return played


def _stages(settings: Settings) -> None:
    """A network that is not cut has no stages to decide between."""
    pictures = (model for model, spec in settings.specs.items() if not is_text(spec))
    lazy = [model for model in pictures if by_stages(_spec(settings, model))]
    if lazy and settings.stages is None and not is_emulated(settings):
        raise SpecError(f"policy {_spec(settings, lazy[0])!r} decides between stages; give --stages K, such as 4")


def _cut(settings: Settings, model: str, profile: Profile, played: Profile | None) -> Profile:
    """The profile in the stages that the device has."""
    if played is not None:
        return profile if profile.stages == played.stages else profile.in_stages(played.stages)
    if is_text(settings.specs[model]) and profile.lengths is None:
        raise SpecError(f"profile {profile.name!r} knows no lengths, {model} is a text model; measure one for it")
    if profile.stages != (settings.stages or 1):
        raise SpecError(
            f"profile {profile.name!r} has {profile.stages} stages, the network of {model} {settings.stages or 1}; "
            f"measure it with profile-model --stages, or give --stages {profile.stages}"
        )
    return profile


def _loaded(name: str, max_batch_size: int | None) -> Profile:
    return load_profile(name).truncated(max_batch_size)


def _profiles(settings: Settings, played: Profile | None, kept: Kept, mistakes: _Mistakes) -> dict[str, Profile]:
    """By model: what a flag names, else what the device plays, else what is kept; no larger than the device's."""
    names = mistakes.of(partial(by_model, settings.profile, settings.specs)) or {}
    loaded = {
        name: mistakes.of(partial(_loaded, name, settings.max_batch_size)) for name in dict.fromkeys(names.values())
    }
    found: dict[str, Profile] = {}
    for model in settings.specs:
        profile = loaded[names[model]] if model in names else played
        if profile is None and model not in names and not is_emulated(settings) and not mistakes.told:
            profile = kept(settings, model, settings.max_batch_size or MEASURED_UP_TO)
        if profile is not None:
            largest = profile.max_batch_size if played is None else played.max_batch_size
            cut = mistakes.of(partial(_cut, settings, model, profile, played))
            found[model] = (cut or profile).truncated(min(largest, profile.max_batch_size))
    return found


def _choices(settings: Settings, profiles: Mapping[str, Profile], mistakes: _Mistakes) -> dict[str, Chosen]:
    """By model with a known profile, its policy; the others' specs are checked as far as they can be."""
    if mistakes.of(partial(by_model, settings.policy, settings.specs)) is None:
        return {}
    found: dict[str, Chosen | None] = {}
    for model in settings.specs:
        profile = profiles.get(model)
        found[model] = mistakes.of(partial(_choice, settings, model, profile))
        largest = profile.max_batch_size if profile else settings.max_batch_size or MEASURED_UP_TO
        mistakes.of(partial(_check_capacity, settings, model, largest))
    return {model: choice for model, choice in found.items() if choice is not None}


def _choice(settings: Settings, model: str, profile: Profile | None) -> Chosen | None:
    if profile is not None:
        return policy_of(settings, model, profile)
    largest, texts = settings.max_batch_size or MEASURED_UP_TO, is_text(settings.specs[model])
    check_spec(_spec(settings, model), largest, _defaults(settings), texts)
    return None


def _check_capacity(settings: Settings, model: str, largest: int) -> None:
    """A queue that is full before a batch is would cap all batches, and nobody would be told."""
    if settings.queue_capacity < largest:
        raise SpecError(
            f"queue_capacity {settings.queue_capacity} is below the largest batch of {model}, {largest}: none could "
            f"ever be full; give --queue-capacity {largest} or more, or --max-batch-size {settings.queue_capacity}"
        )


def _spec(settings: Settings, model: str) -> str:
    return by_model(settings.policy, settings.specs).get(model, "auto")


def _defaults(settings: Settings) -> dict[str, str]:
    flags = {"w2": settings.w2, "slo_p95_ms": settings.slo_p95_ms}
    return {key: repr(value) for key, value in flags.items() if value is not None}
