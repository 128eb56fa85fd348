"""Open every page of a built site in headless Chromium, at several widths, and list what a reader would see broken.

    make docs && python scripts/browse_site.py                    # 1,440, 1,200 and 420 pixels
    python scripts/browse_site.py site --widths 800 --search LoRA  # another width; the pages that the search finds

A page is broken if it is wider than its window, if a picture or another resource does not load, if the console shows an
error, if a wide screen cuts off a code box, or if any screen cuts off a table. The site is served to this machine only:
each page is an iframe of one driving page, browse_site.js, which sends back what it measured.
"""

import contextlib
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tyro

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars --disable-sync "
    "--disable-background-networking --disable-component-update --disable-background-timer-throttling"
).split()
WIDTHS = (1440, 1200, 420)
WIDE = 1000
"""Pixels from which code boxes show all of each line; below, they scroll on their own."""
PATIENCE = 120
"""Seconds to wait for the next page."""
RECORD = """<script>
window.faults = [];
addEventListener("error", e => faults.push(e.message || `does not load: ${e.target.src || e.target.href}`), true);
addEventListener("unhandledrejection", e => faults.push(`rejected: ${e.reason}`));
console.error = console.warn = (...words) => faults.push(`console: ${words.join(" ")}`);
</script>"""
"""Comes before a page's own scripts."""


def find_chromium() -> str | None:
    """Return the path of Chromium or Chrome, if it is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def browse(
    site: Path, *, widths: Sequence[int] = WIDTHS, search: Sequence[str] = (), pages: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Measure the pages of a site, all by default, at each width; then search for words from the home page.

    **Raises** `FileNotFoundError` without Chromium, and `TimeoutError` if it falls silent.
    """
    pages = list(pages) or [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    program = find_chromium()
    if program is None:
        raise FileNotFoundError(f"Chromium is needed: none of {', '.join(PROGRAMS)} is on the path")
    results: queue.Queue = queue.Queue()
    found = []
    task = {"pages": pages, "widths": list(widths), "words": list(search)}
    with _serve(site, task, results) as address, _open(program, f"{address}/__drive__"):
        while True:
            try:
                result = results.get(timeout=PATIENCE)
            except queue.Empty:
                raise TimeoutError(f"{program} sent nothing for {PATIENCE} s after {found[-1:]}") from None
            if "error" in result:
                raise RuntimeError(f"browse_site.js: {result['error']}")
            if "done" in result:
                return found
            found.append(result)


def find_faults(result: dict[str, Any]) -> list[str]:
    """Return the faults of a page at one width, in words."""
    found = [f"{x} at the console" for x in result["faults"]]
    found += [f"picture does not load: {x}" for x in result["images"]]
    if result["width"] > result["inner"]:
        found.append(f"is {result['width']} pixels wide in a window of {result['inner']}")
    found += [f"ends outside of the window: {x}" for x in result["outside"]]
    found += [f"cuts off {x}" for x in result["cut"] if result["window"] >= WIDE or x.startswith("table")]
    return found


@contextlib.contextmanager
def _serve(site: Path, task: dict[str, Any], results: queue.Queue) -> Iterator[str]:
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    drive = (
        f'<!doctype html><meta charset="utf-8"><body style="margin: 0"><script>{script}\nmain({json.dumps(task)})'
        ".then(() => send({done: true}), e => send({error: String(e.stack)}));</script>"
    )

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            path = site / self.path.partition("?")[0].lstrip("/")
            if self.path == "/__drive__":
                self.answer(drive)
            elif path.suffix == ".html" and path.is_file():
                self.answer(path.read_text(encoding="utf-8").replace("<head>", f"<head>{RECORD}", 1))
            else:
                super().do_GET()

        def do_POST(self) -> None:
            results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer("")

        def answer(self, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def _open(program: str, address: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [program, *FLAGS, f"--user-data-dir={folder}", "--window-size=1500,1000", address]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(
    site: tyro.conf.Positional[Path] = Path("site"), *, widths: tuple[int, ...] = WIDTHS, search: tuple[str, ...] = ()
) -> None:
    """Open every page at each width, and fail if any is broken.

    Args:
        site: Folder of a built site.
        widths: Widths of the window in pixels.
        search: Words to search for; the pages found are printed.
    """
    if not (site / "index.html").is_file():
        sys.exit(f"{site} holds no built site: `make docs` builds one")
    results = browse(site, widths=widths, search=search)
    opened = [result for result in results if "page" in result]
    faults = [(result, fault) for result in opened for fault in find_faults(result)]
    for result, fault in faults:
        print(f"{result['page']} at {result['window']}: {fault}")
    for result in results:
        if "words" in result:
            print(f"{result['words']}: {', '.join(result['found'][:5]) or 'nothing'}")
    for width in widths:
        columns = [x["columns"] for x in opened if x["window"] == width and x["columns"]]
        if columns:
            print(f"{min(columns)} characters of code fit at {width} pixels")
    print(f"{len(opened)} pages opened, {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    tyro.cli(main)
