"""Download of images, videos and audios, each once, into a cache that later runs and all processes read.

Addresses of private networks are refused, since a dataset's author could otherwise read a machine's own services. Each
name is resolved once, all its addresses are checked, and the connection is made to one of these.
"""

import hashlib
import http.client
import ipaddress
import os
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import SplitResult, quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from ..cache import cache_root
from ..formats.schemas import UnusableRow
from ..machine import process_scope

REDIRECTS = 5
BLOCK = 1 << 20
BYTES = {"image": 64 << 20, "video": 2 << 30, "audio": 1 << 30}  # largest files
NOUNS = {"image": "an image", "video": "an image or video", "audio": "an audio"}
PORTS = {"http": 80, "https": 443}
HEADERS = {"User-Agent": "megaswift", "Accept": "*/*", "Accept-Encoding": "identity"}


def is_url(source: object) -> bool:
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def timeout() -> float:
    """Return the seconds that a download may take: SWIFT_TIMEOUT, else 20."""
    try:
        return float(os.environ.get("SWIFT_TIMEOUT") or 20)
    except ValueError as error:
        raise ValueError(f"SWIFT_TIMEOUT={os.environ['SWIFT_TIMEOUT']}: not a number. Set seconds.") from error


def cached_file(url: str, kind: str, *, allow_private: bool = False) -> Path:
    """Return the file of a URL, downloaded first if it is not cached. Raises UnusableRow with the reason."""
    name = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    file = cache_root() / "media" / name[:2] / name
    if file.is_file():
        return file
    temporary = file.with_name(f".{name}-{process_scope()}-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _download(url, temporary, BYTES[kind], allow_private)
        temporary.replace(file)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        is_late = isinstance(error, TimeoutError)
        reason = f"SWIFT_TIMEOUT {timeout():g} s passed" if is_late else type(error).__name__
        raise UnusableRow(f"{NOUNS[kind]} cannot be downloaded ({reason})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return file


def _download(url: str, file: Path, most: int, allow_private: bool) -> None:
    deadline = time.monotonic() + timeout()
    for _ in range(REDIRECTS + 1):
        parts = urlsplit(url)
        if parts.scheme.lower() not in PORTS or not parts.hostname:
            raise UnusableRow("a URL of its media is neither http nor https")
        connection = _connect(parts, allow_private, deadline)
        try:
            path = quote(parts.path or "/", safe="/%:=&?~#+!$,;'@()*[]") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers=HEADERS)
            opened = connection.sock  # the connection may hand it over to the response
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308) and (location := response.headers.get("Location")):
                url = urljoin(url, location)
                continue
            if response.status != 200:
                raise UnusableRow(f"a URL of its media cannot be downloaded (HTTP status {response.status})")
            if int(response.headers.get("Content-Length") or 0) > most:
                raise UnusableRow(f"a URL of its media has more than {most >> 20} MiB")
            _write(response, opened, file, most, deadline)
            return
        finally:
            connection.close()
    raise UnusableRow(f"a URL of its media redirects more than {REDIRECTS} times")


def _write(response: http.client.HTTPResponse, opened: socket.socket, file: Path, most: int, deadline: float) -> None:
    size = 0
    with file.open("wb") as stream:
        while block := response.read1(BLOCK):
            size += len(block)
            if size > most:
                raise UnusableRow(f"a URL of its media has more than {most >> 20} MiB")
            stream.write(block)
            opened.settimeout(_left(deadline))
    if response.length:
        raise UnusableRow("a URL of its media cannot be downloaded (the connection ended too early)")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left


def _connect(parts: SplitResult, allow_private: bool, deadline: float) -> http.client.HTTPConnection:
    """Return a connection to one of a host's checked addresses, or to the proxy that the environment sets."""
    scheme, host = parts.scheme.lower(), parts.hostname or ""
    port = parts.port or PORTS[scheme]
    proxy = getproxies().get(scheme)
    if proxy and not proxy_bypass(host):
        _check_behind_proxy(host, port, allow_private)
        return _connect_to_proxy(proxy, parts, host, port, _left(deadline))
    connection = http.client.HTTPConnection(host, port, timeout=_left(deadline))
    error: OSError = OSError("no address")
    for address in _addresses(host, port, allow_private):
        try:
            connection.sock = socket.create_connection((address, port), timeout=_left(deadline))
            break
        except TimeoutError:
            raise
        except OSError as refused:
            error = refused
    else:
        raise error
    if scheme == "https":
        connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
    return connection


def _connect_to_proxy(
    proxy: str, parts: SplitResult, host: str, port: int, seconds: float
) -> http.client.HTTPConnection:
    at = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme.lower() == "https":
        connection = http.client.HTTPSConnection(at.hostname or "", at.port or 80, timeout=seconds)
        connection.set_tunnel(host, port)
        return connection
    return _PlainProxy(at.hostname or "", at.port or 80, f"{parts.scheme}://{parts.netloc}", seconds)


class _PlainProxy(http.client.HTTPConnection):
    """Connection to a proxy of http URLs, which takes whole URLs as paths."""

    def __init__(self, host: str, port: int, origin: str, seconds: float):
        super().__init__(host, port, timeout=seconds)
        self._origin = origin

    def request(self, method, url, *arguments, **options):  # type: ignore[override]
        super().request(method, self._origin + url, *arguments, **options)


def _addresses(host: str, port: int, allow_private: bool) -> list[str]:
    """Return the addresses of a host. Raises UnusableRow if any of them is not public."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnusableRow("the host of a URL of its media is unknown") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if not allow_private and not all(is_public(address) for address in addresses):
        raise UnusableRow("a URL of its media leads to a private network (--allow_private_media_urls true allows that)")
    return addresses


def _check_behind_proxy(host: str, port: int, allow_private: bool) -> None:
    """Check the addresses of a host that a proxy resolves, as far as this machine knows any."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return
    _addresses(host, port, allow_private)


def is_public(address: str) -> bool:
    """Return whether an IP address is of the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    return ip.is_global and not ip.is_multicast and (inner is None or is_public(str(inner)))
