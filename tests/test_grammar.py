"""python -m pytest tests/test_grammar.py      about 5 s: a turn ends where it is read to end"""

import pytest
import torch
from conftest import RULES, SHORT, scripted
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rollout
from data import parse
from kit.grammar import end_of_turn, ending, ending_tokens

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
@given(texts, st.booleans())
@example("<code>print('a</code>\n'</code>", False)  # the new line says that there is no string
@example("<think>I'd use <code> but it's no use</think><answer>red</answer>", False)
def test_no_later_word_overturns_an_end(text, closed):
    """Letter by letter: the first prefix that has ended reads as every longer one does."""
    read = [ending(text[:n], closed=False) for n in range(len(text) + 1)]
    ended = [one for one in read if one is not None]
    assert read == [None] * (len(read) - len(ended)) + ended[:1] * len(ended)
    assert parse(text, closed=False) == (ended[0] if ended else (None, None))
    if ended:
        assert ending(text, closed) == ended[0] and text[len(text) - len(ended)] in ">\n"


def stopped(tokenizer, text, unclosed=""):
    """The tokens of `text` until `generate` would stop, and whether it would."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stop = end_of_turn(tokenizer, 1, [unclosed])
    for n in range(1, len(ids) + 1):
        if stop(torch.tensor([[0, *ids[:n]]]), None).item():
            return ids[:n], True
    return ids, False


def check_the_law(policy, samples, before, text):
    """What the stopping rule ends on, token by token, is what parse reads of the whole text."""
    t = rollout.begin(samples[0], rollout.encode_prompt(policy, samples[0]))
    for turn in before:
        assert rollout.speak(policy, t, policy.encode(turn, []).ids) is not None
    reply, end = stopped(policy.tokenizer, text, t.unclosed)
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
    ],
)
def test_the_tags_in_strings_and_comments_of_code_end_nothing(policy, samples, line):
    code = f"\n{line}\n{CROP}"
    rules = rollout.Rules(**{**vars(RULES), "max_new_tokens": 192})
    with scripted(policy, [[f"<code>{code}</code>", SHORT]]):
        ((t,),) = rollout.play(policy, samples[:1], 1, rules)
    assert (t.turns[0].code, t.answer) == (code, "red") and len(t.images) == 2


@pytest.mark.parametrize(
    "text, code, answer",
    [
        ("<think>a <code>1</code> b</think><answer>B</answer>", "1", None),  # decided at </code>
        ("<code>x = 1  # one</code>", "x = 1  # one", None),
        ("<code>print('a</code>\n", "print('a", None),  # it is run, and the policy reads why not
        ("<code>print('a</code>", None, None),  # the string may go on
        ("<think>a <answer>B</answer>", None, None),  # the thought may go on
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
        ("<think>a <code>1", "1", None),
        ("<code>print('a</code>", "print('a</code>", None),
        ("<think>a</think><code>'''1", "'''1", None),
        ("<think>a", None, None),
        ("", None, None),
    ],
)
def test_what_an_ended_message_is_forgiven(text, code, answer):
    assert ending(text, closed=True) == (code, answer)


# --- its cost ----------------------------------------------------------------------------------


def test_a_row_is_read_only_when_its_newest_token_may_end_it(qwen, monkeypatch):
    tokenizer, decode, read = qwen.tokenizer, qwen.tokenizer.decode, []
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **how: read.append(1) or decode(ids, **how)
    )
    ids, end = stopped(tokenizer, "a longer thought without a line's end, of " * 9 + "</code>")
    assert end and len(read) == 1 and len(ids) > 80
    assert len(ending_tokens(tokenizer)) < 0.05 * len(tokenizer)
