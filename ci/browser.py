"""Read a built site in headless Chromium: every page, on a desk and on a phone.

Usage: python ci/browser.py SITE [--chromium PATH] [--pictures FOLDER]

A page fails if its console shows an error, if it asks another host for anything, if a link within
the site leads nowhere, if a plot was not drawn, or if a phone has to scroll it sideways.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Browser, sync_playwright

SCREENS = {"desk": (1280, 900), "phone": (390, 844)}
DRAWN = "() => [...document.querySelectorAll('.plot')].every(x => x.querySelector('svg.main-svg'))"
WIDE = "() => document.documentElement.scrollWidth > window.innerWidth + 1"
LINKS = "() => [...document.querySelectorAll('a[href]')].map(x => x.href)"
ANCHORS = "() => [...document.querySelectorAll('[id]')].map(x => x.id)"
# of which pictures are taken, where the site has them
SHOWN = ("index.html", "dashboard/flash-attn-triton/index.html", "docs/which-function/index.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""

    def copyfile(self, *arguments: Any) -> None:
        """Send a file; a page that is closed takes the rest of none."""
        with suppress(ConnectionError):
            super().copyfile(*arguments)


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield its address."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Reader:
    """Reads pages, and keeps what is wrong with them and where they lead."""

    def __init__(self, address: str, pictures: Path | None) -> None:
        self.address, self.pictures = address, pictures
        self.faults: list[str] = []
        self.links: dict[str, set[str]] = {}
        self.anchors: dict[str, set[str]] = {}

    def read(self, browser: Browser, path: str, screen: str) -> None:
        """Open a page on a screen."""
        width, height = SCREENS[screen]
        page = browser.new_page(viewport={"width": width, "height": height})
        told: list[str] = []
        page.on("console", lambda m: told.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: told.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{self.address}/{path}", wait_until="load")
        try:
            page.wait_for_function(DRAWN, timeout=20_000)
        except Exception:
            told.append("a plot was not drawn")
        if screen == "phone" and page.evaluate(WIDE):
            told.append("wider than the screen")
        own = (self.address, "data:", "blob:")
        told += [f"asks {url}" for url in asked if not url.startswith(own)]
        self.faults += [f"{path} ({screen}): {text}" for text in told]
        self.links[path] = set(page.evaluate(LINKS))
        self.anchors[path] = set(page.evaluate(ANCHORS))
        if self.pictures and path in SHOWN:
            name = f"{path.replace('/index.html', '').replace('/', '-')}-{screen}.png"
            page.screenshot(path=str(self.pictures / name))
        page.close()

    def follow(self, site: Path) -> None:
        """Check the links between pages."""
        for path, links in self.links.items():
            for link in sorted(links):
                parts = urlsplit(link)
                if not link.startswith(self.address):
                    continue
                target = unquote(parts.path).lstrip("/")
                if target == "" or target.endswith("/"):
                    target += "index.html"
                if not (site / target).is_file():
                    self.faults.append(f"{path}: {target} is not there")
                elif parts.fragment and unquote(parts.fragment) not in self.anchors.get(
                    target, {unquote(parts.fragment)}
                ):
                    self.faults.append(f"{path}: {target} has no #{parts.fragment}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chrome"))
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    if arguments.chromium is None:
        sys.exit("no Chromium was found: install it (Debian: chromium), or name it by --chromium")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    paths = sorted(str(p.relative_to(arguments.site)) for p in arguments.site.rglob("*.html"))
    # a host shows it for an address that is not there, and its links are those of such an address
    paths = [path for path in paths if path != "404.html"]
    with served(arguments.site) as address, sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=options)
        reader = Reader(address, arguments.pictures)
        for path in paths:
            for screen in SCREENS:
                reader.read(browser, path, screen)
        reader.follow(arguments.site)
        browser.close()
    print("\n".join(reader.faults))
    links = sum(map(len, reader.links.values()))
    told = f"{len(paths)} pages on {len(SCREENS)} screens, {links} links"
    print(f"{told}: {len(reader.faults)} faults")
    return 1 if reader.faults else 0


if __name__ == "__main__":
    sys.exit(main())
