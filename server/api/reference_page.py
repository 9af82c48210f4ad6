"""The API reference at /docs: the OpenAPI document as HTML, without scripts or external resources."""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1rem; margin: 1.5rem 0 0; border-top: 1px solid #8886; padding-top: .6rem }
p, ul { margin: .2rem 0 }
"""
_DIGEST = b64encode(sha256(_STYLE.encode()).digest()).decode()
_CSP = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
REFERENCE_HEADERS: Mapping[str, str] = {
    "content-security-policy": f"{_CSP}; style-src 'sha256-{_DIGEST}'",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


def render_reference(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document as an HTML page."""
    routes = "".join(
        _route(method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Batchwright: API reference</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>API reference</h1>'
        f'<p>OpenAPI document: <a href="openapi.json">openapi.json</a></p>{routes}</html>'
    )


def _route(method: str, path: str, operation: Mapping[str, Any]) -> str:
    lines = [
        f"<code>{escape(p['name'])}</code> in the {escape(p['in'])}{', required' if p.get('required') else ''}"
        for p in operation.get("parameters", ())
    ]
    if "requestBody" in operation:
        lines.append(f"body: {escape(', '.join(operation['requestBody']['content']))}")
    items = "".join(f"<li>{line}</li>" for line in lines)
    title = f"<code>{escape(method.upper())} {escape(path)}</code>"
    return f"<h2>{title}</h2><p>{escape(operation.get('summary', ''))}</p>" + (f"<ul>{items}</ul>" if items else "")
