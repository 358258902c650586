"""
evaluate.py: how often is the policy right, and had it looked in the right place?

Concept     Play questions, score every look once, and show the episodes themselves: a rate that
            nobody can check against pictures persuades nobody.
Paper       CodeV, arXiv:2511.19661, Tables 3 and 4 (the benchmarks), Fig. 5 and Table 5
            (faithfulness.py defines the rates)
In          a policy and samples; or a checkpoint folder and the name of a benchmark
Out         summary.json, trajectories.jsonl with its pictures, report.html; figures
Left out    the language models that read an answer out of free prose for the public leaderboards:
            our answers stand in a tag
Read next   faithfulness.py (what each rate means), train.py (who calls this after each stage)

    python evaluate.py --model runs/toy/rl --bench toy --out runs/eval    play, score, show
    torchrun --nproc-per-node 8 evaluate.py --model DIR --bench vstar     the same on 8 GPUs
    python evaluate.py --compare runs/toy runs/accuracy --out runs        runs side by side
    python evaluate.py --film runs/eval --out build                       one episode as a picture

Stop it, or let it be killed, and give the same command again: it goes on where it was.

trajectories.jsonl has one JSON object a line, with the names of the types it holds:

    sample    id, question, options, kind, source (the data set/part/cycle); answer (the
              reference), boxes (the targets: x0, y0, x1, y1 in pixels), image (a PNG file; paths
              are relative to the .jsonl)
    answer    what the policy answered, or null
    ended     answered, turns, length or no_action
    correct   true or false; null: the judge of open answers had no verdict
    reward    its parts: answer, tools, format, steps, total
    steps     one a turn: text (all that the policy wrote), code or null, start and end (its tokens
              are ids[start:end]), score (null: none), and observation: null if no code ran, else
              text (the log), images (PNG files), boxes (the part of the sample's image that each
              shows, or null), sources, error, notes, red_lines, ... as in sandbox.Observation
    acted     who chose the tokens, in runs: [[false, 80], [true, 12], ...]; true is the policy
    ids       the tokens; the first `prompt` of them, with `prompt_images` images, are the question
    dice      the text that seeds its sampling
    place     its place in the order of the benchmark; with --avg-at K, each question has K places
    run       a hash of policy, questions and settings: lines of two evaluations do not mix
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import html
import io
import itertools
import json
import keyword
import math
import os
import random
import re
import shutil
import string
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from accelerate import PartialState
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from tqdm import tqdm

from data import Bad, Box, Lazy, Sample, Usable
from data import anti_prior_questions, read_image, read_rows, toy_questions
from faithfulness import DRAWS, HALF, PERTURBATIONS, Finding, Rate
from faithfulness import ablation, agreement, check_lies, count, cross_table, evidence, faithful
from faithfulness import finding, grid, listing, perturb, study_table, tool_use, without_tools
from rewards import MAX_ANSWER, REWARDS, BoxJudge, ChatJudge, Judge, Reward, Weights
from rewards import area, final_answer, read_number, same_answer, score
from rollout import Policy, Rules, Step, TooLong, Trajectory, check_checkpoint, load_policy, play
from sandbox import Observation

GREEDY = Rules(turns=10, temperature=0.0)
AGAINST_PRIOR = "toy, against the prior"  # `source` of the questions on which a guesser scores 0

# The rows of every table: the name of a number in summary.json, and what a reader sees.
ROWS = {
    "n": "questions", "ungraded": "answers without verdict", "score": "benchmark score",
    "accuracy": "accuracy", "ood_accuracy": "out-of-prior accuracy", "tool_use": "tool use",
    "faithful": "faithful", "unfaithful": "unfaithful", "no_tool": "no tool",
    "faithful_and_correct": "correct and faithful", "calls": "calls per question",
    "faithful_given_correct": "faithful, if correct", "crop_area": "crop area",
    "error_rate": "errors",
}  # fmt: skip


# Play and measure


def load_toy(n: int = 256, seed: int = 0, shortcut: float = 1.0) -> list[Sample]:
    """`n` questions of the toy world, then half as many on which its prior is always wrong."""
    against = anti_prior_questions(n // 2, f"against-{seed}")
    return toy_questions(n, f"evaluation-{seed}", shortcut) + [
        replace(sample, source=AGAINST_PRIOR) for sample in against
    ]


def evaluate(
    policy: Policy, samples: Sequence[Sample], judge: Judge, *, rules: Rules = GREEDY,
    seed: int = 0, out: Path | None = None, own_rules: Sequence[Callable | None] | None = None,
    rollouts: int = 1, wave: int = 512, processes: PartialState | None = None,
) -> tuple[dict, Sequence[Trajectory]]:  # fmt: skip
    """Play every sample `rollouts` times and score every step once: (metrics, trajectories).

    `wave` samples are played at a time. With `out` their episodes then go to trajectories.jsonl
    and leave memory (the trajectories returned are Episodes), and what is there already is not
    played again: a killed evaluation goes on. Several processes share the waves, each with a file
    of its own; process 0 merges them. None of this changes a number.
    own_rules: how each sample's answer counts, from load_bench; None: rewards.grade.
    """
    if not len(samples):
        raise ValueError("nothing to evaluate: expected at least one sample, got none")
    rank, world = (processes.process_index, processes.num_processes) if processes else (0, 1)
    if world > 1 and out is None:
        raise ValueError("several processes meet in a folder: expected out=, got None")
    meet = processes.wait_for_everyone if processes else lambda: None
    run = fingerprint(policy, samples, rules, seed, rollouts, wave)
    places, kept, seen = range(len(samples) * rollouts), [], Counter()
    there = Episodes(out, run) if out else None
    meet()  # nobody writes while another still reads
    if out and (file := out / file_of(rank)) in there.ends:
        os.truncate(file, there.ends[file])  # cut off the half line that a kill left
    done = set(there.lines) if out else set()
    waves = [places[i * rollouts : (i + wave) * rollouts] for i in range(0, len(samples), wave)]
    todo = [here for here in waves[rank::world] if not done.issuperset(here)]

    gpus = [policy.device] if policy.device.type == "cuda" else []
    bar = tqdm(todo, "waves", disable=rank > 0 or len(todo) < 2, leave=False)
    for here in bar:
        first, last = here[0] // rollouts, here[-1] // rollouts + 1
        with torch.random.fork_rng(gpus):  # an evaluation amid training leaves no trace in it
            torch.manual_seed(seed)
            groups = play(policy, samples[first:last], rollouts, rules)
        rewards = score(groups, "tapo", judge, Weights(), random.Random(seed))
        played, rewards = (list(itertools.chain(*nested)) for nested in (groups, rewards))
        if own_rules:
            own = [own_rules[place // rollouts] for place in here]
            rewards = list(map(by_rule, played, rewards, own))
        if out:  # (a wave that a kill cut off is played again as a whole: its newest lines count)
            write_trajectories(played, rewards, here, folder=out, run=run, rank=rank)
        else:
            kept += zip(played, rewards)
        for found in map(finding, played, rewards):
            graded, right = found.correct is not None, bool(found.correct)
            seen.update(n=graded, right=right, search=found.search, faithful=faithful(found))
        shares = seen["right"] / max(seen["n"], 1), seen["faithful"] / max(seen["search"], 1)
        bar.set_postfix_str("accuracy {:.3f}, faithful {:.3f}".format(*shares))

    if out:
        meet()  # everybody has written
        if rank == 0:
            Episodes(out, run).merge()
        meet()
        trajectories = Episodes(out, run)
        rewards = trajectories.rewards
        if list(trajectories.lines) != list(places):
            raise RuntimeError(f"{len(rewards)} of {len(places)} episodes are in {out}")
    else:
        trajectories, rewards = map(list, zip(*kept))
    return measure(trajectories, rewards, rollouts), trajectories


def fingerprint(policy: Policy, samples: Sequence[Sample], *settings: object) -> str:
    """A hash of the policy (a few weights of every tensor), the questions and the settings."""
    few = [p.detach().flatten()[:: max(1, p.numel() // 8)][:8] for p in policy.model.parameters()]
    weights = torch.cat(few).double().cpu().numpy().tobytes()
    ends = (len(samples), samples[0].id, samples[-1].id)
    return hashlib.sha256(weights + repr((ends, settings)).encode()).hexdigest()[:16]


def by_rule(trajectory: Trajectory, reward: Reward, rule: Callable | None) -> Reward:
    """The reward, with the benchmark's own rule for what is right."""
    answer, reference = trajectory.answer, trajectory.sample.answer
    if rule is None or trajectory.ended != "answered":
        return reward
    right = float(len(answer) <= MAX_ANSWER and rule(answer, reference))
    total = None if reward.total is None else reward.total + right - reward.answer
    return replace(reward, answer=right, total=total)


def measure(
    trajectories: Iterable[Trajectory], rewards: Iterable[Reward], rollouts: int = 1
) -> dict:
    """The rates of faithfulness.py, and a benchmark's own score with its parts. Questions against
    the toy's prior count for `ood_accuracy` only; answers without a verdict only as `ungraded`."""
    own, against, sources, ungraded = [], [], [], 0
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        source = trajectory.sample.source
        if reward.answer is None:
            ungraded += 1
        elif source == AGAINST_PRIOR:
            against.append(reward.answer)
        else:
            own.append(finding(trajectory, reward))
            sources.append(source)
    counts = count(own, draws=DRAWS)
    metrics = {"n": len(own) // rollouts} | {name: rate.value for name, rate in counts.items()}
    metrics["rates"] = {name: vars(rate) for name, rate in counts.items()}
    metrics["correct_by_faithful"] = cross_table(counts)
    if ungraded:
        metrics["ungraded"] = ungraded
    if against:
        metrics["ood_accuracy"] = sum(against) / len(against)
    bench = BENCHES.get(sources[0].split("/")[0]) if sources else None
    if bench:
        parts = published(sources, [f.correct for f in own], bench.mean_of_parts)
        metrics |= {"score": parts.pop("all"), "parts": parts}
    return metrics


# Keep the episodes


def file_of(rank: int) -> str:
    return f"trajectories-{rank}.jsonl" if rank else "trajectories.jsonl"


def write_trajectories(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward],
    places: Sequence[int] | None = None, *, folder: Path, run: str = "", rank: int = 0,
) -> None:  # fmt: skip
    """Append lines to this process's file, and pictures to images/; see the head of this module."""
    (folder / "images").mkdir(parents=True, exist_ok=True)

    def plain(thing: object) -> object:  # for what json cannot write by itself
        if not isinstance(thing, Image.Image):
            return vars(thing)
        # Named by what they show: many questions share an image, and an id may be anything.
        content = hashlib.sha256(repr((thing.mode, thing.size)).encode() + thing.tobytes())
        name = f"images/{content.hexdigest()[:24]}.png"
        if not (folder / name).exists():
            thing.save(part := folder / f"{name}.{os.getpid()}", "png", compress_level=1)
            os.replace(part, folder / name)
        return name

    text, places = "", places or range(len(trajectories))
    for place, t, reward in zip(places, trajectories, rewards, strict=True):
        right = None if reward.answer is None else reward.answer > 0
        steps = [{**vars(step), "score": value} for step, value in scored(t, reward)]
        line = {**vars(t), "steps": steps, "acted": runs_of(t.acted), "reward": reward}
        line |= {"correct": right, "place": place, "run": run}
        del line["images"]  # the model's own input, made from these pictures
        text += json.dumps(line, default=plain) + "\n"
    with open(folder / file_of(rank), "a", encoding="utf-8") as lines:
        lines.write(text)


UNFIT = ValueError, KeyError, TypeError, AttributeError, RecursionError  # what odd lines raise


class Unusable(ValueError):
    """Episodes that a folder holds already, and that cannot be gone on from."""


def no_trajectory(path: Path, number: int, error: Exception) -> Unusable:
    return Unusable(
        f"{path}, line {number}: expected a trajectory as described at the head of evaluate.py, "
        f"but {type(error).__name__}: {error}"
    )


class Episodes(Lazy):
    """The episodes of a file or folder, in the order of their places. Each is read when asked
    for, without the model's image inputs; all rewards and ids of samples are kept in memory.

    lines: {place: (file, first byte, end)}; ends: {file: end of its last whole line}. Lines of
    another `run` are refused.
    """

    def __init__(self, where: Path, run: str | None = None) -> None:
        self.folder, self.ends, found = (where.parent if where.is_file() else where), {}, {}
        self.run = run
        files = [where] if where.is_file() else where.glob("trajectories*.jsonl")
        for path in sorted(files):
            end = 0
            for number, text in enumerate(open(path, "rb"), start=1):
                if not text.endswith(b"\n"):
                    break
                start, end = end, end + len(text)
                try:
                    line = json.loads(text)
                    place, theirs, id = line["place"], line["run"], line["sample"]["id"]
                    found[place] = (path, start, end), reward_of(line["reward"]), id
                except UNFIT as error:
                    raise no_trajectory(path, number, error) from error
                if run not in (None, theirs):
                    raise Unusable(
                        f"{path} is from another evaluation (other weights, questions or settings):"
                        f" give --out another folder, or delete it"
                    )
            self.ends[path] = end
        self.lines = {place: found[place][0] for place in sorted(found)}
        self.rewards, self.ids = ([found[place][i] for place in self.lines] for i in (1, 2))
        super().__init__(self.read, list(self.lines.values()))

    def read(self, at: tuple[Path, int, int]) -> Trajectory:
        path, start, end = at
        try:
            return trajectory_of(json.loads(text_at(path, start, end)), self.folder)
        except UNFIT as error:
            number = text_at(path, 0, start).count(b"\n") + 1
            raise no_trajectory(path, number, error) from error

    def merge(self) -> None:
        """Put all lines in order into trajectories.jsonl, and delete the other processes' files."""
        part = self.folder / "trajectories.part"
        with open(part, "wb") as merged:
            merged.writelines(text_at(*at) for at in self.lines.values())
        os.replace(part, self.folder / file_of(0))
        for path in self.folder.glob("trajectories-*.jsonl"):
            path.unlink()


def text_at(path: Path, start: int, end: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(end - start)


def read_trajectories(
    path: Path, first: int | None = None
) -> tuple[Sequence[Trajectory], list[Reward]]:
    """What write_trajectories wrote: all of it, or the `first` so many episodes."""
    if not path.exists():
        raise FileNotFoundError(
            f"no {path}: expected the trajectories.jsonl of a run of train.py or evaluate.py"
        )
    episodes = Episodes(path)
    return episodes[:first], episodes.rewards[:first]


def reward_of(values: dict) -> Reward:
    return Reward(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def trajectory_of(line: dict, folder: Path) -> Trajectory:
    def picture(name: str) -> Image.Image:
        """Decoded when first looked at, with no file held open. With empty EXIF data set, PIL need
        not decode it at once in search of some."""
        image = Image.open(io.BytesIO((folder / name).read_bytes()))
        image.info["exif"] = b""
        return image

    names = {f.name for f in fields(Trajectory)} - {"images"}
    line = {name: line[name] for name in names if name in line}
    sample = line["sample"]
    sample |= {"image": picture(sample["image"]), "options": tuple(sample["options"])}
    line["sample"] = Sample(**{**sample, "boxes": tuple(map(tuple, sample["boxes"]))})
    for step in line["steps"]:
        del step["score"]  # the reward has it
        if seen := step["observation"]:
            seen["images"] = [picture(name) for name in seen["images"]]
            seen["boxes"] = [box and tuple(box) for box in seen["boxes"]]
            step["observation"] = Observation(**seen)
    line["steps"] = [Step(**step) for step in line["steps"]]
    line["acted"] = [who for who, count in line["acted"] for _ in range(count)]
    return Trajectory(**line)


def scored(trajectory: Trajectory, reward: Reward) -> list[tuple[Step, float | None]]:
    """Every step with its score; None where no code ran, or where the judge gave no verdict."""
    scores = iter(reward.steps)
    return [(s, None if s.observation is None else next(scores)) for s in trajectory.steps]


def runs_of(acted: Sequence[bool]) -> list[tuple[bool, int]]:
    """[True, True, False] -> [(True, 2), (False, 1)]"""
    return [(who, len(list(run))) for who, run in itertools.groupby(acted)]


# The public benchmarks: how a row becomes a question, and by which rule an answer to it is right


@dataclass(frozen=True)
class Bench:
    """A benchmark of the paper's Tables 3 and 4.

    where   hub name:split (data.read_rows); --data gives another place, such as VLMEvalKit's TSV
    read    a row -> the fields of its Sample but the image; `part`, by which the score is split;
            perhaps `cycle`; perhaps `rule`(answer, reference) -> bool instead of rewards.is_correct
    """

    where: str
    read: Callable[[dict], dict]
    kind: str = "neutral"  # of every Sample
    judged: bool = False  # open answers that the rules call wrong go to a judge
    mean_of_parts: bool = False  # the score is the mean of the parts' scores, not of all answers


REQUIRED = object()
LETTERS = string.ascii_uppercase


def filled(row: dict, *names: str, default: object = REQUIRED):
    """What the first of these columns that is not empty holds."""
    for name in names:
        if (cell := row.get(name)) not in (None, "", [], {}):
            return cell
    if default is REQUIRED:
        raise Bad(names[0], f"expected something in column {' or '.join(names)}")
    return default


def literal(cell: object) -> object:
    """The value of a Python literal that a TSV holds as text; what is no text stays as it is."""
    try:
        return ast.literal_eval(cell) if isinstance(cell, str) else cell
    except (ValueError, SyntaxError) as error:
        raise Bad("literal", f"expected a list or dict, got {cell!r}") from error


def ask(row: dict, question: str, options: Iterable, answer: object, part: str, **more) -> dict:
    options, answer = tuple(map(str, options)), str(answer)
    if options and answer not in {*LETTERS[: len(options)], *options}:
        raise Bad("answer", f"{answer!r} is neither a letter nor a text of {options}")
    ids = ("index", "id", "pid", "sample_index", "question_id", "Question_id")
    return {"id": str(filled(row, *ids, default="")), "question": question.strip(),
            "options": options, "answer": answer, "part": part, **more}  # fmt: skip


def lettered(row: dict) -> list[str]:
    letters = [c for c in LETTERS if filled(row, c, default=None) is not None]
    if letters != list(LETTERS[: len(letters)]):
        raise Bad("A", f"expected options A, B, ... without a gap, got {', '.join(letters)}")
    return [row[c] for c in letters]


def choose(row: dict, part: str, **more) -> dict:
    """Multiple choice as in VLMEvalKit's TSVs: columns A, B, C, ... hold the options."""
    if not (options := lettered(row)):
        raise Bad("A", "expected options in columns A, B, ...")
    return ask(row, filled(row, "question"), options, filled(row, "answer"), part, **more)


def vstar(row: dict) -> dict:
    """The authors' test_questions.jsonl, a JSON of boxes beside each picture; TSVs have none."""
    part = filled(row, "category")
    if "text" not in row:
        return choose(row, part)
    question, *options = re.split(r"\s*^\([A-Z]\) ?", row["text"], flags=re.MULTILINE)
    if not options:
        raise Bad("text", f"expected a question and options (A) ..., got {row['text']!r}")
    options[-1] = options[-1].split("\n")[0]  # below it stands how to answer: we say that
    labels = row["folder"] / Path(filled(row, "image")).with_suffix(".json")
    if not labels.is_file():
        raise Bad("image", f"expected its boxes in {labels}")
    boxes = tuple(map(corners, json.loads(labels.read_text(encoding="utf-8"))["bbox"]))
    return ask(row, question, options, filled(row, "label"), part, boxes=boxes)


def corners(xywh: Sequence[float]) -> Box:
    """x, y, width, height -> x0, y0, x1, y1 in whole pixels, rounded outwards."""
    x, y, width, height = xywh
    return math.floor(x), math.floor(y), math.ceil(x + width), math.ceil(y + height)


def hrbench(row: dict) -> dict:
    """A question is four rows; from one `cycle` to the next its options move on by one place. FSP
    and FCP: fine-grained perception of a single instance, and across instances."""
    parts, kind = {"single": "FSP", "cross": "FCP"}, filled(row, "category")
    if kind not in parts:
        raise Bad("category", f"expected single or cross, got {kind!r}")
    return choose(row, parts[kind], cycle=filled(row, "cycle_category"))


def mme_realworld(row: dict) -> dict:
    part = filled(row, "Task", "category").split("/")[0]  # Perception or Reasoning
    if filled(row, "A", default=None):
        return choose(row, part)
    options = literal(filled(row, "multi-choice options", "Answer choices"))
    options = [re.sub(r"^\([A-E]\) ?", "", option) for option in options]
    question, answer = filled(row, "question", "Text"), filled(row, "answer", "Ground truth")
    return ask(row, question, options, answer, part)


def vlmblind(row: dict) -> dict:
    task, question = filled(row, "task"), filled(row, "question", "prompt")
    rules = {"Counting": rows_and_columns, "Touching": contained, "Olympic": contained}
    rule = rules.get(task.split()[0], in_braces)
    return ask(row, question, (), filled(row, "answers", "groundtruth"), task, rule=rule)


def in_braces(answer: str, reference: str) -> bool:
    """The answer is asked for as {5}; one that is nothing but the value needs no braces."""
    braced = re.search(r"\{(.*?)\}", answer)
    return (braced[1] if braced else answer).strip() == reference


def contained(answer: str, reference: str) -> bool:
    return reference.casefold() in answer.casefold()


def rows_and_columns(answer: str, reference: str) -> bool:
    """rows={5} columns={6}, in either order, or (5, 6)."""
    named = [re.search(rf"(?i){name}s?\D*(\d+)", answer) for name in ("row", "column")]
    numbers = [match[1] for match in named] if all(named) else re.findall(r"\d+", answer)
    return numbers == re.findall(r"\d+", reference)


def mathvista(row: dict) -> dict:
    question, form, answer = (filled(row, c) for c in ("question", "answer_type", "answer"))
    part = filled(literal(filled(row, "metadata", default=row)), "task", default=form)
    if filled(row, "question_type") == "multi_choice":
        choices = literal(filled(row, "choices"))
        return ask(row, question.split("\nChoices:")[0], choices, answer, part)
    digits = int(float(filled(row, "precision", default=len(str(answer).partition(".")[2]))))
    wanted, rule = {
        "integer": ("a whole number", partial(rounded, int)),
        "float": (f"a number with {digits} decimals", partial(rounded, lambda x: round(x, digits))),
        "list": ("a Python list", same_list),
    }.get(form, ("a word or two", None))
    unit = f" (Unit: {row['unit']})" if filled(row, "unit", default=None) else ""
    return ask(row, f"{question}{unit}\nAnswer with {wanted}.", (), answer, part, rule=rule)


def rounded(how: Callable[[float], float], answer: str, reference: str) -> bool:
    number = read_number(final_answer(answer))
    fits = number is not None and abs(number[0]) < 1e300  # else no float can hold it
    return fits and how(float(number[0])) == float(reference)


def same_list(answer: str, reference: str) -> bool:
    try:
        return ast.literal_eval(final_answer(answer)) == ast.literal_eval(reference)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def mathverse(row: dict) -> dict:
    """(Of the version "Vision Only" even the question stands in the image.)"""
    question, *choices = filled(row, "question", "query_wo").split("\nChoices:")
    options = re.findall(r"^[A-Z]:(.*)$", "".join(choices), re.MULTILINE)
    about = {**(literal(filled(row, "metadata", default={}))), **row}
    return ask(row, question, options, filled(row, "answer"), filled(about, "problem_version"))


def mathvision(row: dict) -> dict:
    question = re.sub(r"<image\d+>", "", filled(row, "question"))
    options = literal(filled(row, "options", "choices", default=[]))
    return ask(row, question, options, filled(row, "answer"), filled(row, "subject", "category"))


def charxiv(row: dict) -> dict:
    """The hub's rows give their descriptive questions as numbers, so we take the reasoning one;
    --data CharXiv_descriptive_val.tsv has the descriptive ones in words."""
    question, answer = filled(row, "question", "reasoning_q"), filled(row, "answer", "reasoning_a")
    return ask(row, question, (), answer, "descriptive" if "qid" in row else "reasoning")


def mmmu(row: dict) -> dict:
    """A question may have images <image 1> to <image 7>: `picture` joins them to one."""
    options = literal(filled(row, "options", default=[])) or lettered(row)
    question, answer = filled(row, "question"), str(filled(row, "answer"))
    if len(set(re.findall(r"<image (\d)>", question))) > 1:
        question += "\n(The images stand below each other, image 1 at the top.)"
    subject = filled(row, "category", "id")
    subject = re.sub(r"^[a-z]+_|_\d+$", "", subject)  # of an id such as validation_Math_1
    rule = any_of if not options and answer.startswith("[") else None
    question = re.sub(r"<image (\d)>", r"[image \1]", question)
    return ask(row, question, options, answer, subject, rule=rule)


def any_of(answer: str, references: str) -> bool:
    return any(same_answer(str(reference), answer) for reference in literal(references))


BENCHES = {
    "vstar": Bench("craigwu/vstar_bench", vstar, "search"),
    "hrbench4k": Bench("DreamMr/HR-Bench:hr_bench_4k", hrbench, "search"),
    "hrbench8k": Bench("DreamMr/HR-Bench:hr_bench_8k", hrbench, "search"),
    "vlmblind": Bench("XAI/vlmsareblind:valid", vlmblind, mean_of_parts=True),
    "mme-realworld-lite": Bench("yifanzhang114/MME-RealWorld-lite-lmms-eval",
                                mme_realworld, "search"),
    "mathvista": Bench("AI4Math/MathVista:testmini", mathvista, judged=True),
    "mathverse": Bench("AI4Math/MathVerse:testmini.parquet", mathverse, judged=True),
    "mathvision": Bench("MathLLMs/MathVision:testmini", mathvision),
    "charxiv": Bench("princeton-nlp/CharXiv:val", charxiv, judged=True),
    "mmmu": Bench("lmms-lab/MMMU:validation", mmmu, judged=True),
}  # fmt: skip


def load_bench(
    name: str, where: str | None = None, first: int | None = None
) -> tuple[Usable[Sample], list[Callable | None]]:
    """(samples, the rule of each or None). Images are decoded when asked for, all else is checked
    now. A row that cannot be used is an error: a score over fewer rows is another score."""
    bench = BENCHES[name]
    title, rows = f"{name} ({where or bench.where})", read_rows(where or bench.where)
    total = min(len(rows), first or len(rows))
    rules: list[Callable | None] = [None] * total

    def words(i: int) -> dict:
        row = {**rows[i], "folder": rows.folder}
        filled(row, *PICTURES)
        values = bench.read(row)
        rules[i] = values.pop("rule", None)
        path = (name, values.pop("part"), values.pop("cycle", ""))
        values["source"] = "/".join(str(word).replace("/", " ") for word in path).rstrip("/")
        values["id"] = f"{name}-{i}-{values['id']}".rstrip("-")  # its own need not be unique
        return values

    def sample(i: int) -> Sample:
        try:
            return Sample(image=picture(rows[i], rows.folder), kind=bench.kind, **words(i))
        except ValueError as error:
            raise ValueError(f"{title}: row {i}: {error}") from error

    return Usable(total, words, sample, "stop", title), rules


PICTURES = ("decoded_image", "image", "bytes", "Image", *(f"image_{i}" for i in range(1, 8)))


def picture(row: dict, folder: Path) -> Image.Image:
    """A row's image; several are joined below each other, so that there is one to look at."""
    cells = [cell for name in PICTURES if (cell := filled(row, name, default=None)) is not None]
    if "image_1" not in row:
        cells = literal(cells[0]) if str(cells[0])[:1] == "[" else cells[:1]
    images, gap = [read_image(cell, folder) for cell in cells], 16
    if len(images) == 1:
        return images[0]
    size = max(i.width for i in images), sum(i.height + gap for i in images) - gap
    sheet, y = Image.new("RGB", size, "white"), 0
    for image in images:
        sheet.paste(image, (0, y))
        y += image.height + gap
    return sheet


def published(
    sources: Sequence[str], correct: Sequence[float], mean_of_parts: bool = False
) -> dict[str, float]:
    """The scores of the benchmark ("all") and of its parts. With cycles (HR-Bench) each is the mean
    of the cycles' accuracies; with `mean_of_parts` (VLMs are blind) "all" is a mean over parts.

    >>> published(["b/p/0", "b/p/0", "b/p/1"], [1, 0, 1])
    {'p': 0.75, 'all': 0.75}
    """
    cycles: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for source, right in zip(sources, correct, strict=True):
        _, part, cycle = f"{source}//".split("/")[:3]
        cycles[cycle][part].append(right)
    scores = defaultdict(list)
    for parts in cycles.values():
        means = {part: fmean(rights) for part, rights in sorted(parts.items())}
        total = means.values() if mean_of_parts else itertools.chain(*parts.values())
        for part, value in (means | {"all": fmean(total)}).items():
            scores[part].append(value)
    return {part: fmean(values) for part, values in scores.items()}


# One table, two figures


def rows(columns: dict[str, dict]) -> Iterator[tuple[str, list[str]]]:
    """A label and a cell for each column. What was not measured stays empty."""
    for name, label in ROWS.items():
        values = [metrics.get(name) for metrics in columns.values()]
        if any(value is not None for value in values):
            texts = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in values)
            yield label, ["" if v is None else text for v, text in zip(values, texts)]


def table(columns: dict[str, dict]) -> str:
    """The stages side by side in plain text."""
    return grid([["", *columns], *([label, *cells] for label, cells in rows(columns))], str.rjust)


# Okabe and Ito's palette, for the colour-blind; lines and markers differ too, for print.
COLORS = ("#0072B2", "#D55E00", "#000000", "#CC79A7", "#009E73", "#E69F00", "#56B4E9")
LINES, MARKERS = ("-", "--", ":", "-.", "-", "--", ":"), "os^DvPX"
PANELS = {  # label of the axis: names of its curves in log.jsonl
    "share": ("tool_use", "faithful", "crop_area"),
    "mean reward, unweighted": ("answer", "tools", "format"),
}


def curves(log_lines: Sequence[dict], path: Path) -> None:
    """curves.png: what the policy does and what it is paid for, over the steps of training."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    for axes, (label, names) in zip(figure.subplots(2, 1, sharex=True), PANELS.items()):
        for name, color, line, marker in zip(names, COLORS, LINES, MARKERS):
            points = [(e["step"], e[name]) for e in log_lines if name in e]
            style = {"color": color, "linestyle": line, "marker": marker}
            if points:
                style |= {"label": name.replace("_", " "), "markevery": len(points) // 8 + 1}
                axes.plot(*zip(*points), **style)
                axes.legend()
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylim(-0.02, 1.02)
    figure.axes[1].set_xlabel("training step" if axes.lines else "training step: nothing logged")
    figure.savefig(path, dpi=120)


def compare(columns: dict[str, dict], path: Path) -> None:
    """Several runs in one figure: a row for each rate, a mark for each run."""
    measured = {name for metrics in columns.values() for name in metrics} - {"n", "ungraded"}
    labels = {name: label for name, label in ROWS.items() if name in measured}
    size = 8, 1.5 + 0.35 * len(labels) + 0.25 * len(columns)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(zip(COLORS, MARKERS))
    for i, ((run, metrics), (color, marker)) in enumerate(zip(columns.items(), styles)):
        aside = 0.5 * (i + 0.5) / len(columns) - 0.25  # so that equal values do not hide each other
        values = [metrics.get(name) for name in labels]
        places = [(value, row + aside) for row, value in enumerate(values) if value is not None]
        axes.plot(*zip(*places), color=color, marker=marker, linestyle="none", label=run)
        for row, name in enumerate(labels):  # 95 % intervals
            ends = metrics.get("rates", {}).get(name, {}).get("interval")
            axes.plot(ends or [], [row + aside] * len(ends or []), color=color, linewidth=1)
    axes.set_yticks(range(len(labels)), labels.values())
    axes.set(xlim=(-0.02, None), ylim=(max(len(labels), 1) - 0.5, -0.5), xlabel="rate")
    axes.grid(alpha=0.3)
    if columns:
        figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


# The page

safe = html.escape  # whatever a model or a data set wrote reaches the page through this
PAGE_LIMIT = 4_500_000  # bytes of episodes on one page; all of them are in trajectories.jsonl

# The template. Its Content-Security-Policy lets the page show its own pictures and run its own
# script, known by its hash: nothing from the network, and nothing hidden in an episode.
PAGE = string.Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
SCRIPT = PAGE.template.split("<script>")[1].split("</script>")[0]


Play = tuple[str, Trajectory, Reward]  # the run it comes from, "" if there is only one


def report(folder: Path, columns: dict[str, dict], shown: int = 50) -> Path:
    """report.html: episodes of the folder, evenly spread over it, and its figures."""
    episodes = Episodes(folder)
    picked = spread(range(len(episodes)), shown)
    plays = [[("", episodes[i], episodes.rewards[i])] for i in picked]
    return _publish(folder, plays, columns, len(episodes))


def report_runs(folder: Path, runs: Sequence[str], columns: dict[str, dict]) -> Path:
    """report.html in `folder`: samples that all runs played, side by side. A run that kept no
    episodes is only in the table."""
    kept = {run.rstrip("/"): Episodes(Path(run)) for run in runs}
    kept = {run: episodes for run, episodes in kept.items() if len(episodes)}
    ids = [dict.fromkeys(episodes.ids) for episodes in kept.values()] or [{}]
    common = [id for id in ids[0] if all(id in own for own in ids)]
    plays = []
    for id in spread(common, max(1, 50 // len(runs))):
        at = {run: episodes.ids.index(id) for run, episodes in kept.items()}  # its first play
        plays.append([(run, kept[run][i], kept[run].rewards[i]) for run, i in at.items()])
    return _publish(folder, plays, columns, len(common))


def spread(items: Sequence, most: int) -> Sequence:
    """At most so many of them, from the first on, evenly spread."""
    return items[:: max(1, math.ceil(len(items) / most))]


def _publish(folder: Path, plays: list[list[Play]], columns: dict[str, dict], total: int) -> Path:
    pictures = [folder / f"{name}.png" for name in ("curves", "compare")]
    drawn = [Image.open(png) for png in pictures if png.exists()]
    text = page(plays, columns, drawn, total)
    (folder / "report.html").write_text(text, encoding="utf-8", errors="backslashreplace")
    return folder / "report.html"


def page(
    plays: Sequence[list[Play]], columns: dict[str, dict], drawn: Sequence[Image.Image], total: int
) -> str:
    """One self-contained page: a card for each sample, with its play in every run; as many cards as
    PAGE_LIMIT holds. `total`: how many samples there were."""
    seen = [step.observation for card in plays for _, t, _ in card for step in t.tool_steps]
    pictures = len(plays) + sum(len(observation.images) for observation in seen)
    budget = PAGE_LIMIT * 2 // 3 // max(1, pictures)  # characters a picture; the rest is for text
    cards = [_card(i, card, budget) for i, card in enumerate(plays, start=1)]
    sizes = itertools.accumulate(len(card.encode(errors="backslashreplace")) for card in cards)
    cards = cards[: sum(size <= PAGE_LIMIT for size in sizes)]
    figures = (f'<img alt="a figure" src="{picture_url(image, 200_000)}">' for image in drawn)
    return PAGE.substitute(
        hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
        head="".join(f'<th scope="col">{safe(name)}' for name in columns),
        body="".join(
            f'<tr><th scope="row">{label}{"".join(f"<td>{cell}" for cell in cells)}'
            for label, cells in rows(columns)
        ),
        count=f"{len(cards)} of {total}",
        figures="".join(figures),
        cards="".join(cards),
    )


def _card(number: int, plays: list[Play], budget: int) -> str:
    sample, found = plays[0][1].sample, [finding(t, r) for _, t, r in plays]
    (width, height), url = sample.image.size, picture_url(sample.image, budget)
    image = f'<image id="p{number}" width="{width}" height="{height}" href="{url}"/>'
    strips = []
    for name, trajectory, reward in plays:
        strips.append(_strip(name, trajectory, reward, number, image, budget))
        image = f'<use href="#p{number}"/>'  # the page holds the picture itself once
    ways = {
        "answer": [answer_of(reward) for _, _, reward in plays],
        "look": [look_of(f) for f in found],
        "kind": [safe(sample.kind)],
        "error": ["some" if f.failed else "none" for f in found],
    }
    data = "".join(f' data-{key}="{" / ".join(values)}"' for key, values in ways.items())
    return f"""
<article id="t{number}" tabindex="-1"{data}>
<h2>{number}. {safe(sample.question)}</h2>
<small>{safe(sample.kind)} · {safe(sample.id)}</small>
<div class="runs">{"".join(strips)}</div>
</article>"""


def answer_of(reward: Reward) -> str:
    return {None: "no verdict", 1.0: "correct"}.get(reward.answer, "wrong")


def look_of(found: Finding) -> str:
    return "no tool" if not found.scores else "faithful" if faithful(found) else "unfaithful"


def _strip(
    name: str, trajectory: Trajectory, reward: Reward, number: int, image: str, budget: int
) -> str:
    """One play as a film strip: the image, every turn, and who chose each token."""
    sample, acted, found = trajectory.sample, trajectory.acted, finding(trajectory, reward)
    look, right = look_of(found), found.correct
    verdict = _mark(right, answer_of(reward))
    apt = look == ("faithful" if found.search else "no tool")
    options = "".join(f"<li>{safe(option)}" for option in sample.options)
    frames = [f"<h3>Image</h3>{_drawn(sample, image)}<ol type=A>{options}</ol>"]
    for turn, (step, value) in enumerate(scored(trajectory, reward), start=1):
        shown = step.observation and _shown(sample, step.observation, value, number, budget)
        frames.append(f"<h3>Turn {turn}</h3>{_written(step.text)}{shown or ''}")
    answer = "no answer" if trajectory.answer is None else trajectory.answer
    frames[-1] += f"<p>{_mark(right, answer)} (reference: {safe(sample.answer)})</p>"
    bar = "".join(
        f'<i{" class=acted" if who else ""} style="flex:{n} 0 0" title="{n} tokens"></i>'
        for who, n in runs_of(acted)
    )
    chose = f"{sum(acted)} tokens chosen by the policy, {len(acted) - sum(acted)} shown to it"
    return f"""<section>
<p>{f"<b>{safe(name)}</b> · " if name else ""}{verdict}
· {_mark(apt, look)} <small>· ended: {safe(trajectory.ended)}</small></p>
<ol class="strip">{"".join(f"<li>{frame}</li>" for frame in frames)}</ol>
<div class="bar" role="img" aria-label="{chose}">{bar}</div><small>{chose}</small></section>"""


def _shown(sample: Sample, seen: Observation, score: float | None, number: int, budget: int) -> str:
    parts = []
    for image, box, source in zip(seen.images, seen.boxes, seen.sources):
        words, where = f"{safe(source)}, {image.width} x {image.height}", ""
        if box is not None:
            share = area(box) / area((0, 0, *sample.image.size))
            words += f", {share:.0%} of the image: {', '.join(map(str, box))}"
            where = _drawn(sample, f'<use href="#p{number}"/>', box)
        shown = f'<img alt="what the step showed" src="{picture_url(image, budget)}">'
        parts.append(f"<figure>{where}{shown}<figcaption>{words}</figcaption></figure>")
    if seen.text:
        parts.append(f"<pre><samp>{safe(seen.text)}</samp></pre>")
    for trouble in filter(None, (seen.error, seen.environment, *seen.notes)):
        parts.append(f'<p class="bad">{safe(trouble)}</p>')
    value = "no verdict" if score is None else f"score {score:g}"
    mark = _mark(bool(score and score > 0), ", ".join([value, *seen.red_lines]))
    return f"{''.join(parts)}<p>{mark}</p>"


def _drawn(sample: Sample, image: str, box: Box | None = None) -> str:
    """The sample's image with boxes on it: the viewBox makes the image's pixels the units."""
    boxes = [("target", target) for target in sample.boxes] + [("shown", box)] * (box is not None)
    rects = "".join(
        f'<rect{name} x="{x0}" y="{y0}" width="{x1 - x0}" height="{y1 - y0}"/>'
        for kind, (x0, y0, x1, y1) in boxes
        for name in ("", f' class="{kind}"')  # twice: a white rim under the coloured line
    )
    size = f"{sample.image.width} {sample.image.height}"
    return f'<svg viewBox="0 0 {size}" role="img" aria-label="the image">{image}{rects}</svg>'


def _mark(good: bool, text: str) -> str:
    return f'<b class="{"good" if good else "bad"}">{"✓" if good else "✗"} {safe(text)}</b>'


def _written(text: str) -> str:
    """All that the policy wrote in a turn: prose with its tags in grey, code highlighted."""
    prose_and_code = re.split(r"<code>(.*?)(?:</code>|$)", text, flags=re.DOTALL)
    parts = []
    for i, piece in enumerate(map(str.strip, prose_and_code)):
        if i % 2:
            parts.append(f"<pre>{highlight(piece)}</pre>")
        elif piece:
            grey = r'<span class="tag">\g<0></span>'
            parts.append(f"<p>{re.sub('&lt;/?(?:think|answer)&gt;', grey, safe(piece))}</p>")
    return "".join(parts)


PYTHON = re.compile(
    r"(?P<c>#[^\n]*)|(?P<s>'''.*?'''|\"[^\"\n]*\"|'[^'\n]*')|(?P<n>\b\d[\d.]*)"
    rf"|(?P<k>\b(?:{'|'.join(keyword.kwlist)})\b)|(?P<other>\w+|[^\w#\"']+|.)",
    re.DOTALL,
)


def highlight(code: str) -> str:
    """Python as HTML: the class is c for comments, s strings, n numbers and k keywords."""
    return PYTHON.sub(lambda m: f'<span class="{m.lastgroup}">{safe(m[0])}</span>', code)


def picture_url(image: Image.Image, budget: int) -> str:
    """A data URL of about `budget` characters: PNG if that fits, else an ever smaller JPEG."""
    small, sides = image.convert("RGB"), (1024, 1024, 768, 512, 384, 256, 128, 64)
    for form, side in zip(("png", *["jpeg"] * 7), sides):
        buffer = io.BytesIO()
        small.thumbnail((side, side))
        small.save(buffer, form, quality=80)
        url = f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"
        if len(url) <= budget:
            break
    return url


# One episode as a picture


def film(trajectory: Trajectory, reward: Reward, path: Path) -> None:
    """A film strip as a PNG: the image with its targets and the boxes shown; every turn with its
    picture and score; and below, who chose each token."""
    sample, turns = trajectory.sample, scored(trajectory, reward)
    options = (f"{letter}. {text}" for letter, text in zip(LETTERS, sample.options))
    words = [_lines("\n".join([sample.question, *options])), *(_lines(s.text) for s, _ in turns)]
    heights = 2.6, 0.16 * max(text.count("\n") + 1 for text in words), 0.14  # inches
    size = 2.9 * len(words), sum(heights) + 0.8
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    places = figure.add_gridspec(3, len(words), height_ratios=heights)

    def cell(row: int, column: int | slice) -> Axes:
        axes = figure.add_subplot(places[row, column], xticks=[], yticks=[])
        axes.spines[:].set_visible(row == 0)
        return axes

    def outline(axes: Axes, box: Box, color: str, line: str) -> None:
        x0, y0, x1, y1 = box
        for edge, width, dash in (("white", 4, "-"), (color, 2, line)):
            style = {"fill": False, "edgecolor": edge, "linewidth": width, "linestyle": dash}
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, **style))

    first = cell(0, 0)
    first.imshow(sample.image, interpolation="nearest")
    first.set_title("image; dashed: the target" if sample.boxes else "image", fontsize=9)
    for box in sample.boxes:
        outline(first, box, "black", "--")
    for i, text in enumerate(words):
        cell(1, i).text(0, 1, text, va="top", fontsize=8, family="monospace")
    for i, (step, value) in enumerate(turns, start=1):
        top = cell(0, i)
        if seen := step.observation:
            verdict = "no verdict" if value is None else f"score {value:g}"
            top.set_title(f"{i}. {', '.join([*seen.sources, verdict])}", fontsize=9)
            for image in seen.images[:1]:
                top.imshow(image, interpolation="nearest")
            for box in filter(None, seen.boxes):
                outline(first, box, COLORS[0], "-")
                first.text(box[0], box[1], f" {i}", color=COLORS[0], va="bottom", weight="bold")
        else:
            said = "no answer" if trajectory.answer is None else trajectory.answer
            verdict = f"{'✓' if reward.right else '✗'} {said}\n(reference: {sample.answer})"
            top.set_title(f"{i}. answer", fontsize=9)
            top.set_box_aspect(sample.image.height / sample.image.width)  # shaped like the image
            color = COLORS[0 if reward.right else 1]
            top.text(0.5, 0.5, _lines(verdict, 20), color=color, ha="center", va="center")
    bar, start = cell(2, slice(None)), 0
    for who, tokens in runs_of(trajectory.acted):
        bar.barh(0, tokens, left=start, color=COLORS[0] if who else "#c9c6be")
        start += tokens
    bar.margins(x=0)
    bar.set_xlabel("blue: tokens chosen by the policy", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def _lines(text: str, width: int = 38, most: int = 16) -> str:
    """Broken into lines that fit a cell; a $ does not begin a formula."""
    text = re.sub(r"(?<=</think>)(?=.)|(?<=.)(?=<answer>)", "\n", text)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    lines = lines[:most] + ["..."] * (len(lines) > most)
    return "\n".join(lines).replace("$", r"\$")


# The study: what does each reward teach?

WORLDS = {"guessing pays": 1.0, "looking pays": 0.5}  # their --shortcut
HOME = "guessing pays"  # where all SFT models learn
STUDIED = ("tapo", "tool_bonus", "deepeyes", "codedance", "thyme", "accuracy", "random")
SHOWN = ("accuracy", "ood_accuracy", "tool_use", "faithful", "crop_area", "error_rate")
QUICK = (("tapo", "tool_bonus", "accuracy"), ("guessing pays",), (0,))  # rewards, worlds, seeds


@dataclass(frozen=True)
class Job:
    """One run of train.py in a folder of the study."""

    reward: str  # a key of REWARDS; "zero-rl", TAPO from the base model; "sft", stage 1 alone
    world: str  # a key of WORLDS
    seed: int
    lambda_tool: float = 0.2

    @property
    def name(self) -> str:
        swept = "" if self.lambda_tool == 0.2 else f"-lambda-{self.lambda_tool:g}"
        return f"{self.reward}{swept}-{self.world.split()[0]}-{self.seed}"

    @property
    def start(self) -> Job | None:
        """Whose SFT model it takes over: its seed's, once that was measured in this world."""
        if self.reward == "sft":
            return None if self.world == HOME else Job("sft", HOME, self.seed)
        return None if self.reward == "zero-rl" else Job("sft", self.world, self.seed)

    def command(self, study: Path) -> list[str]:
        """What one would type by hand. A run that was cut off goes on where it was."""
        folder, python = study / self.name, [sys.executable, "train.py"]
        if (folder / "state.json").exists():
            return [*python, "--resume", str(folder)]
        begin = ["--model", f"{study}/{self.start.name}/sft"] if self.start else []
        begin += ["--sft-steps", "0"] if self.start or self.reward == "zero-rl" else []
        then = {"sft": ["--rl-steps", "0"], "zero-rl": []}
        return [
            *python, *begin, *then.get(self.reward, ["--reward", self.reward]),
            "--seed", str(self.seed), "--shortcut", str(WORLDS[self.world]), "--eval-every", "10",
            "--lambda-tool", str(self.lambda_tool), "--out", str(folder),
        ]  # fmt: skip

    def run(self, study: Path) -> None:
        """Train, unless that is done."""
        folder, start = study / self.name, self.start
        if not (folder / "summary.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            if start and start.world == self.world and not (folder / "state.json").exists():
                # It asked the same model the same questions: they are not played again.
                theirs = study / start.name / "sft-episodes"
                if theirs.is_dir():
                    shutil.copytree(theirs, folder / theirs.name, dirs_exist_ok=True)
            with open(study / f"{self.name}.txt", "a") as heard:
                how = {"cwd": Path(__file__).parent, "stdout": heard, "stderr": heard}
                code = subprocess.run(self.command(study), **how).returncode
            if code:
                raise RuntimeError(f"{self.name} ended with {code}; its words: {heard.name}")


def study_rewards(study: Path, quick: bool) -> dict:
    """Every reward in both worlds, three seeds, from the same SFT models. Writes study.json, which
    it returns, and two figures. One run a core at a time. Finished runs are not run again: after a
    change of the code, give a new folder."""
    study = study.resolve()  # the runs start in the folder of train.py
    rewards, worlds, seeds = QUICK if quick else (STUDIED, tuple(WORLDS), (0, 1, 2))
    jobs = [Job("sft", HOME, seed) for seed in seeds]
    if not quick:
        jobs += [Job("zero-rl", HOME, seed) for seed in seeds]
        jobs += [Job("tapo", HOME, 0, weight) for weight in (0.1, 0.4)]
    jobs += [Job(r, w, s) for s in seeds for w in worlds for r in ("sft", *rewards)]
    jobs, running = list(dict.fromkeys(jobs)), {}  # each once, and after the one it starts from
    over = threading.Event()

    def turn(job: Job) -> None:
        """It comes when the run has ended that this one starts from; after a failure, never."""
        try:
            if job.start:
                running[job.start].result()
            if not over.is_set():
                job.run(study)
        except (RuntimeError, OSError) as error:  # of a run; a full disk, a file in the way
            over.set()
            if isinstance(error, OSError):
                raise RuntimeError(f"{job.name} could not begin: {str(error)[:300]}") from error
            raise

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        bar = tqdm(total=len(jobs), desc="runs")
        try:
            for job in jobs:
                running[job] = pool.submit(turn, job)
            for run in as_completed(running.values()):
                run.result()
                bar.update()
        except BaseException as error:  # Ctrl-C as well: the runs that have begun hear it, too
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)
            bar.write(f"{error or 'stopped'}. The study ends when the runs that have begun do")
            raise
    runs = [result(job, study) for job in jobs]
    found = {"runs": dict(zip((job.name for job in jobs), runs)), "table": rewards_table(runs)}
    (study / "study.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw_study(runs, CURVES, study / "study.png")
    draw_study(runs, PARTS, study / "study_parts.png")
    return found


def quarter(folder: Path) -> dict:
    """Metrics on every fourth question of a stage, those that are asked amid training, too."""
    episodes, rewards = read_trajectories(folder / "trajectories.jsonl")
    return measure(episodes[::4], rewards[::4])


def result(job: Job, study: Path) -> dict:
    """What is kept of a run: metrics of its start and its end (all questions), of an evaluation
    every ten steps (a fourth of them), and the means of the training log over every ten steps."""
    folder = study / job.name
    try:
        stages = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["stages"]
        log = [json.loads(line) for line in open(folder / "log.jsonl", encoding="utf-8")]
    except ValueError as error:
        raise ValueError(f"the summary.json or log.jsonl of {folder} is damaged ({error}): delete "
                         f"that folder and give the same command again") from error  # fmt: skip
    steps = [e for e in log if e["stage"] == "rl"]
    start, end = ({k: v for k, v in stages[s].items() if isinstance(v, int | float | None)}
                  for s in ("sft", "rl"))  # fmt: skip
    asked = [{"step": 0} | quarter(folder / "sft-episodes")]
    asked += [e for e in log if e["stage"] == "evaluation"]
    asked += [{"step": steps[-1]["step"]} | quarter(folder)] if steps else []
    tested = [{name: e[name] for name in ("step", *SHOWN)} for e in asked]
    curve = []
    for i in range(0, len(steps), 10):
        block = steps[i : i + 10]  # ten training steps hold more rollouts than one evaluation
        numbers = [(k, v) for e in block for k, v in e.items() if isinstance(v, int | float)]
        means = {name: fmean(v for k, v in numbers if k == name) for name, _ in numbers}
        curve.append(means | {"step": block[-1]["step"]})
    found = {"routes": routes(start), "start": start, "end": end}
    return {**asdict(job), **found, "evaluations": tested, "curve": curve}


def routes(m: dict) -> dict[str, dict[str, float | None]]:
    """Each way to deal with a search question: its share, and its accuracy, which is
    P(right | route) = P(route | right) P(right) / P(route)."""
    names = {"right crop": "faithful", "careless crop": "unfaithful", "direct answer": "no_tool"}
    paid = {}
    for route, name in names.items():
        right = (m[f"{name}_given_correct"] or 0.0) * m["search_accuracy"]
        paid[route] = {"share": m[name], "accuracy": right / m[name] if m[name] else None}
    return paid


def rewards_table(runs: Sequence[dict]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The paper's Tables 1 and 2 in our metrics: world -> reward -> metric -> its value at the end
    of every seed's run. The reward "start" is the SFT model, before any."""
    table: dict = {}
    for run in (run for run in runs if run["lambda_tool"] == 0.2):
        told = [("start", run["start"])] if run["reward"] == "tapo" else []
        told += [(run["reward"], run["end"])] if run["reward"] != "sft" else []
        for reward, metrics in told:
            numbers = table.setdefault(run["world"], {}).setdefault(reward, {})
            for name in SHOWN:
                numbers.setdefault(name, []).append(metrics[name])
    return table


TOLD = {
    "start": "SFT, where all start", "tapo": "**TAPO**",
    "tool_bonus": "`tool_bonus`, a bonus per call", "deepeyes": "`deepeyes`, a gated bonus",
    "codedance": "`codedance`, a bonus that shrinks with ease", "thyme": "`thyme`, consistency",
    "accuracy": "`accuracy`", "random": "`random`, the null", "zero-rl": "TAPO without SFT",
}  # fmt: skip


def rewards_markdown(found: dict) -> str:
    """The tables of the study as the README shows them: mean (lowest to highest seed)."""
    runs, lines = found["runs"].values(), []

    def head(*names: str) -> None:
        lines.extend([f"| {' | '.join(names)} |", "|---" * len(names) + "|"])

    for world, rewards in found["table"].items():
        lines += [f"{world.capitalize()} (`--shortcut {WORLDS[world]}`):", ""]
        head("", "seeds", *(ROWS[name] for name in SHOWN))
        for reward in (name for name in TOLD if name in rewards):
            cells = [[v for v in rewards[reward][name] if v is not None] for name in SHOWN]
            texts = [f"{fmean(c):.2f} ({min(c):.2f}–{max(c):.2f})" if c else "" for c in cells]
            lines.append(f"| {TOLD[reward]} | {len(cells[0])} | {' | '.join(texts)} |")
        lines.append("")

    ours = [run for run in runs if run["reward"] == "tapo"]
    lines += ["What each route pays at the start (share of search questions, accuracy; means over "
              "seeds):", ""]  # fmt: skip
    head("", *ours[0]["routes"])
    for world in found["table"]:
        own = [r["routes"] for r in ours if (r["world"], r["lambda_tool"]) == (world, 0.2)]
        cells = [[[r[route][x] for r in own if r[route][x] is not None]
                  for x in ("share", "accuracy")] for route in own[0]]  # fmt: skip
        texts = [", ".join(f"{fmean(c):.2f}" if c else "" for c in pair) for pair in cells]
        lines.append(f"| {world} | {' | '.join(texts)} |")

    swept = [r for r in ours if (r["world"], r["seed"]) == (HOME, 0)]
    if len(swept) > 1:
        lines += ["", f"TAPO with other weights of what tools showed ({HOME}, seed 0):", ""]
        head("λ_tool", *(ROWS[name] for name in SHOWN[:-1]))
        for run in sorted(swept, key=lambda run: run["lambda_tool"]):
            texts = [f"{run['end'][name]:.2f}" for name in SHOWN[:-1]]
            lines.append(f"| {run['lambda_tool']} | {' | '.join(texts)} |")
    return "\n".join(lines)


CURVES = {"tool use": "tool_use", "faithful": "faithful"}
PARTS = {"answer reward": "answer", "tool reward": "tools", "format reward": "format",
         "tokens per step": "generated_tokens", "calls per rollout": "calls"}  # fmt: skip


def draw_study(runs: Sequence[dict], panels: dict[str, str], path: Path) -> None:
    """The paper's Figs. 6, 9 and 10 in our metrics: a row for each world, a column for each number,
    a line for each reward: the mean of its seeds, with their range shaded."""
    worlds = list(dict.fromkeys(run["world"] for run in runs))
    told = (run["reward"] for run in runs if run["curve"] and run["reward"] != "zero-rl")
    rewards = list(dict.fromkeys(told))
    size = (3.2 * len(panels) + 1, 3 * len(worlds) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(len(worlds), len(panels), squeeze=False, sharey="col")
    for row, world in zip(places, worlds):
        for axes, (label, name) in zip(row, panels.items()):
            for i, reward in enumerate(rewards):
                own = [r["curve"] for r in runs if (r["reward"], r["world"], r["lambda_tool"])
                       == (reward, world, 0.2)]  # fmt: skip
                if own:
                    steps = [point["step"] for point in own[0]]
                    values = [[point[name] for point in points] for points in zip(*own)]
                    style = {"color": COLORS[i % 7], "linestyle": LINES[i % 7]}
                    axes.plot(steps, list(map(fmean, values)), **style, label=reward)
                    axes.fill_between(steps, [*map(min, values)], [*map(max, values)],
                                      color=COLORS[i % 7], alpha=0.12)  # fmt: skip
            axes.set(title=f"{world}: {label}", xlabel="training step")
            axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


# Command line


def columns_of(runs: Sequence[str]) -> dict[str, dict]:
    """A column for each stage of each run, from the summary.json in its folder."""
    columns = {}
    for run in runs:
        try:
            summary = json.loads((Path(run) / "summary.json").read_text(encoding="utf-8"))
            stages = summary["stages"].items()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"no run in {run}: expected a folder with the summary.json of a finished run of "
                f"train.py or evaluate.py --model, but {error!r}"
            ) from error
        columns.update({f"{run.rstrip('/')} {stage}": metrics for stage, metrics in stages})
    return columns


TOY = {"limit": 256, "max_new_tokens": 64, "max_length": 2048, "wave": 128}
OTHERS = {"max_new_tokens": 1024, "max_length": 16384, "wave": 32}
FLAGS = dict(
    model=dict(metavar="DIR", help="checkpoint to evaluate: a folder or a hub name"),
    bench=dict(choices=("toy", *BENCHES), default="toy", help="which questions"),
    data=dict(metavar="PATH", help="the benchmark's files; else its hub name is used"),
    out=dict(metavar="DIR", type=Path, default=Path("runs/eval"), help="where results go"),
    limit=dict(type=int, help="questions (toy: 256, and half as many against its prior; else all)"),
    shortcut=dict(type=float, default=1.0, help="toy: share of squares that follow the prior"),
    turns=dict(type=int, default=GREEDY.turns, help="how often the policy may speak"),
    temperature=dict(type=float, help="0 is greedy; 1 if --avg-at is above 1"),
    avg_at=dict(metavar="K", type=int, default=1, help="mean over K samples of each question"),
    max_new_tokens=dict(type=int, help="of one turn (1024; toy: 64)"),
    max_length=dict(type=int, help="tokens of a whole episode (16384; toy: 2048)"),
    max_pixels=dict(type=int, help="budget of one image; else the checkpoint's own"),
    wave=dict(type=int, help="questions at a time: memory, and what a kill costs (32; toy: 128)"),
    seed=dict(type=int, default=0, help="of the toy's questions and of sampling"),
    judge_url=dict(help="server of a judge that sees pictures: for steps where no boxes are "
                   "labelled, and for open answers"),
    judge_model=dict(help="its model's name on that server"),
    judge_prompt=dict(choices=("evaluation", "evaluation_original"), default="evaluation",
                      help="what it sees of a step: crop and question, or also the whole image"),
    perturb=dict(metavar="LIES", default="", help="all, or some of " + ",".join(PERTURBATIONS) +
                 ": play again with these in place of what tools show (Table 6)"),
    ablation=dict(action="store_true", help="play again without tools; what was each call worth?"),
    compare=dict(metavar="RUN", nargs="+", help="folders with summary.json, side by side"),
    study=dict(choices=("rewards",), help="train with every reward, in both worlds, three seeds"),
    quick=dict(action="store_true", help="of the study: three rewards, one world, one seed"),
    film=dict(metavar="RUN", help="draw an episode of this folder as --out/film.png"),
    episode=dict(type=int, help="its number; else the first that is right and faithful"),
)  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """What can be refused before a model loads is refused here."""
    if (args.out / "state.json").exists():
        raise ValueError(f"{args.out} holds a training run: give --out another folder")
    if args.bench == "toy" and args.data:
        raise ValueError(f"the toy world is drawn, not read: drop --data {args.data}")
    whole = ("limit", "turns", "avg_at", "wave", "max_new_tokens", "max_length")
    for name, low in (*((name, 1) for name in whole), ("temperature", 0)):
        if (value := getattr(args, name)) is not None and not value >= low:  # nan is not
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if args.avg_at > 1 and not args.temperature:
        raise ValueError(f"--avg-at {args.avg_at} of greedy plays is one play: raise --temperature")
    if args.perturb:
        check_lies(args.perturb, args.temperature)
    if bool(args.judge_url) != bool(args.judge_model):
        raise ValueError("a judge needs both --judge-url and --judge-model: give the other too")
    check_checkpoint(args.model)
    make_folder(args.out)


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out should be a folder or become one, but {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Play a benchmark and show what the policy looked at, or compare runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, about in FLAGS.items():
        parser.add_argument("--" + name.replace("_", "-"), **about)
    args = parser.parse_args(argv)
    if not (args.model or args.compare or args.film or args.study):
        return parser.print_help()
    usual = TOY if args.bench == "toy" else OTHERS
    usual = usual | {"temperature": float(args.avg_at > 1)}
    vars(args).update({name: value for name, value in usual.items() if getattr(args, name) is None})
    lies = PERTURBATIONS if args.perturb == "all" else args.perturb.split(",")
    args.perturb = [lie for lie in lies if lie]
    try:
        if args.film:
            return print(draw_film(args))
        if args.study:
            make_folder(args.out)
            found = study_rewards(args.out, args.quick)
            return print(rewards_markdown(found), "", args.out / "study.json", sep="\n")
        if args.compare:
            return compare_runs(args.compare, args.out)
        check(args)
        cpu = not torch.cuda.is_available()
        processes = PartialState(cpu, timeout=timedelta(days=7))  # long: they wait for the slowest
        if args.bench == "toy":
            samples, own_rules = load_toy(args.limit, args.seed, args.shortcut), None
        else:
            samples, own_rules = load_bench(args.bench, args.data, args.limit)
        policy = load_policy(args.model, processes.device, args.max_pixels)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:  # Ctrl-C
        parser.exit(130, "\nstopped; to go on: the same command\n")

    started = time.monotonic()
    settings = ("turns", "temperature", "max_new_tokens", "max_length")
    rules = replace(GREEDY, **{name: getattr(args, name) for name in settings})
    try:
        judge, second = judges_of(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        metrics, episodes = evaluate(
            policy, samples, judge, rules=rules, seed=args.seed, out=args.out,
            own_rules=own_rules, rollouts=args.avg_at, wave=args.wave, processes=processes,
        )  # fmt: skip
    except (Unusable, TooLong) as error:
        parser.error(str(error))
    if not processes.is_main_process:
        return
    stages, seconds = {args.bench: metrics}, {args.bench: round(time.monotonic() - started, 1)}
    summary = {"config": vars(args) | {"out": str(args.out)}, "seconds": seconds, "stages": stages}
    text = json.dumps(summary, indent=2)
    (args.out / "summary.json").write_text(text, encoding="utf-8")
    compare(stages, args.out / "compare.png")
    print(table(stages), details(metrics), sep="\n\n")
    studies(args, policy, rules, episodes, second)
    print(report(args.out, stages))


def studies(
    args: argparse.Namespace, policy: Policy, rules: Rules, episodes: Episodes, second: Judge | None
) -> None:
    """What faithfulness.py can say of the episodes beyond rates: printed as it comes, and kept in
    studies.json, beside what earlier calls found out about the same evaluation."""
    file, rewards, found = args.out / "studies.json", episodes.rewards, {"run": episodes.run}
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        found = kept if kept.get("run") == episodes.run else found
    found["tool_use"] = tool_use(episodes)
    print("", listing(found["tool_use"]), "", sep="\n")
    if second:
        theirs = [REWARDS["tapo"]([t], second, Weights(), random.Random(0))[0] for t in episodes]
        cells, agree, kappa = agreement(episodes, rewards, theirs)
        found["judges"] = {"agree": agree, "kappa": kappa}
        print(f"boxes and judge agree: {agree}, kappa {kappa}; (boxes, judge): {dict(cells)}\n")
    if args.perturb:
        found["perturb"] = perturb(policy, episodes, rewards, rules, args.perturb, args.seed)
        print(study_table(found["perturb"]), end="\n\n")
    if args.ablation:
        found["ablation"] = ablation(episodes, without_tools(policy, episodes, rules))
        found["evidence"] = evidence(policy, episodes, rewards, rules, seed=args.seed)
        print(listing(found["ablation"]), "", listing(found["evidence"]), "", sep="\n")
    file.write_text(json.dumps(found, indent=2, default=vars), encoding="utf-8")


def compare_runs(runs: Sequence[str], out: Path) -> None:
    columns = columns_of(runs)
    make_folder(out)
    compare(columns, out / "compare.png")
    print(table(columns), out / "compare.png", report_runs(out, runs, columns), sep="\n\n")


def judges_of(args: argparse.Namespace) -> tuple[Judge, Judge | None]:
    """(the judge, a second one to compare it with, or None). Boxes judge where they are labelled,
    else the served judge, which also grades open answers where the benchmark asks for that."""
    boxes, bench = BoxJudge() if args.bench == "toy" else HALF, BENCHES.get(args.bench)
    if not args.judge_url:
        if bench and bench.judged:
            print(args.bench, "asks a judge about open answers: without --judge-url, rules decide")
        return boxes, None
    asked = ChatJudge(args.judge_url, args.judge_model, args.judge_prompt, args.out / "verdicts")
    if args.bench in ("toy", "vstar"):
        return boxes, asked
    return (asked if bench.judged or bench.kind == "search" else boxes), None


def details(metrics: dict) -> str:
    """Every rate with its numerator and denominator, correct x faithful, the benchmark's parts."""
    rates = {name: Rate(**rate) for name, rate in metrics["rates"].items()}
    parts = [f"{part:40} {value:.3f}" for part, value in metrics.get("parts", {}).items()]
    return "\n".join([listing(rates), "", metrics["correct_by_faithful"], "", *parts])


def draw_film(args: argparse.Namespace) -> Path:
    episodes = Episodes(Path(args.film))
    if not len(episodes):
        raise ValueError(f"no trajectories.jsonl with episodes in {args.film}")
    pairs = enumerate(zip(episodes, episodes.rewards), start=1)
    good = (i for i, (t, r) in pairs if r.right and faithful(finding(t, r)))
    at = (next(good, 1) if args.episode is None else args.episode) - 1
    if not 0 <= at < len(episodes):
        raise ValueError(f"--episode is 1 to {len(episodes)}, got {args.episode}")
    make_folder(args.out)
    film(episodes[at], episodes.rewards[at], args.out / "film.png")
    return args.out / "film.png"


if __name__ == "__main__":
    main()
