"""
rivals.py: what other papers pay for. Doors of train.py, such as `--reward deepeyes`.

Concept     Seven other answers to the question of rewards.py: what should a tool call earn? Most
            pay for a call that ran, or for a picture that came back. None but the last asks what
            the picture shows.
Paper       those named below: formulas and constants as their released code has them, where no
            other source is named
In          a group of Trajectories and a judge; no Lambdas: each paper has constants of its own
Out         one Reward for each trajectory, in the same order
Left out    KL, division by a group's deviation, K and masking: no rewards, but flags of train.py.
            Rewards for single turns: one advantage holds for a whole trajectory here
Read next   zoo.py (what they pay for hacks)

Three rules that make them comparable are ours. r_acc is 1 or 0 and r_fmt 0 or -1, as in rewards.py.
A failure of our own sandbox is no call. "Math" is a question that needs no search.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean

from kit.answers import BOXED, CUE, final_answer, read_choice, same_answer
from rewards import Group, Judge, Reward, judge_input, outcome, ran_well
from rollout import Trajectory
from sandbox import Observation

# Of each trajectory: itself, the parts that all rewards share, and what its calls showed.
Played = list[tuple[Trajectory, Reward, list[Observation]]]


def contradicts(trajectory: Trajectory) -> bool:
    """Do the last 500 characters of thought conclude on another answer than the one given?

    Thyme and FaithEyes put this to a model. Our rule reads conclusions that call themselves
    one ("the answer is", a \\boxed{}). Thoughts that conclude nothing contradict nothing."""
    said = "\n".join(turn.text for turn in trajectory.turns)
    said = re.sub(r"(?s)<code>.*?(</code>|$)|<answer>.*?(</answer>|$)|</?think>", " ", said)[-500:]
    if trajectory.answer is None or not (CUE.match(said) or BOXED.search(said)):
        return False
    conclusion = re.split(r"[.;!]\s|\n", final_answer(said).strip())[0]
    options = trajectory.sample.options
    a, b = (read_choice(text, options) for text in (conclusion, trajectory.answer))
    return not (a == b if a and b else same_answer(conclusion, trajectory.answer))


def thyme(played: Played, judge: Judge) -> Iterator[Reward]:
    """Thyme, arXiv:2508.11630: R = r_res + 0.5 r_cons 1[r_res > 0] + 0.5 (1 + r_fmt).

    r_res is 1 for a right answer, -1 for a wrong one, 0 for none. r_cons is 1 unless the
    thoughts contradict the answer. A call earns nothing: the paper dropped terms for code."""
    for t, r, _ in played:
        result = 1 if r.right else -1 if t.ended == "answered" else 0
        consistent = r.right and not contradicts(t)
        yield r.paid(result + 0.5 * consistent + 0.5 * (1 + r.format))


def deepeyes(played: Played, judge: Judge) -> Iterator[Reward]:
    """DeepEyes, arXiv:2505.14362: R = 0.8 r_acc + 0.2 r_fmt + 1.2 1[right, and a tool returned an
    image]. The bonus is blind to what the image shows. Math: 1.2 r_acc + 0.4 r_fmt, no bonus."""
    for t, r, calls in played:
        math_question = t.sample.kind == "neutral"
        bonus = r.right and not math_question and any(seen.images for seen in calls)
        answer, form = (1.2, 0.4) if math_question else (0.8, 0.2)
        yield r.paid(answer * r.right + form * r.format + 1.2 * bonus, float(bonus))


def pixel_reasoner(played: Played, judge: Judge) -> Iterator[Reward]:
    """Pixel-Reasoner, arXiv:2505.15966:
    R = r_acc + 1[n > 0] (0.25 max(0.3 - RaPR, 0) / (2 RaPR) - 0.05 (n - 1)).

    RaPR, the paper's name, is the share of the group that calls a tool: while it is low, calls pay,
    for wrong answers too. n counts calls. r_acc is 0 if the last one failed."""
    rapr = fmean(bool(calls) for *_, calls in played)
    for _, r, calls in played:
        bonus = 0.25 * max(0.3 - rapr, 0) / (2 * rapr) - 0.05 * (len(calls) - 1) if calls else 0.0
        stands = r.right and all(map(ran_well, calls[-1:]))
        yield r.paid(stands + bonus, bonus)


def codedance(played: Played, judge: Judge) -> Iterator[Reward]:
    """CodeDance, arXiv:2512.17312. Hard questions pay for calls, easy ones charge for them:

    R = S + (1.5 if right, else 0.5) d N_ok / N, where S = r_acc + 0.2 r_fmt and
    d = sigmoid(2 gamma (0.5 - mean of S over the group)) - delta

    N_ok of N calls ran; gamma is 4, delta 0.2. Left out: credit for single turns (-0.5 for a failed
    one, discounted by 0.2); other factors for math; a clip of d that comes too late."""
    mean = fmean(r.right + 0.2 * r.format for _, r, _ in played)
    d = 1 / (1 + math.exp(-8 * (0.5 - mean))) - 0.2  # 8 = 2 gamma
    for _, r, calls in played:
        ratio = sum(map(ran_well, calls)) / max(len(calls), 1)
        tools = (1.5 if r.right else 0.5) * d * ratio
        yield r.paid(r.right + 0.2 * r.format + tools, tools)


def pyvision(played: Played, judge: Judge) -> Iterator[Reward]:
    """PyVision-RL, arXiv:2602.20739: R = r_acc + 1[right] 0.1 n. n counts the turns with a
    call, also with one that failed."""
    for _, r, calls in played:
        n = r.right * len(calls)
        yield r.paid(r.right + 0.1 * n, float(n))


def adatooler(played: Played, judge: Judge) -> Iterator[Reward]:
    """AdaTooler-V, arXiv:2512.16918: R = r_acc + 0.6 dS exp(-2 ((n - 6) / 6)^2). n calls ran.

    dS is what tools gain on this question: accuracy with calls less accuracy without. The paper
    measures it with a 72B model. We measure it on the group; it is 0 if one kind is missing."""
    using = [float(r.right) for _, r, calls in played if calls]
    direct = [float(r.right) for _, r, calls in played if not calls]
    gain = fmean(using) - fmean(direct) if using and direct else 0.0
    for _, r, calls in played:
        n = sum(map(ran_well, calls))
        tools = gain * math.exp(-2 * ((n - 6) / 6) ** 2)
        yield r.paid(r.right + 0.6 * tools, tools)


def faitheyes(played: Played, judge: Judge) -> Iterator[Reward]:
    """FaithEyes, arXiv:2607.28225: R = r_acc + 0.2 r_fmt - 0.2 1[thoughts contradict the answer]
    + 0.2 1[n > 0] max(0, 1 - (n_failed + n_rejected) / n) - 0.2 1[cut off].

    n counts calls before the answer. Rejected are calls whose pictures the judge scores 0. The
    paper's judge is the policy in a second role, and withholds unhelpful images from it. Ours
    is the judge of rewards.py, and nothing is withheld."""
    for t, r, calls in played:
        ran = [seen for seen in calls if ran_well(seen)]
        verdicts = [judge(*judge_input(t.sample, seen)) if seen.images else 1.0 for seen in ran]
        silent = None in verdicts
        tools = None if silent else sum(score > 0 for score in verdicts) / max(len(calls), 1)
        fines = contradicts(t) + (t.ended in ("turns", "length"))
        yield r.paid(r.right + 0.2 * (r.format - fines + (tools or 0.0)), tools)


def reward(formula: Callable, group: Group, judge: Judge, *unused: object) -> list[Reward]:
    """A formula as a reward of rewards.py; not used are Lambdas, and a random number generator."""
    shown = [[turn.observation for turn in t.tool_turns] for t in group]
    calls = [[seen for seen in one if not seen.environment] for one in shown]
    return [*formula([(t, outcome(t, judge), seen) for t, seen in zip(group, calls)], judge)]


ALL = thyme, deepeyes, pixel_reasoner, codedance, pyvision, adatooler, faitheyes
RIVALS = {formula.__name__: partial(reward, formula) for formula in ALL}
