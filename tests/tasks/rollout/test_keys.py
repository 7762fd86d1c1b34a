"""Keys of rollout servers: where servers and runs find them."""

import stat
import tempfile
from pathlib import Path

import pytest
from megaswift.tasks.rollout.keys import VARIABLE, client_key, key_file, server_key

from tests.another_user import readable

OURS, THEIRS = "http://10.0.0.7:8000", "https://models.example:443"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_a_server_makes_a_key_once_and_runs_of_its_user_find_it() -> None:
    assert client_key(None, OURS, is_rollout_server=True) is None
    key, line = server_key(None)
    assert len(key) >= 32
    assert key in line
    assert stat.S_IMODE(key_file().stat().st_mode) == 0o600
    assert list(key_file().parent.iterdir()) == [key_file()]
    again, line = server_key(None)
    assert again == key
    assert key not in line
    assert str(key_file()) in line
    assert client_key(None, OURS, is_rollout_server=True) == key


def test_another_account_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)  # a home that others may look into
        monkeypatch.setenv("XDG_CONFIG_HOME", home)
        server_key(None)
        (Path(home) / "open").write_text("")
        assert readable([Path(home) / "open", key_file()]) == [Path(home) / "open"]


def test_the_flag_and_the_variable_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    server_key(None)
    monkeypatch.setenv(VARIABLE, "of the variable")
    assert server_key(None)[0] == client_key(None, OURS, is_rollout_server=True) == "of the variable"
    assert server_key("typed")[0] == client_key("typed", OURS, is_rollout_server=True) == "typed"


def test_a_key_is_sent_to_no_server_of_others() -> None:
    key, _ = server_key(None)
    assert client_key(None, THEIRS, is_rollout_server=False) is None
    assert client_key("typed", THEIRS, is_rollout_server=False) == "typed"
    for url in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        assert client_key(None, url, is_rollout_server=False) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_use_is_refused(mode: int) -> None:
    server_key(None)
    key_file().chmod(mode)
    for get in (lambda: server_key(None), lambda: client_key(None, OURS, is_rollout_server=True)):
        with pytest.raises(ValueError, match=r"rollout\.key: others can read or write it\. Remove it"):
            get()


def test_an_empty_file_is_refused() -> None:
    server_key(None)
    key_file().write_text("")
    with pytest.raises(ValueError, match="it is empty"):
        server_key(None)


def test_a_home_that_cannot_be_written(home: Path) -> None:
    (home / "megaswift").write_text("a file where the folder should be")
    key, line = server_key(None)
    assert f"Key: {key}. Set {VARIABLE} to it for runs" in line
