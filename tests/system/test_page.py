"""The dashboard: its data, its files, and its behaviour in a real browser."""

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.support.harness import Server, serving
from policies.profile import load_profile
from server.api import dashboard
from server.api.schemas import Outputs
from tests.support.http_client import fetch, photograph

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page, Route

EMULATED = ("googlenet", "--device", "emulated:googlenet-tesla-p4")
ASSETS = Path(str(dashboard.__file__)).parent / "assets"
POLICY = "/admin/models/googlenet/policy"
MODELS = [*(f"model-{n}" for n in range(9)), "quality-control-of-line-3"]
SHARED = ("googlenet-tesla-p4", "googlenet-tesla-p4-x10", "googlenet-h200-prior")  # profiles of devices of all but one
OF_TENSORS = """
import numpy as np
from batchwright import Model, Tensor


class Mine(Model):
    inputs = {"x": Tensor("FP32", [2, 3]), "scale": Tensor("INT64", []), "note": Tensor("BYTES", [1])}
    outputs = {"scaled": Tensor("FP64", [2, 3]), "scale": Tensor("INT64", []), "note": Tensor("BYTES", [1])}

    def run(self, x, scale, note):
        return {"scaled": x * scale[:, None, None], "scale": scale, "note": note}


class Dense(Model):
    inputs = {"image": Tensor("FP32", [3, 256, 256])}
    outputs = {"classes": Tensor("FP32", [21, 256, 256])}

    def run(self, image):
        return {"classes": np.repeat(image[:, :1], 21, 1)}


class Own(Model):
    inputs = {"x": Tensor("FP32", [1])}
    outputs = {"y": Tensor("FP32", [1])}

    def run(self, x):
        return {"y": 2 * x}

    def decode(self, body, content_type):
        return {"x": [len(body)]}

    def render(self, outputs):
        return {"twice the length": outputs["y"][0]}
"""
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # the first takes less time
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving(*EMULATED, "--policy", "smdp:w2=1.6") as process:
        yield process


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of models of named tensors: of two inputs, with a large output, and with code for bodies."""
    file = tmp_path_factory.mktemp("models") / "mine.py"
    file.write_text(OF_TENSORS)
    models = [f"{name.lower()}={file}:{name}" for name in ("Mine", "Dense", "Own")]
    with serving(*models, "--profile", "googlenet-tesla-p4", "--policy", "greedy", "--device", "cpu") as process:
        yield process


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a key for each scope."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    lines = [
        f"{scope} {scope} {hashlib.sha256(f'open-{scope}'.encode()).hexdigest()}" for scope in ("predict", "admin")
    ]
    file.write_text("\n".join(lines))
    return str(file)


@pytest.fixture(scope="module")
def with_keys(keys: str) -> Iterator[Server]:
    with serving(*EMULATED, "--policy", "greedy", "--api-key-file", keys) as process:
        yield process


@pytest.fixture(scope="module")
def fleet(keys: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys, of ten models on four devices: the last model has a device and an objective of its own."""
    own = tmp_path_factory.mktemp("profiles") / "a-device-with-a-long-name.json"
    own.write_text(replace(load_profile("resnet50-p4-int8"), name="own").to_json())
    *shared, last = (f"emulated:{profile}" for profile in (*SHARED, own))
    models: list[dict[str, Any]] = [
        {"name": name, "source": "googlenet", "device": ",".join(shared)} for name in MODELS
    ]
    models[-1] |= {"device": last, "policy": "smdp", "slo_p95_ms": 1, "max_batch_size": 4}
    settings = {"models": models, "policy": ["greedy"], "max_batch_size": 32, "api_key_file": keys}
    file = own.with_name("settings.yaml")
    file.write_text(json.dumps(settings))
    with serving("--config", str(file)) as process:
        yield process


def send(url: str, n: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert {reply.status for reply in pool.map(lambda _: fetch(url, "/predict", photograph()), range(n))} == {200}


def assets(html: str) -> list[str]:
    return re.findall(r'(?:src|href)="(assets/[^"]+)"', html)


# without a browser


def test_live_returns_the_state_and_only_new_points(running: Server) -> None:
    send(running.url, 20)
    state = fetch(running.url, "/live?model=googlenet").json
    assert state["models"] == ["googlenet"]
    assert (state["status"], state["weights"], state["slo_ms"]) == ("ready", "emulated", None)
    assert set(state["policy"]) == {"name", "spec", "version", "chart"}
    assert state["policy"]["spec"] == "smdp:w2=1.6"
    assert sum(size * count for size, count, _ in state["observed"]) >= 20
    assert 1 <= len(state["batches"]) <= 20
    keys = {"t", "model", "device", "batch_size", "reason", "policy", "waited_ms", "service_ms", "energy_mj", "cpu_ms"}
    assert all(set(batch) == keys for batch in state["batches"])
    assert [p["seq"] for p in state["points"]] == list(range(1, state["seq"] + 1))
    later = fetch(running.url, f"/live?since={state['seq']}").json
    assert all(point["seq"] > state["seq"] for point in later["points"])
    assert later["run"] == state["run"]


def test_live_policy_returns_the_chart_and_the_profile(running: Server) -> None:
    reply = fetch(running.url, "/live/policy?model=googlenet")
    assert reply.headers["cache-control"] == "no-store"
    view = reply.json
    assert len(view["rates_hz"]) == len(view["batch_size"]) == 49
    assert {len(row) for row in view["batch_size"]} == {len(view["queue_lengths"])}
    assert max(map(max, view["batch_size"])) == view["profile"]["max_batch_size"] == 32
    assert view["profile"]["service_ms"][0] == pytest.approx(1.3575)
    assert view["profile"]["cost"][0] == pytest.approx(39.502)
    assert "w2 = 1.6" in view["how"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/live?model=alexnet", 404),
        ("/live/policy?model=../../etc/passwd", 404),
        ("/live/form?model=alexnet", 404),
        ("/live?since=soon", 400),
        ("/live?since=-1", 400),
        ("/live?since=%C2%B2", 400),
        ("/assets/../page.py", 404),
        ("/assets/%2e%2e/page.py", 404),
        ("/assets/index.html", 404),
        ("/assets/", 404),
        ("/assets", 404),
    ],
)
def test_invalid_parameters_and_paths_are_errors(running: Server, path: str, status: int) -> None:
    reply = fetch(running.url, path)
    assert (reply.status, set(reply.json)) == (status, {"error"})


def test_the_page_shows_the_state_without_scripts_and_blocks_external_resources(running: Server) -> None:
    reply = fetch(running.url, "/")
    html, rules = reply.body.decode(), reply.headers["content-security-policy"]
    assert "<td>googlenet<td>emulated<td>smdp:w2=1.6" in html
    assert f"curl --data-binary @photo.jpg {running.url}/predict" in html
    assert "unsafe" not in rules
    assert rules.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "$" not in html
    assert set(re.findall(r"https?://[^/\s<\"]+", html)) == {running.url}
    for file in ASSETS.iterdir():
        assert not re.findall(r"https?:|//[a-z]+\.", file.read_text()), file


def test_files_are_compressed_cached_and_of_the_right_type(running: Server) -> None:
    found = assets(fetch(running.url, "/").body.decode())
    assert len(found) == 6
    for path in found:
        plain = fetch(running.url, f"/{path}")
        packed = fetch(running.url, f"/{path}", headers={"Accept-Encoding": "gzip"})
        kind = "javascript" if ".js?" in path else "css"
        assert plain.headers["content-type"] == f"text/{kind}; charset=utf-8"
        assert gzip.decompress(packed.body) == plain.body
        assert "immutable" in plain.headers["cache-control"]
        again = fetch(running.url, f"/{path}", headers={"If-None-Match": plain.headers["etag"]})
        assert (again.status, again.body) == (304, b"")


def test_with_keys_the_page_is_open_and_a_swap_needs_a_key(with_keys: Server) -> None:
    html = fetch(with_keys.url, "/").body.decode()
    for path in ("/live", "/live/policy", "/live/form", *(f"/{path}" for path in assets(html))):
        assert fetch(with_keys.url, path).status == 200
    body, bearer = b'{"policy": "greedy"}', {"Authorization": "Bearer open-predict"}
    assert fetch(with_keys.url, POLICY, body, "PUT").status == 401
    assert fetch(with_keys.url, POLICY, body, "PUT", bearer).status == 403
    assert fetch(with_keys.url, "/predict", photograph()).status == 401


# with a browser


@dataclass
class Visit:
    """A page in the browser, with its errors and its requests to other hosts."""

    page: "Page"
    errors: list[str] = field(default_factory=list)
    external_requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[BrowserContext]":
    """A browser with a profile on the disk, where it keeps the scripts that it has compiled: visits take less time.

    For the same reason all tabs share one process, which lives as long as the first tab.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"),
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--renderer-process-limit=1"],
        )
        found.set_default_timeout(30_000)
        yield found
        found.close()


@contextmanager
def visiting(
    browser: "BrowserContext", url: str, width: int = 1280, dark: bool = False, any_script: bool = False
) -> Iterator[Visit]:
    """Visit the page in a tab of its own, so many pixels wide; `any_script`: without the page's policy for scripts."""
    visit = Visit(browser.new_page())
    page = visit.page
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme="dark" if dark else "light")
    if any_script:
        browser.new_cdp_session(page).send("Page.setBypassCSP", {"enabled": True})
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))"
    )
    page.on("console", lambda m: visit.errors.append(m.text) if m.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: visit.errors.append(str(error)))
    ours = (f"{url}/", "data:", f"blob:{url}/")
    page.on(
        "request", lambda request: None if request.url.startswith(ours) else visit.external_requests.append(request.url)
    )
    try:
        page.goto(url)
        page.wait_for_selector("#chart-policy.js-plotly-plot")
        yield visit
    finally:
        page.close()
        browser.set_offline(False)


def drop(page: "Page", data: bytes) -> None:
    make = """(data) => {
              const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
              transfer.items.add(new File([bytes], "photo.jpg", { type: "image/jpeg" })); return transfer; }"""
    transfer = page.evaluate_handle(make, b64encode(data).decode())
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


def swap(page: "Page", spec: str) -> None:
    page.fill("#policy", spec)
    page.press("#policy", "Enter")


def until(page: "Page", condition: str) -> None:
    """Wait inside the page, at most 30 s; its content security policy blocks playwright's wait_for_function."""
    page.evaluate(
        f"""(async () => {{
          for (const end = Date.now() + 30_000; !({condition}); await new Promise((turn) => setTimeout(turn, 20)))
            if (Date.now() > end) throw new Error("not so after 30 s: " + {json.dumps(condition)});
        }})()"""
    )


def rows_of_chart(page: "Page", n: int) -> None:
    until(page, f"document.getElementById('chart-policy').data[0].z.length === {n}")


def test_an_objective_that_cannot_be_kept_or_is_not_pursued_is_a_warning_on_the_page(browser: "BrowserContext") -> None:
    few = serving(*EMULATED, "--max-batch-size", "4", "--slo-p95-ms", "1")
    with few as server, visiting(browser, server.url) as visit:
        page, warning = visit.page, visit.page.locator("#objective-warning")
        shown = warning.inner_text()
        assert shown.startswith("The objective, 95% within 1 ms, cannot be kept at any arrival rate")
        assert shown.count(" ms at ") == 5
        swap(page, "greedy")
        until(page, "document.getElementById('swapped').textContent.endsWith('See the warning above.')")
        until(page, "document.getElementById('objective-warning').textContent.includes('does not pursue')")
        swap(page, "smdp")
        until(page, "!document.getElementById('objective-warning').textContent.includes('does not pursue')")
        assert visit.errors == []


def test_a_page_without_an_objective_has_no_warning_of_one(running: Server, browser: "BrowserContext") -> None:
    with visiting(browser, running.url) as visit:
        assert visit.page.locator("#objective-warning").is_hidden()


def test_what_batches_take_is_shown_in_the_resource_of_the_profile(
    running: Server, browser: "BrowserContext", tmp_path: Path
) -> None:
    named = "[...document.querySelectorAll('h2[data-name]')].map((element) => element.textContent).join()"
    with visiting(browser, running.url) as visit:
        until(visit.page, f"{named} === 'Power,Energy per request,Energy of a batch ζ(b)'")
        assert visit.page.locator("#rate-unit").text_content() == "W"
    times = tmp_path / "times.json"
    times.write_text(
        replace(
            load_profile("googlenet-tesla-p4"), name="times", energies=None, total_energies=None, energy_source="none"
        ).to_json()
    )
    server = serving("googlenet", "--device", f"emulated:{times}", "--policy", "greedy")
    with server as process, visiting(browser, process.url) as visit:
        send(process.url, 1)
        until(visit.page, f"{named} === 'Busy device,Busy time per request,Busy time of a batch ζ(b)'")
        until(visit.page, "Number(document.querySelector('[data-of=rate]').textContent) > 0")
        assert visit.page.locator("#rate-unit").text_content() == "busy share"
        assert visit.errors == []


def test_a_picture_is_predicted_and_a_swap_updates_the_chart(running: Server, browser: "BrowserContext") -> None:
    with visiting(browser, running.url, dark=True) as visit:
        page = visit.page
        rows_of_chart(page, 49)
        drop(page, photograph())
        page.wait_for_selector("#answer li:nth-child(5)")
        assert re.search(
            r"Batch size 1, waiting time [\d.]+ ms, service time [\d.]+ ms, [\d.]+ mJ", page.inner_text("#answer")
        )
        assert "class" in page.inner_text("#answer li")
        send(running.url, 30)
        page.wait_for_selector("#batches tbody tr:nth-child(5)")
        until(page, "document.getElementById('chart-response').data?.[1].y.some((y) => y > 0)")
        until(page, "document.getElementById('chart-service').data.length === 2")
        assert "Emulated" in page.inner_text("#weights")
        assert page.inner_text("#status") == "ready"
        swap(page, "greedy")
        page.wait_for_selector("#swapped:has-text('The policy is now greedy')")
        rows_of_chart(page, 1)
        assert "as soon as the device is free" in page.inner_text("#how")
        chart, drawn = (
            page.locator("#chart-policy").bounding_box(),
            page.locator("#chart-policy svg").first.bounding_box(),
        )
        assert chart is not None
        assert drawn is not None
        assert drawn["height"] <= chart["height"], "a chart of one row is low"
        assert page.inner_text("#spec") == "greedy"
        swap(page, "smdp:w2=1.6")
        rows_of_chart(page, 49)
        assert page.inner_text("#curl") == f"curl --data-binary @photo.jpg {running.url}/predict"
        assert visit.errors == []
        assert visit.external_requests == []


def test_a_form_of_the_inputs_shows_the_outputs_as_a_table(tensors: Server, browser: "BrowserContext") -> None:
    with visiting(browser, tensors.url) as visit:
        page = visit.page
        page.wait_for_selector("#fields label:nth-child(3)")
        assert page.inner_text("#fields label:nth-child(1)").startswith("x FP32 [2, 3]")
        x, scale, note = (page.locator(f"#fields label:nth-child({n}) :is(input, textarea)") for n in (1, 2, 3))
        x.fill("[[1, 2, 3], [4, 5, 6.5]]")
        scale.fill("3")
        note.fill('it\'s a "note"')
        page.click("#sample button")
        page.wait_for_selector("#answer table")
        rows = [row.split("\t") for row in page.locator("#answer tbody tr").all_inner_texts()]
        assert rows == [
            ["scaled", "FP64", "[2, 3]"],
            ["3, 6, 9, 12, 15, 19.5"],
            ["scale", "INT64", "[]"],
            ["3"],
            ["note", "BYTES", "[1]"],
            ['"it\'s a \\"note\\""'],
        ]
        assert "Batch size 1, waiting time" in page.inner_text("#answer")
        x.fill("[[1, 2], [4, 5]]")
        page.click("#sample button")
        page.wait_for_selector("#answer.error:has-text('input x is [[1, 2], [4, 5]]')")
        x.fill("[[1, 2")
        page.click("#sample button")
        page.wait_for_selector("#answer.error:has-text('x is not JSON')")
        visit.errors[:] = [error for error in visit.errors if "status of 400" not in error]
        assert visit.errors == []


def test_the_form_follows_the_model_that_is_shown(tensors: Server, browser: "BrowserContext") -> None:
    with visiting(browser, tensors.url, width=390) as visit:
        page = visit.page
        page.select_option("#model", "dense")
        page.wait_for_selector("#fields label:has-text('image FP32 [3, 256, 256]')")
        page.click("#sample button")
        page.wait_for_selector("#answer td:has-text('[21, 256, 256]')")
        assert f"… {21 * 256 * 256 - 20} more" in page.inner_text("#answer")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.select_option("#model", "own")
        page.wait_for_selector("#drop")
        assert page.inner_text("#answer") == ""
        page.set_input_files("#file", {"name": "a.bin", "mimeType": "application/x-mine", "buffer": b"12345"})
        page.wait_for_selector("#answer pre:has-text('\"twice the length\": 10')")
        assert page.inner_text("#curl").endswith(f"--data-binary @sample.bin {tensors.url}/predict/own")
        assert visit.errors == []


@pytest.mark.parametrize("model", ["mine", "dense"])
def test_the_call_for_a_shell_works_as_it_is(tensors: Server, model: str) -> None:
    curl = fetch(tensors.url, f"/live/form?model={model}").json["curl"]
    answer = json.loads(subprocess.run(curl, shell=True, check=True, capture_output=True).stdout)
    assert answer["model"] == model
    Outputs.model_validate(answer)


def test_errors_of_the_server_are_shown_unchanged(running: Server, browser: "BrowserContext") -> None:
    with visiting(browser, running.url) as visit:
        swap(visit.page, "clever")
        visit.page.wait_for_selector("#swapped.error:has-text(\"unknown policy 'clever'\")")
        drop(visit.page, b"no picture")
        visit.page.wait_for_selector("#answer.error:has-text('JPEG or PNG')")


def test_a_key_is_prompted_for_when_needed_and_stored_for_the_tab_only(
    with_keys: Server, browser: "BrowserContext"
) -> None:
    with visiting(browser, with_keys.url) as visit:
        page = visit.page
        assert not page.is_visible("#admin-key")
        swap(page, "serial")
        page.wait_for_selector("#admin-key:focus")
        page.keyboard.type("open-admin")
        page.keyboard.press("Enter")
        page.wait_for_selector("#swapped:has-text('The policy is now serial')")
        drop(page, photograph())
        page.wait_for_selector("#predict-key:focus")
        page.keyboard.type("open-predict")
        page.keyboard.press("Enter")
        page.wait_for_selector("#answer li:nth-child(5)")
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [2, 0, ""]


def test_a_lost_connection_is_shown_and_a_restarted_server_is_accepted(
    running: Server, with_keys: Server, browser: "BrowserContext"
) -> None:
    with visiting(browser, running.url) as visit:
        page = visit.page
        page.context.set_offline(True)
        page.wait_for_selector("#lost:has-text('Connection to the server lost')")
        assert page.inner_text("#status") == "disconnected"
        page.route(
            "**/live**", lambda route: route.continue_(url=route.request.url.replace(running.url, with_keys.url))
        )
        page.context.set_offline(False)
        page.wait_for_selector("#lost", state="hidden")
        rows_of_chart(page, 1)
        assert page.inner_text("#status") == "ready"


def test_the_page_of_ten_models_on_four_devices_fits_a_phone_and_shows_each(
    fleet: Server, browser: "BrowserContext"
) -> None:
    with visiting(browser, fleet.url, width=390) as visit:
        page = visit.page
        devices = page.locator("#device option")
        assert page.locator("#model option").all_text_contents() == MODELS
        for model in (MODELS[1], MODELS[-1]):
            page.select_option("#model", model)
            until(page, f"document.getElementById('curl').textContent.endsWith('/predict/{model}')")
            disabled = [False, False, False, True] if model != MODELS[-1] else [True, True, True, False]
            assert devices.evaluate_all("(all) => all.map((option) => option.disabled)") == disabled
            assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.input_value("#device") == "3", "the device of this model"
        page.select_option("#model", MODELS[0])
        until(page, "document.getElementById('device').value === '0'")
        for index, profile in enumerate(SHARED):
            page.select_option("#device", str(index))
            page.wait_for_selector(f".resource-source:has-text('From the profile {profile} ')")
            assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert visit.errors == []


def test_all_inputs_are_reachable_by_keyboard_and_labelled(running: Server, browser: "BrowserContext") -> None:
    with visiting(browser, running.url) as visit:
        page = visit.page
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "file":
                break
        assert page.evaluate("document.activeElement.id") == "file"
        assert page.evaluate("getComputedStyle(document.getElementById('drop')).outlineStyle") == "solid"
        unnamed = (
            "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length).map((e) => e.id)"
        )
        assert page.evaluate(unnamed) == []


DRAWN = """[...document.querySelectorAll(".js-plotly-plot")].every(({ _fullLayout: drawn, clientWidth: width }) =>
    Math.abs(drawn.width - width) < 1
    && drawn.font.color === getComputedStyle(document.documentElement).getPropertyValue("--ink"))"""


def show_all_messages(page: "Page") -> None:
    """Choose the model whose objective cannot be kept, and have both keys prompted for."""
    page.select_option("#model", MODELS[-1])
    page.wait_for_selector("#objective-warning")
    swap(page, "serial")
    page.wait_for_selector("#swapped.error")
    drop(page, photograph())
    page.wait_for_selector("#answer.error")
    assert page.locator("input:visible").evaluate_all("(all) => all.map((e) => e.id)") == [
        *("policy", "admin-key", "file", "predict-key")
    ]


@pytest.mark.parametrize("models", ["fleet", "tensors"])
def test_axe_finds_nothing(browser: "BrowserContext", models: str, request: pytest.FixtureRequest) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    with visiting(browser, request.getfixturevalue(models).url, 390, dark=True, any_script=True) as visit:
        page = visit.page
        if models == "fleet":
            show_all_messages(page)
        for width, dark, offline in ((390, True, False), (1280, False, True), (1280, True, True)):
            if offline:  # in both colour schemes; no style depends on width and scheme together
                browser.set_offline(True)
                page.wait_for_selector("#lost")
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme="dark" if dark else "light")
            until(page, DRAWN)
            found = axe.run(page).response["violations"]
            assert {each["id"]: [node["html"][:200] for node in each["nodes"]] for each in found} == {}, (width, dark)


def watch_shifts(page: "Page") -> None:
    page.evaluate(
        "(moved = 0, new PerformanceObserver((list) => list.getEntries().forEach((e) => moved += e.value)))"
        ".observe({ type: 'layout-shift' })"
    )


def assert_nothing_moved(page: "Page") -> None:
    # the units beside numbers move within their lines; 0.1 is what browsers' vendors call good
    assert page.evaluate("moved") < 0.01


def test_nothing_on_the_page_moves_while_it_is_watched(running: Server, browser: "BrowserContext") -> None:
    with visiting(browser, running.url) as visit:
        until(visit.page, "document.getElementById('chart-zeta').classList.contains('js-plotly-plot')")
        watch_shifts(visit.page)
        for _ in range(8):
            fetch(running.url, "/predict", photograph())
            visit.page.wait_for_timeout(250)
        assert_nothing_moved(visit.page)


def test_nothing_on_the_page_moves_when_a_device_of_many_models_becomes_busy_or_idle(
    fleet: Server, browser: "BrowserContext"
) -> None:
    turns = cycle([(0, 0.0), (40, 1234.5)])  # queue lengths and arrival rates, with short texts and with long ones

    def alternate(route: "Route") -> None:
        answer = route.fetch()
        state = answer.json()
        n, rate = next(turns)
        shown = state["devices"][state["device"]]["models"][state["model"]]
        shown |= {"queue_length": n, "oldest_age_ms": 1.3 * n, "arrival_rate_hz": rate, "slowdown": 3.4 if n else 1.0}
        for point in state["points"]:
            point |= {"p50": n / 2, "p95": 0.5 + n, "p99": 2.0 * n, "arrivals": rate}
        route.fulfill(response=answer, json=state)

    with visiting(browser, fleet.url, width=390) as visit:
        page = visit.page
        page.route("**/live?**", alternate)
        page.select_option("#model", MODELS[-1])
        page.wait_for_selector("#objective-warning")
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 1800})  # shows all texts that change
            until(page, "document.getElementById('objective').textContent && " + DRAWN)
            watch_shifts(page)
            for _ in range(4):
                now = json.dumps(page.text_content("#present"))
                until(page, f"document.getElementById('present').textContent !== {now}")
            assert_nothing_moved(page)
