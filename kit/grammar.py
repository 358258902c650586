"""
grammar.py: where a turn of the policy ends, and what it does there.

Concept     One left-to-right reading says both when generation stops and what the turn's action
            is. So it must decide on the text so far, and no later word may overturn it. Tags in
            a closed thought and in the strings and comments of code are words, not actions.
Paper       nothing: the tags are those of the public training data
In          the text of a turn, whole or still growing
Out         None while the turn goes on, then its code, its answer or neither; and the rule by
            which `generate` stops a row
Left out    whether the tags stand in good order (rewards.format_error)
Read next   data.py (parse), rollout.py (next_turn)

    <think>           a thought begins, up to the next </think>; that may be yet to come. A turn
                      may take up a thought that the turn before left open.
    <code>...</code>  code, also in a thought: public traces write code inside one long thought.
                      In a thought that closes first, <code> is a word.
    </code>           in a string of the code it is a part of that string; in a comment it ends
                      the code, because many write it behind a comment
    </answer>         outside thoughts and code it ends the turn; the answer is what stands
                      behind the first <answer>, without thoughts
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

# Python up to its </code>. A string hides the </code> in it. One that has not ended so far goes
# to the end of the text, for it may yet hide what follows; a short one that its line does not
# end was no string after all.
CODE = re.compile(
    r"""(?sx) (?:
      ('{3}|"{3}) (?:\\.|[^\\])*? (?:\1|\\?\Z)    # a long string
    | (['"]) (?:\\.|(?!\2)[^\\\n])* (?:\2|\\?\Z)  # a short string
    | \# (?:(?!</code>)[^\n])*  # a comment: the quotes in it open nothing
    | (?!</code>) .
    )*"""
)


def ending(text: str, closed: bool) -> tuple[str | None, str | None] | None:
    """(code, answer) once the turn has ended, None while it goes on. A closing tag that closes
    nothing ends a turn too, without an action.

    closed: the policy ended its message itself. A missing </code> is then forgiven, and a thought
    without </think> is none. A turn that the length limit cut gets no such favour."""
    words = ""  # outside thoughts and code
    while tag := re.search("<think>|<code>|</code>|</answer>", text):
        words += text[: tag.start()]
        inside, shut, after = text[tag.start() :], "", ""
        if tag[0] == "<think>":
            inside, shut, after = inside.partition("</think>")
        elif tag[0] != "<code>":
            answer = re.search("(?s)<answer>(.*)", words) if tag[0] == "</answer>" else None
            return None, answer and answer[1].strip()
        _, opened, program = inside.partition("<code>")
        code = CODE.match(program)[0]
        if opened and (code != program or closed and not shut):
            return code, None
        if not (shut or closed):
            return None
        text = after if shut else inside.removeprefix("<think>")
    return (None, None) if closed else None


@lru_cache(2)
def ending_tokens(tokenizer) -> set[int]:
    """Where a turn may end: at a ">", or at a new line, where a string turns out to be none. A
    text, not an id, says so: in Qwen's vocabulary "</code>" may end in ">", ">\\n", ">.", ..."""
    ids = list(tokenizer.get_vocab().values())
    texts = tokenizer.batch_decode([[i] for i in ids], skip_special_tokens=True)
    return {i for i, text in zip(ids, texts) if ">" in text or "\n" in text}


def end_of_turn(tokenizer, start: int = 0, unclosed: Sequence[str] = ("",)) -> Callable:
    """The stopping rule of `generate`: [B, L] ids -> [B] has the turn in ids[:, start:] ended?
    (`generate` itself stops a row at the end of its message.) A row is read only
    when its newest token may end it. unclosed: of each row, Trajectory.unclosed."""
    may_end = ending_tokens(tokenizer)

    def ended(row, before: str) -> bool:
        text = tokenizer.decode(row[start:], skip_special_tokens=True)
        return ending(before + text, closed=False) is not None

    def stop(ids, scores):
        rows = zip(ids[:, -1].tolist(), ids, unclosed)
        done = [last in may_end and ended(row, before) for last, row, before in rows]
        return ids.new_tensor(done).bool()

    return stop
