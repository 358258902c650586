"""
judges.py: how good must a judge be? TAPO with judges that err, and TAPO without its parts.

Concept     The toy's judge knows where the target is; a model that judges does not. So we let an
            exact judge err, at random or with a system, and look at what the policy learns. And we
            take TAPO's parts away one at a time: what of the effect is the judge's?
Paper       nothing: CodeV compares two judges by what they teach, but gives no rates of error
In          the folder of the study. An error has a name: `--reward beyond.judges.crop_25_50`
Out         judges.json, judges.png, and tables in Markdown
Left out    judges that err like a model: here they err by a hash, or by a rule that we made up
Read next   study.py (which trains)
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random


from beyond.study import (
    CONTROLS,
    Job,
    control_jobs,
    known,
)
from data import CELL
from kit.boxes import recall, share
from rewards import BoxJudge, Group, GroupReward, Judge, JudgeRequest, Labels, Lambdas, Reward
from rewards import tapo, tool_reward, turn_scores, weighted
from rollout import Trajectory

# Judges that err

COLOR, CORNER = "red", (0, 0, CELL, CELL)
KINDS = {
    "crop": "at random, always the same of one crop",
    "call": "at random, anew at each call",
    "size": "lenient with size: any crop with the target in view is useful",
    "color": f"blind to one colour: nothing about {COLOR} is useful",
    "corner": "in love with one corner: any crop that holds the cell a1 is useful",
}


@dataclass
class NoisyJudge:
    """A judge that errs. Of what `judge` calls useful it misses the share `miss`; of what that
    calls useless it credits the share `alarm`. Which ones, a hash of what was shown decides, so
    that asking again does not help; by `kind` "call", `rng` decides, anew each time. The other
    kinds of KINDS err by a rule, and have no rates."""

    judge: Judge
    miss: float = 0.0
    alarm: float = 0.0
    kind: str = "crop"
    rng: Random | None = None

    def __call__(self, request: JudgeRequest, labels: Labels) -> float | None:
        score = self.judge(request, labels)
        if score is None or not request.images:
            return score
        crops = [b for b in request.boxes if b and share(b, request.size) <= BoxJudge.max_area]
        if self.kind == "size":
            seen = any(recall(crop, target) >= 0.9 for crop in crops for target in labels.targets)
            return float(seen)
        if self.kind == "color":
            return 0.0 if COLOR in request.question.split() else score
        if self.kind == "corner":
            return 1.0 if any(recall(crop, CORNER) == 1 for crop in crops) else score
        draw = self.rng.random() if self.kind == "call" else self.drawn(request)
        if draw >= (self.miss if score else self.alarm):
            return score
        return 0.0 if score else 1.0

    @staticmethod
    def drawn(request: JudgeRequest) -> float:
        """A number from 0 to 1 that what was shown decides."""
        shown = hashlib.sha256(f"{request.question} {request.boxes}".encode())
        for image in request.images:
            shown.update(image.tobytes())
        return int.from_bytes(shown.digest()[:6]) / 2**48


# TAPO without one of its parts


def summed(t: Trajectory, scores: Sequence[float]) -> float:
    """The sum over turns: without the mean of Eq. 6."""
    return sum(known(scores))


def forgiven(t: Trajectory, scores: Sequence[float]) -> float:
    """Without red lines, and without the price of a look at nothing."""
    return tool_reward(t, [max(score or 0.0, 0.0) for score in scores])


def whole_paid(t: Trajectory, scores: Sequence[float]) -> float:
    """The whole image, shown first, is useful: a judge that is lenient with it, whom turn_score
    would not ask."""
    first = next((i for i, turn in enumerate(t.tool_turns) if turn.observation.images), None)
    if first is not None and t.sample.kind == "search":
        seen = t.tool_turns[first].observation
        if {*seen.red_lines} == {"no_op"}:
            scores = [*scores[:first], 1.0, *scores[first + 1 :]]
    return tool_reward(t, scores)


PARTS = {"added": summed, "unpunished": forgiven, "whole": whole_paid}


def __getattr__(name: str) -> GroupReward:
    """The rewards of this file, by name: one of PARTS, a kind of error, or a random kind with miss
    and alarm in percent, such as crop_25_50."""
    kind, *rates = name.split("_")
    if kind not in {*PARTS, *KINDS} or len(rates) not in (0, 2) or not all(map(str.isdigit, rates)):
        raise AttributeError(f"no reward {name!r} in beyond/judges.py")
    miss, alarm = (int(rate) / 100 for rate in rates or (0, 0))

    def reward(group: Group, judge: Judge, lambdas: Lambdas, rng: Random) -> list[Reward]:
        if kind in KINDS:
            return tapo(group, judge, lambdas, rng, NoisyJudge(judge, miss, alarm, kind, rng))
        scored = [(t, turn_scores(t, judge, lambdas.lazy)) for t in group]
        return [weighted(t, judge, lambdas, PARTS[kind](t, s), s) for t, s in scored]

    return reward


# The study


@dataclass(frozen=True)
class Greedy:
    """What stands for a run in which the model that a job ends with plays greedily, as the paper's
    does."""

    start: Job
    reward: str = "greedy"
    world: str = ""

    @property
    def name(self) -> str:
        return f"{self.start.name}-greedy"

    def command(self, study: Path) -> list[str]:
        model = study / self.start.name / ("sft" if self.start.reward == "sft" else "rl")
        flags = {"--model": model, "--limit": 512, "--out": study / self.name}
        return ["evaluate.py", *(str(word) for pair in flags.items() for word in pair)]


PARTS_AWAY = {  # (reward, more flags)
    "without the judge (`blind`)": ("blind", ()),
    "without the mean (a sum over turns)": ("added", ()),
    "without any punishment": ("unpunished", ()),
    "without the price of lazy looks": ("tapo", ("--lazy", "0")),
    "with the whole image paid": ("whole", ()),
}
RATES = (0, 25, 50)  # percent
NOISE = [f"crop_{miss}_{alarm}" for miss in RATES for alarm in RATES if miss + alarm]
CALLS = ["call_25_25"]
SYSTEM = ["size", "color", "corner"]
WEIGHTS = ("0.1", "0.4")  # lambda_tool, beside the default
LONGER = ("--rl-steps", "120")
DIAL = ("--shortcut", "0.95")
HABITS = ("careful", "eager")  # beside the default


def named(reward: str, more: tuple[str, ...] = ()) -> Job:
    own = reward.split("_")[0] in {*PARTS, *KINDS}
    return Job(f"beyond.judges.{reward}" if own else reward, more=more)


def judge_jobs(quick: bool) -> list[Job | Greedy]:
    """The controls first, then what is left of the study: one seed each."""
    controls = control_jobs(quick)
    greedy = [Greedy(job) for job in controls if job.reward != "random"]
    if quick:
        return [*controls, *greedy, *map(named, ("crop_50_0", "crop_0_50"))]
    rest = [*map(named, NOISE), *itertools.starmap(named, PARTS_AWAY.values())]
    rest += map(named, SYSTEM + CALLS)
    weighed = itertools.product(("tapo", "crop_25_25"), WEIGHTS)
    rest += [named(reward, ("--lambda-tool", weight)) for reward, weight in weighed]
    rest += [Job(reward, more=LONGER) for reward in CONTROLS[:2]]
    for more in (DIAL, *(("--habit", habit) for habit in HABITS)):
        rest += [Job(reward, more=more) for reward in CONTROLS[:-1]]
    rest += [Job("sft", more=("--habit", habit)) for habit in HABITS]
    return list(dict.fromkeys([*controls, *greedy, *rest]))
