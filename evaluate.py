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
    reward    its parts: answer, tools, format, scores, total
    steps     one a turn: text (all that the policy wrote), code or null, start and end (its tokens
              are ids[start:end]), score (null: none), and observation: null if no code ran, else
              text (the log), images (PNG files), boxes (the part of the sample's image that each
              shows, or null), sources, error, notes, red_lines, ... as in sandbox.Observation
    acted     who chose the tokens, in runs: [[false, 80], [true, 12], ...]; true is the policy
    ids       the tokens; the first `prompt` of them, with `prompt_images` images, are the question
    seed      the text that seeds its sampling
    place     its place in the order of the benchmark; with --avg-at K, each question has K places
    run       a hash of policy, questions and settings: lines of two evaluations do not mix
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import importlib
import io
import itertools
import json
import keyword
import math
import os
import random
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from matplotlib.figure import Figure
from PIL import Image
from tabulate import tabulate
from tqdm import tqdm

from data import Sample, out_of_prior_questions, toy_questions
from faithfulness import (
    DRAWS,
    HALF,
    Finding,
    Rate,
    count,
    cross_table,
    finding,
    listing,
    tool_use,
)
from kit.answers import MAX_ANSWER
from kit.benchmarks import BENCHES, PICTURES, filled, picture, published
from kit.boxes import Box, area
from kit.perturbations import PERTURBATIONS, check_perturbations
from kit.qwen import Policy, check_checkpoint
from kit.tables import Lazy, read_rows
from kit.usable import Usable
from rewards import BoxJudge, ChatJudge, Judge, Lambdas, Reward, score
from rollout import Rules, TooLong, Trajectory, Turn, load_policy, play
from sandbox import Observation

GREEDY = Rules(turns=10, temperature=0.0)
OUT_OF_PRIOR = "toy, against the prior"  # `source` of the questions on which a guesser scores 0

# The rows of every table: the name of a number in summary.json, and what a reader sees.
LABELS = {
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
    against = out_of_prior_questions(n // 2, f"against-{seed}")
    return toy_questions(n, f"evaluation-{seed}", shortcut) + [
        replace(sample, source=OUT_OF_PRIOR) for sample in against
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
        rewards = score(groups, "tapo", judge, Lambdas(), random.Random(seed))
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
            seen.update(n=graded, right=right, search=found.search, faithful=found.look == "faithful")
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
        elif source == OUT_OF_PRIOR:
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
        del line["turns"]  # which the file calls steps
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
    line["turns"] = line["steps"]
    line = {name: line[name] for name in names if name in line}
    sample = line["sample"]
    sample |= {"image": picture(sample["image"]), "options": tuple(sample["options"])}
    line["sample"] = Sample(**{**sample, "boxes": tuple(map(tuple, sample["boxes"]))})
    for step in line["turns"]:
        del step["score"]  # the reward has it
        if seen := step["observation"]:
            seen["images"] = [picture(name) for name in seen["images"]]
            seen["boxes"] = [box and tuple(box) for box in seen["boxes"]]
            step["observation"] = Observation(**seen)
    line["turns"] = [Turn(**step) for step in line["turns"]]
    line["acted"] = [who for who, count in line["acted"] for _ in range(count)]
    return Trajectory(**line)


def scored(trajectory: Trajectory, reward: Reward) -> list[tuple[Turn, float | None]]:
    """Every step with its score; None where no code ran, or where the judge gave no verdict."""
    scores = iter(reward.scores)
    return [(s, None if s.observation is None else next(scores)) for s in trajectory.turns]


def runs_of(acted: Sequence[bool]) -> list[tuple[bool, int]]:
    """[True, True, False] -> [(True, 2), (False, 1)]"""
    return [(who, len(list(run))) for who, run in itertools.groupby(acted)]


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


# One table, two figures


def lines(columns: dict[str, dict]) -> Iterator[tuple[str, list[str]]]:
    """A label and a cell for each column. What was not measured stays empty."""
    for name, label in LABELS.items():
        values = [metrics.get(name) for metrics in columns.values()]
        if any(value is not None for value in values):
            texts = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in values)
            yield label, ["" if v is None else text for v, text in zip(values, texts)]


def table(columns: dict[str, dict]) -> str:
    """The stages side by side in plain text."""
    rows = [["", *columns], *([label, *cells] for label, cells in lines(columns))]
    sides = ("left", *["right"] * len(columns))
    return tabulate(rows, tablefmt="plain", colalign=sides, disable_numparse=True)


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


# The page

safe = html.escape  # whatever a model or a data set wrote reaches the page through this
PAGE_LIMIT = 4_500_000  # bytes of episodes on one page; all of them are in trajectories.jsonl

# The template. Its Content-Security-Policy lets the page show its own pictures and run its own
# script, known by its hash: nothing from the network, and nothing hidden in an episode.
PAGE = string.Template((Path(__file__).parent / "kit" / "page.html").read_text(encoding="utf-8"))
SCRIPT = PAGE.template.split("<script>")[1].split("</script>")[0]


Play = tuple[str, Trajectory, Reward]  # the run it comes from, "" if there is only one


def report(folder: Path, columns: dict[str, dict], shown: int = 50) -> Path:
    """report.html: episodes of the folder, evenly spread over it, and its figures."""
    episodes = Episodes(folder)
    picked = spread(range(len(episodes)), shown)
    plays = [[("", episodes[i], episodes.rewards[i])] for i in picked]
    return _publish(folder, plays, columns, len(episodes))


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
    seen = [step.observation for card in plays for _, t, _ in card for step in t.tool_turns]
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
            for label, cells in lines(columns)
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
    return "no tool" if not found.scores else "faithful" if found.look == "faithful" else "unfaithful"


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


# What stands above this file: the flag, and the module whose main(args, parser) takes over.
DOORS = {"compare": "beyond.compare", "film": "beyond.film", "study": "beyond.study"}
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
        check_perturbations(args.perturb)
        if args.temperature:
            raise ValueError(f"--perturb compares greedy plays, got temperature "
                             f"{args.temperature:g}: drop --avg-at and --temperature")  # fmt: skip
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
    for word, door in DOORS.items():
        if getattr(args, word):
            return importlib.import_module(door).main(args, parser)
    if not args.model:
        return parser.print_help()
    usual = TOY if args.bench == "toy" else OTHERS
    usual = usual | {"temperature": float(args.avg_at > 1)}
    vars(args).update({name: value for name, value in usual.items() if getattr(args, name) is None})
    lies = PERTURBATIONS if args.perturb == "all" else args.perturb.split(",")
    args.perturb = [lie for lie in lies if lie]
    try:
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
    importlib.import_module("beyond.compare").compare(stages, args.out / "compare.png")
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
    if second or args.perturb or args.ablation:
        beyond = importlib.import_module("beyond.evidence")
        found |= beyond.studies(policy, episodes, rewards, rules, args.seed, args.perturb,
                                args.ablation, second)  # fmt: skip
    file.write_text(json.dumps(found, indent=2, default=vars), encoding="utf-8")


def judges_of(args: argparse.Namespace) -> tuple[Judge, Judge | None]:
    """(the judge, a second one to compare it with, or None). Boxes judge where they are labelled,
    else the served judge, which also grades open answers where the benchmark asks for that."""
    boxes, bench = BoxJudge() if args.bench == "toy" else HALF, BENCHES.get(args.bench)
    if not args.judge_url:
        if bench and bench.judged:
            print(args.bench, "asks a judge about open answers: without --judge-url, rules decide")
        return boxes, None
    how = {"prompt": args.judge_prompt, "cache": args.out / "verdicts"}
    asked = ChatJudge(args.judge_url, args.judge_model, **how)
    if args.bench in ("toy", "vstar"):
        return boxes, asked
    return (asked if bench.judged or bench.kind == "search" else boxes), None


def details(metrics: dict) -> str:
    """Every rate with its numerator and denominator, correct x faithful, the benchmark's parts."""
    rates = {name: Rate(**rate) for name, rate in metrics["rates"].items()}
    parts = [f"{part:40} {value:.3f}" for part, value in metrics.get("parts", {}).items()]
    return "\n".join([listing(rates), "", metrics["correct_by_faithful"], "", *parts])


if __name__ == "__main__":
    main()
