"""Settings of serve-model: command line over environment over file over defaults."""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from policies.types import SpecError
from server.models.text_size_predictor import Guess
from server.telemetry.logs import Form, Level

_PREFIX = "BATCHWRIGHT_"


def _split(value: object) -> object:
    """One text stands for its words: BATCHWRIGHT_MODELS="googlenet resnet50"."""
    return value.split() if isinstance(value, str) else value


def _url(value: str) -> str:
    if re.fullmatch(r"https?://[^/\s]+(/\S*)?", value) is None:
        raise ValueError("give a URL such as http://localhost:4318")
    return value


_Url = Annotated[str, AfterValidator(_url)]
_Words = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Everything that serve-model can be told; an environment variable is the prefix and the name in capitals.

    Attributes:
        models: names of torchvision classification models, or NAME=SPEC.
        policy: [MODEL=]SPEC entries.
        profile: [MODEL=]PROFILE entries.
        device: auto, cpu, cuda:N or emulated:PROFILE; several real or several emulated ones, with commas between.
        max_batch_size: largest batch; None: the profile's, 32 when measuring.
        weights: auto, random or a file.
        guess: how many tokens a text will be is guessed so, where it is not known: limit, online or learned.
        stages: into how many each network is cut; None: not at all, and an emulated device has its profile's.
        w2: weight of power in the objective, where the policy spec leaves it open.
        slo_p95_ms: 95th percentile of the response time to keep, where the policy spec leaves it open.
        queue_capacity: requests that may wait, on all devices together.
        queue_bytes: memory budget of all calls, bytes: bodies, documents while they are parsed, pictures while they are
            decoded, samples until they are served, answers until they are sent. One call may hold half of it.
        hung_after_s: a batch that takes longer, and 20 times its expected time, ends the server for its supervisor.
        host: address to bind.
        port: to bind; 0 takes a free one.
        api_key_file: whose keys are needed to call; None: nobody needs one.
        tls_cert: PEM file of the certificate and its chain; None: plain HTTP.
        tls_key: PEM file of its key.
        header_timeout_s: how long a client may take to send the headers of a request, s.
        body_timeout_s: and then its body, s.
        read_timeout_s: and to read some of an answer that fills the buffers, s.
        answer_timeout_s: and to read the whole of it, s.
        drain_delay_s: how long calls are still admitted after SIGTERM, s, for balancers to notice that it is not ready.
        otlp_endpoint: URL of the OpenTelemetry collector that gets the traces; None: nothing is traced.
        log_level: the least that is logged.
        log_format: console, json, or auto: console on a terminal, else json.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid")
    file: ClassVar[Path | None] = None

    models: _Words = Field(min_length=1)
    policy: _Words = []
    profile: _Words = []
    device: str = "auto"
    max_batch_size: int | None = Field(None, ge=1, le=4096)
    weights: str = "auto"
    guess: Guess = "learned"
    stages: int | None = Field(None, ge=1, le=64)
    w2: float | None = Field(None, ge=0, allow_inf_nan=False)
    slo_p95_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    queue_capacity: int = Field(1024, ge=1)
    queue_bytes: int = Field(2**30, ge=2**26)
    hung_after_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    header_timeout_s: float = Field(20.0, gt=0, le=86400, allow_inf_nan=False)
    body_timeout_s: float = Field(60.0, gt=0, le=86400, allow_inf_nan=False)
    read_timeout_s: float = Field(30.0, gt=0, le=86400, allow_inf_nan=False)
    answer_timeout_s: float = Field(300.0, gt=0, le=86400, allow_inf_nan=False)
    drain_delay_s: float = Field(0.0, ge=0, le=3600, allow_inf_nan=False)
    otlp_endpoint: _Url | None = None
    log_level: Level = "info"
    log_format: Form = "auto"

    @model_validator(mode="after")
    def _models_are_names(self) -> Self:
        if len(self.specs) < len(self.models):
            raise ValueError(f"a model is named twice: {' '.join(self.models)}")
        strange = [name for name in self.specs if not re.fullmatch(r"[\w.-]+", name, re.ASCII)]
        if strange:
            raise ValueError(f"{strange[0]!r} is no torchvision model's name, nor the name in NAME=SPEC")
        return self

    @property
    def specs(self) -> dict[str, str]:
        """By name what each model is; the name itself says it where nothing else does."""
        pairs = (model.partition("=") for model in self.models)
        return {name: spec or name for name, _, spec in pairs}

    @classmethod
    def settings_customise_sources(  # noqa: D102  (pydantic-settings' hook)
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=cls.file)


@dataclass(frozen=True)
class Reading:
    """What could be read of the settings.

    Attributes:
        settings: those that are right, defaults for the others; None where not even the models are known.
        mistakes: what is wrong, a line each.
    """

    settings: Settings | None
    mistakes: tuple[str, ...] = ()

    @property
    def voice(self) -> tuple[Level, Form]:
        """The level and the format of what is logged."""
        return ("info", "auto") if self.settings is None else (self.settings.log_level, self.settings.log_format)


def load_settings(flags: dict[str, Any], file: Path | None) -> Settings:
    """Settings from the flags that were given, the environment and the file.

    Raises:
        SpecError: a value or a key cannot be used; all mistakes in one line.
    """
    reading = read_settings(flags, file)
    if reading.settings is None or reading.mistakes:
        raise SpecError("; ".join(reading.mistakes))
    return reading.settings


def read_settings(flags: dict[str, Any], file: Path | None) -> Reading:
    """Settings from the flags that were given, the environment and the file, and every mistake in them."""
    if file is not None and not file.is_file():
        mistake = f"no configuration file {str(file)!r}: give the path of a YAML file"
        return _with(mistake, read_settings(flags, None))
    try:
        found = _gathered(flags, file)
    except (YAMLError, ValueError, OSError) as error:
        mistake = f"the configuration cannot be read: {' '.join(str(error).split())}"
        return Reading(None, (mistake,)) if file is None else _with(mistake, read_settings(flags, None))
    strange = tuple(_strange_variables())
    try:
        return Reading(_Given(**found), strange)
    except ValidationError as error:
        mistakes = tuple(_mistake(e) for e in error.errors())
        wrong = {e["loc"][0] for e in error.errors() if e["loc"]}
    try:
        rest = _Given(**{key: value for key, value in found.items() if key not in wrong})
    except ValidationError:
        rest = None
    return Reading(rest, (*strange, *mistakes))


def _mistake(error: ErrorDetails) -> str:
    where, value = ".".join(map(str, error["loc"])) or "settings", error["input"]
    if error["type"] == "missing":
        return f"no {where} given: name at least one, such as googlenet"  # all else has a default
    told = "" if isinstance(value, dict) else f", not {str(value)[:80]!r}"
    return f"{where}: {error['msg'].removeprefix('Value error, ')}{told}"


def _with(mistake: str, reading: Reading) -> Reading:
    return Reading(reading.settings, (mistake, *reading.mistakes))


class _Given(Settings):
    """Settings from what is given alone."""

    @classmethod
    def settings_customise_sources(  # type: ignore[override]  # called by keywords, so it takes what it wants
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        **_: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _gathered(flags: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """What all sources say, unchecked."""
    gathered: dict[str, Any] = {}

    class Sources(Settings):
        @model_validator(mode="before")
        @classmethod
        def _look(cls, found: dict[str, Any]) -> dict[str, Any]:
            gathered.update(found)
            return found

    Sources.file = file
    with suppress(ValidationError):
        Sources(**flags)
    return gathered


def _strange_variables() -> Iterator[str]:
    known = {_PREFIX + name.upper() for name in Settings.model_fields}
    ours = known | {_PREFIX + "API_KEY"}  # generate-load's
    strange = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in ours)
    if strange:
        several = "s" if len(strange) > 1 else ""
        yield f"unknown environment variable{several} {', '.join(strange)}; known are {', '.join(sorted(known))}"


def by_model(entries: list[str], models: Collection[str]) -> dict[str, str]:
    """[MODEL=]VALUE entries as a value for each model; one without a model's name is for all others.

    Raises:
        SpecError: a model is given two values, or is not served; all mistakes in one line.
    """
    named: dict[str, str] = {}
    mistakes = []
    for entry in entries:
        model, _, value = entry.partition("=")
        key = model if model in models else ""
        if key in named:
            mistakes.append(f"{entry!r} is a second value for {key or 'all models'}; give one, or MODEL=VALUE for each")
        elif not key and _names_a_model(entry):
            mistakes.append(f"{entry!r} is for {model!r}, which is not served; name one of {', '.join(models)}")
        named[key] = value if key else entry
    if mistakes:
        raise SpecError("; ".join(mistakes))
    return {model: named.get(model, named.get("", "")) for model in models if model in named or "" in named}


def _names_a_model(entry: str) -> bool:
    """Whether it begins like MODEL=: a spec has a colon or a comma before its first =; a file may be called so."""
    return re.match(r"[\w.-]+=", entry, re.ASCII) is not None and not Path(entry).is_file()
