"""The page in a real browser: no errors, values under the cursor, zoom, search, themes, paper, many steps."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from megaswift.cli.main import main

from tests.tasks.report.browser import CHROMIUM, Browser
from tests.tasks.report.pages import completion_row, spiky, train_row, write_completions, write_log

pytestmark = [
    pytest.mark.long,
    pytest.mark.nosample,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
HOSTILE = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def no_errors(browser: Browser) -> Iterator[None]:
    """Whatever a page does, its console stays empty, and nothing is fetched."""
    browser.console.clear()
    browser.requests.clear()
    yield
    assert browser.console == []
    assert [address for address in browser.requests if not address.startswith("file:")] == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GRPO run of 40 steps, with data, checkpoints and replies."""
    folder = tmp_path_factory.mktemp("runs") / "v0-20260131-235959"
    rows = [
        train_row(step, 40, loss=2 / step, reward=step / 40, reward_std=0.1, my_metric=step % 3)
        | {"completions/mean_length": 5, "completions/min_length": 1, "completions/max_length": 9, "timing_s/gen": 0.3}
        for step in range(1, 41)
    ]
    rows += [{"step": 20, "max_steps": 40, "eval_loss": 0.5, "elapsed": 20.0}]
    write_log(folder, rows)
    texts = [f"completion {number}" for number in range(60)] + [HOSTILE]
    write_completions(
        folder, [completion_row(n // 4, text, n / 60, f"prompt {n // 4}") for n, text in enumerate(texts)]
    )
    lengths = {"width": 10, "start": 0, "counts": [3, 8, 1], "quantiles": {"least": 1, "median": 12, "greatest": 29}}
    sources = [{"name": "train.jsonl", "rows": 12, "samples": 12, "dropped": []}]
    data = {"train": {"sources": sources, "samples": 12, "tokens": 150, "lengths": lengths}, "text": "Training data:"}
    (folder / "data.json").write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    assert main("megatron", ["report", str(run)]) == 0
    return run / "report.html"


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(node => node.textContent)")


def enter(browser: Browser, selector: str, value: str) -> None:
    """Type a value into a field."""
    browser.evaluate(
        f"node = document.querySelector({selector!r}); node.value = {value!r}; node.dispatchEvent(new Event('input'))"
    )


def plots(browser: Browser) -> int:
    """Return the number of canvases that have something drawn in them."""
    return browser.evaluate(
        "[...document.querySelectorAll('canvas')].filter(canvas => canvas.width && canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.some(value => value)).length"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 700, 1800])
def test_it_fits_and_is_drawn(browser, page, width, scheme):
    browser.open(page, width=width, scheme=scheme)
    assert plots(browser) >= 10
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(number) for number in paper[4:-1].split(",")) < 3 * 128) == (scheme == "dark")


def test_the_theme_can_be_chosen(browser, page):
    browser.open(page, scheme="dark")
    before = browser.screenshot(whole=False)
    browser.evaluate("document.getElementById('theme').click()")
    browser.frames()
    assert browser.evaluate("color('ink')") == "#1b2330"
    assert browser.screenshot(whole=False) != before


def test_the_cursor_shows_values_and_a_drag_zooms_into_all_charts(browser, page):
    browser.open(page, height=2400)
    place = "const box = charts[0].plot.over.getBoundingClientRect(); [box.x, box.y, box.width, box.height]"
    x, y, width, height = browser.evaluate(f"{{ {place} }}")
    browser.mouse("mouseMoved", x + width * (10 - 1) / 39, y + height / 2)
    browser.frames()
    legend = texts(browser, ".plot:first-of-type .u-legend")[0]
    assert "10" in legend
    assert "0.25" in legend  # the reward of step 10
    browser.mouse("mouseMoved", x + width * (10 - 1) / 39, y + height / 2)
    browser.mouse("mousePressed", x + width * (10 - 1) / 39, y + height / 2, button="left", clickCount=1, buttons=1)
    browser.mouse("mouseMoved", x + width * (20 - 1) / 39, y + height / 2, button="left", buttons=1)
    browser.mouse("mouseReleased", x + width * (20 - 1) / 39, y + height / 2, button="left", clickCount=1)
    browser.frames()
    shown = "charts.filter(each => each.plot && each.followsRange).map(each => each.plot.scales.x)"
    ranges = f"{shown}.map(scale => [scale.min, scale.max])"
    for low, high in browser.evaluate(ranges):
        assert (low, high) == (pytest.approx(10, abs=0.2), pytest.approx(20, abs=0.2))
    browser.evaluate("document.getElementById('reset').click()")
    browser.frames()
    assert [1, 40] in browser.evaluate(ranges)


def test_axes_scales_and_smoothing(browser, page):
    browser.open(page)
    browser.evaluate("axis = document.getElementById('axis'); axis.value = 'tokens'; axis.onchange()")
    browser.frames()
    assert browser.evaluate("[charts[0].plot.scales.x.min, charts[0].plot.scales.x.max]") == [100, 4000]
    browser.evaluate("document.querySelector('.chart button').click()")
    browser.frames()
    assert browser.evaluate("charts[0].plot.scales.y.distr") == 3
    noisy = "smooth([0, 2, 0, 2, 0, 2, 0, 2, 0, 2], 100)"
    assert browser.evaluate(noisy) == pytest.approx([1, 2 / 3, 4 / 3, 2 / 3, 4 / 3, 2 / 3, 4 / 3, 2 / 3, 4 / 3, 1])


def test_completions_can_be_searched(browser, page):
    browser.open(page)
    assert browser.evaluate("window.attacked === undefined")
    found = "#completions .completion"
    enter(browser, ".search", "completion 57")
    assert texts(browser, found) == ["completion 57"]
    assert texts(browser, "#completions mark") == ["completion 57"]
    enter(browser, ".search", "attacked")
    assert texts(browser, found) == [HOSTILE]
    enter(browser, ".search", "")
    enter(browser, ".filters input[type=number]", "0.9")
    assert sorted(texts(browser, found)) == sorted([*(f"completion {number}" for number in range(54, 60)), HOSTILE])
    assert browser.evaluate("window.attacked === undefined && !document.querySelector('#completions img')")


def test_on_paper_all_is_open_and_light(browser, page):
    browser.open(page, scheme="dark")
    assert browser.pdf().startswith(b"%PDF")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    browser.frames()
    assert browser.evaluate("[...document.querySelectorAll('details')].every(node => node.open)")
    assert browser.evaluate("color('paper')") == "#f6f7f9"
    assert "my_metric" in "".join(texts(browser, "details .chart h3"))


def test_a_comparison(browser, run, tmp_path):
    other = write_log(tmp_path / "other", [train_row(step, loss=3 / step) for step in range(1, 8)])
    assert main("megatron", ["report", str(run), str(other), "--report_path", str(tmp_path / "page.html")]) == 0
    browser.open(tmp_path / "page.html")
    assert len(texts(browser, "h1")) == 2
    (loss,) = (text for text in texts(browser, ".chart") if text.startswith("Loss"))
    assert "v0-20260131-235959" in loss
    assert "other" in loss


@pytest.mark.parametrize("rows", [[], [train_row(1)]])
def test_a_run_of_no_or_one_step(browser, tmp_path, rows):
    assert main("megatron", ["report", str(write_log(tmp_path, rows))]) == 0
    browser.open(tmp_path / "report.html")
    assert plots(browser) >= len(rows)
    assert ("No step has been logged yet." in texts(browser, ".notice")) == (not rows)


def test_many_steps_open_quickly(browser, tmp_path):
    assert main("megatron", ["report", str(write_log(tmp_path, spiky(100_000)))]) == 0
    # 0.15 s on an idle machine of 2 cores.
    assert browser.open(tmp_path / "report.html") < 3
    assert "loss is not finite at step 20001" in texts(browser, ".notice")
