"""Small stand-in for Hugging Face's API on 127.0.0.1: repositories, uploads and commits, in memory."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_secret0123456789"


class FakeHub:
    """What the server has received. `failures`: answers with status 500 that are still to come."""

    def __init__(self, failures: int = 0):
        self.failures, self.requests = failures, 0
        self.private: dict[str, bool] = {}  # by repository
        self.files: dict[str, dict[str, bytes]] = {}  # by repository and path
        self.messages: list[str] = []
        self.blobs: dict[str, bytes] = {}  # large files by sha256
        self.address = ""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON."""
        self.requests += 1
        if self.failures:
            self.failures -= 1
            return 500, {"error": "Internal error"}
        path = path.partition("?")[0]
        if method == "PUT" and path.startswith("/blob/"):
            digest = path.removeprefix("/blob/")
            assert hashlib.sha256(body).hexdigest() == digest
            self.blobs[digest] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": f"Invalid credentials {token}"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        name, action = self._split(path)
        return getattr(self, f"_{action}")(name, body) if action else (200, {"id": name, "sha": "0" * 40})

    def _split(self, path: str) -> tuple[str, str]:
        """Return the repository and the handler of a request."""
        for pattern, action in (
            (r"/api/models/(.+)/preupload/main", "preupload"),
            (r"/api/models/(.+)/commit/main", "commit"),
            (r"/(.+)\.git/info/lfs/objects/batch", "batch"),
        ):
            if match := re.fullmatch(pattern, path):
                return match[1], action
        return path.removeprefix("/api/models/").partition("/revision")[0], ""

    def _create(self, request: dict) -> tuple[int, Any]:
        name = "/".join(filter(None, (request.get("organization") or "me", request["name"])))
        if name in self.private:
            return 409, {"error": "exists", "url": f"{self.address}/{name}"}
        self.private[name] = bool(request.get("private")) or request.get("visibility") == "private"
        self.files[name] = {}
        return 200, {"url": f"{self.address}/{name}", "name": name, "id": name}

    def _preupload(self, name: str, body: bytes) -> tuple[int, Any]:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        return 200, {"files": files}

    def _batch(self, name: str, body: bytes) -> tuple[int, Any]:
        objects = [
            {**entry, "actions": {"upload": {"href": f"{self.address}/blob/{entry['oid']}", "header": {}}}}
            for entry in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.messages.append(value["summary"])
            elif entry["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[name][value["path"]] = self.blobs[value["oid"]]
        return 200, {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1" * 40, "success": True}


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` within the context; its address is set."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self._body()
            status, content = hub.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _handle

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
