"""
faithfulness.py: had the policy looked in the right place? Counted, not felt.

Concept     A right answer may be luck. Each search question falls into one of three classes:
            faithful    a tool showed the evidence (a step score of 1: 0.5 is not enough)
            unfaithful  tools showed pictures, and none of them the evidence
            no tool     no picture was shown at all
Paper       CodeV, arXiv:2511.19661, Fig. 2 (rates among right answers) and Table 5 (faithful and
            right, over all questions). It leaves denominators and several crops open: both
            denominators stand here, and four ways to treat several crops.
In          Trajectories and their Rewards with step scores (rewards.tapo), computed once
Out         rates that keep their numerators and denominators
Left out    confidence intervals, agreement of judges, perturbations
Read next   evaluate.py (which plays the questions and prints the rates)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from PIL import Image

from data import Sample
from rewards import BoxJudge, Reward, Weights, area, crop, hand_made, ran_well, recall, tapo
from rollout import Trajectory
from sandbox import Observation


@dataclass(frozen=True)
class Rate:
    numerator: float
    denominator: float

    @property
    def value(self) -> float | None:
        """None, not nan, where there was nothing to count."""
        return self.numerator / self.denominator if self.denominator else None

    def __str__(self) -> str:
        share = "none" if self.value is None else f"{self.value:.3f}"
        return f"{share} ({self.numerator:g}/{self.denominator:g})"


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
    recalls: tuple[float, ...]  # of each target, in the crop that shows most of it; () if no target

    @property
    def hits(self) -> tuple[float, ...]:
        return tuple(float(score is not None and score >= 1) for score in self.scores)

    @property
    def has_verdict(self) -> bool:
        return None not in self.scores


def finding(trajectory: Trajectory, reward: Reward) -> Finding:
    """A step with a red line scores -1 and is no hit, even if the evidence was in its picture."""
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
    return Finding(
        search=sample.kind == "search",
        correct=reward.answer > 0,
        scores=tuple(score for o, score in zip(seen, reward.steps) if o.images),
        calls=len(steps),
        failed=sum(not (ran_well(o) or o.environment) for o in seen),
        areas=tuple(area(box) / whole for box in crops),
        recalls=tuple(max((recall(c, t) for c in proper), default=0.0) for t in sample.boxes),
    )


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


def count(findings: Iterable[Finding], aggregate: str = "any") -> dict[str, Rate]:
    """Every rate with its numerator and denominator.

    A trajectory in which the judge had no verdict leaves the rates of faithfulness, not the rest.
    """
    findings = list(findings)
    search = [f for f in findings if f.search]
    direct = [f for f in findings if not f.search]
    judged = [f for f in search if f.has_verdict]
    right = [f for f in judged if f.correct]
    with_boxes = [f for f in search if f.recalls]
    areas = [share for f in search for share in f.areas]

    def looked_right(among: list[Finding]) -> float:
        return sum(faithful(f, aggregate) for f in among)

    def looked_wrong(among: list[Finding]) -> float:
        return sum(1 - faithful(f, aggregate) for f in among if f.scores)

    def did_not_look(among: list[Finding]) -> int:
        return sum(not f.scores for f in among)

    def box_hits(of: Callable, least: float) -> Rate:
        return Rate(sum(of(f.recalls) >= least for f in with_boxes), len(with_boxes))

    return {
        "accuracy": Rate(sum(f.correct for f in findings), len(findings)),
        "search_accuracy": Rate(sum(f.correct for f in search), len(search)),
        "direct_accuracy": Rate(sum(f.correct for f in direct), len(direct)),
        "tool_use": Rate(sum(f.calls > 0 for f in search), len(search)),
        # Unconditional: these three partition the search questions.
        "faithful": Rate(looked_right(judged), len(judged)),
        "unfaithful": Rate(looked_wrong(judged), len(judged)),
        "no_tool": Rate(did_not_look(judged), len(judged)),
        # Table 5: right, and for the right reason, over all questions.
        "faithful_and_correct": Rate(looked_right(right), len(judged)),
        # Fig. 2: among right answers; and among those that came with a picture.
        "faithful_given_correct": Rate(looked_right(right), len(right)),
        "unfaithful_given_correct": Rate(looked_wrong(right), len(right)),
        "no_tool_given_correct": Rate(did_not_look(right), len(right)),
        "faithful_given_correct_and_shown": Rate(
            looked_right(right), len(right) - did_not_look(right)
        ),
        # "57 % of tool calls" may mean this one.
        "faithful_per_call": Rate(
            sum(sum(f.hits) for f in judged), sum(len(f.hits) for f in judged)
        ),
        "accuracy_given_faithful": Rate(looked_right(right), looked_right(judged)),
        # Against labelled boxes, whatever a judge says: any target seen, or each in some crop.
        "box_any_50": box_hits(max, 0.5),
        "box_all_50": box_hits(min, 0.5),
        "box_any_80": box_hits(max, 0.8),
        "box_all_80": box_hits(min, 0.8),
        "crop_area": Rate(sum(areas), len(areas)),
        "calls": Rate(sum(f.calls for f in findings), len(findings)),
        "error_rate": Rate(sum(f.failed > 0 for f in findings), len(findings)),
        "no_verdict": Rate(len(search) - len(judged), len(search)),
    }


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
