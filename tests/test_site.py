"""The site of `make docs` in a browser: light, dark and narrow, with diagrams and search, without another host."""

import http.server
import re
import shutil
import subprocess
import threading
from functools import partial

import numpy as np
import pytest
from PIL import Image
from test_layers import ROOT
from test_ui import FLAGS
from test_ui import page as page_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SITE = ROOT / "site"
# Where mermaid is not loaded the theme would load one from unpkg.com; the page of a test has loaded ours.
KNOWN = {"https://unpkg.com/mermaid@11/dist/mermaid.min.js", "https://unpkg.com/resize-observer-polyfill"}
# Without any other host.
OFFLINE = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site():
    """The address of the built site on loopback."""
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def dom(address, folder, expected):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_ui.FLAGS", FLAGS + OFFLINE)
        return page_of(address, folder, expected)


def picture(address, path, *options):
    """Return the pixels of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "needs a browser, which `make test-full` installs"
    options = [
        f"--user-data-dir={path.parent / 'profile'}",
        f"--screenshot={path}",
        "--virtual-time-budget=20000",
        *options,
    ]
    command = [browser, *FLAGS, *OFFLINE, "--hide-scrollbars", *options, address]
    subprocess.run(command, capture_output=True, timeout=240, check=True)
    return np.asarray(Image.open(path).convert("L"))


def test_the_site_has_a_page_for_every_page_of_docs(site):
    docs = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert docs | {SITE / "index.html"} - {SITE / "index.html"} <= {
        path.relative_to(SITE) for path in SITE.rglob("*.html")
    }


def test_the_site_names_no_other_host(site):
    for path in [*SITE.rglob("*.html"), *SITE.rglob("*.css")]:
        loaded = r"""(?:src=|@import |url\()["']?((?:https?:)?//[^"')\s]+)|<link[^>]+href="((?:https?:)?//[^"]+)"""
        assert not re.findall(loaded, path.read_text()), path
    scripts = "".join(path.read_text() for path in (SITE / "assets/javascripts").glob("bundle*.js"))
    assert set(re.findall(r"https://unpkg\.com/[\w@./-]+", scripts)) == KNOWN


def test_diagrams_are_drawn_without_another_host(site, tmp_path):
    html = dom(f"{site}/architecture.html", tmp_path, ['<div class="mermaid">'])
    assert html.count('<div class="mermaid">') == 2, "each text of a diagram is replaced by its picture"
    assert '<pre class="mermaid">' not in html
    assert "unpkg.com" not in html


def test_the_search_finds_a_setting(site, tmp_path):
    html = dom(f"{site}/index.html?q=layerscale", tmp_path, ["md-search-result__link"])
    assert "settings.html" in " ".join(re.findall(r'href="([^"]+)" class="md-search-result__link"', html))


def test_the_site_is_light_or_dark_as_the_reader_has_it(site, tmp_path):
    light = picture(f"{site}/architecture.html", tmp_path / "light.png", "--window-size=1400,1000")
    dark = picture(
        f"{site}/architecture.html",
        tmp_path / "dark.png",
        "--window-size=1400,1000",
        "--blink-settings=preferredColorScheme=0",
    )
    assert np.median(light) > 230
    assert np.median(dark) < 60


def test_the_site_fits_a_narrow_screen(site, tmp_path):
    for name in ("index", "settings", "formats"):
        narrow = picture(f"{site}/{name}.html", tmp_path / f"{name}.png", "--window-size=500,1000")
        assert narrow.shape == (1000, 500)
        assert (narrow[200:] < 100).mean() > 0.005, "text"
