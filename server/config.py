"""Settings of serve-model, defined once: flags, environment variables and keys of the configuration file.

A flag takes precedence over the environment, the environment over the file, the file over the default.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from policies.profile import Resource
from policies.types import SpecError
from server.energy.meters import METER_USAGE, METERS
from server.models.upstream_spec import upstreams_of
from server.telemetry.logs import LogFormat, LogLevel

_PREFIX = "BATCHWRIGHT_"
_SERVICE_LINK = re.compile(r"BATCHWRIGHT_(SERVICE_(HOST|PORT).*|PORT_\d+_(TCP|UDP).*)")
_SERVICE_LINKS = (
    "are Kubernetes' variables of a service called batchwright; set enableServiceLinks: false in the pod, or call the "
    "service otherwise"
)
_OF_MODEL = (
    "device",
    "max_batch_size",
    "max_batch_tokens",
    "weights",
    "w2",
    "slo_p95_ms",
    "meter",
    "labels",
)  # keys of a model in the configuration file
_IN_LISTS = (
    "policy",
    "profile",
    "sample",
    "priority_weights",
    "priority_max_wait_ms",
)  # further keys of a model, which the settings have as [MODEL=]VALUE


_PATHS = ("api_key_file", "tls_cert", "tls_key")
_SUFFIXES = (".py", ".pt2", ".onnx", ".json", ".npz")


def _split(value: object) -> object:
    """Split the string of an environment variable into words, such as BATCHWRIGHT_MODELS="googlenet resnet50"."""
    return value.split() if isinstance(value, str) else value


def _url(value: str) -> str:
    if re.fullmatch(r"https?://[^/\s]+(/\S*)?", value) is None:
        raise ValueError("give a URL such as http://localhost:4318")
    return value


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _threads(value: object) -> object:
    """The text of an integer, which YAML makes of 3, and by base 60 also of 3:1 without quotes."""
    if type(value) is not int:
        return value
    if value >= 60:
        raise ValueError('give text, such as "3:1" in quotes')
    return str(value)


_Url = Annotated[str, AfterValidator(_url)]
Meter = Annotated[str, StringConstraints(pattern=f"^({METERS})$")]
_Words = Annotated[list[str], NoDecode, BeforeValidator(_split)]


FLAG_GROUPS = {  # in the help, by the first of each in the order of the settings
    "profile": "Models and devices",
    "policy": "Policy",
    "host": "HTTP and gRPC",
    "queue_capacity": "Limits",
    "log_level": "Logs and traces",
}


class Settings(BaseSettings):
    """Settings of a server; the description of a field is the help text of its flag.

    The environment variable of a field is BATCHWRIGHT_ and the field's name in capitals.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid")

    models: _Words = Field(
        min_length=1,
        description="torchvision classification models, or NAME=SPEC, where SPEC is such a model, a model of yours (a "
        "class in FILE.py:CLASS, an exported program FILE.pt2, or FILE.onnx), an encoder of texts "
        "(hf:ID_OR_FOLDER) or a model of another server (oip:http://HOST:PORT/MODEL)",
    )
    profile: _Words = Field(
        [],
        description="[MODEL=]PROFILE: a shipped name or a file; else the emulated device's, a cached or a measured one",
    )
    profile_first: bool = Field(
        False,
        description="measure a profile that is missing before the server is ready, instead of between the first calls",
    )
    sample: _Words = Field(
        [],
        description="[MODEL=]FILE.json or FILE.npz with one sample of a FILE.py:CLASS, FILE.pt2 or FILE.onnx, for "
        "warm-up and profiling; else random ones",
    )
    device: str = Field("auto", description="auto, cpu, cuda:N or emulated:PROFILE; several are separated by commas")
    meter: Meter = Field(
        "none",
        description=f"energy meter of the server of an oip:http://HOST:PORT/MODEL, if it runs on this machine: "
        f"{METER_USAGE}",
    )
    max_batch_size: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="largest batch size; else the profile's largest; for a measured profile 32, or on CUDA the size of "
        "at most 128 above which throughput gains less than 2 percent",
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=1,
        le=10**9,
        description="of models with padded inputs: largest product of batch size and longest length of a batch",
    )
    weights: str = Field(
        "pretrained",
        description="pretrained (cached or downloaded; without them the server does not start), auto (random if there "
        "are no pretrained ones), random, or a FILE of a state dict",
    )
    optimise: Literal["auto", "eager", "none"] = Field(
        "auto",
        description="networks of images on CUDA: auto (captured graphs of the fastest of several implementations), "
        "eager (captured graphs of the network as it is) or none (one operation after the other, without graphs)",
    )
    threads: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}(:[1-9]\d{0,3})?$"), BeforeValidator(_threads)] | None = Field(
        None,
        description="threads of a model on the CPU, such as 3, or these and the threads that decode, 3:1 (default: "
        "those of the model are compared at start and while serving)",
    )
    pipeline_processes: int = Field(
        1, ge=1, le=64, description="processes of each pipeline, FILE.py:CLASS with a Pipeline"
    )
    stages: int | None = Field(
        None, ge=1, le=64, description="stages into which each network is split, for the policies lazy and catch-up"
    )
    reload: Literal["beside", "replace"] = Field(
        "beside",
        description="how a model is loaded again while the server serves: beside the one in service, which then needs "
        "memory for both, or replace, after that is removed; its calls get 503 meanwhile",
    )
    policy: _Words = Field(
        [], description="[MODEL=]SPEC: batching policy of MODEL, or of all models without one of their own; else auto"
    )
    w2: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="weight of the resource in the objective, ms per W, core or busy share, where the policy spec does "
        "not set it",
    )
    slo_p95_ms: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="bound on the 95th percentile of the response time, ms, where the policy spec does not set it; "
        "NAME=MS for one model, or for a pipeline, whose bound is split over its models",
    )
    priority_weights: _Words = Field(
        [],
        description="[MODEL=]W1,W2,...: priority levels of MODEL, or of all models; the weights of their mean response "
        "times, the greatest first",
    )
    priority_max_wait_ms: _Words = Field(
        [],
        description="[MODEL=]M1,M2,...: of each level the time in ms after which a request precedes those of all "
        "levels; inf for never, the default",
    )
    reserved_share: float = Field(
        0.1, ge=0, lt=1, allow_inf_nan=False, description="share of the queue that only calls of priority level 1 take"
    )
    resource: Resource | None = Field(
        None,
        description="what goals save: energy, cpu_time or busy_time (default: the first of these that the profile has)",
    )
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 takes a free one")
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the Open Inference Protocol over gRPC, on the same host; 0 takes a free one; without it "
        "there is no gRPC; needs the extra grpc",
    )
    api_key_file: Path | None = Field(
        None,
        description="file of API keys, one per line: name scope sha256-of-key, optionally a rate limit in calls/s; "
        "without a file no key is required",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of the TLS certificate and its chain; plain HTTP without it"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a passphrase")
    gateways: Annotated[str | None, BeforeValidator(_text)] = Field(
        None, description="without effect, and an error in the next version: one process serves HTTP"
    )
    queue_capacity: int = Field(1024, ge=1, description="maximum number of waiting requests, over all devices")
    queue_bytes: int = Field(
        2**30,
        ge=2**26,
        description="memory budget of all calls from their first byte to the end of the response, bytes; "
        "one call may use half of it",
    )
    max_json_bytes: int = Field(
        8 * 2**20, ge=2**16, le=64 * 2**20, description="maximum size of the JSON part of a call, bytes"
    )
    hung_after_s: float = Field(
        30.0,
        gt=0,
        allow_inf_nan=False,
        description="batch timeout in seconds, or 20 times the expected service time if that is longer; after it the "
        "model is loaded again in a new process, or the other server is unavailable",
    )
    header_timeout_s: float = Field(
        20.0, gt=0, le=86400, allow_inf_nan=False, description="time limit for a client to send a call's headers, s"
    )
    body_timeout_s: float = Field(
        60.0, gt=0, le=86400, allow_inf_nan=False, description="time limit for a client to send a call's body, s"
    )
    read_timeout_s: float = Field(
        30.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="time limit for a client to read any part of a response while the write buffer is full, s",
    )
    answer_timeout_s: float = Field(
        300.0, gt=0, le=86400, allow_inf_nan=False, description="time limit for a client to read a whole response, s"
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="time after SIGTERM during which calls are still admitted while readiness is already 503, s",
    )
    log_level: LogLevel = Field("info", description="lowest level that is logged: debug, info, warning or error")
    log_format: LogFormat = Field("auto", description="auto (console on a terminal, else json), console or json")
    otlp_endpoint: _Url | None = Field(
        None, description="URL of an OpenTelemetry collector that receives traces; needs the extra otel"
    )

    _of_model: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_model_names(self) -> Self:
        if len(self.specs) < len(self.models):
            raise ValueError(f"a model is named twice: {' '.join(self.models)}")
        invalid = [name for name in self.specs if not re.fullmatch(r"[\w.-]+", name, re.ASCII)]
        if invalid:
            raise ValueError(
                f"{invalid[0]!r} is not a model name; use letters, digits and _ . - for a torchvision model's name or "
                "the name in NAME=SPEC"
            )
        for name, spec in self.specs.items():
            upstreams_of(spec)
            if name == spec and Path(spec).suffix in (".pt2", ".onnx"):
                raise ValueError(f"{spec!r} has no name; write NAME={spec}")
        return self

    @property
    def model_threads(self) -> int | None:
        """Threads of a model on the CPU; None where they are to be chosen."""
        return None if self.threads is None else int(self.threads.partition(":")[0])

    @property
    def decoding_threads(self) -> int | None:
        """Threads that decode; None for the defaults."""
        decoding = (self.threads or "").partition(":")[2]
        return int(decoding) if decoding else None

    @property
    def specs(self) -> dict[str, str]:
        """The spec of each model by its name; an entry without = is both name and spec."""
        pairs = (model.partition("=") for model in self.models)
        return {name: spec or name for name, _, spec in pairs}

    def of(self, model: str) -> Self:
        """The settings with the values that the configuration file gives this model."""
        own = {key: value for key, value in self._of_model.get(model, {}).items() if key != "labels"}
        return self.model_copy(update=own) if own else self

    def is_own(self, model: str, key: str) -> bool:
        """Whether the configuration file gives this key to this model alone."""
        return key in self._of_model.get(model, {})

    def by_device(self) -> list[Self]:
        """The settings of each device alone, with the models that it serves; a device may be named several times.

        Another server, of a model NAME=oip:http://HOST:PORT/MODEL, is a device of its own.
        """
        slots: dict[tuple[str, int], dict[str, str]] = {}  # specs by device and how often it was named before
        for model, spec in self.specs.items():
            upstreams = upstreams_of(spec)
            given = [name.strip() for name in self.of(model).device.split(",")]
            names = [upstream.device for upstream in upstreams] or given
            for at, name in enumerate(names):
                own = upstreams[at].spec if upstreams else spec
                slots.setdefault((name, names[:at].count(name)), {})[model] = own
        return [self._with_specs(specs, device) for (device, _), specs in slots.items()]

    def without(self, names: Collection[str]) -> Self:
        """The settings without these models."""
        models = [entry for entry in self.models if entry.partition("=")[0] not in names]
        return self.model_copy(update={"models": models})

    def own_settings(self, model: str) -> list[str]:
        """What is set for this model alone, as it is given."""
        entries = [
            f"--{key.replace('_', '-')} {each}"
            for key in _IN_LISTS
            for each in getattr(self, key)
            if each.startswith(f"{model}=")
        ]
        return [*self._of_model.get(model, {}), *entries]

    def only(self, model: str) -> Self:
        """The settings of this device with one of its models alone."""
        return self._with_specs({model: self.specs[model]}, self.device)

    def _with_specs(self, specs: Mapping[str, str], device: str) -> Self:
        """The settings of a device that serves these models alone."""
        others = self.specs.keys() - specs
        lists = {
            key: [entry for entry in getattr(self, key) if entry.partition("=")[0] not in others] for key in _IN_LISTS
        }
        models = [f"{model}={spec}" for model, spec in specs.items()]
        one = self.model_copy(update={"device": device, "models": models, **lists})
        one._of_model = {
            model: {key: value for key, value in own.items() if key != "device"}
            for model, own in self._of_model.items()
        }
        return one

    def labels(self, model: str) -> tuple[str, ...]:
        """The labels that the configuration file gives this model; empty without any.

        Raises:
            SpecError: the file of labels cannot be read.
        """
        labels = self._of_model.get(model, {}).get("labels", ())
        if not isinstance(labels, str):
            return tuple(map(str, labels))
        try:
            return tuple(Path(labels).read_text(encoding="utf-8-sig").splitlines())
        except (OSError, ValueError) as error:
            raise SpecError(
                f"the labels of {model} cannot be read: {error}; give a file with a label a line"
            ) from error

    @classmethod
    def settings_customise_sources(  # type: ignore[override]  # noqa: D102  (pydantic-settings' hook, called by keywords)
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        **_: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `read_settings` merges the other sources, to keep the valid values among invalid ones


@dataclass(frozen=True)
class SettingsResult:
    """Settings and the errors in their sources.

    Attributes:
        settings: the valid values, with defaults in place of the invalid ones; None without a valid list of models.
        errors: one line for each invalid value, unknown key or unreadable file.
    """

    settings: Settings | None
    errors: tuple[str, ...] = ()

    @property
    def log_options(self) -> tuple[LogLevel, LogFormat]:
        """Level and format of the log."""
        return ("info", "auto") if self.settings is None else (self.settings.log_level, self.settings.log_format)


def load_settings(flags: Mapping[str, Any], file: Path | None) -> Settings:
    """Settings from the given flags, the environment and the file.

    Raises:
        SpecError: a value is invalid or a key unknown; all errors in one line.
    """
    result = read_settings(flags, file)
    if result.settings is None or result.errors:
        raise SpecError("; ".join(result.errors))
    return result.settings


def read_settings(flags: Mapping[str, Any], file: Path | None) -> SettingsResult:
    """Settings from the given flags, the environment and the file, with all errors."""
    values, errors = _read_file(file)
    of_model = _split_models(values, errors)
    explicit = {**EnvSettingsSource(Settings)(), **flags}
    served = _entries(explicit.get("models", values.get("models")))
    bounds = _split_bound(explicit, [str(entry).partition("=")[0] for entry in served], errors)
    values |= explicit
    _merge_lists(values, of_model, explicit)
    of_model = {
        model: {key: value for key, value in own.items() if key not in explicit} for model, own in of_model.items()
    }
    for model, own in bounds.items():
        of_model.setdefault(model, {}).update(own)
    known = {key: value for key, value in values.items() if key in Settings.model_fields}
    errors += _unknown_variables()
    errors += [f"{key}: unknown setting; serve-model --help lists all" for key in values if key not in known]
    names = {key: _PREFIX + key.upper() for key in explicit}
    names |= {key: "--" + key.replace("_", "-") for key in flags if key != "models"}
    try:
        return SettingsResult(_with_absolute_paths(_with_models(known, of_model, errors)), tuple(errors))
    except ValidationError as error:
        details = error.errors()
    errors += [_message(each, names) for each in details]
    invalid = {each["loc"][0] for each in details if each["loc"]}
    try:
        valid = Settings(**{key: value for key, value in known.items() if key not in invalid})
    except ValidationError:
        return SettingsResult(None, tuple(errors))
    return SettingsResult(valid, tuple(errors))


def _entries(value: object) -> list[Any]:
    """The entries of a list, or the words of a string."""
    words = _split(value)
    return words if isinstance(words, list) else []


def _merge_lists(values: dict[str, Any], of_model: Mapping[str, dict[str, Any]], explicit: Collection[str]) -> None:
    """Move the policies and profiles of single models into the lists of [MODEL=]VALUE entries.

    A flag or variable replaces those of the models that it names, or of all models if it names none.
    """
    served = {str(entry).partition("=")[0] for entry in _entries(values.get("models"))}
    for key in _IN_LISTS:
        entries = _entries(values.get(key))
        names = {str(entry).partition("=")[0] for entry in entries}
        general = key in explicit and not names <= served
        own = {model: options.pop(key) for model, options in of_model.items() if key in options}
        added = [f"{m}={value}" for m, value in own.items() if m in served and m not in names and not general]
        if added:
            values[key] = [*entries, *added]


def _split_bound(explicit: dict[str, Any], served: Sequence[str], errors: list[str]) -> dict[str, dict[str, Any]]:
    """The bound of NAME=MS alone, by that name, taken out of the settings of all; errors are appended to `errors`."""
    given = explicit.get("slo_p95_ms")
    if not isinstance(given, str) or "=" not in given:
        return {}
    del explicit["slo_p95_ms"]
    name, _, bound = given.partition("=")
    if name not in served:
        errors.append(f"--slo-p95-ms {given} is for {name!r}, which is not served; name one of {', '.join(served)}")
        return {}
    return {name: {"slo_p95_ms": bound}}


def _with_models(known: dict[str, Any], of_model: Mapping[str, dict[str, Any]], errors: list[str]) -> Settings:
    """The settings with the values of single models; the errors in these are appended to `errors`."""
    settings = Settings(**known)
    for model, own in of_model.items():
        general = {key: value for key, value in own.items() if key in Settings.model_fields}
        try:
            validated = Settings(**{**known, **general})
        except ValidationError as error:
            errors += [f"models: {model}: {_message(each, {})}" for each in error.errors()]
            continue
        settings._of_model[model] = {**own, **{key: getattr(validated, key) for key in general}}
    return settings


def _with_absolute_paths(settings: Settings) -> Settings:
    """The settings with absolute paths of files: the code of a model may change the process's folder later."""
    paths = {key: path.absolute() for key in _PATHS if (path := getattr(settings, key)) is not None}
    specs = {name: _absolute(spec) for name, spec in settings.specs.items()}
    models = [name if spec == name else f"{name}={spec}" for name, spec in specs.items()]
    lists = {key: [_absolute_entry(entry, specs) for entry in getattr(settings, key)] for key in _IN_LISTS}
    resolved = settings.model_copy(
        update={"models": models, "weights": _absolute(settings.weights, any_name=True), **paths, **lists}
    )
    resolved._of_model = {model: {**own} for model, own in settings._of_model.items()}
    for own in resolved._of_model.values():
        for key in ("labels", "weights"):
            if isinstance(own.get(key), str):
                own[key] = _absolute(own[key], any_name=True)
    return resolved


def _absolute_entry(entry: str, models: Collection[str]) -> str:
    """A [MODEL=]VALUE entry, whose value is absolute if it is a file."""
    model, separator, value = entry.partition("=")
    return f"{model}={_absolute(value)}" if separator and model in models else _absolute(entry)


def _absolute(value: str, any_name: bool = False) -> str:
    """The absolute path of an existing file, with the class that follows it; other values as they are.

    A name without a suffix or a slash is one of torchvision or of a shipped profile, unless any name is a file's.
    """
    file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    path = Path(file)
    is_file = any_name or "/" in file or path.suffix in _SUFFIXES
    return f"{path.absolute()}{colon}{name}" if is_file and path.exists() else value


def _split_models(content: dict[str, Any], errors: list[str]) -> dict[str, dict[str, Any]]:
    """Turn the mappings in the list of models into NAME=SOURCE entries; return their other keys by model.

    The errors are appended to `errors`.
    """
    entries = content.get("models")
    if not isinstance(entries, list):
        return {}
    names: list[Any] = []
    of_model: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            names.append(entry)
            continue
        own = {key: value for key, value in entry.items() if value is not None}
        name, source = own.pop("name", None), own.pop("source", None)
        if not isinstance(name, str):
            errors.append(f"models: an entry has no name, {str(entry)[:80]!r}; write name: and source:")
            continue
        names.append(name if source is None else f"{name}={source}")
        unknown = next((key for key in own if key not in (*_IN_LISTS, *_OF_MODEL)), None)
        if unknown is not None:
            known = ", ".join(("name", "source", *_IN_LISTS, *_OF_MODEL))
            errors.append(f"models: {name}: unknown key {unknown!r}; a model has {known}")
        labels = own.get("labels", "")
        if not isinstance(labels, str | list):
            errors.append(f"models: {name}: labels is {labels!r}; give a list, or a file with a label a line")
        elif (odd := next((label for label in labels if not isinstance(label, str)), None)) is not None:
            errors.append(f"models: {name}: the label {odd!r} is no text; write it in quotes")
        of_model[name] = {key: value for key, value in own.items() if key in (*_IN_LISTS, *_OF_MODEL)}
    content["models"] = names
    return of_model


def _read_file(file: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The content of the configuration file, and the errors in it."""
    if file is None:
        return {}, []
    if not file.is_file():
        return {}, [f"no configuration file {str(file)!r}: give the path of a YAML file"]
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
        return {}, [f"the configuration {str(file)!r} cannot be read: {reason}; give a readable YAML file"]
    if not isinstance(content, dict | None):
        return {}, [f"the configuration {str(file)!r} is not a mapping; write lines such as port: 8000"]
    return content or {}, []


def _message(error: ErrorDetails, names: Mapping[str, str]) -> str:
    """The error in one line; `names` are those of the flags and variables that were given, by key."""
    location, value = ".".join(names.get(str(each), str(each)) for each in error["loc"]) or "settings", error["input"]
    if error["type"] == "missing":
        return f"no {location} given: name at least one, such as googlenet"  # all other fields have defaults
    given = "" if isinstance(value, dict) else f", not {str(value)[:80]!r}"
    if str(value).startswith(("tcp://", "udp://")):
        given += f", one of those that {_SERVICE_LINKS}"
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ").partition(", unable to parse")[0]
    if error["type"] == "string_pattern_mismatch":
        reason = f"give a value for: {Settings.model_fields[str(error['loc'][0])].description}"
    return f"{location}: {reason}{given}"


def _unknown_variables() -> list[str]:
    variables = {_PREFIX + name.upper() for name in Settings.model_fields}
    allowed = variables | {_PREFIX + "API_KEY"}  # read by generate-load
    unknown = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in allowed)
    if not unknown:
        return []
    if any(_SERVICE_LINK.fullmatch(name) for name in unknown):
        return [f"{', '.join(unknown)} {_SERVICE_LINKS}"]
    plural = "s" if len(unknown) > 1 else ""
    return [f"unknown environment variable{plural} {', '.join(unknown)}; known are {', '.join(sorted(variables))}"]


def by_model(entries: list[str], models: Collection[str]) -> dict[str, str]:
    """The value of each model in [MODEL=]VALUE entries; an entry without a model is for all models not named.

    Raises:
        SpecError: a model has two values, or is not served; all errors in one line.
    """
    named: dict[str, str] = {}
    errors = []
    for entry in entries:
        model, _, value = entry.partition("=")
        key = model if model in models else ""
        if key in named:
            errors.append(f"{entry!r} is a second value for {key or 'all models'}; give one, or MODEL=VALUE for each")
        elif not key and _has_model(entry):
            errors.append(f"{entry!r} is for {model!r}, which is not served; name one of {', '.join(models)}")
        named[key] = value if key else entry
    if errors:
        raise SpecError("; ".join(errors))
    return {model: named.get(model, named.get("", "")) for model in models if model in named or "" in named}


def _has_model(entry: str) -> bool:
    """Whether an entry begins with MODEL=. A spec has : or , before its first =, but the name of a file may have =."""
    return re.match(r"[\w.-]+=", entry, re.ASCII) is not None and not Path(entry).is_file()
