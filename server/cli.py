"""serve-model: the command line, and the start of a server from its settings."""

import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from policies.command_line.common import INTERRUPTED, VersionFlag, complete_policies, complete_profiles, examples, run
from policies.cpus import SWITCH_INTERVAL
from server.app.lifecycle import exit_on_sigterm
from server.config import FLAG_GROUPS, Settings, SettingsResult, read_settings
from server.telemetry.logs import configured_logging
from server.telemetry.printed import printed_to_log

app = typer.Typer()

_EXAMPLES = examples(
    "serve-model googlenet",
    "serve-model googlenet --slo-p95-ms 50",
    "serve-model mine=model.py:Mine --device cuda:0,cuda:1 --port 8080",
    "serve-model googlenet --device emulated:googlenet-tesla-p4 --policy smdp:w2=2",
)
_NUMBERS = {int: "<int>", float: "<float>"}


def _complete_devices(incomplete: str) -> list[str]:
    names = ["auto", "cpu", "cuda:0", *(f"emulated:{name}" for name in complete_profiles(""))]
    return [name for name in names if name.startswith(incomplete)]


_COMPLETIONS: dict[str, Callable[[str], list[str]]] = {
    "profile": complete_profiles,
    "policy": complete_policies,
    "device": _complete_devices,
}


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of a setting, or the argument MODEL...; its value is None if it is not given."""
    text, default = field.description, field.default
    if name == "models":
        option: object = typer.Argument(metavar="MODEL...", help=text)
    else:
        shown = f"{default:g}" if isinstance(default, float) else default
        number = next((name for kind, name in _NUMBERS.items() if field.annotation in (kind, kind | None)), None)
        text = text if default in (None, []) or default is False else f"{text} (default {shown})"
        names = [f"--{name.replace('_', '-')}"] if field.annotation is bool else []  # without a --no-...
        option = typer.Option(*names, metavar=number, help=text, autocompletion=_COMPLETIONS.get(name))
    types = (each for each in (list[str], Path, bool) if field.annotation in (each, each | None))
    flag_type: Any = next(types, str)  # the settings parse numbers, so that all mistakes are reported together
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[flag_type | None, option]
    )


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each setting in place of its `**flags`."""
    (*own, _) = inspect.signature(command).parameters.values()
    flags = [_flag(name, field) for name, field in Settings.model_fields.items()]
    command.__signature__ = inspect.Signature([*flags, *own])  # type: ignore[attr-defined]  # typer reads it
    return command


@app.command(epilog=_EXAMPLES)
@_with_flags
def serve_model(
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, such as queue_capacity: 512")] = None,
    version: VersionFlag = False,
    **flags: Any,
) -> None:
    """Serve models over HTTP, in batches that a policy launches."""
    started = monotonic()
    exit_on_sigterm()
    result = read_settings({name: value for name, value in flags.items() if value not in (None, [])}, config)
    with configured_logging(*result.log_options), printed_to_log():
        try:
            code = _serve(result, started)
        except SystemExit as end:  # SIGTERM before the server handles it
            code = int(end.code or 0)
        except KeyboardInterrupt:
            code = INTERRUPTED
            logging.getLogger("batchwright").info("interrupted before the server was ready")
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for a thread in a hung device call, and abort in one that computes


def _serve(result: SettingsResult, started: float) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL)
    from profiler.first_profile import FirstProfiles  # not at the top, since --help has no need of all this
    from server.app import serving

    return serving.run(result, FirstProfiles(), started)


def _groups() -> dict[str, list[str]]:
    """Titles of the groups of flags in the help, and the settings in each."""
    title, groups = "", dict[str, list[str]]()
    for name in Settings.model_fields:
        title = FLAG_GROUPS.get(name, title)
        if title:
            groups.setdefault(title, []).append(name)
    return groups


GROUPS = _groups()


def main() -> None:
    """The console entry point."""
    run(app, "serve-model", GROUPS)


if __name__ == "__main__":
    main()
