"""Names of datasets without their last part; flags with a text or a text file, and texts that look like file names."""

import pytest
from megaswift.templates.formats.dataset_names import check_dataset, resolve_text


@pytest.mark.parametrize(("name", "part"), [("a/b@", "split"), ("a/b@#5", "split"), ("a/b:", "subset")])
def test_a_name_that_ends_too_early(tmp_path, monkeypatch, name, part):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{name}: the name of a {part} must follow [@:]. Set one, or remove [@:].$"):
        check_dataset(name)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b@").mkdir()
    check_dataset("a/b@")


@pytest.mark.parametrize(
    "text", [None, "", "Be brief.", "/no_think", "Write\nto notes.txt", "See " + "very " * 99 + "long.txt", "v1.5", "."]
)
def test_texts_are_taken_as_they_are(text):
    assert resolve_text("--system", text) == text


@pytest.mark.parametrize("name", ["system.txt", "system.md", "./system", "my prompt.TXT", "~/system.txt"])
def test_files_are_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name.removeprefix("~/")).write_text("Be dense. 漢\n", encoding="utf-8")
    assert resolve_text("--system", name) == "Be dense. 漢"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("nope.txt", None, "no such file"),
        ("prompts/nope.md", None, "no such file"),
        ("nope.jinja", None, "no such file"),
        ("empty.txt", b" \n", "the file is empty. Write the text to it, or unset --system."),
        ("latin.txt", b"\xe9t\xe9", "is not UTF-8"),
    ],
)
def test_files_that_hold_no_text(tmp_path, monkeypatch, name, content, problem):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^--system {name}: {problem}"):
        resolve_text("--system", name)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match=r"folder\.txt: is not a regular file"):
        resolve_text("--system", "folder.txt")
