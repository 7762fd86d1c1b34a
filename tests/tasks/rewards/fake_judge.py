"""Small OpenAI-compatible server of this process, as a stand-in for a judge."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge:
    """Server that says YES where the response is the reference. `statuses` come before, one a request."""

    def __init__(self) -> None:
        self.models = ["judge-7b"]
        self.statuses: list[int] = []
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.reply = lambda prompt: "YES" if len(set(prompt.split("|"))) == 1 else "NO"
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"data": [{"id": name} for name in judge.models]} if self.path == "/v1/models" else None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.bodies.append(body)
                judge.keys.append(self.headers["Authorization"])
                content = judge.reply(body["messages"][0]["content"])
                choice = {"choices": [{"message": {"role": "assistant", "content": content}}]}
                self.answer(choice if self.path == "/v1/chat/completions" else None)

            def answer(self, table: dict | None) -> None:
                status = judge.statuses.pop(0) if judge.statuses else 200 if table else 404
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(table).encode() if status == 200 else b"out of order")

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # of a client that has given up
        self.url = f"http://127.0.0.1:{self.server.server_port}"
