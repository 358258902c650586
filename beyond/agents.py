"""
agents.py: rates of the trajectories of any agent. `python faithfulness.py FILE`

Concept     To ask of an agent whether it looked in the right place, one needs its questions, its
            answers and what each of its tool calls showed; not its weights.
Paper       CodeV, arXiv:2511.19661, Fig. 2 and Table 5 do this for several agents
In          a file with one JSON object a line: evaluate.py's trajectories.jsonl, or as below
Out         rates with intervals, correct x faithful, and the use of tools
Left out    reading other agents' own log formats (docs/faithfulness.md has an importer as example)
Read next   faithfulness.py (what each rate means)

Boxes are [x0, y0, x1, y1] in pixels of the image, and are cut at its border; paths are relative to
the file. Each line has

    question, image (a file), answer (what the agent answered, or null), correct (true or false)
    steps      one object for each tool call: what it showed, as box (a part of the image), image (a
               file), or neither. It may have text (what was said before), code, error, and score (a
               judge's, 0 to 1, or null); without a score the box is compared with the targets. A
               box that is null, reversed, empty, outside or not four numbers shows nothing: counted
    and, where they are known: targets (boxes of the evidence), kind ("search" or "neutral"), text
    (what was said at the end), id (plays of one question share it: they are not independent)
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from data import Sample
from evaluate import read_trajectories
from faithfulness import DRAWS, HALF, count, cross_table, finding, listing, means, use_of
from kit.boxes import Box, outwards
from kit.flags import knob, parse, refusals
from kit.tables import read_image
from rewards import BoxJudge, ChatJudge, Judge, Reward, turn_score
from rollout import Trajectory, Turn
from sandbox import Observation

REQUIRED = {"question": str, "image": str, "answer": str | None, "correct": bool, "steps": list}
LINE = REQUIRED | {"targets": list, "kind": str, "text": str, "id": str}
STEP = {"box": list | None, "image": str, "text": str, "code": str}
STEP |= {"error": str | None, "score": int | float | None}
NOTHING = "a box that holds nothing of the image"


def read_foreign(path: Path, judge: Judge = HALF) -> Iterator[tuple[Trajectory, Reward]]:
    """One pair at a time: pictures may be large. The head of this file has the schema."""
    for number, text in enumerate(path.read_text("utf-8-sig").split("\n"), start=1):
        try:
            if text.strip():
                yield from_line(json.loads(text), path.parent, judge, f"line {number}")
        except (ValueError, RecursionError) as error:  # brackets nested by the thousand recurse
            expected = "expected a trajectory as described at the head of beyond/agents.py"
            raise ValueError(f"{path}, line {number}: {expected}, but {error}") from error


def from_line(line: dict, folder: Path, judge: Judge, name: str) -> tuple[Trajectory, Reward]:
    check(line, LINE, REQUIRED, "the line")
    image, kind = read_image(line["image"], folder), line.get("kind", "search")
    boxes = tuple(box_in(image, box) for box in line.get("targets", ()))
    if None in boxes:
        raise ValueError(f"one of the targets {line['targets']} has no pixel of the image")
    sample = Sample(line.get("id", name), image, line["question"], "", kind=kind, boxes=boxes)
    turns, scores = [], []
    for number, step in enumerate(line["steps"], start=1):
        check(step, STEP, (), f"step {number}")
        error, box = step.get("error"), None
        seen = Observation(error=error, red_lines=["sandbox_error"] if error else [])
        if "box" in step and (step["box"] is not None or "image" not in step):
            box = box_in(image, step["box"])
            seen.notes.extend([] if box else [NOTHING])
        if box or "image" in step:
            picture = read_image(step["image"], folder) if "image" in step else image.crop(box)
            seen = replace(seen, images=[picture], boxes=[box], sources=["reported"])
        if "score" not in step:  # a BoxJudge cannot see a picture without a box
            blind = seen.boxes == [None] and isinstance(judge, BoxJudge)
            step["score"] = None if blind else turn_score(sample, seen, judge)
        elif not 0 <= (step["score"] or 0) <= 1:
            raise ValueError(f"step {number} has score {step['score']}: expected one from 0 to 1")
        scores.append(step["score"])
        turns.append(Turn(step.get("text", ""), step.get("code", ""), seen, 0, 0))
    turns.append(Turn(line.get("text", ""), None, None, 0, 0))
    trajectory = Trajectory(sample, turns=turns, answer=line["answer"], ended="answered")
    return trajectory, Reward(float(line["correct"]), None, 0.0, tuple(scores), None)


def check(found: object, types: dict, must: Iterable[str], what: str) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {found!r:.60}, no object")
    missing, strange = sorted({*must} - {*found}), sorted({*found} - {*types})
    if missing or strange:
        raise ValueError(f"{what} lacks {missing} and has {strange}; known are {', '.join(types)}")
    for key, value in [*found.items()]:
        if value is None and key not in must and not isinstance(value, types[key]):
            del found[key]  # null: it is not known
        elif not isinstance(value, types[key]):
            raise ValueError(f"{what}: {key} {value!r:.60}, which is of another type than expected")


def box_in(image: Image.Image, box: object) -> Box | None:
    """In whole pixels, rounded outwards and cut at the border of the image; None: no pixel left."""
    if box is not None and (not isinstance(box, list) or any(isinstance(v, str) for v in box)):
        raise ValueError(f"a box is [x0, y0, x1, y1], not {box!r:.60}")
    if [isinstance(v, int | float) for v in box or ()] != [True] * 4:
        return None  # the agent's slip; a text is one of the format
    if all(0 <= v <= 1 for v in box) and not all(isinstance(v, int) for v in box):
        raise ValueError(f"expected pixels, got the box {box} in shares: multiply by the size")
    try:
        return outwards(*box, size=image.size)
    except ValueError:
        return None


@dataclass(frozen=True)
class Options:
    """Rates of the trajectories of evaluate.py, or of any agent."""

    file: Path = knob(None, "trajectories.jsonl, or as at the head of beyond/agents.py", word=True)
    judge_url: str = knob("", "OpenAI-compatible server that looks at pictures without a score")
    judge_model: str = knob("", "its name there")
    judge_tokens: int = knob(2048, "most of its reply; a judge that thinks may need more", least=1)


def main(argv: list[str]) -> None:
    given = parse(Options, argv)
    with refusals(), given.file.open(encoding="utf-8-sig") as file:
        if '"sample": {' in file.readline():  # a file of evaluate.py's
            pairs = zip(*read_trajectories(given.file))
        else:
            how = dict(model=given.judge_model, prompt="evaluation", max_tokens=given.judge_tokens)
            judge = ChatJudge(given.judge_url, **how) if given.judge_url else HALF
            pairs = read_foreign(given.file, judge)
        units, empty = [], 0
        for trajectory, reward in pairs:
            units.append((finding(trajectory, reward), use_of(trajectory)))
            empty += sum(turn.observation.notes.count(NOTHING) for turn in trajectory.tool_turns)
        if not units:
            raise ValueError(f"{given.file} is empty: expected at least one trajectory")
    counts = count((f for f, _ in units), DRAWS)
    used = means(((use, f.cluster) for f, use in units), DRAWS)
    if empty:
        print(f"{empty} calls gave {NOTHING} (null, reversed, outside, ...)\n")
    print(listing(counts), cross_table(counts), listing(used), sep="\n\n")
