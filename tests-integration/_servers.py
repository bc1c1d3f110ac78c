"""Package indexes on this machine: one of stubs, and one that serves a folder of files."""

import http.server
import threading
import zipfile

JSON = "application/vnd.pypi.simple.v1+json"


def make_wheel(folder, name, version, modules, requires=()):
    """Write a wheel that holds an empty module of each name."""
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    files = {f"{module}/__init__.py": "" for module in modules}
    needed = "".join(f"Requires-Dist: {x}\n" for x in requires)
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


class Server:
    """Serves requests by a handler in a thread."""

    def __init__(self, handler):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}/simple/"

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Index(Server):
    """A package index on this machine that remembers which projects it was asked about."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = set()
        index = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(folder))

            def do_GET(self):
                kind, _, name = self.path.strip("/").partition("/")
                if kind == "files":
                    return super().do_GET()
                index.asked.add(name)
                return self.list_project(name)

            def list_project(self, name):
                found = sorted((folder / "files").glob(f"{name.replace('-', '_')}-*.whl"))
                links = "".join(f'<a href="/files/{p.name}">{p.name}</a>\n' for p in found)
                body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        (folder / "files").mkdir()
        super().__init__(Handler)

    def offer(self, name, version, modules=()):
        make_wheel(self.folder / "files", name, version, modules)


class Site(Server):
    """Serves a folder as any static host does, or JSON to whoever accepts it."""

    def __init__(self, folder, has_json):
        self.asked = set()
        site = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(folder))

            def do_GET(self):
                site.asked.add(self.path)
                if has_json and self.path.endswith("/") and JSON in self.headers["Accept"]:
                    self.path += "index.json"
                super().do_GET()

            def guess_type(self, path):
                return JSON if path.endswith("index.json") else super().guess_type(path)

            def log_message(self, *_):
                pass

        super().__init__(Handler)
