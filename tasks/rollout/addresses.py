"""Addresses of rollout servers. This module imports no torch: the command line checks flags with it."""

import ipaddress
import json
import os
from typing import NamedTuple
from urllib.parse import urlsplit

from ..options.rollout import EngineOptions

STARTED_SERVERS = "MEGASWIFT_ROLLOUT_SERVERS"  # environment variable of the trainer: a StartedServers as JSON


class StartedServers(NamedTuple):
    """Servers that the run's command has started (--rollout_num_gpus)."""

    urls: list[str]
    api_key: str


def started_servers() -> StartedServers | None:
    """Return the servers that the launcher of this process has started; None in the launcher itself."""
    text = os.environ.get(STARTED_SERVERS)
    return StartedServers(*json.loads(text)) if text else None


def check_address(flag: str, url: str) -> None:
    """Raise ValueError, naming the flag, for an invalid address."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{flag} {url}: it must begin with http:// or https://. Use http://host:port.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{flag} {url}: {error}. Use http://host:port.") from None
    if not host or port == 0 or any(letter.isspace() for letter in url):
        raise ValueError(f"{flag} {url}: not an address. Use http://host:port.")


def server_urls(options: EngineOptions) -> list[str]:
    """Return the URLs of the servers. Raises ValueError, naming the flag, for invalid or inconsistent flags."""
    if options.vllm_server_base_url:
        for url in options.vllm_server_base_url:
            check_address("--vllm_server_base_url", url)
        return [url.rstrip("/") for url in options.vllm_server_base_url]
    hosts, ports = options.vllm_server_host or ["127.0.0.1"], options.vllm_server_port
    if invalid := [host for host in hosts if not _is_host(host)]:
        raise ValueError(
            f"--vllm_server_host {invalid[0]}: not a host name or IP address (IPv6 in brackets). Set "
            "--vllm_server_base_url for an address with http:// or a port."
        )
    if invalid := [port for port in ports if not 0 < port <= 65535]:
        raise ValueError(f"--vllm_server_port {invalid[0]}: not a port. Set one from 1 to 65535.")
    count = max(len(hosts), len(ports))
    if len(hosts) not in (1, count) or len(ports) not in (1, count):
        raise ValueError(
            f"--vllm_server_host has {len(hosts)} hosts and --vllm_server_port {len(ports)} ports: set one "
            "port for each host, or one of either."
        )
    return [f"http://{hosts[i % len(hosts)]}:{ports[i % len(ports)]}" for i in range(count)]


def is_loopback(url: str) -> bool:
    """Return whether a URL points to this machine's loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_flags(options: EngineOptions) -> str:
    """Return the names of the flags that set the addresses."""
    return "--vllm_server_base_url" if options.vllm_server_base_url else "--vllm_server_host and --vllm_server_port"


def _is_host(text: str) -> bool:
    try:
        return bool(text) and " " not in text and urlsplit(f"http://{text}:1").hostname == text.strip("[]").lower()
    except ValueError:
        return False
