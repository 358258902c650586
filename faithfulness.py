"""
faithfulness.py: had the policy looked in the right place, and did it matter? Counted, not felt.

Concept     A right answer may be luck. Each search question falls into one of three classes:
            faithful    a tool showed the evidence (a step score of 1: 0.5 is not enough)
            unfaithful  tools showed pictures, and none of them the evidence
            no tool     no picture was shown at all
            To have looked is not yet to have used it, so we also lie: we change what the tools
            show, and see whether thoughts, actions and answers follow.
Paper       CodeV, arXiv:2511.19661, Fig. 2 (rates among right answers), Table 5 (faithful and
            right, over all questions), Table 6 (perturbations), Appendix 12 (use of tools). It
            leaves denominators and several crops open: both denominators stand here, and four ways
            to treat several crops. Agreement, ablation and evidence values are ours.
In          Trajectories and their Rewards with step scores (rewards.tapo), computed once
Out         rates with numerator, denominator and bootstrap interval; tables of them
Left out    which part of a crop was used; template matching for pictures without a box
Read next   evaluate.py (which plays the questions and prints the tables)

    python faithfulness.py                       the rates on six hand-made trajectories
    python faithfulness.py TRAJECTORIES.jsonl    on recorded ones: evaluate.py's, or any agent's

One JSON object a line for each trajectory of any agent (fields in brackets may be absent):

    question, answer (what it answered, or null), correct (true or false)
    image       a file; paths are relative to the .jsonl. Boxes are [x0, y0, x1, y1] in its pixels
    steps       one a tool call, each with what it showed: box, the part of the image, or image, a
                file (of neither: it showed nothing). [text, before the call] [code] [error]
                [score: a judge's, from 0 to 1, or null; else the box is held against the targets]
    [targets    boxes of the evidence]   [kind: "search" (default) or "neutral"]   [reference]
    [id: plays of one question share it, and the bootstrap draws them together]   [text, at the end]
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import torch
from PIL import Image

from data import Box, Sample
from grpo import group_row, group_rows, log_probs
from rewards import (
    BoxJudge,
    Judge,
    Reward,
    Weights,
    area,
    crop,
    hand_made,
    is_correct,
    ran_well,
    recall,
    step_scores,
    tapo,
)
from rollout import Policy, Rules, Step, Trajectory, begin, listen, play_on, rows_that_fit
from rollout import Encoded
from sandbox import Observation, Sandbox

# Rates

Parts = dict[str, tuple[float, float]]  # what one unit adds to each rate: above and below the line


@dataclass(frozen=True)
class Rate:
    numerator: float
    denominator: float
    interval: tuple[float, float] | None = None  # 95 %; None: not asked for, or nothing to draw

    @property
    def value(self) -> float | None:
        """None, not nan, where there was nothing to count."""
        return self.numerator / self.denominator if self.denominator else None

    def __str__(self) -> str:
        share = "none" if self.value is None else f"{self.value:.3f}"
        if self.interval:
            share += f" [{self.interval[0]:.3f}, {self.interval[1]:.3f}]"
        return f"{share} ({self.numerator:g}/{self.denominator:g})"


def add_up(
    units: Sequence[Parts], clusters: Sequence[str] = (), draws: int = 0, seed: int = 0
) -> dict[str, Rate]:
    """Sum over units (samples, calls). With draws > 0, percentile bootstrap intervals: whole
    clusters are drawn with replacement, for plays of one question are no independent evidence.
    Units with an empty cluster, or all if none are given, stand alone. Draws in which a rate has
    no denominator are left out of its interval; a single cluster gives no interval."""
    if not units:
        return {}
    amounts = np.array([list(unit.values()) for unit in units], float)  # [units, rates, 2]
    keys = [cluster or i for i, cluster in enumerate(clusters or [""] * len(units))]
    place = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    C = len(place)
    grouped = np.zeros((C, *amounts.shape[1:]))
    np.add.at(grouped, [place[key] for key in keys], amounts)
    times = np.random.default_rng(seed).multinomial(C, [1 / C] * C, draws)  # [draws, C]
    drawn = np.tensordot(times, grouped, 1)  # [draws, rates, 2]
    rates = {}
    for r, (name, sums) in enumerate(zip(units[0], amounts.sum(0).tolist())):
        above, below = drawn[drawn[:, r, 1] != 0, r].T
        enough = len(below) and C > 1 and sums[1]
        ends = np.percentile(above / below, (2.5, 97.5)) if enough else None
        rates[name] = Rate(*sums, None if ends is None else tuple(ends.tolist()))
    return rates


def listing(rates: dict[str, Rate]) -> str:
    return columns([[name, str(rate)] for name, rate in rates.items()])


def columns(rows: list[list[str]]) -> str:
    """Plain text, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# One trajectory


@dataclass(frozen=True)
class Finding:
    """What one trajectory adds to the counts; enough to count again in another way."""

    search: bool  # False: a question that needs no visual search
    correct: bool
    scores: tuple[float | None, ...]  # one for each step that showed a picture; None: no verdict
    calls: int  # <code> steps that were run
    failed: int  # those that failed by the policy's own fault
    areas: tuple[float, ...]  # of each crop shown, as a share of the image
    recalls: tuple[float, ...]  # of each target, by the union of all crops; () if no target
    focuses: tuple[float, ...] = ()  # |target| / |crop| of each crop that shows half a target
    cluster: str = ""  # what the bootstrap draws as one: the question

    @property
    def hits(self) -> tuple[float, ...]:
        return tuple(float(score is not None and score >= 1) for score in self.scores)

    @property
    def has_verdict(self) -> bool:
        return None not in self.scores


def finding(trajectory: Trajectory, reward: Reward, cluster: str | None = None) -> Finding:
    """A step with a red line scores -1 and is no hit, even if the evidence was in its picture.
    cluster: the sample's id by default; for HR-Bench, what the four cycles of a question share."""
    sample, steps = trajectory.sample, trajectory.tool_steps
    if len(reward.steps) != len(steps):
        raise ValueError(
            f"sample {sample.id}: expected a score for each of {len(steps)} tool steps, got "
            f"{len(reward.steps)}; rate with rewards.tapo, whatever the policy was trained with"
        )
    seen = [step.observation for step in steps]
    whole = area((0, 0, *sample.image.size))
    crops = [box for observation in seen for box in observation.boxes if box]
    proper = [box for box in crops if area(box) <= BoxJudge.max_area * whole]
    focuses = [[area(t) / area(c) for t in sample.boxes if recall(c, t) >= 0.5] for c in proper]
    return Finding(
        search=sample.kind == "search",
        correct=(reward.answer or 0) > 0,
        scores=tuple(score for o, score in zip(seen, reward.steps) if o.images),
        calls=len(steps),
        failed=sum(not (ran_well(o) or o.environment) for o in seen),
        areas=tuple(area(box) / whole for box in crops),
        recalls=tuple(covered(target, proper) for target in sample.boxes),
        focuses=tuple(max(values) for values in focuses if values),
        cluster=sample.id if cluster is None else cluster,
    )


def covered(target: Box, crops: Iterable[Box]) -> float:
    """|target ∩ (union of crops)| / |target|, pixel by pixel."""
    x0, y0, x1, y1 = target
    seen = np.zeros((y1 - y0, x1 - x0), bool)
    for u0, v0, u1, v1 in crops:
        seen[max(v0 - y0, 0) : max(v1 - y0, 0), max(u0 - x0, 0) : max(u1 - x0, 0)] = True
    return float(seen.mean())


# All of them

# When is a trajectory with several pictures faithful? Each maps its hits (0 or 1) to a share.
AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "any": max,
    "all": min,
    "last": lambda hits: hits[-1],
    "mean": fmean,
}


def faithful(finding: Finding, aggregate: str = "any") -> float:
    """1 faithful, 0 not (between them only under "mean")."""
    if aggregate not in AGGREGATES:
        raise ValueError(f"expected aggregate out of {', '.join(AGGREGATES)}; got {aggregate!r}")
    return AGGREGATES[aggregate](finding.hits) if finding.hits else 0.0


def parts(f: Finding, aggregate: str = "any") -> Parts:
    """A trajectory in which the judge had no verdict leaves the rates of faithfulness, not the
    rest."""
    judged, looked, boxed = f.search and f.has_verdict, bool(f.scores), f.search and bool(f.recalls)
    good, right = faithful(f, aggregate), judged and f.correct
    bad = looked - good

    def one(value: float, among: bool) -> tuple[float, float]:
        return (float(value), 1.0) if among else (0.0, 0.0)

    def several(values: Sequence[float], among: bool = True) -> tuple[float, float]:
        return (sum(values), len(values)) if among else (0.0, 0.0)

    return {
        "accuracy": one(f.correct, True),
        "search_accuracy": one(f.correct, f.search),
        "direct_accuracy": one(f.correct, not f.search),
        "tool_use": one(f.calls > 0, f.search),
        # Unconditional: these three partition the search questions.
        "faithful": one(good, judged),
        "unfaithful": one(bad, judged),
        "no_tool": one(not looked, judged),
        # Table 5: right, and for the right reason, over all questions.
        "faithful_and_correct": one(good * f.correct, judged),
        # Fig. 2: among right answers; and among those that came with a picture.
        "faithful_given_correct": one(good, right),
        "unfaithful_given_correct": one(bad, right),
        "no_tool_given_correct": one(not looked, right),
        "faithful_given_correct_and_shown": one(good, right and looked),
        "faithful_per_call": several(f.hits, judged),  # "57 % of tool calls" may mean this one
        "accuracy_given_faithful": (good * f.correct, good) if judged else (0.0, 0.0),
        # Against labelled boxes, whatever a judge says: any target seen, or each of them.
        "box_any_50": one(max(f.recalls, default=0) >= 0.5, boxed),
        "box_all_50": one(min(f.recalls, default=0) >= 0.5, boxed),
        "box_any_80": one(max(f.recalls, default=0) >= 0.8, boxed),
        "box_all_80": one(min(f.recalls, default=0) >= 0.8, boxed),
        "focus": several(f.focuses, boxed),
        "crop_area": several(f.areas, f.search),
        "calls": one(f.calls, True),
        "error_rate": one(f.failed > 0, True),
        "no_verdict": one(not f.has_verdict, f.search),
    }


def count(
    findings: Iterable[Finding], aggregate: str = "any", draws: int = 0, seed: int = 0
) -> dict[str, Rate]:
    """Every rate with its numerator and denominator; with draws > 0 with its interval."""
    findings = list(findings)
    units = [parts(f, aggregate) for f in findings]
    nothing = dict.fromkeys(parts(Finding(False, False, (), 0, 0, (), ())), (0.0, 0.0))
    return add_up(units or [nothing], [f.cluster for f in findings], draws, seed)


def cross_table(findings: Iterable[Finding], aggregate: str = "any") -> dict[str, dict[str, float]]:
    """correct x faithful, among search questions with a verdict. No tool is not faithful."""
    table = {answer: {"faithful": 0.0, "not": 0.0} for answer in ("correct", "wrong")}
    for f in findings:
        if f.search and f.has_verdict:
            row = table["correct" if f.correct else "wrong"]
            row["faithful"] += faithful(f, aggregate)
            row["not"] += 1 - faithful(f, aggregate)
    return table


def rates(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], aggregate: str = "any"
) -> dict[str, float | None]:
    """The values of `count`, and how many there were: what goes into summary.json."""
    findings = [finding(t, r) for t, r in zip(trajectories, rewards, strict=True)]
    counts = count(findings, aggregate)
    return {"n": len(findings), **{name: rate.value for name, rate in counts.items()}}


@dataclass(frozen=True)
class Agreement:
    """Two judges on the same pictures: is it a hit (a score of 1)?"""

    table: Counter[tuple[bool, bool]]  # (first says hit, second says hit) -> how many
    left_out: int  # calls on which one of them had no verdict

    @property
    def rate(self) -> Rate:
        return Rate(self.table[True, True] + self.table[False, False], self.table.total())

    @property
    def kappa(self) -> float | None:
        """Cohen's: agreement beyond chance. None if chance alone would always agree."""
        n, both = self.table.total(), self.table[True, True]
        a, b = both + self.table[True, False], both + self.table[False, True]
        chance = (a * b + (n - a) * (n - b)) / n**2 if n else 1.0
        return None if chance == 1 else (self.rate.value - chance) / (1 - chance)


def agreement(
    trajectories: Sequence[Trajectory], first: Sequence[Reward], second: Sequence[Reward]
) -> Agreement:
    """Per call, from both judges' rewards. A red line is no judge's verdict: such calls, and those
    that showed no picture, are not compared."""
    table, left_out = Counter(), 0
    for t, one, two in zip(trajectories, first, second, strict=True):
        for step, *pair in zip(t.tool_steps, one.steps, two.steps, strict=True):
            if None in pair:
                left_out += bool(step.observation.images)
            elif step.observation.images and min(pair) >= 0:
                table[pair[0] >= 1, pair[1] >= 1] += 1
    return Agreement(table, left_out)


# How tools were used (Appendix 12)

KINDS = {
    "crop": r"\.crop\(|\[[^\]\n]*:[^\]\n]*,[^\]\n]*:",
    "rotate": r"rotate|transpose|flip|ROTATE_",
    "contrast": r"ImageEnhance|contrast|equalize|CLAHE|\.point\(|convertScaleAbs|cvtColor|Sharp",
    "draw": r"ImageDraw|\.(?:rectangle|circle|line|polygon|putText|ellipse|plot|scatter|bar)\(",
}
AREAS = (0.01, 0.05, 0.25, 0.5, 0.9, 1.0)  # upper ends of the bins, as shares of the image
CLAIM = re.compile(  # of a look that was taken, or is about to be
    r"\b(?:cropp(?:ed|ing)|zoom(?:ed|ing) in|(?:the|this|my) (?:crop|close-up|zoom\w*))\b"
    r"|\bi(?:'ll| will)? (?:now )?(?:crop|zoom)\b|\.crop\(",
    re.IGNORECASE,
)


def kinds_of(code: str, seen: Observation) -> set[str]:
    """What a program did, by its text; a recorded box proves a crop."""
    found = {kind for kind, pattern in KINDS.items() if re.search(pattern, code)}
    found |= {"crop"} if any(seen.boxes) else set()
    return found or {"other" if seen.images else "compute"}


def use_of(t: Trajectory) -> Parts:
    """What one trajectory adds to the rates of tool use."""
    seen, whole = [s.observation for s in t.tool_steps], area((0, 0, *t.sample.image.size))
    calls, kinds = len(seen), [kinds_of(s.code or "", s.observation) for s in t.tool_steps]
    pictures = [source for o in seen for _, source in zip(o.images, o.sources)]
    bins = [sum(area(box) > e * whole for e in AREAS) for o in seen for box in o.boxes if box]
    said = re.sub(r"(?s)<code>.*?</code>", "", " ".join(s.text for s in t.steps))
    failed = [not (ran_well(o) or o.environment) for o in seen]
    lows = (0, *AREAS)
    return {
        **{f"{n} calls": (calls == n, 1) for n in range(5)},
        "5 or more calls": (calls > 4, 1),
        **{f"calls that {k}": (sum(k in found for found in kinds), calls)
           for k in (*KINDS, "compute", "other")},
        **{f"crops of {low:.0%} to {high:.0%}": (bins.count(i), len(bins))
           for i, (low, high) in enumerate(zip(lows, AREAS))},
        "failed calls": (sum(failed), calls),
        "repaired calls": (sum(bool(o.notes) for o in seen), calls),
        # After an error: did the next call run?
        "errors mended": (sum(a and not b for a, b in zip(failed, failed[1:])), sum(failed)),
        # A picture counts as verified if the sandbox itself found it in the image.
        "verified crops": (pictures.count("crop"), len(pictures)),
        # Claimed in words or in code that was never run, while no tool showed anything.
        "decorative crops": (bool(CLAIM.search(said)) and not pictures, 1),
    }  # fmt: skip


def tool_use(trajectories: Sequence[Trajectory], draws: int = 1000) -> dict[str, Rate]:
    return add_up([use_of(t) for t in trajectories], [t.sample.id for t in trajectories], draws)


# Lies (Table 6). Each takes a picture and its box in the sample's image, and returns what is shown
# instead; None: there is no such picture.


def identity(image: Image.Image, box: Box | None, sample: Sample, rng: Random) -> Image.Image:
    """Encoded once more, as a good JPEG: the noise floor, below which no change means anything."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=95, subsampling=0)
    return Image.open(buffer).convert("RGB")


def mask(image: Image.Image, box: Box | None, sample: Sample, rng: Random) -> Image.Image:
    """Grey all over; black if it was that grey already."""
    grey = Image.new("RGB", image.size, (128, 128, 128))
    return Image.new("RGB", image.size) if grey.tobytes() == image.tobytes() else grey


def noise(image: Image.Image, box: Box | None, sample: Sample, rng: Random) -> Image.Image:
    """Gaussian noise and nothing else."""
    values = np.random.default_rng(rng.getrandbits(32)).normal(128, 64, (*image.size[::-1], 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def elsewhere(
    image: Image.Image, box: Box | None, sample: Sample, rng: Random
) -> Image.Image | None:
    """Another part of the sample's image, of the crop's size and shown at the same scale."""
    place = box and place_beside(box, sample.image.size, rng)
    return place and sample.image.crop(place).resize(image.size)


def place_beside(box: Box, size: tuple[int, int], rng: Random) -> Box | None:
    """A box as large as this one, uniformly drawn among all that do not overlap it."""
    (x0, y0, x1, y1), (w, h) = box, (box[2] - box[0], box[3] - box[1])
    right, bottom = size[0] - w, size[1] - h  # the last places of an upper left corner
    middle = max(0, x0 - w + 1), min(x1 - 1, right)
    strips = [(0, x0 - w, 0, bottom), (x1, right, 0, bottom),
              (*middle, 0, y0 - h), (*middle, y1, bottom)]  # fmt: skip
    sizes = [max(0, b - a + 1) * max(0, d - c + 1) for a, b, c, d in strips]
    if not sum(sizes):
        return None
    a, b, c, d = rng.choices(strips, sizes)[0]
    x, y = rng.randint(a, b), rng.randint(c, d)
    return x, y, x + w, y + h


PICTURES = {"identity": identity, "mask": mask, "noise": noise, "random": elsewhere}
PERTURBATIONS = (*PICTURES, "empty")  # empty: no tool output at all, neither pictures nor text


def lie(name: str, seen: Observation, sample: Sample, rng: Random) -> Observation | None:
    """What is told instead of `seen`; None if this lie cannot be told of it. The boxes stay: they
    say what the policy asked for."""
    if name == "empty":
        return Observation()
    shown = [PICTURES[name](image, box, sample, rng) for image, box in zip(seen.images, seen.boxes)]
    return None if any(image is None for image in shown) else replace(seen, images=shown)


class Liar:
    """A sandbox whose code lives in the true world; only what it shows is changed."""

    def __init__(self, name: str, sample: Sample, rules: Rules, seed: int) -> None:
        self.name, self.sample, self.rng = name, sample, Random(f"{seed} {name} {sample.id}")
        self.sandbox = Sandbox(sample.image, rules.limits, rules.allow_weak_sandbox)
        self.close, self.asked, self.possible = self.sandbox.close, Counter(), True

    def run(self, code: str) -> Observation:
        seen = self.sandbox.run(code)
        self.asked[action(code, seen)] += 1
        return self.tell(seen)

    def tell(self, seen: Observation) -> Observation:
        told = lie(self.name, seen, self.sample, self.rng)
        self.possible &= told is not None  # if not, the trajectory is left out at the end
        return Observation() if told is None else told


def action(code: str, seen: Observation) -> tuple:
    """An action as the study compares it: the boxes it looked at, else its code."""
    return tuple(seen.boxes) if any(seen.boxes) else tuple(code.split())


def thoughts(steps: Sequence[Step]) -> list[str]:
    """The words of some turns without code, answer, tags, case and white space."""
    hidden = r"(?s)<code>.*?(?:</code>|$)|<answer>.*?(?:</answer>|$)|</?think>"
    return " ".join(re.sub(hidden, " ", step.text) for step in steps).casefold().split()


def right_answer(t: Trajectory) -> bool:
    return t.ended == "answered" and is_correct(t.answer, t.sample)


def up_to(policy: Policy, t: Trajectory, i: int) -> Trajectory:
    """A copy that ends with the i-th action, before anything of its outcome is told."""
    seen = [image for step in t.steps[:i] for image in step.observation.images]
    pictures = t.images[: t.prompt_images + len(seen)]
    pictures = pictures or policy.pictures([t.sample.image, *seen])  # read from a file: without
    steps, end = [replace(step) for step in t.steps[: i + 1]], t.steps[i].end
    steps[-1].observation = None
    return Trajectory(
        t.sample, t.ids[:end], t.acted[:end], pictures, steps, t.prompt, t.prompt_images
    )


def told_lies(
    policy: Policy, cases: list[tuple[Trajectory, int]], name: str, rules: Rules, seed: int
) -> list[tuple[Trajectory, Liar]]:
    """Each trajectory once more from its i-th action on, with every picture since then changed."""
    copies = [up_to(policy, t, i) for t, i in cases]
    liars = [Liar(name, t.sample, rules, seed) for t, _ in cases]

    def restore(liar: Liar, copy: Trajectory) -> None:  # later code may need earlier variables
        for step in copy.steps:
            liar.sandbox.run(step.code)

    try:
        with ThreadPoolExecutor(rules.sandboxes) as pool:
            list(pool.map(restore, liars, copies))
        live = {}
        for copy, liar, (t, i) in zip(copies, liars, cases):
            told = liar.tell(t.steps[i].observation)
            if listen(policy, copy, told, policy.pictures(told.images), rules):
                live[id(copy)] = copy, liar
        if live:
            sandboxes = {key: liar for key, (_, liar) in live.items()}
            play_on(policy, [copy for copy, _ in live.values()], sandboxes, rules)
    finally:
        for liar in liars:
            liar.close()
    return list(zip(copies, liars))


Study = dict[str, dict[str, dict[str, Rate]]]  # source of the questions -> lie -> rates


def perturb(
    policy: Policy, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], rules: Rules,
    names: Sequence[str] = PERTURBATIONS, seed: int = 0,
    right: Callable[[Trajectory], bool] = right_answer, draws: int = 1000,
) -> Study:  # fmt: skip
    """Table 6: search questions on which a tool showed a picture, played again greedily from the
    first picture on, under each lie. What changed, and what became of accuracy? Change alone is no
    proof of use: accuracy after a hit should fall, accuracy after a miss has little to lose.

    trajectories: greedy, under the same rules. Where a lie cannot be told (no room for another
    crop beside this one; no box) a trajectory is left out of that lie and counted: `possible`.
    """
    if unknown := set(names) - set(PERTURBATIONS):
        raise ValueError(
            f"expected perturbations out of {', '.join(PERTURBATIONS)}; got {', '.join(unknown)}"
        )
    if rules.temperature:
        raise ValueError("perturbations compare greedy plays: expected temperature 0, got "
                         f"{rules.temperature:g}")  # fmt: skip
    cases = []
    for t, reward in zip(trajectories, rewards, strict=True):
        shown = [i for i, s in enumerate(t.steps) if s.observation and s.observation.images]
        if shown and t.sample.kind == "search":
            cases.append((t, shown[0], finding(t, reward)))
    wave = max(1, min(64, rows_that_fit(policy, rules)))
    study: Study = {}
    units = defaultdict(list)
    for name in names:
        for k in range(0, len(cases), wave):
            batch = [(t, i) for t, i, _ in cases[k : k + wave]]
            played = told_lies(policy, batch, name, rules, seed)
            for (t, i, found), (copy, liar) in zip(cases[k : k + wave], played):
                effect = effect_of(t, i, found, copy, liar, right)
                for source in ("all", t.sample.source):
                    units[source, name].append((effect, found.cluster))
    for (source, name), effects in units.items():
        rates = add_up(*zip(*effects), draws, seed)
        study.setdefault(source, {})[name] = rates
    if len(study) == 2:
        del study["all"]
    return study


def effect_of(
    t: Trajectory, i: int, found: Finding, copy: Trajectory, liar: Liar, right: Callable
) -> Parts:
    later, told = t.steps[i + 1 :], copy.steps[i + 1 :]
    before = Counter(action(s.code, s.observation) for s in later if s.observation)
    ok, hit = liar.possible, found.has_verdict and faithful(found) > 0
    miss, now = found.has_verdict and not hit, right(copy)

    def of(value: bool, among: bool = True) -> tuple[float, float]:
        return (float(value), 1.0) if ok and among else (0.0, 0.0)

    return {
        "possible": (float(ok), 1.0),
        "thoughts": of(thoughts(later) != thoughts(told)),
        "actions": of(before != liar.asked),
        "answers": of((t.answer or "").casefold().split() != (copy.answer or "").casefold().split()),
        "accuracy": of(now), "clean": of(found.correct),
        "accuracy_hit": of(now, hit), "clean_hit": of(found.correct, hit),
        "accuracy_miss": of(now, miss), "clean_miss": of(found.correct, miss),
    }  # fmt: skip


def study_table(study: Study) -> str:
    """Table 6 in plain text: % that changed, then accuracy (and the same trajectories' own)."""
    head = ["", "n", "thoughts", "actions", "answers", "accuracy (clean)", "95 %",
            "after a hit (clean)", "after a miss (clean)"]  # fmt: skip
    rows = [head]
    for source, lies in study.items():
        rows.append([source, *[""] * 8])
        for name, r in lies.items():
            changed = [percent(r[key]) for key in ("thoughts", "actions", "answers")]
            pairs = [f"{percent(r['accuracy' + x])} ({percent(r['clean' + x])})"
                     for x in ("", "_hit", "_miss")]  # fmt: skip
            low, high = r["accuracy"].interval or (None, None)
            ends = "" if low is None else f"{100 * low:.1f} to {100 * high:.1f}"
            n = f"{r['possible'].numerator:g}/{r['possible'].denominator:g}"
            rows.append([f"  {name}", n, *changed, pairs[0], ends, *pairs[1:]])
    return columns(rows)


def percent(rate: Rate) -> str:
    return "-" if rate.value is None else f"{100 * rate.value:.1f}"


# Needed, and used (ours)


class NoTools:
    """A sandbox that refuses."""

    def run(self, code: str) -> Observation:
        return Observation(blocked=True, error="there are no tools")

    def close(self) -> None:
        pass


def answer_now(policy: Policy, t: Trajectory, i: int) -> Trajectory:
    """A copy in which the i-th turn keeps its thought, but must answer where its code began."""
    copy, words = up_to(policy, t, i), t.steps[i].text.split("<code>")[0]
    words += "</think>" * (words.count("<think>") > words.count("</think>")) + "<answer>"
    start = t.steps[i].start
    del copy.ids[start:], copy.acted[start:], copy.steps[i:]
    copy.observe(policy.encode(words, []))
    return copy


def without_tools(
    policy: Policy, trajectories: Sequence[Trajectory], rules: Rules
) -> list[Trajectory]:
    """The same policy and the same first thought, but where the first code would begin, it has to
    answer. Trajectories that used no tool are returned as they are."""
    wave = max(1, rows_that_fit(policy, rules))
    direct = [answer_now(policy, t, 0) if t.tool_steps else t for t in trajectories]
    cut = [d for d, t in zip(direct, trajectories) if d is not t]
    for k in range(0, len(cut), wave):
        batch = cut[k : k + wave]
        once = replace(rules, turns=1, temperature=0.0)
        play_on(policy, batch, {id(t): NoTools() for t in batch}, once)
    for t in cut:
        answer, tag, _ = t.steps[-1].text.partition("</answer>")
        t.answer, t.ended = (answer.strip(), "answered") if tag else (None, "length")
    return direct


def ablation(
    trajectories: Sequence[Trajectory], direct: Sequence[Trajectory],
    right: Callable[[Trajectory], bool] = right_answer, draws: int = 1000,
) -> dict[str, Rate]:  # fmt: skip
    """Is the tool worth it? The same questions with tools and without, and what each alone solves."""
    units = []
    for t, d in zip(trajectories, direct, strict=True):
        a, b = right(t), right(d)
        units.append({"with tools": (a, 1), "without tools": (b, 1), "only with": (a and not b, 1),
                      "only without": (b and not a, 1)})  # fmt: skip
    return add_up(units, [t.sample.id for t in trajectories], draws)


@torch.no_grad()
def evidence(
    policy: Policy, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], rules: Rules,
    crops: int = 4, margin: float = 0.1, seed: int = 0, draws: int = 1000,
) -> dict[str, Rate]:  # fmt: skip
    """What each call was worth, in nats of log pi(reference answer), the history held fixed:

    evidence value   after what the tool showed, less the mean after random crops of the same size
    decision value   after what the tool showed, less where the call began: had it answered there

    A call is used if the first exceeds `margin`, needed if the second does. The answer is put in
    the policy's mouth at once, without a further thought, which might give the crop's reading
    away. Calls without a picture, without a box for each or without room for others are left out.
    """
    units, clusters = [], []
    for t, reward in zip(trajectories, rewards, strict=True):
        rng, scores = Random(f"{seed} {t.sample.id}"), iter(reward.steps)
        for i, step in enumerate(t.steps):
            score = None if step.observation is None else next(scores)
            if step.observation is None or t.sample.kind != "search":
                continue
            seen = step.observation
            others = [lie("random", seen, t.sample, rng) for _ in range(crops)]
            measured = bool(seen.images) and None not in others
            gain = used = decision = 0.0
            if measured:
                real, *rest, direct = answer_log_probs(policy, t, i, [seen, *others], rules)
                gain, decision = real - fmean(rest), real - direct
            used, needed = gain > margin, decision > margin
            hit = measured and score is not None and score >= 1
            miss = measured and score is not None and score < 1
            units.append({
                "calls measured": (measured, 1),
                "evidence value": (gain, measured),
                "evidence value of hits": (gain * hit, hit),
                "evidence value of misses": (gain * miss, miss),
                "decision value": (decision, measured),
                "used": (used, measured),
                "needed": (needed, measured),
                "needed and used": (used and needed, measured),
            })  # fmt: skip
            clusters.append(t.sample.id)
    return add_up(units, clusters, draws, seed)


def answer_log_probs(
    policy: Policy, t: Trajectory, i: int, shown: list[Observation], rules: Rules
) -> list[float]:
    """log pi(reference answer): after the i-th action and each of `shown`, then without the call.
    One history, several futures: the row of grpo.py, so the score is the one stage 2 learns by."""
    reply = policy.encode(policy.neutralise(t.sample.answer) + "</answer>", []).ids
    base = up_to(policy, t, i)
    closed, branches = base.ids[-1] == policy.end_id, []
    for seen in shown:
        branch = begin(t.sample, Encoded(base.ids, base.images))
        pictures = policy.pictures(seen.images)
        branch.observe(policy.encode_observation(seen, pictures, closed, rules.max_log_chars))
        branch.observe(policy.encode("<answer>", []))
        branches.append(branch)
    branches.append(answer_now(policy, t, i))
    for branch in branches:
        branch.act(reply)
    indexed = list(enumerate(branches))
    rows = [*group_rows(policy, indexed[:-1], rules.max_length), group_row(policy, indexed[-1:])]
    logp, owner = log_probs(policy, rows)
    return torch.zeros(len(branches)).index_add(0, owner.cpu(), logp.float().cpu()).tolist()


def demo() -> str:
    """Five search questions about a square in one of 16 cells, and one that needs no search."""
    image, target = Image.new("RGB", (256, 256)), (76, 76, 120, 120)
    question = "Which texture is on the red square ?"
    search = Sample("demo", image, question, "checker", boxes=(target,))
    direct = Sample("demo", image, "What color is the object at b2 ?", "red", kind="neutral")
    right, wrong = crop(search, (64, 64, 128, 128)), crop(search, (128, 64, 192, 128))
    typo = Observation(error="NameError: 'imag' is not defined", red_lines=["sandbox_error"])
    cases = {
        "a wrong cell, then the right one": hand_made(search, wrong, right, answer="checker"),
        "the right cell, misread": hand_made(search, right, answer="diagonal"),
        "a wrong cell, a lucky answer": hand_made(search, wrong, answer="checker"),
        "a typo, then a lucky answer": hand_made(search, typo, answer="checker"),
        "a guess": hand_made(search, answer="diagonal"),
        "no search needed": hand_made(direct, answer="red"),
    }
    rewards = tapo(list(cases.values()), BoxJudge(), Weights(), Random(0))
    findings = [finding(t, r) for t, r in zip(cases.values(), rewards)]
    lines = [
        f"{name:34}{'correct' if f.correct else 'wrong':9}step scores {list(r.steps)}"
        for name, f, r in zip(cases, findings, rewards)
    ]
    lines += ["", *(f"{name:34}{rate}" for name, rate in count(findings).items()), ""]
    lines += [f"{answer:34}{row}" for answer, row in cross_table(findings).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(demo())
