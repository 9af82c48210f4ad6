"""Settings of serve-model: command line over environment over file over defaults."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from policies.types import SpecError

_PREFIX = "BATCHWRIGHT_"


def _split(value: object) -> object:
    """One text stands for its words: BATCHWRIGHT_MODELS="googlenet resnet50"."""
    return value.split() if isinstance(value, str) else value


_Words = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Everything that serve-model can be told; an environment variable is the prefix and the name in capitals.

    Attributes:
        models: names of torchvision classification models.
        policy: [MODEL=]SPEC entries.
        profile: [MODEL=]PROFILE entries.
        device: auto, cpu, cuda:N or emulated:PROFILE.
        max_batch_size: largest batch; None: the profile's, 32 when measuring.
        weights: auto, random or a file.
        w2: weight of power in the objective, where the policy spec leaves it open.
        slo_p95_ms: 95th percentile of the response time to keep, where the policy spec leaves it open.
        queue_capacity: requests that may wait.
        host: address to bind.
        port: to bind; 0 takes a free one.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid")
    file: ClassVar[Path | None] = None

    models: _Words = Field(min_length=1)
    policy: _Words = []
    profile: _Words = []
    device: str = "auto"
    max_batch_size: int | None = Field(None, ge=1, le=4096)
    weights: str = "auto"
    w2: float | None = Field(None, ge=0, allow_inf_nan=False)
    slo_p95_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    queue_capacity: int = Field(1024, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)

    @model_validator(mode="after")
    def _models_are_names(self) -> Self:
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"a model is named twice: {' '.join(self.models)}")
        strange = [name for name in self.models if not re.fullmatch(r"[\w.-]+", name, re.ASCII)]
        if strange:
            raise ValueError(f"{strange[0]!r} is no torchvision model's name")
        return self

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


def load_settings(flags: dict[str, Any], file: Path | None) -> Settings:
    """Settings from the flags that were given, the environment and the file.

    Raises:
        SpecError: a value or a key cannot be used; all mistakes in one line.
    """
    if file is not None and not file.is_file():
        raise SpecError(f"no configuration file {str(file)!r}: give the path of a YAML file")
    known = {_PREFIX + name.upper() for name in Settings.model_fields}
    strange = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)
    if strange:
        raise SpecError(f"unknown environment variable {strange[0]}; known are {', '.join(sorted(known))}")

    class WithFile(Settings):
        pass

    WithFile.file = file
    try:
        return WithFile(**flags)
    except ValidationError as error:
        mistakes = (f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
        raise SpecError("; ".join(mistakes)) from error
    except (YAMLError, ValueError) as error:
        raise SpecError(f"the configuration cannot be read: {' '.join(str(error).split())}") from error


def by_model(entries: list[str], models: list[str]) -> dict[str, str]:
    """[MODEL=]VALUE entries as a value for each model; one without a model's name is for all others.

    Raises:
        SpecError: a model is given two values.
    """
    named: dict[str, str] = {}
    for entry in entries:
        model, _, value = entry.partition("=")
        key = model if model in models else ""
        if key in named:
            raise SpecError(f"{entry!r} is a second value for {key or 'all models'}; give one, or MODEL=VALUE for each")
        named[key] = value if key else entry
    return {model: named.get(model, named.get("", "")) for model in models if model in named or "" in named}
