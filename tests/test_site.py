"""The site of `make docs` in a browser: light, dark and narrow, with diagrams and search, without another host."""

import html
import http.server
import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from functools import partial

import numpy as np
import pytest
from PIL import Image
from test_layers import ROOT
from test_tutorials import free_port
from test_ui import FLAGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SITE = ROOT / "site"
# Where mermaid is not loaded the theme would load one from unpkg.com; the page of a test has loaded ours.
KNOWN = {"https://unpkg.com/mermaid@11/dist/mermaid.min.js", "https://unpkg.com/resize-observer-polyfill"}
# Without any other host.
OFFLINE = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


# Chooses dark, as the button does.
DARK = """<script>
localStorage.setItem("/.__palette", JSON.stringify({index: 1, color: {scheme: "slate", primary: "indigo"}}))
</script>"""
# Searches as a reader does, and copies the addresses of the results. The page is loaded when it has some: the server
# answers `wait` after `found`.
SEARCH = """<body><iframe src="index.html?q=layerscale" width=1400 height=900></iframe><img src="wait"><script>
setInterval(() => {
  const page = frames[0].document, box = page.querySelector("[data-md-component=search-query]")
  if (box) box.dispatchEvent(new Event("keyup"))
  const links = [...page.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"))
  if (links.length) { document.body.dataset.found = links.join(" "); fetch("found") }
}, 500)
</script></body>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """The files of the site, and the pages that act as a reader."""

    found = threading.Event()

    def do_GET(self):
        if self.path == "/search":
            self._answer(SEARCH)
        elif self.path == "/dark":
            self._answer((SITE / "architecture.html").read_text().replace("<head>", f"<head>{DARK}"))
        elif self.path in ("/found", "/wait"):
            self.found.set() if self.path == "/found" else self.found.wait(60)
            self._answer("")
        else:
            super().do_GET()

    def _answer(self, text):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site():
    """The address of the built site on loopback."""
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=SITE)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def browse(address, folder, *options):
    """Return what the browser prints."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "needs a browser, which `make test-full` installs"
    command = [browser, *FLAGS, *OFFLINE, f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def picture(address, path, *options):
    """Return the pixels of a page."""
    browse(address, path.parent, f"--screenshot={path}", "--virtual-time-budget=20000", "--hide-scrollbars", *options)
    return np.asarray(Image.open(path).convert("L"))


def test_the_site_has_a_page_for_every_page_of_docs(site):
    docs = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert docs <= {path.relative_to(SITE) for path in SITE.rglob("*.html")}


def test_no_page_shows_an_escape_of_markdown(site):
    shown = {}
    for path in SITE.rglob("*.html"):
        text = re.sub(r"<(pre|script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        shown[path.name] = html.unescape(re.sub(r"<[^>]*>", "", text))
    assert "vit_<width><depth>x<branches>_<patch>[_<stem>]" in shown["settings.html"]
    assert not [name for name, text in shown.items() if "\\" in text]


def test_make_docs_serve_shows_the_site(site):
    address = f"127.0.0.1:{free_port()}"
    command = ["make", "docs-serve", f"DOCS_ADDRESS={address}"]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stderr.readline, "")  # make's error, or mkdocs's log
            started = next((line for line in lines if "Serving on" in line or "Error" in line), "")
            assert f"Serving on http://{address}/" in started
            with urllib.request.urlopen(f"http://{address}/results.html") as page:
                assert b"Results on CIFAR-10" in page.read()
        finally:
            os.killpg(server.pid, signal.SIGTERM)


def test_the_site_names_no_other_host(site):
    for path in [*SITE.rglob("*.html"), *SITE.rglob("*.css")]:
        loaded = r"""(?:src=|@import |url\()["']?((?:https?:)?//[^"')\s]+)|<link[^>]+href="((?:https?:)?//[^"]+)"""
        assert not re.findall(loaded, path.read_text()), path
    scripts = "".join(path.read_text() for path in (SITE / "assets/javascripts").glob("bundle*.js"))
    assert set(re.findall(r"https://unpkg\.com/[\w@./-]+", scripts)) == KNOWN


def test_diagrams_are_drawn_without_another_host(site, tmp_path):
    page = browse(f"{site}/architecture.html", tmp_path, "--dump-dom", "--virtual-time-budget=20000")
    assert page.count('<div class="mermaid">') == 2, "each text of a diagram is replaced by its picture"
    assert '<pre class="mermaid">' not in page
    assert "unpkg.com" not in page


def test_the_search_finds_a_setting(site, tmp_path):
    page = browse(f"{site}/search", tmp_path, "--dump-dom")
    (found,) = re.findall(r'<body data-found="([^"]+)"', page)
    assert "settings.html" in found


def test_the_site_is_light_and_at_the_readers_choice_dark(site, tmp_path):
    size = "--window-size=1400,1600"
    assert np.median(picture(f"{site}/architecture.html", tmp_path / "light.png", size)) > 230
    dark = picture(f"{site}/dark", tmp_path / "dark.png", size)
    assert np.median(dark) < 60
    assert (dark > 200).mean() < 0.03, "boxes of the diagrams are dark too: their texts are light"


def test_the_site_fits_a_narrow_screen(site, tmp_path):
    for name in ("index", "settings", "formats"):
        narrow = picture(f"{site}/{name}.html", tmp_path / f"{name}.png", "--window-size=500,1000")
        assert narrow.shape == (1000, 500)
        assert (narrow[200:] < 100).mean() > 0.005, "text"
