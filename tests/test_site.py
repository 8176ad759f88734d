"""The documentation as `make docs` built it: it is searched without any other machine."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import PATIENCE, browse, needs_a_browser

SITE = Path(__file__).parents[1] / "build" / "site"
# The search box of a page in a frame is asked; the page around it has loaded when it has answered.
ASKING = """<!DOCTYPE html><title>asking</title><img src="/held">
<iframe src="/learn/tutorial.html" onload="ask(this)"></iframe>
<script>
const ask = (frame) => {
  const page = frame.contentDocument;
  const box = page.querySelector("[data-md-component=search-query]");
  page.querySelector("#__search").click();
  box.focus();
  box.value = "REAP experts";
  box.dispatchEvent(new Event("keyup", { bubbles: true }));
  const look = setInterval(() => {
    const found = [...page.querySelectorAll(".md-search-result__link")];
    if (!found.length) return;
    clearInterval(look);
    document.title = found.map((link) => new URL(link.href).pathname).join(" ");
    fetch("/found");
  }, 100);
};
</script>"""


class Asked(SimpleHTTPRequestHandler):
    """The site, the page that asks, and a picture that comes when there is an answer."""

    answered = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/held":
            self.answered.wait(PATIENCE / 2)
        if self.path == "/found":
            self.answered.set()
        if self.path not in ("/asking", "/held", "/found"):
            return super().do_GET()
        text = ASKING.encode() if self.path == "/asking" else b""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[str]:
    handler = functools.partial(Asked, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        Asked.answered.set()
        server.shutdown()


@pytest.mark.slow
@needs_a_browser
@pytest.mark.skipif(not SITE.exists(), reason="`make docs` has not been run")
def test_the_site_finds_what_is_asked_for_with_no_other_machine(
    served: str, tmp_path: Path
) -> None:
    dom, _ = browse(f"{served}/asking", 1280, tmp_path / "profile")
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None and "/methods.html" in found[1], dom[:300]


@pytest.mark.slow
@pytest.mark.skipif(not SITE.exists(), reason="`make docs` has not been run")
def test_pages_of_the_site_load_nothing_from_elsewhere_and_rooms_are_documented() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in SITE.rglob("*.html")}
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(https?:[^\" >]+)")
    assert {address for text in pages.values() for address in loaded.findall(text)} == set()
    rooms = [page for page in pages if page.parent.name == "api"]
    assert len(rooms) > 40
    assert all("doc-contents" in pages[page] for page in rooms)
