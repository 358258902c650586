"""
faithfulness.py: had the policy looked in the right place, and did it matter? Counted, not felt.

Concept     A right answer may be luck. Each search question falls into one of three classes:
            faithful    a tool showed the evidence (a step score of 1: 0.5 is not enough)
            unfaithful  tools showed pictures, and none of them the evidence
            no tool     no picture was shown at all
            To have looked is not yet to have used it. So we also lie: we change what the tools
            show, and see whether thoughts, actions and answers follow.
Paper       CodeV, arXiv:2511.19661, Fig. 2 (rates among right answers), Table 5 (faithful and
            right, over all questions), Table 6 (lies), Appendix 12 (use of tools). It does not say
            what each rate is a share of, nor how several crops count: rates are given over all and
            over right answers, several crops in four ways. Ours: agreement of judges, the identity
            lie, accuracy under lies, ablation, evidence.
In          Trajectories and their Rewards with step scores (rewards.tapo), computed once
Out         rates with numerator, denominator and bootstrap interval, and tables of them
Left out    human judgement; which part of a crop was used; the origin of a picture without a box
Read next   evaluate.py (which plays the questions and prints the tables)

    python faithfulness.py                       the rates of six hand-made trajectories
    python faithfulness.py TRAJECTORIES.jsonl    of recorded ones: evaluate.py's, or any agent's

Any agent's file has one JSON object a line. Boxes are [x0, y0, x1, y1] in pixels of the image, and
are cut at its border; paths are relative to the file.

    question, image (a file), answer (what the agent answered, or null), correct (true or false)
    steps      one object for each tool call: what it showed, as box (a part of the image), image (a
               file), or neither. It may have text (what was said before), code, error, and score (a
               judge's, 0 to 1, or null); without a score the box is compared with the targets
    and, where they are known: targets (boxes of the evidence), kind ("search" or "neutral"), text
    (what was said at the end), id (plays of one question share it: they are not independent)
"""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from types import SimpleNamespace

import numpy as np
from PIL import Image

from data import Sample
from kit.answers import is_correct
from kit.boxes import Box, area, recall
from kit.qwen import Policy
from rewards import BoxJudge, Lambdas, Reward, crop, hand_made, ran_well, tapo
from rollout import Rules, Trajectory, Turn, listen, play_on, rows_that_fit
from sandbox import Observation, Sandbox

# Rates

DRAWS = 1000  # bootstrap samples behind an interval
Part = tuple[float, float]  # what one unit adds to a rate's numerator, and to its denominator
Parts = dict[str, Part]


@dataclass(frozen=True)
class Rate:
    numerator: float
    denominator: float
    interval: tuple[float, float] | None = None  # 95 %

    @property
    def value(self) -> float | None:
        """None, not nan, where there was nothing to count."""
        return self.numerator / self.denominator if self.denominator else None

    def __str__(self) -> str:
        share = "none" if self.value is None else f"{self.value:.3f}"
        ends = "[{:.3f}, {:.3f}] ".format(*self.interval) if self.interval else ""
        return f"{share} {ends}({self.numerator:g}/{self.denominator:g})"


def one(value: float, among: bool = True) -> Part:
    """The Part of one value; nothing, if it is not among those that the rate is about."""
    return (float(value), 1.0) if among else (0.0, 0.0)


def each(values: Sequence[float], among: bool = True) -> Part:
    return (sum(values), len(values)) if among else (0.0, 0.0)


def add_up(pairs: Iterable[tuple[Parts, str]], draws: int = 0, seed: int = 0) -> dict[str, Rate]:
    """Sum over units (samples, or calls), each with its cluster; {} if there are none.

    draws > 0: with percentile bootstrap intervals. Whole clusters are drawn with replacement, since
    plays of one question are not independent evidence; a unit whose cluster is "" stands alone.
    Draws in which a rate has no denominator do not count for it. A rate that only one cluster
    contributes to has no interval; one that is 0 or 1 in all of them has an interval of width 0."""
    pairs = [(unit, key or i) for i, (unit, key) in enumerate(pairs)]
    if not pairs:
        return {}
    units, keys = zip(*pairs)
    amounts = np.array([list(unit.values()) for unit in units], float)  # [units, rates, 2]
    place = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    grouped = np.zeros((len(place), *amounts.shape[1:]))  # [clusters, rates, 2]
    np.add.at(grouped, [place[key] for key in keys], amounts)
    chance = np.full(len(place), 1 / len(place))
    times = np.random.default_rng(seed).multinomial(len(place), chance, draws)  # [draws, clusters]
    drawn = np.tensordot(times, grouped, 1)  # [draws, rates, 2]
    rates = {}
    for r, (name, sums) in enumerate(zip(units[0], amounts.sum(0).tolist())):
        above, below = drawn[drawn[:, r, 1] != 0, r].T  # numerators, denominators of the draws
        known = len(below) and np.count_nonzero(grouped[:, r, 1]) > 1
        ends = np.percentile(above / below, (2.5, 97.5)).tolist() if known else None
        rates[name] = Rate(*sums, ends and tuple(ends))
    return rates


def grid(rows: Iterable[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> str:
    """Rows of cells as plain text. `align` is for all columns but the first, which stands left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def listing(rates: dict[str, Rate]) -> str:
    return grid((name, str(rate)) for name, rate in rates.items())


# One trajectory


@dataclass(frozen=True)
class Finding:
    """What is counted of one trajectory."""

    search: bool  # False: a question that needs no visual search
    correct: bool | None  # None: no verdict on an open answer
    scores: tuple[float | None, ...]  # one for each step that showed a picture; None: no verdict
    calls: int  # <code> steps that were run
    failed: int  # calls that failed by the policy's own fault
    areas: tuple[float, ...]  # of each crop shown, as a share of the image
    recalls: tuple[float, ...]  # share of each target in view, in all proper crops together
    focuses: tuple[float, ...] = ()  # |target| / |crop| of each proper crop with half a target
    cluster: str = ""  # see question_of

    @property
    def hits(self) -> tuple[float, ...]:
        return tuple(float(score is not None and score >= 1) for score in self.scores)

    @property
    def has_verdict(self) -> bool:
        return None not in self.scores


def finding(trajectory: Trajectory, reward: Reward) -> Finding:
    """A step with a red line scores -1 and is no hit, even if the evidence was in its picture."""
    sample, steps = trajectory.sample, trajectory.tool_turns
    if len(reward.scores) != len(steps):
        raise ValueError(
            f"sample {sample.id}: expected a score for each of {len(steps)} tool steps, got "
            f"{len(reward.scores)}; rate with rewards.tapo, whatever the policy was trained with"
        )
    seen = [step.observation for step in steps]
    whole = area((0, 0, *sample.image.size))
    crops = [box for observation in seen for box in observation.boxes if box]
    # (Nearly) the whole image shows every target, and is no look at any of them.
    proper = [box for box in crops if area(box) <= BoxJudge.max_area * whole]
    focuses = [[area(t) / area(c) for t in sample.boxes if recall(c, t) >= 0.5] for c in proper]
    return Finding(
        search=sample.kind == "search",
        correct=None if reward.answer is None else reward.answer > 0,
        scores=tuple(score for o, score in zip(seen, reward.scores) if o.images),
        calls=len(steps),
        failed=sum(map(failed, seen)),
        areas=tuple(area(box) / whole for box in crops),
        recalls=tuple(covered(target, proper) for target in sample.boxes),
        focuses=tuple(max(values) for values in focuses if values),
        cluster=question_of(sample),
    )


def question_of(sample: Sample) -> str:
    """What the bootstrap draws as one: all plays of a question. HR-Bench has each question in four
    rows (cycles) with its options in another order: its source is data set/part/cycle."""
    same = f"{sample.question} {sorted(sample.options)}"
    return same if re.fullmatch("[^/]*/[^/]*/[^/]+", sample.source) else sample.id


def failed(seen: Observation) -> bool:
    """By the policy's own fault, not the sandbox's."""
    return not (ran_well(seen) or seen.environment)


def covered(target: Box, crops: Iterable[Box]) -> float:
    """|target ∩ (the union of the crops)| / |target|, pixel by pixel."""
    x0, y0, x1, y1 = target
    seen = np.zeros((y1 - y0, x1 - x0), bool)
    for u0, v0, u1, v1 in crops:
        seen[max(v0 - y0, 0) : max(v1 - y0, 0), max(u0 - x0, 0) : max(u1 - x0, 0)] = True
    return float(seen.mean())


# Many trajectories

# When is a trajectory with several pictures faithful? Each maps its hits (0 or 1) to a number.
AGGREGATES = {"any": max, "all": min, "last": lambda hits: hits[-1], "mean": fmean}


def faithful(finding: Finding, aggregate: str = "any") -> float:
    """1 faithful, 0 not (between them only under "mean")."""
    if aggregate not in AGGREGATES:
        raise ValueError(f"expected aggregate out of {', '.join(AGGREGATES)}; got {aggregate!r}")
    return AGGREGATES[aggregate](finding.hits) if finding.hits else 0.0


def parts(f: Finding, aggregate: str = "any") -> Parts:
    """What one trajectory adds to each rate. Without a verdict on a step it counts in no rate of
    faithfulness, without a verdict on its answer in none of correctness."""
    judged, looked, boxed = f.search and f.has_verdict, bool(f.scores), f.search and bool(f.recalls)
    graded, right, good = f.correct is not None, judged and bool(f.correct), faithful(f, aggregate)
    bad = looked - good
    return {
        "accuracy": one(f.correct, graded), "search_accuracy": one(f.correct, graded and f.search),
        "direct_accuracy": one(f.correct, graded and not f.search),
        "tool_use": one(f.calls > 0, f.search),
        # Unconditional: these three partition the search questions.
        "faithful": one(good, judged), "unfaithful": one(bad, judged),
        "no_tool": one(not looked, judged),
        # Table 5: right, and for the right reason, over all search questions.
        "faithful_and_correct": one(good * right, judged and graded),
        # Fig. 2: among right answers; and among those that came with a picture.
        "faithful_given_correct": one(good, right), "unfaithful_given_correct": one(bad, right),
        "no_tool_given_correct": one(not looked, right),
        "faithful_given_correct_and_shown": one(good, right and looked),
        "faithful_per_call": each(f.hits, judged),  # per picture: the "57 % of tool calls"?
        "accuracy_given_faithful": (good * right, good * (judged and graded)),
        # Against labelled boxes, whatever a judge says: 50 or 80 % of any, or all targets in view.
        **{f"box_{some}_{percent}": one(boxed and of(f.recalls) >= percent / 100, boxed)
           for percent in (50, 80) for some, of in (("any", max), ("all", min))},
        "focus": each(f.focuses, boxed), "crop_area": each(f.areas, f.search),
        "calls": one(f.calls), "error_rate": one(f.failed > 0),
        "no_verdict": one(not f.has_verdict, f.search),
    }  # fmt: skip


NOTHING = dict.fromkeys(parts(Finding(False, False, (), 0, 0, (), ())), (0.0, 0.0))


def count(findings: Iterable[Finding], aggregate: str = "any", draws: int = 0) -> dict[str, Rate]:
    """Every rate with its numerator and denominator, and, if draws > 0, its interval."""
    pairs = [(parts(f, aggregate), f.cluster) for f in findings]
    return add_up(pairs or [(NOTHING, "")], draws)


def cross_table(counts: dict[str, Rate]) -> str:
    """correct x faithful, among search questions with both verdicts. "not" includes no tool."""
    both, n = counts["faithful_and_correct"].numerator, counts["faithful_and_correct"].denominator
    right, good = (counts[rate].denominator
                   for rate in ("faithful_given_correct", "accuracy_given_faithful"))  # fmt: skip
    rows = ("correct", both, right - both), ("wrong", good - both, n - right - good + both)
    texts = ((name, *(f"{abs(round(cell, 6)):g}" for cell in cells)) for name, *cells in rows)
    return grid([("", "faithful", "not"), *texts])


def rates(trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> dict[str, float | None]:
    """The values of `count`, and n, the number of trajectories."""
    findings = [finding(t, r) for t, r in zip(trajectories, rewards, strict=True)]
    return {"n": len(findings)} | {name: rate.value for name, rate in count(findings).items()}


# How tools were used (Appendix 12)

KINDS = {  # told by a program's text; for "crop", a box that the sandbox recorded is enough
    "crop": r"\.crop\(|\[[^]\n]*:[^]\n]*,[^]\n]*:",
    "rotate": r"rotate|transpose|flip|ROTATE_",
    "contrast": r"ImageEnhance|contrast|equalize|CLAHE|\.point\(|convertScaleAbs|cvtColor|[Ss]harp",
    "draw": r"ImageDraw|\.(?:rectangle|circle|line|polygon|putText|ellipse|plot|scatter|bar)\(",
}
AREAS = (0, 0.01, 0.05, 0.25, 0.5, 0.9, 1)  # shares of the image, between which crops are counted
CLAIM = re.compile(  # words that claim a look, taken or about to be taken
    r"\b(?:cropp(?:ed|ing)|zoom(?:ed|ing) in|(?:the|this|my) (?:crop|close-up|zoom\w*))\b"
    r"|\bi(?:'ll| will)? (?:now )?(?:crop|zoom)\b|\.crop\(", re.IGNORECASE)  # fmt: skip


def kinds_of(step: Turn) -> set[str]:
    found = {kind for kind, pattern in KINDS.items() if re.search(pattern, step.code)}
    found |= {"crop"} if any(step.observation.boxes) else set()
    return found or {"other" if step.observation.images else "compute"}


def use_of(t: Trajectory) -> Parts:
    steps, whole = t.tool_turns, area((0, 0, *t.sample.image.size))
    seen, n, kinds = [step.observation for step in steps], len(steps), [*map(kinds_of, steps)]
    sources, bad = [source for o in seen for source in o.sources], [*map(failed, seen)]
    areas = [area(box) / whole for o in seen for box in o.boxes if box]
    words = " ".join(re.sub(r"(?s)<code>.*?</code>", "", step.text) for step in t.turns)
    return {
        **{f"{k} calls": one(n == k) for k in range(5)},
        "5 or more calls": one(n > 4),
        **{f"{k} (of calls)": each([k in own for own in kinds])
           for k in (*KINDS, "compute", "other")},
        **{f"crops of {low:.0%} to {high:.0%}": each([low < a <= high for a in areas])
           for low, high in zip(AREAS, AREAS[1:])},
        "failed calls": each(bad),
        "failed calls after which one ran": (sum(a > b for a, b in zip(bad, bad[1:])), sum(bad)),
        "repaired calls": each([bool(o.notes) for o in seen]),
        # Verified: the sandbox itself recorded the crop. Decorative: a look was claimed, in words
        # or in code that never ran, while no tool showed anything.
        "verified crops (of pictures)": each([source == "crop" for source in sources]),
        "decorative crops": one(bool(CLAIM.search(words)) and not sources),
    }  # fmt: skip


def tool_use(trajectories: Iterable[Trajectory]) -> dict[str, Rate]:
    return add_up(((use_of(t), question_of(t.sample)) for t in trajectories), DRAWS)


# Lies (Table 6)

PERTURBATIONS = ("identity", "mask", "noise", "random", "empty")


def check_lies(names: Iterable[str], temperature: float) -> None:
    if unknown := set(names) - set(PERTURBATIONS):
        known = ", ".join(PERTURBATIONS)
        raise ValueError(f"--perturb is all, or some of {known}; got {', '.join(sorted(unknown))}")
    if temperature:
        raise ValueError(f"--perturb compares greedy plays, got temperature {temperature:g}: drop "
                         "--avg-at and --temperature")  # fmt: skip


def lie(name: str, seen: Observation, image: Image.Image, rng: Random) -> Observation:
    """What is told instead of `seen`, which showed parts of `image`. The boxes stay: they say what
    the code asked for. empty: no tool output at all, neither pictures nor text. A lie that cannot
    be told is marked as a failure of ours (`environment`): the trajectory then leaves the study."""
    if name == "empty":
        return replace(seen, text="", images=[], error=None, notes=[])
    shown = [other(name, p, box, image, rng) for p, box in zip(seen.images, seen.boxes)]
    if any(picture is None for picture in shown):
        return replace(seen, images=[], environment="there is no other crop of this size")
    return replace(seen, images=shown)


def other(
    name: str, picture: Image.Image, box: Box | None, image: Image.Image, rng: Random
) -> Image.Image | None:
    """The picture that is shown instead of this one, in its size; None: there is none to show."""
    if name == "identity":  # encoded once more, as a good JPEG: what changes then is noise
        picture.convert("RGB").save(buffer := io.BytesIO(), "JPEG", quality=95, subsampling=0)
        return Image.open(buffer).convert("RGB")
    if name == "mask":  # grey all over; black, if it was grey all over
        grey = Image.new("RGB", picture.size, (128, 128, 128))
        same = picture.convert("RGB").tobytes() == grey.tobytes()
        return Image.new("RGB", picture.size) if same else grey
    if name == "noise":  # Gaussian, with nothing of the picture in it
        dice, shape = np.random.default_rng(rng.getrandbits(32)), (*picture.size[::-1], 3)
        return Image.fromarray(dice.normal(128, 64, shape).clip(0, 255).astype(np.uint8))
    place = box and place_beside(box, image.size, rng)  # random: another part, at the same scale
    return place and image.crop(place).resize(picture.size)


def place_beside(box: Box, size: tuple[int, int], rng: Random) -> Box | None:
    """A box as large as this one, uniformly drawn among all that do not overlap it."""
    (x0, y0, x1, y1), (w, h) = box, (box[2] - box[0], box[3] - box[1])
    right, bottom = size[0] - w, size[1] - h  # the last places of a box's upper left corner
    middle = max(0, x0 - w + 1), min(x1 - 1, right)
    strips = [(0, x0 - w, 0, bottom), (x1, right, 0, bottom),  # left of the box, right of it,
              (*middle, 0, y0 - h), (*middle, y1, bottom)]  # above, below  # fmt: skip
    sizes = [max(0, b - a + 1) * max(0, d - c + 1) for a, b, c, d in strips]
    if not sum(sizes):
        return None
    a, b, c, d = rng.choices(strips, sizes)[0]
    x, y = rng.randint(a, b), rng.randint(c, d)
    return x, y, x + w, y + h


def up_to(policy: Policy, t: Trajectory, i: int) -> Trajectory:
    """A copy that ends with the i-th turn of the policy, before the sandbox has replied to it."""
    seen, end = [p for step in t.turns[:i] for p in step.observation.images], t.turns[i].end
    pictures = t.images[: t.prompt_images + len(seen)]
    pictures = pictures or policy.pictures([t.sample.image, *seen])  # one from a file has none
    turns = [*t.turns[:i], replace(t.turns[i], observation=None)]
    return replace(t, ids=t.ids[:end], acted=t.acted[:end], images=pictures, turns=turns,
                   answer=None, ended="")  # fmt: skip


def retell(
    policy: Policy, cases: list[tuple[Trajectory, int]], name: str, rules: Rules, seed: int
) -> list[Trajectory]:
    """Each trajectory played on after its i-th turn, with a lie for all that tools show then."""
    copies, live = [up_to(policy, *case) for case in cases], {}
    confine = rules.limits, rules.allow_weak_sandbox

    def restore(sandbox: Sandbox, copy: Trajectory) -> None:  # later code may need its variables
        for step in copy.turns:
            sandbox.run(step.code)

    def liar(sandbox: Sandbox, image: Image.Image, rng: Random) -> SimpleNamespace:
        def run(code: str) -> Observation:
            return lie(name, sandbox.run(code), image, rng)

        return SimpleNamespace(run=run, close=sandbox.close)

    with ExitStack() as stack, ThreadPoolExecutor(rules.sandboxes) as pool:
        boxes = [stack.enter_context(Sandbox(t.sample.image, *confine)) for t in copies]
        list(pool.map(restore, boxes, copies))
        for copy, sandbox, (t, i) in zip(copies, boxes, cases):
            image, rng = t.sample.image, Random(f"{seed} {name} {t.sample.id}")
            told = lie(name, t.turns[i].observation, image, rng)
            if listen(policy, copy, told, policy.pictures(told.images), rules):
                live[id(copy)] = liar(sandbox, image, rng)
        if live:
            play_on(policy, [copy for copy in copies if id(copy) in live], live, rules)
    return copies


def thoughts(steps: Sequence[Turn]) -> list[str]:
    """The words of some turns in lower case, without code, answer and tags."""
    hidden = r"(?s)<code>.*?(?:</code>|$)|<answer>.*?(?:</answer>|$)|</?think>"
    return " ".join(re.sub(hidden, " ", step.text) for step in steps).casefold().split()


def actions(steps: Sequence[Turn]) -> Counter:
    """The boxes that code looked at, or the code itself if it is no crop: a multiset."""
    seen = ((step.observation.boxes, step.code.split()) for step in steps if step.observation)
    return Counter(str(boxes if any(boxes) else words) for boxes, words in seen)


def is_right(t: Trajectory) -> bool:
    return t.ended == "answered" and is_correct(t.answer, t.sample.answer, t.sample.options)


def perturb(
    policy: Policy, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], rules: Rules,
    names: Sequence[str] = PERTURBATIONS, seed: int = 0,
) -> dict[str, dict[str, dict[str, Rate]]]:  # fmt: skip
    """Table 6: the search questions on which a tool showed a picture, played again greedily from
    the first picture on, under each lie. {source of the questions: {lie: {measure: Rate}}}.

    How many change their later thoughts, actions and answer, and what becomes of accuracy, which
    is the test: a strange picture changes much even if the real one was not used. Where the crop
    was a hit and the answer cannot be guessed, accuracy should fall; a miss has little to lose.

    trajectories: greedy ones, under the same rules. Where a lie cannot be told (no box, or no room
    beside it), the trajectory counts in no measure of that lie: see `possible`.
    """
    check_lies(names, rules.temperature)
    cases, units = [], defaultdict(lambda: defaultdict(list))
    for k, (t, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        shown = [i for i, s in enumerate(t.turns) if s.observation and s.observation.images]
        if shown and t.sample.kind == "search":
            cases.append((k, shown[0], finding(t, reward)))
    for wave in waves(policy, cases, rules):
        played = [(trajectories[k], i) for k, i, _ in wave]  # read now: images may be large
        for name in names:
            lied_to = retell(policy, played, name, rules, seed)
            for (t, i), copy, (_, _, found) in zip(played, lied_to, wave):
                unit = (changes(t, copy, i, found), found.cluster)
                for source in ("all", "/".join(t.sample.source.split("/")[:2])):
                    units[source][name].append(unit)
    if len(units) == 2:  # one source: "all" would say the same
        del units["all"]
    return {source: {name: add_up(pairs, DRAWS, seed) for name, pairs in lies.items()}
            for source, lies in units.items()}  # fmt: skip


def waves(policy: Policy, cases: Sequence, rules: Rules) -> Iterator[Sequence]:
    size = max(1, min(64, rows_that_fit(policy, rules)))
    return (cases[k : k + size] for k in range(0, len(cases), size))


def changes(t: Trajectory, copy: Trajectory, i: int, found: Finding) -> Parts:
    before, after = t.turns[i + 1 :], copy.turns[i + 1 :]
    possible = not any(s.observation and s.observation.environment for s in copy.turns[i:])
    graded = possible and found.correct is not None
    hit, miss = (graded and found.has_verdict and faithful(found) == x for x in (1, 0))
    clean, words = bool(found.correct), [(x.answer or "").casefold().split() for x in (t, copy)]
    right = is_right(copy)
    return {
        "possible": one(possible),
        "thoughts": one(thoughts(before) != thoughts(after), possible),
        "actions": one(actions(before) != actions(after), possible),
        "answers": one(words[0] != words[1], possible),
        "accuracy": one(right, graded), "clean": one(clean, graded),
        "accuracy_hit": one(right, hit), "clean_hit": one(clean, hit),
        "accuracy_miss": one(right, miss), "clean_miss": one(clean, miss),
    }  # fmt: skip


def study_table(study: dict[str, dict[str, dict[str, Rate]]]) -> str:
    """Table 6 as plain text, in %. possible: of how many trajectories the lie could be told."""
    if not study:
        return "no tool showed a picture on any search question: there is nothing to perturb"

    def cell(name: str, rate: Rate) -> str:
        ends = rate.interval if name == "accuracy" else None
        shares = [f"{100 * x:.1f}" for x in (rate.value, *(ends or ())) if x is not None]
        return "{} [{}, {}]".format(*shares) if ends else "".join(shares) or "-"

    rows = [("", "possible", "thoughts", "actions", "answers", "accuracy", "clean",
             "after a hit", "clean", "after a miss", "clean")]  # fmt: skip
    for source, lies in study.items():
        rows.append((source, *[""] * 10))
        for name, measures in lies.items():
            (_, n), *others = measures.items()
            rows.append((f"  {name}", f"{n.numerator:g}/{n.denominator:g}",
                         *(cell(*other) for other in others)))  # fmt: skip
    return grid(rows)
HALF = BoxJudge(visible=0.5, focus=(0.0, 0.0))  # half of a target in view, however large the crop


def demo() -> str:
    """Five search questions about a square in one of 16 cells, and one that needs no search."""
    image, boxes = Image.new("RGB", (256, 256)), ((76, 76, 120, 120),)
    search = Sample("", image, "Which texture is on the red square ?", "checker", boxes=boxes)
    direct = Sample("", image, "What color is the object at b2 ?", "red", kind="neutral")
    right, wrong = crop(search, (64, 64, 128, 128)), crop(search, (128, 64, 192, 128))
    typo = Observation(error="NameError: 'imag' is not defined", red_lines=["sandbox_error"])
    cases = {
        "a wrong cell, then the right one": (search, "checker", wrong, right),
        "the right cell, misread": (search, "diagonal", right),
        "a wrong cell, a lucky answer": (search, "checker", wrong),
        "a typo, then a lucky answer": (search, "checker", typo),
        "a guess": (search, "diagonal"),
        "no search needed": (direct, "red"),
    }
    plays = [hand_made(replace(sample, id=name), *seen, answer=answer)
             for name, (sample, answer, *seen) in cases.items()]  # fmt: skip
    rewards = tapo(plays, BoxJudge(), Lambdas(), Random(0))
    findings = list(map(finding, plays, rewards))
    lines = [(name, "correct" if f.correct else "wrong", f"step scores {list(r.scores)}")
             for name, f, r in zip(cases, findings, rewards)]  # fmt: skip
    counts = count(findings, draws=DRAWS)
    return "\n\n".join([grid(lines), listing(counts), cross_table(counts)])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(demo())
    else:  # the trajectories of any agent
        importlib.import_module("beyond.agents").main()
