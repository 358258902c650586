"""python -m pytest tests/test_evaluate.py      about 10 s, and 10 s more where chromium is found"""

import base64
import html
import io
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ANSWER, FAIL, LOOK, PRINT, RULES, SHORT, scripted
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import evaluate as module
from beyond.compare import columns_of, compare, report_runs
from data import USUAL_TEXTURE, Sample
from evaluate import (
    OUT_OF_PRIOR,
    PAGE_LIMIT,
    curves,
    evaluate,
    highlight,
    load_toy,
    main,
    measure,
    page,
    picture_url,
    read_trajectories,
    report,
    runs_of,
    scored,
    table,
)
from rewards import BoxJudge, Reward
from rollout import Trajectory, Turn
from sandbox import Observation


def write_trajectories(trajectories, rewards, folder):
    module.write_trajectories(trajectories, rewards, folder=folder)


def in_memory(trajectories):
    """Pictures as PIL's plain images, which compare by their pixels."""
    for t in trajectories:
        object.__setattr__(t.sample, "image", plain(t.sample.image))
        for step in t.tool_turns:
            step.observation.images = list(map(plain, step.observation.images))
    return trajectories


def plain(image):
    return Image.frombytes(image.mode, image.size, image.tobytes())


def shown(trajectories, rewards, columns):
    plays = [[("", *pair)] for pair in zip(trajectories, rewards)]
    return page(plays, columns, (), len(plays))


TARGET = (76, 140, 120, 184)
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (256, 256, 3), np.uint8))
SAMPLE = Sample("one", IMAGE, "Which texture is on the red square ?", "checker", boxes=(TARGET,))


def episode(sample=SAMPLE, *turns, answer="checker", scores=(), right=1.0):
    """A trajectory of (text, code, observation) turns, and its reward."""
    trajectory = Trajectory(sample, ids=[1] * 30, acted=[False] * 30, prompt=30, ended="answered")
    for text, code, seen in turns:
        start = len(trajectory.ids)
        trajectory.ids += [2] * 10 + [3] * 5
        trajectory.acted += [True] * 10 + [False] * 5
        trajectory.turns.append(Turn(text, code, seen, start, start + 10))
    trajectory.answer = answer
    return trajectory, Reward(right, sum(filter(None, scores)), 0.0, tuple(scores), right)


def looked(box=(64, 128, 128, 192), **more):
    crop = IMAGE.crop(box)
    return (
        LOOK,
        "image.crop(...)",
        Observation(images=[crop], boxes=[box], sources=["crop"], **more),
    )


def worked_example():
    """One of each: a good look, an error and a picture that is no crop, and a guess."""
    figure = Observation(
        text="12\n", images=[IMAGE.resize((40, 30))], boxes=[None], sources=["figure"],
        notes=["plt.show() was kept"], seconds=0.25,
    )  # fmt: skip
    error = Observation(error="ValueError: outside", red_lines=["invalid_coords"])
    answered = (ANSWER, None, None)
    lettered = replace(SAMPLE, id="two", options=("checker", "diagonal"), kind="neutral")
    pairs = [
        episode(SAMPLE, looked(), answered, scores=(1.0,)),
        episode(lettered, (FAIL, "1/0", error), ("<code>\nplot()\n</code>", "plot()", figure),
                answer=None, scores=(-1.0, None), right=0.0),
        episode(SAMPLE, answered),
    ]  # fmt: skip
    return [t for t, _ in pairs], [r for _, r in pairs]


# --- play and measure ------------------------------------------------------------------------


def test_the_toy_has_half_as_many_questions_against_its_prior_and_repeats_exactly():
    samples = load_toy(n=12, seed=3)
    against = [s for s in samples if s.source == OUT_OF_PRIOR]
    assert len(samples) == 18 and len(against) == 6
    assert len({s.id for s in samples}) == 18
    usual = [USUAL_TEXTURE[s.question.split()[5]] for s in against]
    assert all(s.answer != texture for s, texture in zip(against, usual))
    assert [s.answer for s in samples] == [s.answer for s in load_toy(n=12, seed=3)]
    assert [s.answer for s in samples] != [s.answer for s in load_toy(n=12, seed=4)]


def test_evaluate_plays_each_sample_once_scores_each_step_and_keeps_the_episodes(
    policy, samples, tmp_path
):
    scripts, rules = [[LOOK, ANSWER], [FAIL, PRINT, SHORT], [SHORT]], replace(RULES, turns=2)
    with scripted(policy, scripts):
        metrics, played = evaluate(policy, samples[:3], BoxJudge(), rules=rules, out=tmp_path)
    assert [t.sample.id for t in played] == [s.id for s in samples[:3]]
    assert metrics["n"] == 3
    kept, rewards = read_trajectories(tmp_path / "trajectories.jsonl")
    assert [len(r.scores) for r in rewards] == [1, 2, 0]
    assert [t.answer for t in kept] == ["checker", None, "red"]
    assert kept[1].ended == "turns"


def test_sampling_repeats_with_its_seed_and_leaves_the_random_numbers_of_training_alone(
    policy, samples
):
    def sampled(seed):
        rules = replace(RULES, max_new_tokens=8, turns=1)
        played = evaluate(policy, samples[:2], BoxJudge(), rules=rules, seed=seed)[1]
        return [trajectory.ids for trajectory in played]

    before = torch.random.get_rng_state()
    assert sampled(1) == sampled(1) != sampled(2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_evaluating_nothing_is_refused(policy):
    with pytest.raises(ValueError, match="at least one sample"):
        evaluate(policy, [], BoxJudge())


def test_questions_against_the_prior_count_for_one_number_only():
    against = replace(SAMPLE, source=OUT_OF_PRIOR)
    pairs = [
        episode(SAMPLE, looked(), scores=(1.0,)),
        episode(SAMPLE, right=0.0),
        episode(against, right=0.0),
        episode(against, looked(), scores=(1.0,)),
        episode(against, right=0.0),
        episode(against, right=0.0),
    ]
    metrics = measure([t for t, _ in pairs], [r for _, r in pairs])
    assert metrics["n"] == 2 and metrics["accuracy"] == 0.5 and metrics["faithful"] == 0.5
    assert metrics["ood_accuracy"] == 0.25
    assert "ood_accuracy" not in measure(*map(list, zip(*pairs[:2])))


# --- the file of episodes --------------------------------------------------------------------


def test_trajectories_come_back_as_they_were_written(tmp_path):
    trajectories, rewards = worked_example()
    trajectories[0].turns[0].text += "\u2028 \ud800 \x00 ' \" </script>"  # lone surrogate and all
    write_trajectories(trajectories, rewards, tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")  # a folder may be moved, or sent to somebody
    back, rewards_back = read_trajectories(tmp_path / "there" / "trajectories.jsonl")
    assert in_memory(list(back)) == trajectories  # pictures too: PIL compares their pixels
    assert rewards_back == rewards


def test_a_line_holds_what_the_head_of_the_file_promises(tmp_path):
    write_trajectories(*worked_example(), tmp_path)
    first, second, _ = map(json.loads, (tmp_path / "trajectories.jsonl").open())
    documented = re.findall(r"^    ([a-z]+)  +", module.__doc__, re.MULTILINE)
    assert set(first) == {*documented, "prompt", "prompt_images"}
    assert first["sample"]["boxes"] == [list(TARGET)] and first["sample"]["answer"] == "checker"
    assert [step["score"] for step in first["steps"]] == [1.0, None]
    assert [step["score"] for step in second["steps"]] == [-1.0, None]
    assert (first["correct"], second["correct"]) == (True, False)
    assert first["acted"] == [[False, 30], [True, 10], [False, 5], [True, 10], [False, 5]]
    crop = tmp_path / first["steps"][0]["observation"]["images"][0]
    assert Image.open(crop).size == (64, 64)
    assert second["steps"][0]["observation"]["red_lines"] == ["invalid_coords"]


@pytest.mark.parametrize("line", ["{", "{}", "[]", "[" * 99_999, '{"sample": 1, "reward": {}}'])
def test_a_line_that_is_no_trajectory_is_named(line, tmp_path):
    write_trajectories(*worked_example(), tmp_path)
    file = tmp_path / "trajectories.jsonl"
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"jsonl, line 4: expected a trajectory"):
        read_trajectories(file)


@pytest.mark.parametrize("field", ["steps", "acted"])
def test_a_line_that_lacks_a_field_is_named_when_it_is_read(field, tmp_path):
    write_trajectories(*worked_example(), tmp_path)
    file = tmp_path / "trajectories.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[1][field]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=f"jsonl, line 2: .*KeyError: '{field}'"):
        list(read_trajectories(file)[0])


def test_no_episodes_make_an_empty_file_and_a_page_that_says_so(tmp_path):
    write_trajectories([], [], tmp_path)
    assert list(map(list, read_trajectories(tmp_path / "trajectories.jsonl"))) == [[], []]
    assert "0 of 0 episodes" in report(tmp_path, {}).read_text()


def test_a_turn_without_code_has_no_score_even_between_turns_that_have_one():
    turns = [looked(), ("<think>So.</think>", None, None), looked()]
    trajectory, reward = episode(SAMPLE, *turns, scores=(1.0, 0.5))
    assert [score for _, score in scored(trajectory, reward)] == [1.0, None, 0.5]


@given(st.lists(st.booleans()))
def test_runs_of_tokens_unroll_to_the_tokens(acted):
    runs = runs_of(acted)
    assert [who for who, count in runs for _ in range(count)] == acted
    assert all(a != b for (a, _), (b, _) in itertools.pairwise(runs))


# --- table and figures -----------------------------------------------------------------------


def test_the_table_is_aligned_and_leaves_empty_what_was_not_measured():
    columns = {
        "SFT": {"n": 256, "accuracy": 0.9571, "faithful": 0.33, "ood_accuracy": None},
        "TAPO": {"n": 256, "accuracy": 1.0, "ood_accuracy": 0.68, "no such row": 1.0},
    }
    assert table(columns).splitlines() == [
        "                         SFT   TAPO",
        "questions                256    256",
        "accuracy               0.957  1.000",
        "out-of-prior accuracy         0.680",
        "faithful               0.330",
    ]
    assert table({}) == ""


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "log",
    [
        [],
        [{"step": 1, "loss": 0.5}],
        [{"step": 1, "accuracy": 0.5, "answer": 0.5}, {"step": 2, "accuracy": None}],
        [{"step": 1, "faithful": None}],
        [{"step": s, "accuracy": 0.9, "tool_use": 0.5, "faithful": s / 40, "answer": 0.9,
          "tools": -0.2, "format": 0.0} for s in range(40)],
    ],
)  # fmt: skip
def test_curves_are_drawn_from_whatever_was_logged(log, tmp_path):
    curves(log, tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").size == (720, 600)


def test_every_curve_can_be_told_apart_without_colour():
    styles = list(zip(module.LINES, module.MARKERS))
    assert len(set(module.MARKERS)) == len(module.COLORS) == len(set(styles)) == len(styles)


@pytest.mark.filterwarnings("error::UserWarning")
def test_runs_are_compared_in_one_table_and_one_figure(tmp_path, capsys):
    for name, share in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        summary = {"stages": {"sft": {"n": 4, "faithful": share}, "rl": {"n": 4, "calls": None}}}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    a, b = str(tmp_path / "a"), str(tmp_path / "b") + "/"
    main(["--compare", a, b, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert f"{tmp_path}/a sft" in printed and f"{tmp_path}/b rl" in printed
    assert re.search(r"^faithful +0\.250 +0\.750$", printed, re.MULTILINE)
    assert Image.open(tmp_path / "out" / "compare.png").width == 960
    assert len(columns_of([a, b])) == 4
    for broken in ("{", "{}", "[]", '{"stages": []}'):
        (tmp_path / "b" / "summary.json").write_text(broken)
        with pytest.raises(ValueError, match="/b/: expected a folder with the summary.json of a"):
            columns_of([a, b])
    compare({}, tmp_path / "empty.png")


def test_a_figure_shows_how_sure_a_rate_is(tmp_path):
    def coloured(interval):
        metrics = {"faithful": 0.5, "rates": {"faithful": {"interval": interval}}}
        compare({"a": metrics}, tmp_path / "compare.png")
        pixels = np.asarray(Image.open(tmp_path / "compare.png").convert("RGB"), int)
        return (np.ptp(pixels, axis=-1) > 40).sum()

    none, narrow, wide = map(coloured, (None, (0.45, 0.55), (0.1, 0.9)))
    assert none < narrow < wide


# --- the page --------------------------------------------------------------------------------


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

    def shape(self):
        """All tags with the names of their attributes, but for the spans that colour words."""
        return [(tag, *attributes) for tag, attributes in self.tags if tag != "span"]

    def all(self, tag, **attributes):
        return [a for t, a in self.tags if t == tag and attributes.items() <= a.items()]


def test_the_page_shows_each_episode_as_a_film_strip():
    seen = Reader(shown(*worked_example(), {"SFT": {"n": 3, "accuracy": 2 / 3}}))
    cards = seen.all("article")
    assert [c["data-answer"] for c in cards] == ["correct", "wrong", "correct"]
    assert [c["data-look"] for c in cards] == ["faithful", "unfaithful", "no tool"]
    assert [c["data-kind"] for c in cards] == ["search", "neutral", "search"]
    assert [c["data-error"] for c in cards] == ["none", "some", "none"]
    # The first image is there once, and again where the crop was looked at; units are its pixels.
    assert len(seen.all("image")) == 3 and len(seen.all("use", href="#p1")) == 1
    assert all(svg["viewbox"] == "0 0 256 256" for svg in seen.all("svg"))
    where = {"x": "64", "y": "128", "width": "64", "height": "64", "class": "shown"}
    assert len(seen.all("rect", **where)) == 1
    assert len(seen.all("rect", **{"class": "target", "x": "76", "width": "44"})) == 4
    for words in ("score 1", "6% of the image: 64, 128, 128, 192", "✓ checker (reference: checker)",
                  "✗ no answer", "ValueError: outside", "score -1, invalid_coords", "no verdict",
                  "figure, 40 x 30", "plt.show() was kept", "3 of 3 episodes", "0.667",
                  "20 tokens chosen by the policy, 40 shown to it"):  # fmt: skip
        assert words in seen.text, words
    bar = [(i["style"], i.get("class")) for i in seen.all("i")[:5]]
    lengths = [(30, None), (10, "acted"), (5, None), (10, "acted"), (5, None)]
    assert bar == [(f"flex:{length} 0 0", name) for length, name in lengths]


def test_an_answer_that_no_judge_could_read_is_neither_right_nor_wrong(tmp_path):
    pairs = [episode(right=right) for right in (1.0, 0.0, None)]
    cards = Reader(shown(*zip(*pairs), {})).all("article")
    assert [card["data-answer"] for card in cards] == ["correct", "wrong", "no verdict"]
    write_trajectories(*zip(*pairs), tmp_path)
    lines = map(json.loads, (tmp_path / "trajectories.jsonl").open())
    assert [line["correct"] for line in lines] == [True, False, None]


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)" x=\'',
    "' onmouseover='alert(1)",
    "</textarea></pre></style></title><!--",
    "<svg/onload=alert(1)>",
    "&lt;b&gt; &#60;b&#62; $script ${style} https://example.com/x.png",
    "<a href='javascript:alert(1)'>x</a>]]>",
    "\u202e\x00\ud800",
]


@pytest.mark.parametrize("words", HOSTILE)
def test_whatever_a_model_or_a_data_set_wrote_is_only_text(words, tmp_path):
    calm = Reader(shown(*everywhere("words"), {"words": {"n": 1}}))
    write_trajectories(*everywhere(words), tmp_path)
    raw = report(tmp_path, {words: {"n": 1}}).read_text()
    seen = Reader(raw)
    assert seen.shape() == calm.shape()
    if words.isprintable():
        assert seen.text.count(words) == calm.text.count("words")  # and nothing is lost


def everywhere(words):
    """One episode in which every text that comes from outside is `words`."""
    sample = Sample(words, IMAGE, words, words, options=(words, words), source=words)
    seen = Observation(
        text=words, images=[IMAGE], boxes=[None], sources=[words], error=words,
        environment=words, notes=[words], red_lines=[words],
    )  # fmt: skip
    turns = [(f"{words}<code>{words} # {words}</code>{words}", words, seen), (words, None, None)]
    trajectory, reward = episode(sample, *turns, answer=words, scores=(0.0,))
    trajectory.ended = words
    return [trajectory], [reward]


def test_the_page_loads_nothing_and_may_load_nothing(tmp_path):
    write_trajectories(*worked_example(), tmp_path)
    curves([], tmp_path / "curves.png")
    raw = report(tmp_path, {"SFT": {"n": 3}}).read_text()
    seen = Reader(raw)
    links = [
        a[name] for _, a in seen.tags for name in ("src", "href", "data", "action") if name in a
    ]
    assert len(links) == 3 + 2 + 1 + 1  # images, what steps showed, where, curves
    assert all(link.startswith(("data:image/", "#p")) for link in links)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", re.sub(r"base64,[^\"]*", "", raw))
    assert len(seen.all("script")) == 1
    (policy,) = seen.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; img-src data:;")


def test_fifty_episodes_with_photographs_stay_under_five_megabytes():
    noise = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)
    sample = replace(SAMPLE, image=Image.fromarray(noise))  # nothing compresses worse
    box = (0, 0, 320, 240)
    seen = Observation(images=[sample.image.crop(box)], boxes=[box], sources=["crop"])
    pairs = [episode(sample, (LOOK, "x", seen), scores=(1.0,)) for _ in range(50)]
    text = shown(*zip(*pairs), {})
    assert "50 of 50 episodes" in text
    assert 1_000_000 < len(text.encode()) < 5_000_000


def test_endless_texts_leave_later_episodes_out_and_the_page_says_so(tmp_path):
    pairs = [episode(SAMPLE, ("é" * (PAGE_LIMIT // 6), None, None)) for _ in range(4)]
    text = shown(*zip(*pairs), {})
    assert "2 of 4 episodes" in text and len(text.encode()) < 5_000_000
    pairs = [episode() for _ in range(9)]
    write_trajectories([t for t, _ in pairs], [r for _, r in pairs], tmp_path)
    text = report(tmp_path, {}, shown=4).read_text()
    assert "3 of 9 episodes" in text and text.count("<article") == 3
    assert list(module.spread(range(9), 4)) == [0, 3, 6]  # the last ones too have their chance


@pytest.mark.parametrize("budget", [500_000, 20_000, 4_000])
def test_a_picture_fits_its_budget_and_keeps_its_shape(budget):
    url = picture_url(IMAGE.resize((1600, 800)), budget)
    assert len(url) <= budget
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
    assert image.width == 2 * image.height


def test_code_is_highlighted():
    assert highlight("for i in 'a<b': # 1") == (
        '<span class="k">for</span><span class="other"> </span><span class="other">i</span>'
        '<span class="other"> </span><span class="k">in</span><span class="other"> </span>'
        '<span class="s">&#x27;a&lt;b&#x27;</span><span class="other">: </span>'
        '<span class="c"># 1</span>'
    )


@given(st.text(st.sampled_from("ab1_ .#'\"\n<>&=for"), max_size=60))
def test_highlighting_loses_nothing_and_escapes_everything(code):
    text = re.sub(r"</?span[^>]*>", "", highlight(code))
    assert html.unescape(text) == code and not set("<>\"'") & set(text)


# --- the command line ------------------------------------------------------------------------


def test_without_arguments_it_shows_how_it_is_used(capsys):
    main([])
    printed = capsys.readouterr().out
    assert "usage" in printed and "--compare" in printed and "(default: 10)" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "m", "--bench", "vstar9"], "invalid choice: 'vstar9'"),
        (["--model", "/no/such/folder"], "no checkpoint in /no/such/folder: expected a folder"),
        (["--model", "m", "--data", "x"], "drop --data x"),
        (["--model", "m", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--model", "m", "--turns", "0"], "--turns must be at least 1, got 0"),
        (["--model", "m", "--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (["--model", "m", "--temperature", "nan"], "--temperature must be at least 0, got nan"),
        (["--model", "m", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--model", "tiny", "--out", f"{__file__}/x"], "--out should be a folder or become one"),
        (["--study", "rewards", "--out", __file__], "--out should be a folder or become one"),
        (["--model", "m", "--shortcut", "2"], "shortcut is a share between 0 and 1, got 2.0"),
        (
            ["--compare", "/no/such/run"],
            "no run in /no/such/run: expected a folder with the summary.json",
        ),
    ],
)
def test_a_wrong_command_is_explained_before_any_model_loads(
    arguments, message, monkeypatch, capsys
):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_benchmark_run_leaves_a_table_a_summary_and_a_page(policy, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "load_policy", lambda name, device, max_pixels: policy)
    small = replace(module.GREEDY, max_new_tokens=64, max_length=2048)
    monkeypatch.setattr(module, "GREEDY", small)
    asked = {}
    monkeypatch.setattr(module, "evaluate", lambda *a, **k: asked.update(k) or evaluate(*a, **k))
    flags = ["--limit", "2", "--turns", "2", "--temperature", "0.5", "--seed", "7"]
    flags += ["--max-new-tokens", "64", "--max-length", "2048"]
    with scripted(policy, [[LOOK, ANSWER], [SHORT], [ANSWER]]):
        main(["--model", "m", *flags, "--out", str(tmp_path / "deep" / "out")])
    assert asked["rules"] == replace(small, turns=2, temperature=0.5) and asked["seed"] == 7
    assert re.search(r"^questions +2$", capsys.readouterr().out, re.MULTILINE)
    summary = json.loads((tmp_path / "deep" / "out" / "summary.json").read_text())
    assert set(summary) == {"config", "seconds", "stages"}
    assert set(summary["stages"]) == {"toy"}
    assert 0 <= summary["stages"]["toy"]["ood_accuracy"] <= 1
    assert "of 3 episodes" in (tmp_path / "deep" / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "kept, message",
    [
        ('{"place": 0, "run": "?"}\n', "line 1: expected a trajectory"),
        ("other", "another evaluation"),
        ("", "--max-length 5 leaves"),
    ],
)
def test_what_an_evaluation_refuses_is_told_in_a_sentence(
    kept, message, policy, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module, "load_policy", lambda name, device, max_pixels: policy)
    if kept == "other":
        write_trajectories(*worked_example(), tmp_path)
    else:
        (tmp_path / "trajectories.jsonl").write_text(kept)
    with pytest.raises(SystemExit):
        flags = ["--model", "tiny", "--limit", "2", "--max-new-tokens", "2", "--max-length", "5"]
        main([*flags, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err


# --- in a browser ----------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium")
PROBE = """<script>
const press = (key, more = {}, on = document.body) => {
  on.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, ...more}));
  return document.activeElement.id;
};
const all = (selector, of) => [...document.querySelectorAll(selector)].map(of), result = {};
Object.assign(document.body.style, {width: "WIDTHpx", margin: 0});  // no style asks for more
result.width = Math.max(...all("body *", e => e.getBoundingClientRect().right));
result.bar = all("section:first-of-type .bar i", i => i.getBoundingClientRect().width).slice(0, 5);
result.colors = all(".bar i", i => getComputedStyle(i).backgroundColor).slice(0, 3);
result.lines = all("article:first-of-type rect", r => getComputedStyle(r).stroke).slice(0, 6);
result.code = getComputedStyle(document.querySelector("pre")).whiteSpaceCollapse;
result.filters = all("label", label => label.textContent.trim().split(" ")[0]);
const choose = name => document.querySelector(`select[name=${name}]`);
result.values = ["look", "kind"].map(name => [...choose(name).options].map(o => o.text));
result.keys = ["k", "j", "j", "k", "ArrowRight", "ArrowRight", "j", "ArrowLeft"].map(k => press(k));
result.quiet = [press("k", {ctrlKey: true}), press("k", {metaKey: true}),
  press("k", {}, choose("look"))];
const only = (name, text) => {
  choose(name).selectedIndex = [...choose(name).options].findIndex(option => option.text == text);
  choose(name).dispatchEvent(new Event("change", {bubbles: true}));
  return all("article:not([hidden])", card => card.id);
};
result.shown = [only("answer", "wrong"), only("answer", "correct")];
press("k");
result.next = press("j");  // past the one that is hidden
const y = document.activeElement.getBoundingClientRect().top;
result.seen = 0 <= y && y < innerHeight;
result.shown.push(only("look", "faithful"), only("look", "all"), only("answer", "all"));
document.title = JSON.stringify(result);
</script>"""


def browse(folder, *flags):
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}")  # fmt: skip
    command = [CHROMIUM, *quiet, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize(
    "width, film, mode",
    [(1280, (34, 38, 43), "--mute-audio"), (390, (10, 12, 14), "--force-dark-mode")],
)
def test_a_browser_shows_the_page_without_cut_text_and_runs_its_one_script(
    width, film, mode, tmp_path
):
    trajectories, rewards = worked_example()
    long = "a_name_that_is_much_too_long_for_a_phone_" * 4
    trajectories[1].turns[0].text = f"<think>{long}</think><code>\n{long}()\n</code>"
    trajectories[1].sample = replace(trajectories[1].sample, question=long, id=long)
    write_trajectories(trajectories, rewards, tmp_path)
    curves([], tmp_path / "curves.png")
    file = report(tmp_path, {"SFT": {"n": 3}, long: {"n": 3, "accuracy": 0.5}})

    shot = tmp_path / "shot.png"
    browse(tmp_path, mode, f"--window-size={width},1600", f"--screenshot={shot}", file.as_uri())
    pixels = np.asarray(Image.open(shot).convert("RGB"))
    assert pixels.shape == (1600, width, 3)
    assert (pixels == film).all(-1).mean() > 0.02  # the film is there, with its colour

    # The page's own policy forbids any other script, so the probe runs in a copy without it.
    probed = tmp_path / "probed.html"
    text = re.sub(r"<meta http-equiv[^>]*>", "", file.read_text())
    probed.write_text(text + PROBE.replace("WIDTH", str(width)))
    seen = browse(tmp_path, f"--window-size={width},1600", "--dump-dom", probed.as_uri())
    result = json.loads(html.unescape(re.search("<title>(.*?)</title>", seen)[1]))
    assert result["width"] <= width  # nothing sticks out
    bar, tokens = sum(result["bar"]), [30, 10, 5, 10, 5]
    assert bar > width / 2
    assert result["bar"] == pytest.approx([bar * n / 60 for n in tokens], abs=1)
    shown_to_it, chosen, again = result["colors"]
    assert shown_to_it == again != chosen
    white, black, blue = "rgb(255, 255, 255)", "rgb(0, 0, 0)", "rgb(0, 114, 178)"
    assert result["lines"] == [white, black, white, black, white, blue]  # a rim, then the line
    assert result["code"] == "preserve"
    assert result["filters"] == ["answer", "look", "kind", "error"]
    looks = ["faithful", "no tool", "unfaithful"]
    assert result["values"] == [["all", *looks], ["all", "neutral", "search"]]
    assert result["keys"] == ["t1", "t2", "t3", "t2", "t3", "t3", "t3", "t2"]
    assert result["quiet"] == ["t2"] * 3
    assert result["shown"] == [["t2"], ["t1", "t3"], ["t1"], ["t1", "t3"], ["t1", "t2", "t3"]]
    assert result["next"] == "t3" and result["seen"]

    # With the policy in place its own script still runs, and no other does.
    hostile = tmp_path / "hostile.html"
    hostile.write_text(file.read_text() + PROBE)
    seen = browse(tmp_path, "--dump-dom", hostile.as_uri())
    assert "<select" in seen and "<title>What it looked at" in seen


SIDES = """<script>
Object.assign(document.body.style, {width: "WIDTHpx", margin: 0});
const boxes = [...document.body.querySelectorAll("*")].map(e => e.getBoundingClientRect());
const [a, b] = [...document.querySelectorAll("section")].map(e => e.getBoundingClientRect());
const result = {width: Math.max(...boxes.map(box => box.right)), beside: a.top == b.top};
document.title = JSON.stringify(result);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("width, beside", [(1280, True), (390, False)])
def test_runs_stand_side_by_side_on_a_screen_and_below_each_other_on_a_phone(
    width, beside, tmp_path
):
    runs = [str(tmp_path / ("a_long_name_for_a_run_" * 3 + letter)) for letter in "ab"]
    for run in runs:
        write_trajectories(*worked_example(), Path(run))
    columns = {f"{run} toy": {"n": 3, "accuracy": 0.5} for run in runs}
    compare(columns, tmp_path / "compare.png")
    text = report_runs(tmp_path, runs, columns).read_text()
    probed = tmp_path / "probed.html"
    text = re.sub(r"<meta http-equiv[^>]*>", "", text) + SIDES.replace("WIDTH", str(width))
    probed.write_text(text)
    seen = browse(tmp_path, f"--window-size={width},1600", "--dump-dom", probed.as_uri())
    result = json.loads(html.unescape(re.search("<title>(.*?)</title>", seen)[1]))
    assert result == {"width": pytest.approx(width, abs=width / 2), "beside": beside}
    assert result["width"] <= width
