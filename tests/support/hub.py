"""A hub of datasets on this machine: as much of its protocol as `datasets` and huggingface_hub ask for."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote

COMMIT = "a" * 40


@contextmanager
def hub_of(repository: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """The URL of a hub with one repository of these files, in folders of one level."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            if path.startswith(prefix := f"/datasets/{repository}/resolve/"):
                content = files.get(path.removeprefix(prefix).partition("/")[2])
                headers = {"X-Repo-Commit": COMMIT}
                if content is None:
                    return self.answer(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
                return self.answer(200, content, headers | {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
            if path.startswith(prefix := f"/api/datasets/{repository}"):
                is_tree = path.removeprefix(prefix).startswith("/tree/")
                answer = self.tree() if is_tree else {"id": repository, "sha": COMMIT}
                return self.answer(200, json.dumps(answer).encode(), {})
            return self.answer(404, b"", {})

        def tree(self) -> list[dict[str, Any]]:
            folders = {name.partition("/")[0] for name in files if "/" in name}
            listed = [{"type": "directory", "path": name, "oid": "0"} for name in sorted(folders)]
            sizes = {name: len(content) for name, content in files.items()}
            return [
                *listed,
                *({"type": "file", "path": name, "size": size, "oid": "1"} for name, size in sizes.items()),
            ]

        def answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
