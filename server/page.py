"""The page at /: what is served, how it decides, and where to look further."""

from html import escape

from server.inference import Inference

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8886 }
.note { color: #c60 }
"""


def render_page(inference: Inference, address: str) -> str:
    """The page as it stands now, for whom the server is at `address`; it needs no script and nothing from outside."""
    rows = "".join(_row(inference, name) for name in inference.models)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Batchwright</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>Batchwright</h1>'
        f"<p>Send a picture: <code>curl --data-binary @photo.jpg {escape(address)}predict</code></p>"
        f"<table><tr><th>model<th>weights<th>policy<th>waiting<th>arrivals, 1/s</tr>{rows}</table>"
        f'<p><a href="docs">interface</a> · <a href="metrics">metrics</a> · <a href="v2">protocol</a></p></html>'
    )


def _row(inference: Inference, name: str) -> str:
    dispatcher, weights = inference.dispatcher, inference.models[name].weights
    mark = ' class="note"' if weights in {"random", "emulated"} else ""
    return (
        f"<tr><td>{escape(name)}<td{mark}>{escape(weights)}<td>{escape(dispatcher.chosen[name].spec)}"
        f"<td>{dispatcher.queue_length(name)}<td>{dispatcher.arrival_rate(name):.1f}</tr>"
    )
