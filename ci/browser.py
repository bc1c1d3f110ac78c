"""Read a built site in headless Chromium: every page, on a desk and on a phone.

Usage: python ci/browser.py SITE [--chromium PATH] [--pictures FOLDER]

A page fails if its console shows an error, if it asks another host for anything, if a link within
the site leads nowhere, if a plot was not drawn, or if a phone has to scroll it sideways.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from playwright.sync_api import Browser, Route, sync_playwright

SCREENS = {"desk": (1280, 900), "phone": (390, 844)}
# where the browser finds the site; no server stands there
HOST = "http://site.test"
DRAWN = "() => [...document.querySelectorAll('.plot')].every(x => x.querySelector('svg.main-svg'))"
WIDE = "() => document.documentElement.scrollWidth > window.innerWidth + 1"
LINKS = "() => [...document.querySelectorAll('a[href]')].map(x => x.href)"
ANCHORS = "() => [...document.querySelectorAll('[id]')].map(x => x.id)"
# of which pictures are taken, where the site has them
SHOWN = ("index.html", "dashboard/flash-attn-triton/index.html", "docs/which-function/index.html")


def file_of(url: str) -> str:
    """Return the path that an address has within the site."""
    path = unquote(urlsplit(url).path).lstrip("/")
    return f"{path}index.html" if path.endswith("/") or not path else path


class Reader:
    """Reads the pages of a site, and keeps what is wrong with them and where they lead."""

    def __init__(self, site: Path, browser: Browser, pictures: Path | None) -> None:
        self.site, self.browser, self.pictures = site, browser, pictures
        self.faults: list[str] = []
        self.links: dict[str, set[str]] = {}
        self.anchors: dict[str, set[str]] = {}

    def read(self, path: str, screen: str) -> None:
        """Open a page on a screen."""
        width, height = SCREENS[screen]
        page = self.browser.new_page(viewport={"width": width, "height": height})
        told: list[str] = []

        def answer(route: Route) -> None:
            if not route.request.url.startswith(f"{HOST}/"):
                told.append(f"asks {route.request.url}")
                route.abort()
            elif (file := self.site / file_of(route.request.url)).is_file():
                route.fulfill(path=file)
            else:
                route.fulfill(status=404)

        page.route("**/*", answer)
        page.on("console", lambda m: told.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.goto(urljoin(HOST, path), wait_until="load")
        try:
            page.wait_for_function(DRAWN, timeout=20_000)
        except Exception:
            told.append("a plot was not drawn")
        if screen == "phone" and page.evaluate(WIDE):
            told.append("wider than the screen")
        self.faults += [f"{path} ({screen}): {text}" for text in told]
        self.links[path] = set(page.evaluate(LINKS))
        self.anchors[path] = set(page.evaluate(ANCHORS))
        if self.pictures and path in SHOWN:
            name = f"{path.replace('/index.html', '').replace('/', '-')}-{screen}.png"
            page.screenshot(path=str(self.pictures / name))
        page.close()

    def follow(self) -> None:
        """Check the links between pages."""
        for path, links in self.links.items():
            for link in sorted(x for x in links if x.startswith(f"{HOST}/")):
                target, anchor = file_of(link), unquote(urlsplit(link).fragment)
                if not (self.site / target).is_file():
                    self.faults.append(f"{path}: {target} is not there")
                elif anchor and anchor not in self.anchors.get(target, {anchor}):
                    self.faults.append(f"{path}: {target} has no #{anchor}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chrome"))
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    if given.chromium is None:
        sys.exit("no Chromium was found: install it (Debian: chromium), or name it by --chromium")
    if given.pictures:
        given.pictures.mkdir(parents=True, exist_ok=True)
    # a host shows 404.html for an address that is not there; its links are those of such an address
    paths = sorted(str(p.relative_to(given.site)) for p in given.site.rglob("*.html"))
    paths.remove("404.html")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=given.chromium, args=options)
        reader = Reader(given.site, browser, given.pictures)
        for path in paths:
            for screen in SCREENS:
                reader.read(path, screen)
        reader.follow()
        browser.close()
    print("\n".join(reader.faults))
    links = sum(map(len, reader.links.values()))
    told = f"{len(paths)} pages on {len(SCREENS)} screens, {links} links"
    print(f"{told}: {len(reader.faults)} faults")
    return 1 if reader.faults else 0


if __name__ == "__main__":
    sys.exit(main())
