"""python -m pytest tests/test_grammar.py      about 5 s: a turn ends where it is read to end"""

import pytest
import torch
from conftest import RULES, SHORT, scripted
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rollout
from data import parse
from kit.grammar import end_of_turn, ending, ending_tokens
from rewards import format_error

TAGS = [f"<{slash}{tag}>" for tag in ("think", "code", "answer") for slash in ("", "/")]
PYTHON = ["'", '"', "'''", '"""', "#", "\\", "\n", "x"]
words = st.sampled_from([*TAGS, " red ", "it's", "<", ">"])
programs = st.lists(st.sampled_from([*PYTHON, *TAGS[:4], "</code>"]), max_size=9)
texts = st.lists(words | programs.map(lambda own: "<code>" + "".join(own))).map("".join)
OPEN = "<think>I look.<code>\nprint(1)\n</code>"  # the thought goes on in the next turn


@pytest.fixture(scope="module")
def qwen(standin_folder):
    return rollout.load_policy(standin_folder, weights=False)


# --- the law -----------------------------------------------------------------------------------


@settings(max_examples=500)
@given(texts, st.booleans(), st.booleans())
@example("<code>print('a</code>\n'</code>", False, False)  # the new line says: no string
@example("<think>I'd use <code> but it's no use</think><answer>red</answer>", False, False)
@example("<think><code>print('</think>')\n</code> so </think>", False, False)
def test_no_later_word_overturns_an_end(text, closed, thought):
    """Letter by letter: the first prefix that has ended reads as every longer one does."""
    read = [ending(text[:n], False, thought) for n in range(len(text) + 1)]
    ended = [one for one in read if one is not None]
    assert read == [None] * (len(read) - len(ended)) + ended[:1] * len(ended)
    if ended:
        stop = len(text) - len(ended) + 1  # letters that a stop after each letter lets through
        assert ended[0].end <= stop and text[stop - 1] in ">\n"
        assert ending(text, closed, thought) == ended[0]
        # Only a quote that its line leaves open can put off the stop, to the end of that line.
        assert ended[0].end == stop or text[stop - 1] == "\n"


@settings(max_examples=300)
@given(texts, texts, st.booleans())
def test_what_stands_behind_the_end_is_never_read(text, more, thought):
    end = ending(text, False, thought)
    if end is not None:
        own = text[: end.end]
        assert (
            ending(text + more, True, thought) == end == ending(text + "\n" + more, True, thought)
        )
        assert ending(own, True, thought) == end  # what is read is enough to read it


@given(texts, texts)
def test_words_of_a_closed_thought_neither_end_nor_answer(text, after):
    """All but whole code: that acts where it closes, before anybody can know of the </think>."""
    words = text.replace("</code>", "<answer>").replace("</think>", "</answer>")
    words = words.translate(str.maketrans("", "", "'\"")) + "\n</think>"
    end, bare = ending("<think>" + words + after, True), ending("<think></think>" + after, True)
    assert end[:2] == bare[:2] and end.tags == bare.tags


def stopped(tokenizer, text, thought=False):
    """The tokens of `text` until `generate` would stop, and whether it would."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stop = end_of_turn(tokenizer, [1], [thought])
    for n in range(1, len(ids) + 1):
        if stop(torch.tensor([[0, *ids[:n]]]), None).item():
            return ids[:n], True
    return ids, False


def check_the_law(policy, samples, before, text):
    """What the stopping rule ends on, token by token, is what parse reads of the whole text."""
    t = rollout.begin(samples[0], rollout.encode_prompt(policy, samples[0]))
    for turn in before:
        assert rollout.speak(policy, t, policy.encode(turn, []).ids) is not None
    reply, end = stopped(policy.tokenizer, text, t.thinking)
    if reply:
        code = rollout.speak(policy, t, reply)
        assert (code, t.answer) == parse("<think>" * len(before) + text, closed=False)
        assert end == (t.ended != "length")


histories = st.sampled_from([[], [OPEN]])


@given(histories, texts)
@example([], "<code>print('a</code>\nb")
def test_play_ends_on_what_parse_reads(policy, samples, before, text):
    check_the_law(policy, samples, before, text)


@given(histories, texts)
def test_so_it_is_with_the_tokens_of_qwen(qwen, samples, before, text):
    check_the_law(qwen, samples, before, text)


# --- one by one --------------------------------------------------------------------------------

THOUGHT = "<think>I must end with <answer> and </answer> tags. It is vertical.</think>"
VERTICAL = "<answer>vertical</answer>"
CROP = "image.crop((0, 0, 64, 64)).show()\n"


@pytest.mark.parametrize(
    "turn",
    [
        THOUGHT + VERTICAL,
        "<think>maybe <answer>checker</answer> no</think>" + VERTICAL,
        "<think>Code ends with </code>, an answer with </answer>.</think>" + VERTICAL,
        "<think>I'd use <code> but it's plain.</think>" + VERTICAL,
        "<think>Code goes from <code>\nto its end, so it's # the tag\n</think>" + VERTICAL,
        "<think>A <think> in a <think>: <answer>A or B</answer></answer></think>" + VERTICAL,
    ],
)
def test_the_words_of_a_closed_thought_are_no_answer(policy, samples, turn):
    rules = rollout.Rules(**{**vars(RULES), "max_new_tokens": 256})
    with scripted(policy, [[turn], [OPEN, turn.replace("<think>", "")]]):
        (group,) = rollout.play(policy, samples[:1], 2, rules)
    assert [t.answer for t in group] == ["vertical"] * 2  # also of a thought that spans two turns
    assert parse(turn, closed=True) == parse(turn, closed=False) == (None, "vertical")


@pytest.mark.parametrize(
    "line",
    [
        "print('</answer>')",
        "print('</code>')",
        '"""\nends with </code>, it\'s said\n"""',
        "print('it\\'s </code>')",
        "# then <answer>B</answer>",
        "# it's <answer>B</answer>, isn't it",
        "print('<think>')",
        "print(f'<code></code> {1}', r'\\d</answer>', b'</code>')",
    ],
)
def test_the_tags_in_strings_and_comments_of_code_end_nothing(policy, samples, line):
    code = f"\n{line}\n{CROP}"
    rules = rollout.Rules(**{**vars(RULES), "max_new_tokens": 192})
    roles = [
        [f"<code>{code}</code>", SHORT],
        [f"<think>I look.<code>{code}</code>", "</think>" + SHORT],
    ]
    with scripted(policy, roles):
        ((t, thinking),) = rollout.play(policy, samples[:1], 2, rules)
    assert (t.turns[0].code, t.answer) == (code, "red") and len(t.images) == 2
    assert thinking.turns[0].code == code and len(thinking.images) == 2
    assert not format_error(t) and not format_error(thinking)


@pytest.mark.parametrize(
    "text, code, answer",
    [
        ("<think>a <code>1</code> b</think><answer>B</answer>", "1", None),  # decided at </code>
        ("<answer><think>is it <answer>A</answer>?</think>B</answer>", None, "B"),
        ("<code>x = 1  # one</code>", "x = 1  # one", None),
        ("<code>print('a</code>\n", "print('a", None),  # it is run, and the policy reads why not
        ("<code>print('a</code>", None, None),  # the string may go on
        ("<think>a <answer>B</answer>", None, None),  # the thought may go on
        ("<think>'a <code> b</think><answer>B</answer>", None, "B"),
        ("<think><code>'a</think><answer>B</answer>", None, None),  # the string may go on
        ("<think><code>'a</think><answer>B</answer>\n", None, "B"),
        ("<think><code>'</think>'</code>", "'</think>'", None),
        ("a</code><answer>B</answer>", None, None),
        ("a</answer><answer>B</answer>", None, None),
    ],
)
def test_what_is_decided_and_what_is_still_open(text, code, answer):
    assert parse(text, closed=False) == (code, answer)


@pytest.mark.parametrize(
    "text, code, answer",
    [
        ("<think>a <answer>B</answer>", None, "B"),
        ("<think>a <answer>A</answer>? no: <answer>B</answer> \n", None, "B"),
        ("<think>maybe <answer>A</answer>, maybe not", None, None),  # words of a thought
        ("<think>a</code> <answer>B</answer>", None, "B"),
        ("<think>a <code>1", "1", None),
        ("<code>print('a</code>", "print('a", None),  # the line ends with the message
        ("<think><code>'a</think><answer>B</answer>", None, "B"),
        ("<think>a</think><code>'''1", "'''1", None),
        ("<think>a", None, None),
        ("", None, None),
    ],
)
def test_what_an_ended_message_is_forgiven(text, code, answer):
    assert ending(text, closed=True)[:2] == (code, answer)


# --- its cost ----------------------------------------------------------------------------------


def test_a_row_is_read_only_when_its_newest_token_may_end_it(qwen, monkeypatch):
    tokenizer, decode, read = qwen.tokenizer, qwen.tokenizer.decode, []
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **how: read.append(1) or decode(ids, **how)
    )
    ids, end = stopped(tokenizer, "a longer thought without a line's end, of " * 9 + "</code>")
    assert end and len(read) == 1 and len(ids) > 80
    assert len(ending_tokens(tokenizer)) < 0.05 * len(tokenizer)
