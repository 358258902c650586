"""
judges.py: rewards whose judge errs, and TAPO without one of its parts: how good must a judge be?

Concept     The toy's judge knows where the target is; a model that judges does not. So we let an
            exact judge err, at random or with a system, and look at what the policy learns. And we
            take TAPO's parts away one at a time: what of the effect is the judge's?
Paper       nothing: CodeV compares two judges by what they teach, but gives no rates of error
In          as for every reward: a group of Trajectories, and the judge that is to err
Out         one Reward for each trajectory; by name, as in `--reward beyond.judges.crop_25_50`
Left out    judges that err like a model: here they err by a hash, or by a rule that we made up
Read next   study.py (which trains with all of them), docs/judge.md (what came out)
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

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
            return float(any(recall(c, t) >= 0.9 for c in crops for t in labels.targets))
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


def forgiven(t: Trajectory, scores: Sequence[float]) -> float:
    """Without red lines, and without the price of a look at nothing."""
    return tool_reward(t, [max(score or 0.0, 0.0) for score in scores])


def whole_paid(t: Trajectory, scores: Sequence[float]) -> float:
    """The whole image, shown first, is useful: a judge that is lenient with it, whom turn_score
    would not ask."""
    seen = [turn.observation for turn in t.tool_turns]
    first = next((i for i, shown in enumerate(seen) if shown.images), None)
    if first is not None and t.sample.kind == "search" and {*seen[first].red_lines} == {"no_op"}:
        scores = [*scores[:first], 1.0, *scores[first + 1 :]]
    return tool_reward(t, scores)


PARTS = {"added": lambda t, scores: sum(filter(None, scores)),  # no mean, as Eq. 6 has
         "unpunished": forgiven, "whole": whole_paid}  # fmt: skip


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
