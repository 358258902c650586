"""python -m pytest tests/test_page.py      the page of episodes, and in a browser"""

import base64
import html
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import ANSWER, GOOD, IMAGE, LOOK, SEARCH, TYPO, WRONG
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import kit.page as module
from evaluate import EPISODES, write_trajectories
from kit.page import PAGE_LIMIT, TEMPLATES, report, spread
from rewards import Reward
from rollout import Trajectory, Turn
from sandbox import Observation

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 320, 3), np.uint8))
FIGURE = Observation("12\n", [IMAGE.resize((40, 30))], [None], ["figure"], notes=["it was kept"])
NEUTRAL = replace(SEARCH, id="two", kind="neutral", options=("checker", "diagonal"))


def turn(text, seen=None):
    return Turn(text, None, seen, 0, 0)


def episode(*turns, sample=SEARCH, right=1.0, scores=(), answer="checker"):
    """A play, and what it earned: a score for each turn that was shown something."""
    acted = [False] * 30 + ([True] * 10 + [False] * 5) * len(turns)
    t = Trajectory(sample, acted=acted, turns=[*turns], answer=answer, ended="answered")
    return t, Reward(right, None, 0.0, scores)


def keep(folder, *episodes):
    write_trajectories(folder / EPISODES, *(zip(*episodes) if episodes else ((), ())))
    return folder


LOOKED = episode(turn(LOOK, GOOD), turn(ANSWER), scores=(1.0,))
GUESSED = episode(turn(ANSWER), sample=replace(SEARCH, id="three"))


def worked_example(words="<think> hm</think>", **other):
    """One of each: a good look, an error and a picture that is no crop, and a guess."""
    turns = turn(f"{words}<code>\nif 1/0: 'no'  # no\n</code>", TYPO), turn("", FIGURE)
    lost = dict(sample=replace(NEUTRAL, **other), right=0.0, scores=(-1.0, None), answer=None)
    return LOOKED, episode(*turns, **lost), GUESSED


class Reader(HTMLParser):
    """What a browser would see: tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag, **attributes):
        return [a for t, a in self.tags if t == tag and attributes.items() <= a.items()]


# What is on the page
def test_each_episode_is_a_film_strip(tmp_path):
    table = [["", "SFT"], ["questions", "3"], ["accuracy", "0.667"]]
    seen = Reader(report(keep(tmp_path, *worked_example()), table).read_text())
    cards = seen.all("article")
    assert [[c[f"data-{x}"] for x in ("answer", "look", "kind", "error")] for c in cards] == [
        ["correct", "faithful", "search", "none"],
        ["wrong", "unfaithful", "neutral", "some"],
        ["correct", "no tool", "search", "none"],
    ]
    # The first image is there once, and again where the crop was looked at; units are its pixels.
    assert len(seen.all("image")) == 3 and len(seen.all("use", href="#p1")) == 1
    assert all(svg["viewbox"] == "0 0 256 256" for svg in seen.all("svg"))
    where = {"x": "64", "y": "64", "width": "64", "height": "64", "class": "shown"}
    assert len(seen.all("rect", **where)) == 1
    assert len(seen.all("rect", **{"class": "target", "x": "76", "width": "44"})) == 4
    text = " ".join(seen.text.split())
    for words in ("score 1", "crop, 64 x 64, 6% of the image: 64, 64, 128, 128", "✗ no answer",
                  "✓ checker (reference: checker)", "NameError: imag", "figure, 40 x 30",
                  "score -1, sandbox_error", "no verdict", "it was kept", "0.667",
                  "3 of 3 episodes", "20 tokens chosen by the policy, 40 shown to it"):  # fmt: skip
        assert words in text, words
    bar = [(i["style"].split()[0], i["class"]) for i in seen.all("i")[:3]]
    assert bar == [("flex:30", "read"), ("flex:10", "acted"), ("flex:5", "read")]
    assert [tag for tag, _ in seen.tags if tag in ("td", "th")] == "td th th td th td".split()


def test_a_look_is_marked_good_if_the_question_asks_for_it_and_no_verdict_is_no_fault(tmp_path):
    looks = [((turn(LOOK, GOOD),), (1.0,)), ((turn(LOOK, WRONG),), (0.0,)), ((), ())]
    kept = [episode(*turns, sample=sample, scores=scores, right=right) for turns, scores in looks
            for sample, right in ((SEARCH, 0.0), (NEUTRAL, None))]  # fmt: skip
    text = report(keep(tmp_path, *kept), []).read_text()
    assert "".join(re.findall("([✓✗]) (?:faithful|unfaithful|no tool)", text)) == "✓✗✗✗✗✓"
    answers = [card["data-answer"] for card in Reader(text).all("article")]
    assert answers == ["wrong", "no verdict"] * 3


def test_no_episodes_make_a_page_that_says_so(tmp_path):
    assert "0 of 0 episodes" in report(tmp_path, []).read_text()
    assert "0 of 0 episodes" in report(keep(tmp_path), []).read_text()


def test_runs_stand_side_by_side_with_the_samples_that_all_of_them_played(tmp_path):
    one, two, three = worked_example()
    again = replace(two[0], answer="the second play"), two[1]
    other = episode(turn(LOOK, WRONG), turn("", TYPO), scores=(0.0, -1.0), right=0.0)
    keep(tmp_path / "a", one, two, again, three)
    keep(tmp_path / "b", three, other)
    runs = [f"{tmp_path}/{name}" for name in ("a/", "b", "no episodes")]
    seen = Reader(report(tmp_path, [["", "a", "b", "no episodes"]], runs=runs).read_text())
    first, second = seen.all("article")
    assert first["data-answer"] == "correct / wrong" and first["data-error"] == "none / some"
    assert first["data-look"] == "faithful / unfaithful" and first["data-kind"] == "search"
    assert second["data-look"] == "no tool / no tool"
    assert len(seen.all("section")) == 4 and len(seen.all("image")) == 2
    assert seen.text.count(f"{tmp_path}/a ·") == 2 and "2 of 2 episodes" in seen.text
    assert "no episodes" in seen.text and f"{tmp_path}/no episodes" not in seen.text
    keep(tmp_path / "b", two)
    text = report(tmp_path, [], runs=runs[:2]).read_text()
    assert "reference" in text and "the second play" not in text


# Nothing from outside gets in
HOSTILE = [
    "</script><script>alert(1)</script>", "</textarea></pre></style></title><!--",
    "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "' onmouseover='alert(1)",
    '" onmouseover="alert(1)" x=\'', "<a href='javascript:alert(1)'>x</a>]]>",
    "&lt;b&gt; &#60;b&#62; $script ${style} https://example.com/x.png",
    "{{ 6 * 7 }} {% raw %} {# out #} {{ cards.__class__ }}", "\u202e\x00\ud800",
]  # fmt: skip


def everywhere(words):
    """One episode in which every text that comes from outside is `words`."""
    sample = replace(SEARCH, id=words, question=words, answer=words, options=(words, words))
    seen = Observation(words, [IMAGE], [None], [words], words, notes=[words], red_lines=[words])
    seen.environment = words
    turns = turn(f"{words}<code>{words} # {words}</code>{words}", seen), turn(words)
    t, reward = episode(*turns, sample=sample, scores=(0.0,), answer=words)
    return replace(t, ended=words), reward


def test_whatever_a_model_or_a_data_set_wrote_is_only_text(tmp_path):
    def shown(*told):
        kept = keep(tmp_path, *map(everywhere, told))
        return Reader(report(kept, [["", "SFT"], *([words] * 2 for words in told)]).read_text())

    calm, seen = shown(*["harmless"] * len(HOSTILE)), shown(*HOSTILE)
    tags = [[(t, *a) for t, a in page.tags if t != "span"] for page in (calm, seen)]
    assert tags[0] == tags[1]  # spans colour words
    for words in filter(str.isprintable, HOSTILE):  # and nothing is lost
        assert seen.text.count(words) == calm.text.count("harmless") / len(HOSTILE)


def test_the_page_loads_nothing_and_may_load_nothing(tmp_path):
    keep(tmp_path, *worked_example())
    IMAGE.save(tmp_path / "curves.png")
    raw = report(tmp_path, [["", "SFT"], ["questions", "3"]], ["curves.png"]).read_text()
    seen = Reader(raw)
    links = [a[k] for _, a in seen.tags for k in ("src", "href", "data", "action") if k in a]
    assert len(links) == 3 + 2 + 1 + 1  # images, what calls showed, where, curves
    assert all(link.startswith(("data:image/", "#p")) for link in links)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", re.sub(r"base64,[^\"]*", "", raw))
    assert len(seen.all("script")) == 1
    (policy,) = seen.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; img-src data:;")
    script = re.search("<script>(.*)</script>", raw, re.DOTALL)[1]
    assert f"script-src 'sha256-{TEMPLATES.filters['sha256'](script)}'" in policy["content"]


# Sizes
def test_episodes_with_photographs_stay_under_their_limit(tmp_path, monkeypatch):
    assert PAGE_LIMIT + 200_000 < 5_000_000  # with a figure
    monkeypatch.setattr(module, "PAGE_LIMIT", 450_000)
    sample = replace(SEARCH, image=NOISE)  # compresses worst
    again = turn(LOOK, Observation(images=[NOISE], boxes=[(0, 0, *NOISE.size)], sources=["crop"]))
    keep(tmp_path, *[episode(again, sample=sample, scores=(1.0,))] * 5)
    text = report(tmp_path, []).read_text()
    pictures = re.findall('"(data:image/.*?)"', text)
    assert "5 of 5 episodes" in text and len(pictures) == 10
    assert 30_000 < sum(map(len, pictures)) <= 300_000  # the rest is for texts
    image = Image.open(io.BytesIO(base64.b64decode(pictures[0].split(",")[1])))
    assert 5 * image.width == 8 * image.height  # it is smaller, and keeps its shape


def test_endless_texts_leave_later_episodes_out_and_the_page_says_so(tmp_path, monkeypatch):
    keep(tmp_path, *[episode()] * 51)
    text = report(tmp_path, []).read_text()
    assert "26 of 51 episodes" in text and text.count("<article") == 26
    assert list(spread(range(9), 4)) == [0, 3, 6]  # the last ones too have their chance
    monkeypatch.setattr(module, "PAGE_LIMIT", 90_000)
    keep(tmp_path, *[episode(turn("é" * 15_000))] * 4)
    assert "2 of 4 episodes" in report(tmp_path, []).read_text()


@given(st.text(st.sampled_from("ab1_ .#'\"\n<>&=for"), max_size=60))
def test_highlighting_loses_nothing_and_escapes_everything(code):
    text = re.sub(r'</?span[^<>"]*("\w*")?>', "", TEMPLATES.filters["python"](code))
    assert html.unescape(text).strip("\n") == code.strip("\n") and not set("<>") & set(text)


# In a browser
CHROMIUM = shutil.which("chromium")
QUIET = """--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-quic --hide-scrollbars""".split()


class Browser:
    """One chromium for all tests. It takes commands as JSON (its DevTools protocol), each ended by
    a zero: it hears them at its file descriptor 3, and answers at 4."""

    def __init__(self, profile):
        command = ["sh", "-c", 'exec timeout 300 "$0" "$@" 3<&0 4>&1 >/dev/null 2>&1', CHROMIUM]
        command += [*QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.heard, self.page = self.listen(), {}
        targets = self.do("Target.getTargets")["targetInfos"]
        (page,) = (target["targetId"] for target in targets if target["type"] == "page")
        self.page = self.do("Target.attachToTarget", targetId=page, flatten=True)

    def listen(self):
        rest = b""
        while said := self.process.stdout.read1():
            *whole, rest = (rest + said).split(b"\0")
            yield from map(json.loads, whole)

    def do(self, method, **words):
        command = {"id": 1, "method": method, "params": words, **self.page}
        self.process.stdin.write(json.dumps(command).encode() + b"\0")
        self.process.stdin.flush()
        return next(said["result"] for said in self.heard if "id" in said)  # the others are events

    def run(self, script):
        """What a script returns. The page's own policy does not bind it."""
        said = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return said["result"].get("value")

    def show(self, page, width, scheme="light"):
        size = dict(width=width, height=1600, deviceScaleFactor=1, mobile=False)
        self.do("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.do("Emulation.setEmulatedMedia", features=features)
        self.do("Page.navigate", url=page.as_uri())
        self.run("new Promise(go => document.readyState == 'complete' ? go() : onload = go)")

    def shot(self):
        png = base64.b64decode(self.do("Page.captureScreenshot")["data"])
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    it = Browser(tmp_path_factory.mktemp("profile"))
    with it.process:
        yield it
        it.process.terminate()


PROBE = """(() => {
const all = (selector, of) => [...document.querySelectorAll(selector)].map(of), result = {};
const box = e => e.getBoundingClientRect(), style = e => getComputedStyle(e);
result.width = Math.max(...all("body *", e => box(e).right));
result.bar = all("section:first-of-type .bar i", i => box(i).width).slice(0, 5);
result.colors = all(".bar i", i => style(i).backgroundColor).slice(0, 3);
result.lines = all("article:first-of-type rect", r => style(r).stroke).slice(0, 6);
result.words = ["k", "mi", "s1", "c1"].map(name => all(`#t2 pre .${name}`, e => style(e).color)[0]);
result.filters = all("select", s => [s.name, ...[...s.options].map(o => o.text)].join(" "));
const press = (key, more = {}, on = document.body) => {
  on.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, ...more}));
  return document.activeElement.id;
};
const only = (name, text) => {
  const select = document.querySelector(`select[name=${name}]`);
  select.selectedIndex = [...select.options].findIndex(option => option.text == text);
  select.dispatchEvent(new Event("change", {bubbles: true}));
  return all("article:not([hidden])", card => card.id);
};
const keys = ["k", "j", "j", "k", "ArrowRight", "ArrowRight", "j", "ArrowLeft"];
result.keys = keys.map(key => press(key));
result.quiet = [press("k", {ctrlKey: true}), press("k", {metaKey: true}),
  press("k", {}, document.querySelector("select"))];
result.shown = [only("answer", "wrong"), only("answer", "correct")];
result.next = [press("k"), press("j")];  // past the one that is hidden
result.seen = 0 <= box(document.activeElement).top && box(document.activeElement).top < innerHeight;
result.shown.push(only("look", "faithful"), only("look", "all"), only("answer", "all"));
return result;
})()"""


@pytest.mark.parametrize("width, film, scheme", [
    (1280, (34, 38, 43), "light"), (390, (10, 12, 14), "dark"),
])  # fmt: skip
def test_a_browser_shows_the_page_without_cut_text_and_runs_its_one_script(
    browser, width, film, scheme, tmp_path
):
    long = "a_name_that_is_much_too_long_for_a_phone_" * 4
    words = f"<think>{long}</think><code>\n{long}()\n</code>"
    keep(tmp_path, *worked_example(words, id=long, question=long))
    Image.new("RGB", (720, 600), "white").save(tmp_path / "curves.png")
    table = [["", "SFT", long], ["questions", "3", "3"], ["accuracy", "", "0.500"]]
    file = report(tmp_path, table, ["curves.png"])
    file.write_text(file.read_text() + "<script>document.title = 'its policy let me in'</script>")
    browser.show(file, width, scheme)
    assert browser.run("document.title") == "What it looked at, and what it answered"

    assert (browser.shot() == film).all(-1).mean() > 0.02  # the film is there, with its colour
    result = browser.run(PROBE)
    assert result["width"] <= width < 2 * (bar := sum(result["bar"]))  # nothing sticks out
    assert result["bar"] == pytest.approx([bar * n / 60 for n in (30, 10, 5, 10, 5)], abs=1)
    shown_to_it, chosen, again = result["colors"]
    assert shown_to_it == again != chosen
    white, black, blue = "rgb(255, 255, 255)", "rgb(0, 0, 0)", "rgb(0, 114, 178)"
    assert result["lines"] == [white, black, white, black, white, blue]  # a rim, then the line
    keyword, number, string, comment = result["words"]
    assert len({keyword, number, comment}) == 3 and number == string
    filters = ["answer all correct wrong", "look all faithful no tool unfaithful"]
    assert result["filters"] == [*filters, "kind all neutral search", "error all none some"]
    assert result["keys"] == ["t1", "t2", "t3", "t2", "t3", "t3", "t3", "t2"]
    assert result["quiet"] == ["t2"] * 3
    assert result["shown"] == [["t2"], ["t1", "t3"], ["t1"], ["t1", "t3"], ["t1", "t2", "t3"]]
    assert result["next"] == ["t1", "t3"] and result["seen"]


def test_runs_stand_side_by_side_on_a_screen_and_below_each_other_on_a_phone(browser, tmp_path):
    runs = [str(tmp_path / ("a_long_name_for_a_run_" * 3 + letter)) for letter in "ab"]
    for run in runs:
        keep(Path(run), *worked_example())
    Image.new("RGB", (960, 400), "white").save(tmp_path / "compare.png")
    table = [["", *(f"{run} toy" for run in runs)], ["questions", "3", "3"]]
    page = report(tmp_path, table, ["compare.png"], runs)
    places = "[...document.querySelectorAll('{}')].map(e => e.getBoundingClientRect().{})"
    for width, beside in ((1280, True), (390, False)):
        browser.show(page, width)
        assert width / 2 <= max(browser.run(places.format("body *", "right"))) <= width
        a, b, *_ = browser.run(places.format("section", "top"))
        assert (a == b) is beside
