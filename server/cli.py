"""serve-model: the command line, and the processes that it starts."""

import inspect
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from prometheus_client import disable_created_metrics
from pydantic.fields import FieldInfo

from policies.command import run
from policies.types import SpecError
from server.app.http_server import bind
from server.app.supervisor import number_of_gateways, role_of_this_process, supervise
from server.config import Settings, read_settings
from server.telemetry.logs import configured_logging
from server.telemetry.printed import printed_to_log

app = typer.Typer(add_completion=False)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of a setting, or the argument MODEL...; its value is None if it is not given."""
    text, default = field.description, field.default
    if name == "models":
        option: object = typer.Argument(metavar="MODEL...", help=text)
    else:
        shown = f"{default:g}" if isinstance(default, float) else default
        option = typer.Option(help=text if default in (None, []) else f"{text} (default {shown})")
    types = (each for each in (list[str], int, float, Path) if field.annotation in (each, each | None))
    flag_type: Any = next(types, str)  # the settings parse other types from a string
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[flag_type | None, option]
    )


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each setting in place of its `**flags`."""
    (config, _) = inspect.signature(command).parameters.values()
    flags = [_flag(name, field) for name, field in Settings.model_fields.items()]
    command.__signature__ = inspect.Signature([*flags, config])  # type: ignore[attr-defined]  # typer reads it
    return command


@app.command()
@_with_flags
def serve_model(
    *,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings, such as queue_capacity: 512")] = None,
    **flags: Any,
) -> None:
    """Serve models over HTTP, in batches that a policy launches."""
    started = monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until the server handles it
    result = read_settings({name: value for name, value in flags.items() if value not in (None, [])}, config)
    role = role_of_this_process()
    with configured_logging(*result.log_options), printed_to_log():
        bound = None if role is not None else _bound_for_gateways(result.settings)
        if bound is not None:
            code = supervise(sys.argv[1:], *bound)
        else:
            from profiler.first_profile import FirstProfiles  # here: a supervisor needs none of it
            from server.app.start import serve_alone, serve_behind_gateways

            profiles = FirstProfiles()
            if role is None:
                code = serve_alone(result, profiles, started)
            else:
                code = serve_behind_gateways(result, profiles, started, *role)
    logging.shutdown()
    os._exit(code)  # a thread in a hung device call or sensor would block a normal exit


def _bound_for_gateways(settings: Settings | None) -> tuple[int, socket.socket] | None:
    """The number of gateways and their bound address; None without gateways, or if the address cannot be bound.

    Planning then reports all that is wrong with the settings together.
    """
    if settings is None or not (gateways := number_of_gateways(settings.gateways)):
        return None
    with suppress(SpecError):
        return gateways, bind(settings.host, settings.port)
    return None


def main() -> None:
    """The console entry point."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    run(app, "serve-model")


if __name__ == "__main__":
    main()
