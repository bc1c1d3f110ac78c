"""Read a built site in headless Chromium: every page, on a desk and on a phone.

Usage: python ci/browser.py SITE [--chromium PATH] [--pictures FOLDER]

A page fails if its console shows an error, if it asks for a file that is not there or another host
for anything, if a plot was not drawn, or if a phone has to scroll it sideways. Where links lead,
MkDocs checks as it builds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Browser, Route, sync_playwright

SCREENS = {"desk": (1280, 900), "phone": (390, 844)}
# where the browser finds the site; no server stands there
HOST = "http://site.test/"
DRAWN = "() => [...document.querySelectorAll('.plot')].every(x => x.querySelector('svg.main-svg'))"
WIDE = "() => document.documentElement.scrollWidth > window.innerWidth + 1"
# of which pictures are taken, where the site has them
SHOWN = ("index.html", "dashboard/flash-attn-triton/index.html", "docs/which-function/index.html")


Place = tuple[Path, Browser, Path | None]


def faults_of(path: str, screen: str, place: Place) -> list[str]:
    """Open a page on a screen, and return what is wrong with it."""
    site, browser, pictures = place
    width, height = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": height})
    told: list[str] = []

    def answer(route: Route) -> None:
        file = site / unquote(urlsplit(route.request.url).path).lstrip("/")
        if not route.request.url.startswith(HOST):
            told.append(f"asks {route.request.url}")
            route.abort()
        elif file.is_file():
            route.fulfill(path=file)
        else:
            route.fulfill(status=404)

    page.route("**/*", answer)
    page.on("console", lambda m: told.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto(HOST + path, wait_until="load")
    try:
        page.wait_for_function(DRAWN, timeout=20_000)
    except Exception:
        told.append("a plot was not drawn")
    if screen == "phone" and page.evaluate(WIDE):
        told.append("wider than the screen")
    if pictures and path in SHOWN:
        name = f"{path.replace('/index.html', '').replace('/', '-')}-{screen}.png"
        page.screenshot(path=str(pictures / name))
    page.close()
    return [f"{path} ({screen}): {text}" for text in told]


def main() -> None:
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
        place = given.site, browser, given.pictures
        faults = [x for path in paths for screen in SCREENS for x in faults_of(path, screen, place)]
        browser.close()
    print(*faults, f"{len(paths)} pages on {len(SCREENS)} screens: {len(faults)} faults", sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
