"""The page for a person, in a real browser: Debian's chromium, without a window."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.support.processes.serve import MODEL, serving
from tests.support.stand_ins.page_front import PageFront, page_front

WAIT_S = 30.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if (path := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    expect.set_options(timeout=WAIT_S * 1000)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def front() -> Iterator[PageFront]:
    with page_front() as front:
        yield front


@pytest.fixture
def page(browser: Browser, front: PageFront) -> Iterator[Page]:
    """At the end, nothing was refused and nothing was thrown."""
    wrong: list[str] = []
    with browser.new_page() as page:
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" and "400" not in line.text else None)
        page.goto(front.url)
        yield page
    assert not wrong


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".assistant .said")


def until_ready(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def said(*parts: str) -> list[dict[str, Any] | None]:
    return [{"content": part} for part in parts]


def test_a_conversation(page: Page, front: PageFront) -> None:
    front.answers = [said("Hel", "lo ", "é😀"), said("Again.")]
    expect(page.locator("#model")).to_have_text("acme/small")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("Hello é😀")
    until_ready(page)
    expect(page.locator(".user .said")).to_have_text("one\ntwo")
    expect(page.locator(".figures summary")).to_have_text(
        re.compile(r"^3 tokens · .*first after \d+ ms · 32 of 48 prompt tokens cached$")
    )
    expect(page.get_by_label("Message")).to_be_focused()
    why = page.get_by_text("The first 32 tokens of the prompt were cached")
    expect(why).to_be_hidden()
    page.locator(".figures summary").click()
    expect(why).to_contain_text("The other 16 were computed")
    say(page, "three")
    expect(answers(page).nth(1)).to_have_text("Again.")
    assert front.asked[1]["messages"] == [
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "Hello é😀"},
        {"role": "user", "content": "three"},
    ]
    assert front.asked[1].keys() == {"messages", "stream", "stream_options"}, "what is not set is left to the model"
    until_ready(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_what_is_said_is_text(page: Page, front: PageFront) -> None:
    html = "<img src=x onerror='document.title=1'><b>bold</b> &amp; <script>document.title=2</script>"
    front.answers = [[{"reasoning_content": html}, {"content": html}]]
    say(page, html)
    for place in (".user .said", ".thought div", ".assistant .said"):
        expect(page.locator(place)).to_have_text(html)
    until_ready(page)
    assert page.title() == "kvkeeper"
    expect(page.locator("#log :is(img, b, script)")).to_have_count(0)


@pytest.mark.parametrize("by", ["Escape", "Stop", "New chat"])
def test_an_answer_is_stopped(page: Page, front: PageFront, by: str) -> None:
    front.answers = [[*said("so far"), None], said("next")]
    say(page, "go")
    expect(page.locator(".assistant.running .said")).to_have_text("so far")
    if by == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name=by).click()
    assert front.left.wait(WAIT_S), "the front has heard of it"
    until_ready(page)
    if by != "New chat":
        expect(page.locator(".figures summary")).to_have_text(re.compile("stopped$"))
    say(page, "on")
    expect(answers(page).last).to_have_text("next")
    kept = [] if by == "New chat" else [{"role": "user", "content": "go"}, {"role": "assistant", "content": "so far"}]
    assert front.asked[1]["messages"] == [*kept, {"role": "user", "content": "on"}]


def test_settings(page: Page, front: PageFront) -> None:
    front.answers = [said("ok")]
    page.get_by_role("button", name="Settings").click()
    given = {"System prompt": "Be brief.", "Temperature": "0.5", "Top k": "7", "Most tokens": "9", "Key": "secret"}
    for name, value in given.items():
        page.get_by_label(name).fill(value)
    page.get_by_label("Top p").fill("7")  # out of its range: nothing is sent
    say(page, "hi")
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_label("Top p").fill("")
    say(page, "hi")
    expect(answers(page)).to_have_text("ok")
    (asked,) = front.asked
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["temperature"], asked["top_k"], asked["max_tokens"]) == (0.5, 7, 9)
    assert front.keys == ["Bearer secret"]


def test_what_fails_is_told_and_can_be_sent_again(page: Page, front: PageFront) -> None:
    front.error = (400, "temperature: <b>too</b> high")
    say(page, "hi")
    expect(page.get_by_role("alert")).to_have_text("temperature: <b>too</b> high")
    expect(page.get_by_label("Message")).to_have_value("hi")
    until_ready(page)
    front.error, front.answers = None, [said("ok")]
    page.get_by_label("Message").press("Enter")
    expect(answers(page).last).to_have_text("ok")
    assert front.asked[1]["messages"] == [{"role": "user", "content": "hi"}]


def test_dark_and_narrow(page: Page, front: PageFront) -> None:
    shades = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shades.append(max(map(int, re.findall(r"\d+", colour))))
    assert shades[1] < 64 < 192 < shades[0]
    page.set_viewport_size({"width": 360, "height": 640})
    front.answers = [said("word" * 200)]
    page.get_by_role("button", name="Settings").click()
    say(page, "x" * 200)
    expect(answers(page)).to_have_text("word" * 200)
    for wide in ("document.documentElement", "document.getElementById('log')"):
        assert page.evaluate(f"{wide}.scrollWidth") == 360, "nothing is wider than the screen"


def test_with_the_real_services(browser: Browser) -> None:
    with serving() as served, browser.new_page() as page:
        page.goto(served.ready["http"].removesuffix("/v1"))
        expect(page.locator("#model")).to_have_text(MODEL)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Most tokens").fill("40")
        say(page, "def fibonacci(n):\n" * 4)
        until_ready(page)
        say(page, "again")
        last, first = page.locator(".figures summary").last, page.locator(".figures summary").first
        expect(last).to_have_text(re.compile(r"tokens/s · .* · [1-9]\d* of \d+ prompt tokens cached"))
        expect(first).to_have_text(re.compile(r"^40 tokens · .* tokens/s · .* · 0 of \d+ prompt tokens cached"))
