"""The page at /: what it is made of, and in a real browser that nothing from elsewhere may reach."""

import gzip
import hashlib
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.serving import Server, serving
from server.api import dashboard
from tests.support.http_client import ask, photograph

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EMULATED = ("googlenet", "--device", "emulated:googlenet-tesla-p4")
ASSETS = Path(str(dashboard.__file__)).parent / "assets"
POLICY = "/admin/models/googlenet/policy"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving(*EMULATED, "--policy", "smdp:w2=1.6") as process:
        yield process


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    lines = [
        f"{scope} {scope} {hashlib.sha256(f'open-{scope}'.encode()).hexdigest()}" for scope in ("predict", "admin")
    ]
    file.write_text("\n".join(lines))
    with serving(*EMULATED, "--policy", "greedy", "--api-key-file", str(file)) as process:
        yield process


def send(url: str, n: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert {reply.status for reply in pool.map(lambda _: ask(url, "/predict", photograph()), range(n))} == {200}


def assets(html: str) -> list[str]:
    return re.findall(r'(?:src|href)="(assets/[^"]+)"', html)


# without a browser


def test_how_things_stand_is_told_with_what_is_new_only(running: Server) -> None:
    send(running.url, 20)
    state = ask(running.url, "/live?model=googlenet").json
    assert state["models"] == ["googlenet"]
    assert (state["status"], state["weights"], state["slo_ms"]) == ("ready", "emulated", None)
    assert set(state["policy"]) == {"name", "spec", "version", "chart"}
    assert state["policy"]["spec"] == "smdp:w2=1.6"
    assert sum(size * count for size, count, _ in state["observed"]) >= 20
    assert 1 <= len(state["batches"]) <= 20
    wanted = {"t", "size", "reason", "policy", "waited_ms", "service_ms", "energy_mj"}
    assert all(set(batch) == wanted for batch in state["batches"])
    assert [p["seq"] for p in state["points"]] == list(range(1, state["seq"] + 1))
    later = ask(running.url, f"/live?since={state['seq']}").json
    assert all(point["seq"] > state["seq"] for point in later["points"])
    assert later["run"] == state["run"]


def test_the_policy_is_told_as_a_chart_with_the_profile(running: Server) -> None:
    reply = ask(running.url, "/live/policy?model=googlenet")
    assert reply.headers["cache-control"] == "no-store"
    view = reply.json
    assert len(view["rates_hz"]) == len(view["batch_size"]) == 49
    assert {len(row) for row in view["batch_size"]} == {len(view["queue_lengths"])}
    assert max(map(max, view["batch_size"])) == view["profile"]["max_batch_size"] == 32
    assert view["profile"]["service_ms"][0] == pytest.approx(1.3575)
    assert view["profile"]["energy_mj"][0] == pytest.approx(39.502)
    assert "w2 = 1.6" in view["how"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/live?model=alexnet", 404),
        ("/live/policy?model=../../etc/passwd", 404),
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
def test_what_is_not_there_is_an_error_and_no_file(running: Server, path: str, status: int) -> None:
    reply = ask(running.url, path)
    assert (reply.status, set(reply.json)) == (status, {"error"})


def test_the_page_tells_the_facts_without_a_script_and_allows_nothing_from_elsewhere(running: Server) -> None:
    reply = ask(running.url, "/")
    html, rules = reply.body.decode(), reply.headers["content-security-policy"]
    assert "<td>googlenet<td>emulated<td>smdp:w2=1.6" in html
    assert f"curl --data-binary @photo.jpg {running.url}/predict" in html
    assert "unsafe" not in rules
    assert rules.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "$" not in html
    assert set(re.findall(r"https?://[^/\s<\"]+", html)) == {running.url}
    for file in ASSETS.iterdir():
        assert not re.findall(r"https?:|//[a-z]+\.", file.read_text()), file


def test_the_files_are_compressed_cached_and_of_the_right_type(running: Server) -> None:
    found = assets(ask(running.url, "/").body.decode())
    assert len(found) == 5
    for path in found:
        plain = ask(running.url, f"/{path}")
        packed = ask(running.url, f"/{path}", headers={"Accept-Encoding": "gzip"})
        kind = "javascript" if ".js?" in path else "css"
        assert plain.headers["content-type"] == f"text/{kind}; charset=utf-8"
        assert gzip.decompress(packed.body) == plain.body
        assert "immutable" in plain.headers["cache-control"]
        again = ask(running.url, f"/{path}", headers={"If-None-Match": plain.headers["etag"]})
        assert (again.status, again.body) == (304, b"")


def test_with_keys_the_page_is_open_and_the_swap_is_not(guarded: Server) -> None:
    html = ask(guarded.url, "/").body.decode()
    for path in ("/live", "/live/policy", *(f"/{path}" for path in assets(html))):
        assert ask(guarded.url, path).status == 200
    body, bearer = b'{"policy": "greedy"}', {"Authorization": "Bearer open-predict"}
    assert ask(guarded.url, POLICY, body, "PUT").status == 401
    assert ask(guarded.url, POLICY, body, "PUT", bearer).status == 403
    assert ask(guarded.url, "/predict", photograph()).status == 401


# with a browser


@dataclass
class Visit:
    """A page in the browser, and what went wrong or outside."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def visiting(browser: "Browser", url: str, **context: Any) -> Iterator[Visit]:
    opened = browser.new_context(**context)
    opened.set_default_timeout(30_000)
    visit = Visit(opened.new_page())
    page = visit.page
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective))"
    )
    page.on("console", lambda m: visit.complaints.append(m.text) if m.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    ours = (f"{url}/", "data:", f"blob:{url}/")
    page.on("request", lambda request: None if request.url.startswith(ours) else visit.outside.append(request.url))
    page.goto(url)
    page.wait_for_selector("#chart-policy.js-plotly-plot")
    yield visit
    opened.close()


def drop(page: "Page", data: bytes) -> None:
    make = """(data) => {
              const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
              transfer.items.add(new File([bytes], "photo.jpg", { type: "image/jpeg" })); return transfer; }"""
    transfer = page.evaluate_handle(make, b64encode(data).decode())
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


def swap(page: "Page", spec: str) -> None:
    page.fill("#policy", spec)
    page.press("#policy", "Enter")


def until(page: "Page", holds: str) -> None:
    """Wait inside the page, since its rules forbid playwright's own way, which evaluates text."""
    page.evaluate(f"(async () => {{ while (!({holds})) await new Promise((turn) => setTimeout(turn, 20)); }})()")


def rows_of_chart(page: "Page", n: int) -> None:
    until(page, f"document.getElementById('chart-policy').data[0].z.length === {n}")


def test_a_picture_is_answered_and_a_swap_moves_the_chart(running: Server, browser: "Browser") -> None:
    with visiting(browser, running.url, color_scheme="dark") as visit:
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
        assert drawn["height"] <= chart["height"], "one row is a low chart"
        assert page.inner_text("#spec") == "greedy"
        swap(page, "smdp:w2=1.6")
        rows_of_chart(page, 49)
        assert visit.complaints == []
        assert visit.outside == []


def test_an_error_is_shown_as_the_server_words_it(running: Server, browser: "Browser") -> None:
    with visiting(browser, running.url) as visit:
        swap(visit.page, "clever")
        visit.page.wait_for_selector("#swapped.error:has-text(\"unknown policy 'clever'\")")
        drop(visit.page, b"no picture")
        visit.page.wait_for_selector("#answer.error:has-text('JPEG or PNG')")


def test_a_key_is_asked_for_when_it_is_needed_and_kept_for_the_tab_only(guarded: Server, browser: "Browser") -> None:
    with visiting(browser, guarded.url) as visit:
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


def test_lost_contact_is_said_and_another_run_of_the_server_is_taken_up(
    running: Server, guarded: Server, browser: "Browser"
) -> None:
    with visiting(browser, running.url) as visit:
        page = visit.page
        page.context.set_offline(True)
        page.wait_for_selector("#lost:has-text('Connection to the server lost')")
        assert page.inner_text("#status") == "disconnected"
        page.route("**/live**", lambda route: route.continue_(url=route.request.url.replace(running.url, guarded.url)))
        page.context.set_offline(False)
        page.wait_for_selector("#lost", state="hidden")
        rows_of_chart(page, 1)
        assert page.inner_text("#status") == "ready"


def test_on_a_phone_nothing_is_wider_than_the_screen(running: Server, browser: "Browser") -> None:
    with visiting(browser, running.url, viewport={"width": 390, "height": 844}) as visit:
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 390


def test_everything_can_be_reached_by_keyboard_and_has_a_name(running: Server, browser: "Browser") -> None:
    with visiting(browser, running.url) as visit:
        page = visit.page
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "file":
                break
        assert page.evaluate("document.activeElement.id") == "file"
        assert page.evaluate("getComputedStyle(document.getElementById('drop')).outlineStyle") == "solid"
        unnamed = "[...document.querySelectorAll('input, select')].filter((e) => !e.labels.length).map((e) => e.id)"
        assert page.evaluate(unnamed) == []
