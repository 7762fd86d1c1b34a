"""API keys of rollout servers: from a flag, MEGASWIFT_API_KEY, or a key file shared by one user's servers and runs."""

import os
import secrets
import stat
from pathlib import Path

from .addresses import is_loopback

VARIABLE = "MEGASWIFT_API_KEY"


def key_file() -> Path:
    """Return the path of the user's key file."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "megaswift" / "rollout.key"


def server_key(api_key: str | None) -> tuple[str, str]:
    """Return a server's key, and a line for the user on where clients read it.

    Creates the key file if it is missing. Raises ValueError where that file is unsafe.
    """
    if api_key:
        return api_key, "Key: set by --api_key"
    if key := os.environ.get(VARIABLE):
        return key, f"Key: set by {VARIABLE}"
    file = key_file()
    if key := _read(file):
        return key, f"Key: in {file}, read by runs of this user. Set {VARIABLE} for other users"
    key = secrets.token_urlsafe(24)
    try:
        if not _write(file, key):  # another server has just created it
            return server_key(None)
    except OSError as error:
        return key, f"Key: {key}. Set {VARIABLE} to it for runs, as {file} cannot be written ({error.strerror})"
    return key, f"Key: {key}, written to {file}, read by runs of this user. Set {VARIABLE} for other users"


def client_key(api_key: str | None, url: str, *, is_rollout_server: bool) -> str | None:
    """Return the key to send to a server; None to send no key.

    `is_rollout_server`: whether it is a rollout server of this user. Other servers get the key of the environment or
        the file only on this machine, since their operators would learn it.
    """
    if api_key or not (is_rollout_server or is_loopback(url)):
        return api_key
    return os.environ.get(VARIABLE) or _read(key_file())


def _write(file: Path, key: str) -> bool:
    """Create the key file atomically. Returns False if it exists. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
        stream.write(f"{key}\n")
    try:
        os.link(temporary, file)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink()


def _read(file: Path) -> str | None:
    """Return the key in a file, None without the file. Raises ValueError where the file is unsafe."""
    try:
        with file.open() as stream:
            status, key = os.fstat(stream.fileno()), stream.read(4096).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}). Remove it and restart the server") from None
    if not key or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        problem = "others can read or write it" if key else "it is empty"
        raise ValueError(f"{file}: {problem}. Remove it and restart the server")
    return key
