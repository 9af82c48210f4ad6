"""The dashboard at /: its HTML with the current state, and the static files that it loads."""

import asyncio
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import metadata, resources
from string import Template

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from policies.catalog import CATALOG
from server.api.dashboard.live import curl_example
from server.api.inference import Inference

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'",
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
PAGE_HEADERS: Mapping[str, str] = {
    "content-security-policy": "; ".join(_CSP),
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_IMMUTABLE = "public, max-age=31536000, immutable"  # the page's links contain the versions of the files
_FILES = {
    "app": "app.js",
    "charts": "charts.js",
    "form": "form.js",
    "style": "style.css",
    "plotly": "plotly.js",
    "plotly_css": "plotly.css",  # nearly empty; plotly adds its rules to this style sheet
}
_STYLE_ID = re.compile(rb'document\.getElementById\("([0-9a-f]{64})"\)')
_STYLE_PLACEHOLDERS = (
    b"for (const id of %s) document.head.append(Object.assign(document.createElement('meta'), { id }));\n"
)
_PLACEHOLDERS_VERSION = 1  # part of the script's version; increase it when `_STYLE_PLACEHOLDERS` changes
_SUGGESTED_POLICIES = (
    *("greedy", "serial", "static:8", "timeout:5", "rate-matching", "max-under-deadline:slo_ms=50"),
    *("smdp:w2=1", "smdp:w2=16", "smdp:slo_p95_ms=100", "smdp:slo_mean_ms=50", "smdp:power_cap_w=20"),
)


def render_page(inference: Inference, address: str) -> str:
    """Render the page with the current state, also readable without scripts; `address` is the server's URL."""
    models = "".join(f"<option>{escape(name)}</option>" for name in inference.models)
    return _html().substitute(
        curl=escape(curl_example(inference, next(iter(inference.models)), address)),
        models=models,
        rows="".join(_row(inference, name) for name in inference.models),
        policies="".join(f'<option value="{escape(spec)}"></option>' for spec in _SUGGESTED_POLICIES),
        names=", ".join(CATALOG),
        **{key: f"assets/{file}?v={_version(file)}" for key, file in _FILES.items()},
    )


def page_routes() -> list[Route]:
    """Return one route per file, so that no path of a request is used to open a file."""
    return [_route(file) for file in _FILES.values()]


def _route(file: str) -> Route:
    async def answer(request: Request) -> Response:
        headers = {"etag": f'"{_version(file)}"', "cache-control": _IMMUTABLE, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            body = await asyncio.to_thread(_compressed, file)
        else:
            body = await asyncio.to_thread(_read, file)
        return Response(body, headers=headers, media_type=_TYPES[file.rpartition(".")[2]])

    return Route(f"/assets/{file}", answer)


@cache
def _compressed(file: str) -> bytes:
    """Return the compressed file; it is cached, since plotly's script has 4.8 MB."""
    return gzip.compress(_read(file), mtime=0)


@cache
def _version(file: str) -> str:
    """Return a version that changes with the file: a hash, or for plotly's large script the package's version."""
    if file == "plotly.js":
        return f"{metadata.version('plotly')}-{_PLACEHOLDERS_VERSION}"
    return hashlib.sha256(_read(file)).hexdigest()[:12]


@cache
def _read(file: str) -> bytes:
    if file == "plotly.js":
        return _with_placeholders((resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes())
    return (resources.files("server.api.dashboard") / "assets" / file).read_bytes()


def _with_placeholders(plotly: bytes) -> bytes:
    """Prepend elements with the ids of plotly's inline styles for maps.

    Plotly does not insert a style whose id exists. The page's content security policy would block them.
    """
    ids = sorted({name.decode() for name in _STYLE_ID.findall(plotly)})
    return _STYLE_PLACEHOLDERS % json.dumps(ids).encode() + plotly


@cache
def _html() -> Template:
    return Template(_read("index.html").decode())


def _row(inference: Inference, name: str) -> str:
    fleet, weights = inference.fleet, inference.models[name].weights
    return (
        f"<tr><td>{escape(name)}<td>{escape(weights)}<td>{escape(fleet.first_of(name).chosen[name].spec)}"
        f"<td>{fleet.queue_length(name)}<td>{fleet.arrival_rate(name):.1f}</tr>"
    )
