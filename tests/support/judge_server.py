"""A small server of OpenAI's API on 127.0.0.1, whose answers a test decides."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The body of a request -> status and text of the answer.
Answer = Callable[[dict[str, Any]], tuple[int, str]]


class JudgeServer:
    """Keeps the requests it got.

    Attributes:
        url: base URL of the API.
        requests: bodies of chat completion requests, in order of arrival.
    """

    def __init__(self, answer: Answer, models: list[str] | None, refusal: int) -> None:
        self.answer, self.models, self.refusal = answer, models, refusal
        self.requests: list[dict[str, Any]] = []
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


def _handler(server: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if server.models is None:
                self._send(server.refusal, {"error": {"message": "no such path"}})
            else:
                data = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in server.models]
                self._send(200, {"object": "list", "data": data})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(body)
            status, text = server.answer(body)
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            completion = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
            self._send(status, completion | {"choices": [choice]} if status == 200 else {"error": {"message": text}})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    return Handler


@contextmanager
def judge_server(answer: Answer, models: list[str] | None = None, refusal: int = 404) -> Iterator[JudgeServer]:
    """A server for the time of a `with` block; `models`: what it lists, None: it refuses to, with status `refusal`."""
    server = JudgeServer(answer, models, refusal)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)  # stops within that
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
