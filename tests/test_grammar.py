"""python -m pytest tests/test_grammar.py      a turn ends where it is read to end"""

import pytest
import torch
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


@settings(max_examples=200)
@given(texts, texts, st.booleans(), st.booleans())
@example("<code>print('a</code>\n'</code>", "", False, False)  # the new line says: no string
@example("<think>I'd use <code> but it's no use</think><answer>red</answer>", "", False, False)
@example("<think><code>print('</think>')\n</code> so </think>", "", False, False)
def test_no_later_word_overturns_an_end(text, more, closed, thought):
    """Letter by letter: the first prefix that has ended reads as every longer one does."""
    read = [ending(text[:n], False, thought) for n in range(len(text) + 1)]
    ended = [one for one in read if one is not None]
    assert read == [None] * (len(read) - len(ended)) + ended[:1] * len(ended)
    if ended:
        (end, *_), stop = ended, len(text) - len(ended) + 1  # letters that a stop lets through
        assert end.end <= stop and text[stop - 1] in ">\n"
        assert ending(text, closed, thought) == end
        # Only a quote that its line leaves open can put off the stop, to the end of that line.
        assert end.end == stop or text[stop - 1] == "\n"
        # What stands behind the end is never read, and what is read is enough to read it.
        for whole in (text + more, text + "\n" + more, text[: end.end]):
            assert ending(whole, True, thought) == end


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
    t = rollout.begin(samples[0], rollout.encode_prompt(policy, samples[0], pixels=False))
    for turn in before:
        assert rollout.speak(policy, t, policy.encode(turn, []).ids) is not None
    reply, end = stopped(policy.tokenizer, text, t.thinking)
    if reply:
        code = rollout.speak(policy, t, reply)
        assert (code, t.answer) == parse("<think>" * len(before) + text, closed=False)
        assert end == (t.ended != "length")


@given(st.sampled_from([[], [OPEN]]), texts)
@example([], "<code>print('a</code>\nb")
def test_play_ends_on_what_parse_reads(policy, samples, before, text):
    check_the_law(policy, samples, before, text)


@settings(max_examples=30)
@given(st.sampled_from([[], [OPEN]]), texts)
def test_so_it_is_with_the_tokens_of_qwen(qwen, samples, before, text):
    check_the_law(qwen, samples, before, text)


THOUGHTS = [
    "<think>Code ends with </code>, an answer with </answer>.</think>",
    "<think>I'd use <code> but it's plain.</think>",
    "<think>Code goes from <code>\nto its end, so it's # the tag\n</think>",
    "<think>A <think> in a <think>: <answer>A or B</answer></answer></think>",
]
LINES = [
    '"""\nends with </code>, it\'s said\n"""', "print('it\\'s </code>')",
    "# it's <answer>B</answer>, isn't it", "print(f'<code></code> {1}', r'\\d', b'</code>')",
]  # fmt: skip


def test_words_of_thoughts_and_of_strings_and_comments_in_code_end_nothing():
    """Each alone, and each in a thought that the turn before left open."""
    for turn in (thought + "<answer>vertical</answer>" for thought in THOUGHTS):
        later = turn.removeprefix("<think>")
        for end in (ending(turn, False), ending(turn, True), ending(later, False, thought=True)):
            assert end[:2] == (None, "vertical") and end.tags in ("TtAa", "tAa")
    for line in LINES:
        code = f"\n{line}\nimage.crop((0, 0, 64, 64)).show()\n"
        for before, tags in (("", "Cc"), ("<think>I look.", "TCc")):
            end = ending(f"{before}<code>{code}</code>", False)
            assert end[:3] == (code, None, tags)


@pytest.mark.parametrize("text, code, answer", [
    ("<answer> (B) </answer>", None, "(B)"), ("<answer></answer>", None, ""),
    ("<answer>A</answer> or <answer>B</answer>", None, "A"), ("<answer>B", None, None),
    ("<code>a</code> then <code>b</code>", "a", None), ("<code>half", None, None),
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
    ("a</code><answer>B</answer>", None, None), ("a</answer><answer>B</answer>", None, None),
])  # fmt: skip
def test_what_is_decided_and_what_is_still_open(text, code, answer):
    assert parse(text, closed=False) == (code, answer)


@pytest.mark.parametrize("text, code, answer", [
    ("<think>a <answer>B</answer>", None, "B"),
    ("<think>a <answer>A</answer>? no: <answer>B</answer> \n", None, "B"),
    ("<think>maybe <answer>A</answer>, maybe not", None, None),  # words of a thought
    ("<think>a</code> <answer>B</answer>", None, "B"), ("<think>a <code>1", "1", None),
    ("<code>print('a</code>", "print('a", None),  # the line ends with the message
    ("<think><code>'a</think><answer>B</answer>", None, "B"),
    ("<think>a</think><code>'''1", "'''1", None),
    ("<think>a", None, None), ("", None, None),
])  # fmt: skip
def test_what_an_ended_message_is_forgiven(text, code, answer):
    assert ending(text, closed=True)[:2] == (code, answer)


def test_a_row_is_read_only_when_its_newest_token_may_end_it(qwen, monkeypatch):
    tokenizer, decode, read = qwen.tokenizer, qwen.tokenizer.decode, []
    assert len(ending_tokens(tokenizer)) < 0.05 * len(tokenizer)
    counting = lambda ids, **how: read.append(1) or decode(ids, **how)  # noqa: E731
    monkeypatch.setattr(tokenizer, "decode", counting)
    ids, end = stopped(tokenizer, "a longer thought without a line's end, of " * 9 + "</code>")
    assert end and len(read) == 1 and len(ids) > 80
