"""What a fleet of equal devices costs: what solve-policy --plan makes least, and whether its flags go together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from policies.profile import Profile
from policies.types import SpecError

_TAKEN = (
    *("profile", "plan", "arrival_rate", "slo_mean_ms", "slo_p95_ms", "slo_share", "no_mix", "min_batch_size"),
    *("max_batch_size", "service_distribution", "simulate", "seed", "output", "as_json"),
)
_PRICES = ("device_price", "idle_power_w", "power_price")


@dataclass(frozen=True, slots=True)
class Price:
    """What a fleet costs.

    Attributes:
        per_device: whatever it does.
        per_watt: of mean power beyond `idle`.
        unit: of the cost: "an hour" (money), "W" or "devices".
        idle: power of a device that does nothing, W; 0 where that is not known.
    """

    per_device: float
    per_watt: float
    unit: str
    idle: float

    def cost(self, devices: int, power: float) -> float:
        """Of so many devices and their mean power beyond `idle`, W."""
        return devices * self.per_device + self.per_watt * power


def check_flags(given: Sequence[str], planning: bool) -> None:
    """Whether the flags go together; `given` names those that were.

    Raises:
        SpecError: they do not.
    """
    for name in given:
        flag = f"--{name.replace('_', '-')}"
        if planning and name not in (*_TAKEN, *_PRICES):
            raise SpecError(f"--plan finds how many devices a rate and a promise need: leave {flag} out")
        if not planning and name in (*_PRICES, "plan"):
            raise SpecError(f"{flag} is what a plan reckons with: add --plan")
    if planning and not {"slo_mean_ms", "slo_p95_ms", "slo_share"} & set(given):
        raise SpecError("--plan keeps a promise: add --slo-p95-ms M, --slo-mean-ms M or --slo-share MS:SHARE")


def priced(
    profile: Profile, device_price: float | None, idle_power: float | None, power_price: float | None
) -> tuple[Profile, Price]:
    """What is to be least: money, else power where idle power is known, else the number of devices.

    Args:
        profile: of a device. Where it knows no idle power, its energies hold it while a batch is served.
        device_price: an hour.
        idle_power: that a device draws in any case, W.
        power_price: a kWh.

    Returns:
        The profile with energies beyond the idle power, and the price.

    Raises:
        SpecError: a price cannot be, or does not go with this profile.
    """
    for flag, value in (("device-price", device_price), ("idle-power-w", idle_power), ("power-price", power_price)):
        if value is not None and not 0.0 < value < inf:
            raise SpecError(f"--{flag} {value:g} cannot be; give a number above 0, or leave it out")
    by_power = [f"--{flag}" for flag, value in (("idle-power-w", idle_power), ("power-price", power_price)) if value]
    if by_power and (profile.energies is None or profile.cost_unit != "J"):
        raise SpecError(f"profile {profile.name!r} has no energies in joules: leave {by_power[0]} out")
    if idle_power is not None:
        profile = _beyond_idle(profile, idle_power)
    idle = profile.idle_power or 0.0
    if device_price is not None or power_price is not None:
        per_watt = (power_price or 0.0) / 1e3
        price = Price((device_price or 0.0) + idle * per_watt, per_watt, "an hour", idle)
    elif idle and profile.energies is not None:
        price = Price(idle, 1.0, "W", idle)
    else:
        price = Price(1.0, 0.0, "devices", idle)
    if not price.per_device:
        raise SpecError("by --power-price alone a device costs nothing: add --device-price, or --idle-power-w")
    return profile, price


def _beyond_idle(profile: Profile, idle_power: float) -> Profile:
    """Energies without what the device draws in any case."""
    if profile.idle_power is not None:
        known = f"{profile.idle_power:g} W idle"
        raise SpecError(f"profile {profile.name!r} says {known} itself: leave --idle-power-w out")
    pairs = list(zip(profile.energies or (), profile.service_times, strict=True))
    least = min(energy / time for energy, time in pairs)
    if idle_power > least:
        raise SpecError(
            f"--idle-power-w {idle_power:g} is above the {least:.4g} W that profile {profile.name!r} draws at work; "
            "give less"
        )
    beyond = tuple(max(energy - idle_power * time, 0.0) for energy, time in pairs)
    return replace(profile, energies=beyond, idle_power=idle_power)
