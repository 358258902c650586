"""
evaluate.py: how often is the policy right, and had it looked in the right place?

Concept     Play questions, score every look once, and show the episodes themselves: a rate that
            nobody can hold against pictures persuades nobody.
Paper       CodeV, arXiv:2511.19661, Fig. 5 and Table 5 (faithfulness.py defines the rates)
In          a policy and samples; or a checkpoint folder and the name of a benchmark
Out         summary.json, trajectories.jsonl with its pictures, report.html; figures
Left out    the public benchmarks; a mean over several plays; several processes
Read next   faithfulness.py (what each rate means), train.py (who calls this after each stage)

    python evaluate.py --model runs/toy/rl --bench toy --out runs/eval    play, score, show
    python evaluate.py --compare runs/toy runs/accuracy --out runs        runs side by side

trajectories.jsonl has one JSON object a line, with the names of the types it holds:

    sample    id, question, options, kind, source; answer (the reference), boxes (the targets: x0,
              y0, x1, y1 in pixels), image (a PNG file; paths are relative to the .jsonl)
    answer    what the policy answered, or null
    ended     answered, turns, length or no_action
    correct   true or false
    reward    its parts: answer, tools, format, steps, total
    steps     one a turn: text (all that the policy wrote), code or null, start and end (its tokens
              are ids[start:end]), score (null: none), and observation: null if no code ran, else
              text (the log), images (PNG files), boxes (the part of the sample's image that each
              shows, or null), sources, error, notes, red_lines, ... as in sandbox.Observation
    acted     who chose the tokens, in runs: [[false, 80], [true, 12], ...]; true is the policy
    ids       the tokens; the first `prompt` of them, with `prompt_images` images, are the question
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import io
import itertools
import json
import keyword
import random
import re
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image

from data import Box, Sample, anti_prior_questions, toy_questions
from faithfulness import faithful, finding, rates
from rewards import REWARDS, BoxJudge, Judge, Reward, Weights, area
from rollout import Policy, Rules, Step, Trajectory, load_policy, play
from sandbox import Observation

GREEDY = Rules(turns=10, temperature=0.0)
AGAINST_PRIOR = "toy, against the prior"  # `source` of the questions on which a guesser scores 0

# The rows of every table: what summary.json calls a number, and what a reader sees.
ROWS = {
    "n": "questions", "accuracy": "accuracy", "ood_accuracy": "out-of-prior accuracy",
    "tool_use": "tool use", "faithful": "faithful", "unfaithful": "unfaithful",
    "no_tool": "no tool", "faithful_and_correct": "correct and faithful",
    "faithful_given_correct": "faithful, if correct", "calls": "calls per question",
    "crop_area": "crop area", "error_rate": "errors",
}  # fmt: skip


# Play and measure


def load_toy(n: int = 256, seed: int = 0, shortcut: float = 1.0) -> list[Sample]:
    """`n` questions of the toy world, then half as many on which its prior is always wrong."""
    against = anti_prior_questions(n // 2, f"against-{seed}")
    return toy_questions(n, f"evaluation-{seed}", shortcut) + [
        replace(sample, source=AGAINST_PRIOR) for sample in against
    ]


BENCHES: dict[str, Callable[[argparse.Namespace], list[Sample]]] = {
    "toy": lambda args: load_toy(args.n, args.seed, args.shortcut),
}


def evaluate(
    policy: Policy,
    samples: Sequence[Sample],
    judge: Judge,
    *,
    rules: Rules = GREEDY,
    seed: int = 0,
    out: Path | None = None,
) -> tuple[dict, list[Trajectory]]:
    """Play every sample once, score every step once. `out` gets trajectories.jsonl."""
    if not samples:
        raise ValueError("nothing to evaluate: expected at least one sample, got none")
    gpus = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # an evaluation amid training leaves no trace in it
        torch.manual_seed(seed)
        groups = play(policy, list(samples), rollouts=1, rules=rules)
    trajectories = [trajectory for group in groups for trajectory in group]
    rng = random.Random(seed)
    rewards = [REWARDS["tapo"]([t], judge, Weights(), rng)[0] for t in trajectories]
    if out is not None:
        write_trajectories(trajectories, rewards, out)
    return measure(trajectories, rewards), trajectories


def measure(trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> dict:
    """The rates of faithfulness.py; questions against the toy's prior count for one number only."""
    own, against = [], []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        (against if trajectory.sample.source == AGAINST_PRIOR else own).append((trajectory, reward))
    metrics = rates([t for t, _ in own], [r for _, r in own])
    if against:
        metrics["ood_accuracy"] = sum(reward.answer for _, reward in against) / len(against)
    return metrics


# Keep the episodes


def write_trajectories(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], folder: Path
) -> None:
    """trajectories.jsonl and images/ in `folder`; the head of this file describes them."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    # Pictures are numbered: an id comes from a data set and may be anything, even another path.
    names = (f"images/{number:06d}.png" for number in itertools.count())

    def plain(thing: object) -> object:  # what json cannot write by itself
        if not isinstance(thing, Image.Image):
            return vars(thing)
        thing.save(folder / (name := next(names)))
        return name

    with open(folder / "trajectories.jsonl", "w", encoding="utf-8") as file:
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            line = {**vars(trajectory), "reward": reward, "correct": reward.answer > 0}
            line["steps"] = [
                {**vars(step), "score": score} for step, score in scored(trajectory, reward)
            ]
            line["acted"] = runs_of(trajectory.acted)
            del line["images"]  # the model's own input, made from these pictures
            print(json.dumps(line, default=plain), file=file)


def read_trajectories(
    path: Path, first: int | None = None
) -> tuple[list[Trajectory], list[Reward]]:
    """What write_trajectories wrote, or the `first` of it; without the model's image inputs."""
    pairs, lines = [], path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines[:first], start=1):
        try:
            pairs.append(_from_line(json.loads(text), path.parent))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a trajectory as described at the head of "
                f"evaluate.py, but {type(error).__name__}: {error}"
            ) from error
    return [trajectory for trajectory, _ in pairs], [reward for _, reward in pairs]


def _from_line(line: dict, folder: Path) -> tuple[Trajectory, Reward]:
    def picture(name: str) -> Image.Image:
        return Image.open(folder / name).convert("RGB")

    sample, reward = line["sample"], line.pop("reward")
    sample |= {"image": picture(sample["image"]), "options": tuple(sample["options"])}
    line["sample"] = Sample(**{**sample, "boxes": tuple(map(tuple, sample["boxes"]))})
    for step in line["steps"]:
        del step["score"]  # reward.steps has it, as reward.answer has `correct`
        if seen := step["observation"]:
            seen["images"] = [picture(name) for name in seen["images"]]
            seen["boxes"] = [box and tuple(box) for box in seen["boxes"]]
            step["observation"] = Observation(**seen)
    line["steps"] = [Step(**step) for step in line["steps"]]
    line["acted"] = [who for who, count in line["acted"] for _ in range(count)]
    del line["correct"]
    return Trajectory(**line), Reward(**{**reward, "steps": tuple(reward["steps"])})


def scored(trajectory: Trajectory, reward: Reward) -> list[tuple[Step, float | None]]:
    """Every step with its score; None where no code ran, or where the judge gave no verdict."""
    scores = iter(reward.steps)
    return [(s, None if s.observation is None else next(scores)) for s in trajectory.steps]


def runs_of(acted: Sequence[bool]) -> list[tuple[bool, int]]:
    """[True, True, False] -> [(True, 2), (False, 1)]"""
    return [(who, len(list(run))) for who, run in itertools.groupby(acted)]


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
    grid = [["", *columns], *([label, *cells] for label, cells in rows(columns))]
    widths = [max(map(len, column)) for column in zip(*grid)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in grid)
    return "\n".join("  ".join(line).rstrip() for line in lines)


# Okabe and Ito's palette; lines and markers differ too, for print and for every kind of eye.
COLORS = ("#0072B2", "#D55E00", "#000000", "#CC79A7", "#009E73", "#E69F00")
LINES, MARKERS = ("-", "--", ":", "-.", "-", "--"), "os^DvP"
PANELS = {  # label of the axis: what log.jsonl calls the curves
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
    labels = {name: label for name, label in ROWS.items() if name != "n"}
    figure = Figure(figsize=(8, 6 + 0.25 * len(columns)), layout="constrained")
    axes = figure.subplots()
    styles = itertools.cycle(zip(COLORS, MARKERS))
    for i, ((run, metrics), (color, marker)) in enumerate(zip(columns.items(), styles)):
        aside = 0.5 * (i + 0.5) / len(columns) - 0.25  # equal values must not hide each other
        values = [metrics.get(name) for name in labels]
        places = [(value, row + aside) for row, value in enumerate(values) if value is not None]
        axes.plot(*zip(*places), color=color, marker=marker, linestyle="none", label=run)
    axes.set_yticks(range(len(labels)), labels.values())
    axes.set(xlim=(-0.02, None), ylim=(len(labels) - 0.5, -0.5), xlabel="rate")
    axes.grid(alpha=0.3)
    if columns:
        figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


# The page

safe = html.escape  # whatever a model or a data set wrote reaches the page through this
PAGE_LIMIT = 4_500_000  # bytes of episodes on one page; all of them are in trajectories.jsonl

# The template. Its security line lets the page show what it carries and run its own script, known
# by its hash: nothing from the network, and nothing that an episode may have smuggled in.
PAGE = string.Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
SCRIPT = PAGE.template.split("<script>")[1].split("</script>")[0]


def report(folder: Path, columns: dict[str, dict], shown: int = 50) -> Path:
    """report.html: the first episodes of the folder, and its curves.png if there is one."""
    file, png = folder / "trajectories.jsonl", folder / "curves.png"
    drawn = Image.open(png) if png.exists() else None
    total = len(file.read_text(encoding="utf-8").splitlines())
    text = page(*read_trajectories(file, shown), columns, drawn, total)
    (folder / "report.html").write_text(text, encoding="utf-8", errors="backslashreplace")
    return folder / "report.html"


def page(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[Reward],
    columns: dict[str, dict],
    drawn: Image.Image | None = None,
    total: int | None = None,
) -> str:
    """One self-contained page of these episodes out of `total`, or as many as PAGE_LIMIT holds."""
    pairs = list(zip(trajectories, rewards, strict=True))
    pictures = sum(1 + sum(len(s.observation.images) for s in t.tool_steps) for t, _ in pairs)
    budget = PAGE_LIMIT * 2 // 3 // max(1, pictures)  # characters a picture; the rest is for text
    cards = [_card(i, *pair, budget) for i, pair in enumerate(pairs, start=1)]
    sizes = itertools.accumulate(len(card.encode(errors="backslashreplace")) for card in cards)
    cards = cards[: sum(size <= PAGE_LIMIT for size in sizes)]
    figure = drawn and f'<img alt="curves of training" src="{picture_url(drawn, 400_000)}">'
    return PAGE.substitute(
        hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
        head="".join(f'<th scope="col">{safe(name)}' for name in columns),
        body="".join(
            f'<tr><th scope="row">{label}{"".join(f"<td>{cell}" for cell in cells)}'
            for label, cells in rows(columns)
        ),
        count=f"{len(cards)} of {total or len(pairs)}",
        curves=figure or "",
        cards="".join(cards),
    )


def _card(number: int, trajectory: Trajectory, reward: Reward, budget: int) -> str:
    sample, acted = trajectory.sample, trajectory.acted
    found = finding(trajectory, reward)
    right, error = found.correct, "some" if found.failed else "none"
    look = "no tool" if not found.scores else "faithful" if faithful(found) else "unfaithful"
    apt = look == ("faithful" if found.search else "no tool")
    width, height = sample.image.size
    url = picture_url(sample.image, budget)
    image = f'<image id="p{number}" width="{width}" height="{height}" href="{url}"/>'
    options = "".join(f"<li>{safe(option)}" for option in sample.options)
    frames = [f"<h3>Image</h3>{_drawn(sample, image)}<ol type=A>{options}</ol>"]
    for turn, (step, score) in enumerate(scored(trajectory, reward), start=1):
        shown = step.observation and _shown(sample, step.observation, score, number, budget)
        frames.append(f"<h3>Turn {turn}</h3>{_written(step.text)}{shown or ''}")
    answer = "no answer" if trajectory.answer is None else trajectory.answer
    frames[-1] += f"<p>{_mark(right, answer)} (reference: {safe(sample.answer)})</p>"
    bar = "".join(
        f'<i{" class=acted" if who else ""} style="flex:{count} 0 0" title="{count} tokens"></i>'
        for who, count in runs_of(acted)
    )
    chose = f"{sum(acted)} tokens chosen by the policy, {len(acted) - sum(acted)} shown to it"
    return f"""
<article id="t{number}" tabindex="-1" data-answer="{"correct" if right else "wrong"}"
 data-look="{look}" data-kind="{safe(sample.kind)}" data-error="{error}">
<h2>{number}. {safe(sample.question)}</h2>
<p>{_mark(right, "correct" if right else "wrong")} · {_mark(apt, look)} · {safe(sample.kind)}
<small>· {safe(sample.id)} · ended: {safe(trajectory.ended)}</small></p>
<ol class="strip">{"".join(f"<li>{frame}</li>" for frame in frames)}</ol>
<div class="bar" role="img" aria-label="{chose}">{bar}</div><small>{chose}</small>
</article>"""


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
        for name in ("", f' class="{kind}"')  # twice: a white rim, then the line
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
    """Python as HTML: comments, strings, numbers and keywords can be told apart by class."""
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


# Command line


def columns_of(runs: Sequence[str]) -> dict[str, dict]:
    """One column a stage of each run, from the summary.json in its folder."""
    columns = {}
    for run in runs:
        try:
            stages = json.loads((Path(run) / "summary.json").read_text(encoding="utf-8"))["stages"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"no run in {run}: expected a folder with the summary.json of a finished run of "
                f"train.py or evaluate.py --model, but {error!r}"
            ) from error
        columns.update({f"{run.rstrip('/')} {stage}": metrics for stage, metrics in stages.items()})
    return columns


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Play a benchmark and show what the policy looked at, or compare runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flag = parser.add_argument
    flag("--model", metavar="DIR", help="checkpoint to evaluate: a folder or a hub name")
    flag("--bench", choices=BENCHES, default="toy", help="which questions")
    flag("--data", metavar="PATH", help="where the benchmark's files are (the toy draws its own)")
    flag("--out", metavar="DIR", type=Path, default=Path("runs/eval"), help="where results go")
    flag("--n", type=int, default=256, help="toy: questions, plus half as many against the prior")
    flag("--shortcut", type=float, default=1.0, help="toy: share of squares that follow the prior")
    flag("--turns", type=int, default=GREEDY.turns, help="how often the policy may speak")
    flag("--temperature", type=float, default=GREEDY.temperature, help="0 is greedy")
    flag("--seed", type=int, default=0, help="of the toy's questions and of sampling")
    flag("--compare", metavar="RUN", nargs="+", help="folders with summary.json, side by side")
    args = parser.parse_args(argv)
    if not args.model and not args.compare:
        parser.print_help()
        return
    try:
        if args.compare:
            columns = columns_of(args.compare)
            args.out.mkdir(parents=True, exist_ok=True)
            compare(columns, args.out / "compare.png")
            print(table(columns), args.out / "compare.png", sep="\n\n")
            return
        if (args.out / "state.json").exists():
            raise ValueError(f"{args.out} holds a training run: give --out another folder")
        if args.bench == "toy" and args.data:
            raise ValueError(f"the toy world is drawn, not read: drop --data {args.data}")
        for name, low in (("n", 1), ("turns", 1), ("temperature", 0)):
            if getattr(args, name) < low:
                raise ValueError(f"--{name} must be at least {low}, got {getattr(args, name)}")
        samples = BENCHES[args.bench](args)
        policy = load_policy(args.model, "cuda" if torch.cuda.is_available() else "cpu")
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))

    started = time.monotonic()
    rules = replace(GREEDY, turns=args.turns, temperature=args.temperature)
    metrics, _ = evaluate(policy, samples, BoxJudge(), rules=rules, seed=args.seed, out=args.out)
    summary = {
        "config": {**vars(args), "out": str(args.out)},
        "seconds": {args.bench: round(time.monotonic() - started, 1)},
        "stages": {args.bench: metrics},
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    print(table(summary["stages"]), report(args.out, summary["stages"]), sep="\n\n")


if __name__ == "__main__":
    main()
