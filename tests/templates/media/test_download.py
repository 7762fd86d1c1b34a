"""Downloads: once each, within limits, and from public addresses only."""

import http.server
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from megaswift.templates.formats.schemas import UnusableRow
from megaswift.templates.media import download
from megaswift.templates.media.download import cached_file, is_public
from megaswift.templates.media.images import image_size, open_image

from tests.templates.media.test_images import encoded
from tests.tiny_vision import picture

PNG = encoded(picture(30, 20))


class Handler(http.server.BaseHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        match urlsplit(self.path).path:
            case "/slow.png":
                self._answer(200, {"Content-Length": "100"})
                for _ in range(30):
                    time.sleep(0.1)
                    self.wfile.write(b"x")
            case "/large.png":
                self._answer(200, {"Content-Length": str(1 << 40)})
            case "/endless.png":
                self._answer(200, {})
                for _ in range(100):
                    self.wfile.write(bytes(10_000))
            case "/cut.png":
                self._answer(200, {"Content-Length": str(len(PNG))})
                self.wfile.write(PNG[:50])
            case "/private.png":
                self._answer(302, {"Location": f"http://127.0.0.2:{self.server.server_port}/a.png"})
            case "/elsewhere.png":
                self._answer(302, {"Location": "file:///etc/hostname"})
            case "/round.png":
                self._answer(302, {"Location": self.path})
            case "/moved.png":
                self._answer(301, {"Location": "/a.png"})
            case "/a.png" | "/a%20b.png" | "/%E5%9B%BE.png":
                self._answer(200, {"Content-Length": str(len(PNG))})
                self.wfile.write(PNG)
            case _:
                self._answer(404, {})

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """Return the address of a server and the paths that it was asked for. Its address counts as public."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    handler = type("Counting", (Handler,), {"requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.requests
        server.shutdown()
        thread.join()


def files(cache: Path) -> list[Path]:
    return [file for file in (cache / "megaswift" / "media").rglob("*") if file.is_file()]


def test_a_url_is_fetched_once(server, cache: Path) -> None:
    address, requests = server
    for _ in range(3):
        assert image_size(f"{address}/a.png") == (20, 30)
    assert open_image(f"{address}/a.png").size == (30, 20)
    assert requests == ["/a.png"]
    [file] = files(cache)
    assert file.read_bytes() == PNG
    assert image_size(f"{address}/a.png?size=2") == (20, 30)
    assert image_size(f"{address}/moved.png") == (20, 30)
    assert image_size(f"{address}/a b.png") == image_size(f"{address}/\u56fe.png") == (20, 30)
    assert requests[1:] == ["/a.png?size=2", "/moved.png", "/a.png", "/a%20b.png", "/%E5%9B%BE.png"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/missing.png", "HTTP status 404"),
        ("/large.png", "more than 64 MiB"),
        ("/endless.png", "more than 0 MiB"),
        ("/cut.png", "ended too early|IncompleteRead"),
        ("/private.png", "leads to a private network"),
        ("/elsewhere.png", "neither http nor https"),
        ("/round.png", "redirects more than 5 times"),
        ("/slow.png", "SWIFT_TIMEOUT 0.5 s passed"),
    ],
)
def test_downloads_that_fail_leave_nothing(server, cache: Path, monkeypatch, path: str, reason: str) -> None:
    if path == "/slow.png":
        monkeypatch.setenv("SWIFT_TIMEOUT", "0.5")
    if path == "/endless.png":
        monkeypatch.setitem(download.BYTES, "image", 100_000)
    start = time.monotonic()
    with pytest.raises(UnusableRow, match=reason):
        image_size(server[0] + path)
    assert time.monotonic() - start < 5
    assert files(cache) == []


def test_private_addresses(cache: Path) -> None:
    for host in (
        "127.0.0.1",
        "localhost",
        "10.1.2.3",
        "169.254.169.254",
        "[::1]",
        "0.0.0.0",
        "0x7f000001",
        "2130706433",
    ):
        with pytest.raises(UnusableRow, match=r"leads to a private network|host of a URL of its media is unknown"):
            cached_file(f"http://{host}:9/a.png", "image")
    assert not any(
        map(is_public, ("::ffff:10.0.0.1", "fe80::1%eth0", "fc00::1", "2002:7f00:1::", "100.64.0.1", "224.0.0.1"))
    )
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111")))


def test_private_addresses_that_a_flag_allows(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "is_public", is_public)
    with pytest.raises(UnusableRow, match="--allow_private_media_urls true allows that"):
        image_size(f"{server[0]}/a.png")
    assert image_size(f"{server[0]}/a.png", allow_private=True) == (20, 30)


def test_unreachable_and_unknown_hosts(server) -> None:
    with pytest.raises(UnusableRow, match=r"cannot be downloaded .ConnectionRefusedError"):
        image_size("http://127.0.0.1:1/a.png", allow_private=True)
    with pytest.raises(UnusableRow, match="host of a URL of its media is unknown"):
        image_size("http://no-such-host.invalid/a.png")
    with pytest.raises(UnusableRow, match="URL of its media"):
        image_size("http:///a.png")


def test_a_proxy_of_the_environment(server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the whole URL; hosts on private networks are refused behind it too."""
    address, requests = server
    monkeypatch.setenv("http_proxy", address)
    with pytest.raises(UnusableRow, match="HTTP status 404"):
        image_size("http://pictures.invalid/missing.png")
    assert requests == ["http://pictures.invalid/missing.png"]
    with pytest.raises(UnusableRow, match="leads to a private network"):
        image_size("http://127.0.0.2/a.png")
