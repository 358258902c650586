"""
grammar.py: where a turn of the policy ends, and what it does there.

Concept     One left-to-right reading says when generation stops, what the turn's action is, and
            which tags are tags. So it must decide on the text so far, and no later word may
            overturn it. Tags in a thought, and in the strings and comments of code, are words.
            One tag acts in an open thought too: the <code> that closes there.
Paper       nothing: the tags are those of the public training data
In          the text of a turn, whole or still growing
Out         None while the turn goes on, then its Ending; and the rule by which `generate` stops
Left out    which order of the tags is a good one (rewards.format_error)
Read next   data.py (parse), rollout.py (continue_turns)

    <think>           a thought begins, up to the next </think>; that may be yet to come. A turn
                      goes on with the thought that the turn before left open.
    <code>...</code>  code: the turn ends. In an open thought too: the prompt asks for "your
                      reasoning, with any code" there, and in public traces one thought spans
                      all programs and what they showed. Whether </think> will follow, nobody who
                      reads from left to right can know. If it comes first, <code> was a word.
    </code>           in a string of the code it is a part of that string; in a comment it ends
                      the code, because many write it behind a comment
    </answer>         outside thoughts and code it ends the turn. The answer is what stands
                      behind the first <answer>, without thoughts. In a thought it is a word,
                      so a policy that forgets </think> goes on until it ends its message.
    </code>, </answer> that close nothing, outside thoughts: the turn ends without an action,
                      because who writes one waits for a reply
    end of message    the turn ends, and what is missing is forgiven: a </code>, so what there is
                      of the code runs; and a </think> before the <answer>...</answer> that the
                      message ends with. The length limit forgives nothing.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

# Python up to the tag that ends it. A string hides the tags in it. One that has not ended so far
# goes to the end of the text, for it may yet hide what follows; a short one that its line does
# not end was no string after all, and neither is an apostrophe in a word (it's).
PYTHON = r"""(?sx) (?:
      (?<!\w) [rRbBfFuU]{0,2} ('{3}|"{3}) (?:\\.|[^\\])*? (?:\1|\\?\Z)    # a long string
    | (?<!\w) [rRbBfFuU]{0,2} (['"]) (?:\\.|(?!\2)[^\\\n])* (?:\2|\\?\Z)  # a short string
    | \# (?:(?!STOP)[^\n])*  # a comment: the quotes in it open nothing
    | (?!STOP) .
    )*"""
CODE = re.compile(PYTHON.replace("STOP", "</code>"))
CODE_IN_THOUGHT = re.compile(PYTHON.replace("STOP", "</(?:code|think)>"))
TAG = re.compile("</?(?:think|code|answer)>")
TAG_IN_THOUGHT = re.compile("<code>|</think>")
LAST_ANSWER = re.compile(r"(?s).*<answer>((?:(?!</answer>).)*)</answer>\s*\Z")


class Ending(NamedTuple):
    """How a turn ended. Of its text, text[:end] was read."""

    code: str | None
    answer: str | None
    tags: str  # those that are no words: T opens a thought and t closes it; so C, c and A, a
    thought: bool  # is one open, for the next turn to go on with?
    end: int


def ending(text: str, closed: bool, thought: bool = False) -> Ending | None:
    """How the turn ended, or None while it goes on.

    closed: the policy ended its message itself. thought: the turn before left a thought open."""
    tags, answer, at = "", None, 0
    whole = text + "\n" * closed  # the last line ends with its message
    while tag := (TAG_IN_THOUGHT if thought else TAG).search(text, at):
        if answer is not None and not thought:
            answer += text[at : tag.start()]
        at = tag.end()
        if tag[0] == "<code>":
            stop = min((CODE_IN_THOUGHT if thought else CODE).match(whole, at).end(), len(text))
            code = text[at:stop]
            if text.startswith("</code>", stop):
                return Ending(code, None, tags + "Cc", thought, stop + len("</code>"))
            if stop == len(text):
                return Ending(code, None, tags + "C", thought, stop) if closed else None
            at = stop  # </think> comes first
            continue
        tags += tag[0][2] if tag[0][1] == "/" else tag[0][1].upper()
        if tag[0] in ("</code>", "</answer>"):
            answer = answer if tag[0] == "</answer>" else None
            return Ending(None, answer and answer.strip(), tags, False, at)
        if tag[0] == "<answer>":
            answer = "" if answer is None else answer + tag[0]
        else:
            thought = tag[0] == "<think>"
    if not closed:
        return None
    last = LAST_ANSWER.match(text, at)  # only a thought can hold one that was not read
    return Ending(None, last and last[1].strip(), tags, thought, len(text))


def endings(texts: Iterable[str]) -> list[Ending]:
    """How the turns of one trajectory ended, in order. Each takes up the thought before it."""
    ends: list[Ending] = []
    for text in texts:
        ends.append(ending(text, True, bool(ends) and ends[-1].thought))
    return ends


@lru_cache(2)
def ending_tokens(tokenizer) -> set[int]:
    """Where a turn may end: at a ">", or at a new line, where a string turns out to be none. A
    text, not an id, says so: in Qwen's vocabulary "</code>" may end in ">", ">\\n", ">.", ..."""
    ids = list(tokenizer.get_vocab().values())
    texts = tokenizer.batch_decode([[i] for i in ids], skip_special_tokens=True)
    return {i for i, text in zip(ids, texts) if ">" in text or "\n" in text}


def end_of_turn(tokenizer, starts: Sequence[int], thoughts: Sequence[bool]) -> Callable:
    """The stopping rule of `generate`: [B, L] ids -> [B] has the turn in ids[b, starts[b]:] ended?
    A row is read only when its newest token may end it. thoughts: of each, Trajectory.thinking."""
    may_end = ending_tokens(tokenizer)

    def ended(row, start: int, thought: bool) -> bool:
        text = tokenizer.decode(row[start:], skip_special_tokens=True)
        return ending(text, False, thought) is not None

    def stop(ids, scores):
        rows = zip(ids[:, -1].tolist(), ids, starts, thoughts)
        done = [last in may_end and ended(*row) for last, *row in rows]
        return ids.new_tensor(done).bool()

    return stop
