"""docs/dialects.md: made from the tables, and current."""

from megaswift.cli.dialects_doc import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m megaswift.cli.dialects_doc"
