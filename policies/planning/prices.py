"""The cost of a fleet of equal devices, which solve-policy --plan minimises, and checks of its flags."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from policies.profile import Profile
from policies.types import SpecError

_PLAN_OPTIONS = (
    *("profile", "plan", "arrival_rate", "slo_mean_ms", "slo_p95_ms", "slo_share", "no_mix", "min_batch_size"),
    *("max_batch_size", "service_distribution", "resource", "simulate", "seed", "output", "as_json"),
    *("priority_weights", "priority_shares"),
)
_PLAN_ONLY = ("spare", "device_price", "idle_power_w", "power_price")


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a fleet.

    Attributes:
        per_device: fixed cost of a device.
        per_watt: cost per W of mean power above `idle`.
        unit: unit of the cost: "an hour" (money), "W" or "devices".
        idle: power of an idle device, W; 0 where it is not known.
    """

    per_device: float
    per_watt: float
    unit: str
    idle: float

    def cost(self, devices: int, power: float) -> float:
        """Return the cost of a number of devices with this total mean power above `idle`, W."""
        return devices * self.per_device + self.per_watt * power


def check_flags(given: Sequence[str], planning: bool) -> None:
    """Check the combination of flags; `given` names the parameters that were set.

    Raises:
        SpecError: they exclude each other, or one is missing.
    """
    for name in given:
        flag = f"--{name.replace('_', '-')}"
        if planning and name not in (*_PLAN_OPTIONS, *_PLAN_ONLY):
            raise SpecError(f"--plan does not take {flag}: leave {flag} out")
        if not planning and name in (*_PLAN_ONLY, "plan"):
            raise SpecError(f"{flag} is an option of --plan: add --plan")
    if planning and not {"slo_mean_ms", "slo_p95_ms", "slo_share"} & set(given):
        raise SpecError("--plan needs a bound: add --slo-p95-ms M, --slo-mean-ms M or --slo-share MS:SHARE")


def priced(
    profile: Profile, device_price: float | None, idle_power: float | None, power_price: float | None
) -> tuple[Profile, Price]:
    """Choose the cost to minimise: money, else power if the idle power is known, else the number of devices.

    Args:
        profile: profile of a device. If it has no idle power, its energies include idle power during service.
        device_price: price of a device per hour.
        idle_power: power of an idle device, W.
        power_price: price of a kWh.

    Returns:
        The profile with energies above idle power, and the price.

    Raises:
        SpecError: a price is not positive, or the profile does not support it.
    """
    for flag, value in (("device-price", device_price), ("idle-power-w", idle_power), ("power-price", power_price)):
        if value is not None and not 0.0 < value < inf:
            raise SpecError(f"--{flag} {value:g} is invalid; give a number above 0, or leave it out")
    by_power = [f"--{flag}" for flag, value in (("idle-power-w", idle_power), ("power-price", power_price)) if value]
    if by_power and profile.rate_unit != "W":
        raise SpecError(f"profile {profile.name!r} does not save energy in joules: leave {by_power[0]} out")
    if idle_power is not None:
        profile = _above_idle(profile, idle_power)
    idle = (profile.idle_power or 0.0) if profile.saved == "energy" else 0.0
    if device_price is not None or power_price is not None:
        per_watt = (power_price or 0.0) / 1e3
        price = Price((device_price or 0.0) + idle * per_watt, per_watt, "an hour", idle)
    elif idle and profile.saved == "energy":
        price = Price(idle, 1.0, "W", idle)
    else:
        price = Price(1.0, 0.0, "devices", idle)
    if not price.per_device:
        raise SpecError("with --power-price alone a device has no cost: add --device-price, or --idle-power-w")
    return profile, price


def _above_idle(profile: Profile, idle_power: float) -> Profile:
    """Subtract the idle power from the energies."""
    if profile.idle_power is not None:
        known = f"{profile.idle_power:g} W"
        raise SpecError(f"profile {profile.name!r} has an idle power of {known}: leave --idle-power-w out")
    pairs = list(zip(profile.energies or (), profile.service_times, strict=True))
    least = min(energy / time for energy, time in pairs)
    if idle_power > least:
        raise SpecError(
            f"--idle-power-w {idle_power:g} is above the {least:.4g} W that profile {profile.name!r} draws in service; "
            "give less"
        )
    above = tuple(max(energy - idle_power * time, 0.0) for energy, time in pairs)
    return replace(profile, energies=above, idle_power=idle_power)
