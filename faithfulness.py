"""
faithfulness.py: had the policy looked in the right place, and did it matter? Counted, not felt.

Concept     A right answer may be luck. Each search question falls into one of three classes:
            faithful    a tool showed the evidence (a turn score of 1; a score of 0.5 is not enough)
            unfaithful  tools showed pictures, and none of them the evidence
            no tool     no picture was shown at all
            To have looked is not yet to have used it. So we also perturb: we change what the tools
            show, and see whether thoughts, actions and answers follow.
Paper       CodeV, arXiv:2511.19661, Fig. 2 (rates among right answers), Table 5 (faithful and
            right), Table 6 (perturbations), Appendix 12 (use of tools; measures ours). The paper
            does not say what each rate is a share of, nor how several crops count: rates are
            given over all and over right answers, and one turn that shows the evidence is enough.
            Ours: the identity perturbation, and accuracy under perturbations.
In          Trajectories and their Rewards with turn scores (rewards.tapo), computed once
Out         rates with numerator, denominator and bootstrap interval, and tables of them
Left out    human judgement; which part of a crop was used; the origin of a picture without a box
Read next   evaluate.py (which plays the questions and prints the tables)

    python faithfulness.py                       the rates of six hand-made trajectories
    python faithfulness.py TRAJECTORIES.jsonl    evaluate.py's, or any agent's (beyond/agents.py)
"""

import importlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace

import numpy as np
from PIL import Image
from tabulate import tabulate

from data import Sample
from kit.answers import is_correct
from kit.boxes import area, covered, recall, share
from kit.perturbations import PERTURBATIONS, check_perturbations, instead_of
from kit.qwen import Policy
from rewards import BoxJudge, Lambdas, Reward, crop, hand_made, ran_well, tapo
from rollout import Rules, Trajectory, Turn, listen, play_on
from sandbox import Observation, Sandbox

# Rates. A trajectory answers each question that is asked of it, and a rate is the mean of the
# answers: yes or no (True, False), an amount, several values (one for each crop, say), or None,
# where the question is not asked of this trajectory.

DRAWS = 1000  # bootstrap samples behind an interval
HALF = BoxJudge(visible=0.5, focus=(0.0, 0.0))  # half of a target in view, however large the crop
Answer = bool | float | Sequence[float] | None
Answers = dict[str, Answer]  # name of the rate: the answer of one trajectory


@dataclass(frozen=True)
class Rate:
    numerator: float  # the sum of the answers
    denominator: float  # how many there were
    interval: tuple[float, float] | None = None  # 95 %

    @property
    def value(self) -> float | None:
        """None, not nan, where nobody was asked."""
        return self.numerator / self.denominator if self.denominator else None

    def __str__(self) -> str:
        share = "none" if self.value is None else f"{self.value:.3f}"
        ends = "[{:.3f}, {:.3f}] ".format(*self.interval) if self.interval else ""
        return f"{share} {ends}({self.numerator:g}/{self.denominator:g})"


def sum_and_number(answer: Answer) -> tuple[float, float]:
    values = [] if answer is None else answer if isinstance(answer, Sequence) else [answer]
    return float(sum(values)), float(len(values))


def means(units: Iterable[tuple[Answers, str]], draws: int = 0, seed: int = 0) -> dict[str, Rate]:
    """The mean of each answer over units (answers, cluster); {} if there are no units.

    draws > 0 adds percentile bootstrap intervals. Whole clusters are drawn with replacement, since
    plays of one question are not independent evidence; a unit whose cluster is "" stands alone.
    A draw in which nobody was asked does not count for that rate. A rate that only one cluster
    answers has no interval; one that is 0 or 1 in all clusters has an interval of width 0.
    """
    units = list(units)
    if not units:
        return {}
    amounts = np.array([[*map(sum_and_number, given.values())] for given, _ in units])
    keys = [cluster or i for i, (_, cluster) in enumerate(units)]
    place = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    grouped = np.zeros((len(place), *amounts.shape[1:]))  # [clusters, rates, 2]
    np.add.at(grouped, [place[key] for key in keys], amounts)
    chance = np.full(len(place), 1 / len(place))
    times = np.random.default_rng(seed).multinomial(len(place), chance, draws)  # [draws, clusters]
    drawn = np.tensordot(times, grouped, 1)  # [draws, rates, 2]
    rates = {}
    for r, (name, sums) in enumerate(zip(units[0][0], amounts.sum(0).tolist())):
        above, below = drawn[drawn[:, r, 1] != 0, r].T  # numerators, denominators of the draws
        known = len(below) and np.count_nonzero(grouped[:, r, 1]) > 1
        ends = np.percentile(above / below, (2.5, 97.5)).tolist() if known else None
        rates[name] = Rate(*sums, ends and tuple(ends))
    return rates


def plain_table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as plain text, all to the left."""
    text = tabulate(list(rows), tablefmt="plain", disable_numparse=True, preserve_whitespace=True)
    return "\n".join(map(str.rstrip, text.split("\n")))


def listing(rates: dict[str, Rate]) -> str:
    return plain_table((name, str(rate)) for name, rate in rates.items())


# One trajectory


@dataclass(frozen=True)
class Finding:
    """What is counted of one trajectory."""

    search: bool  # False: a question that needs no visual search
    correct: bool | None  # None: no verdict on an open answer
    scores: tuple[float | None, ...]  # of each turn that showed a picture; None: no verdict
    calls: int  # programs that were run
    failed: int  # calls that failed by the policy's own fault
    areas: tuple[float, ...]  # of each crop shown, as a share of the image
    recalls: tuple[float, ...]  # share of each target in view, in all proper crops together
    focuses: tuple[float, ...] = ()  # |target| / |crop| of each proper crop with half a target
    cluster: str = ""  # see question_of

    @property
    def hits(self) -> tuple[bool, ...]:
        return tuple(score is not None and score >= 1 for score in self.scores)

    @property
    def look(self) -> str:
        """The class of the trajectory. One hit among several turns is enough."""
        return "faithful" if any(self.hits) else "unfaithful" if self.scores else "no tool"


def finding(trajectory: Trajectory, reward: Reward) -> Finding:
    """A turn with a red line scores -1 and is no hit, even if its picture showed the evidence."""
    sample, turns = trajectory.sample, trajectory.tool_turns
    if len(reward.scores) != len(turns):
        raise ValueError(
            f"sample {sample.id}: expected a score for each of {len(turns)} tool turns, got "
            f"{len(reward.scores)}; rate with rewards.tapo, whatever the policy was trained with"
        )
    seen, size = [turn.observation for turn in turns], sample.image.size
    crops = [box for observation in seen for box in observation.boxes if box]
    # (Nearly) the whole image shows every target, and is no look at any of them.
    proper = [box for box in crops if share(box, size) <= BoxJudge.max_area]
    focuses = [[area(t) / area(c) for t in sample.boxes if recall(c, t) >= 0.5] for c in proper]
    return Finding(
        search=sample.kind == "search",
        correct=None if reward.answer is None else reward.answer > 0,
        scores=tuple(score for o, score in zip(seen, reward.scores) if o.images),
        calls=len(turns),
        failed=sum(map(failed, seen)),
        areas=tuple(share(box, size) for box in crops),
        recalls=tuple(covered(target, proper) for target in sample.boxes),
        focuses=tuple(max(values) for values in focuses if values),
        cluster=question_of(sample),
    )


def question_of(sample: Sample) -> str:
    """What the bootstrap draws as one: all plays of a question. HR-Bench asks each question in four
    cycles, with its options in another order each time."""
    return f"{sample.question} {sorted(sample.options)}" if sample.cycle else sample.id


def failed(seen: Observation) -> bool:
    """By the policy's own fault, not the sandbox's."""
    return not (ran_well(seen) or seen.environment)


# Many trajectories


def answers(f: Finding) -> Answers:
    """What one trajectory answers. Without a verdict on a turn, no question of faithfulness is
    asked of it; without a verdict on its answer, none of correctness."""
    looked, good = bool(f.scores), any(f.hits)
    judged, boxed = f.search and None not in f.scores, f.search and bool(f.recalls)
    right = judged and bool(f.correct)

    def given(asked: bool, answer: Answer) -> Answer:
        return answer if asked else None

    return {
        "accuracy": f.correct,
        "search_accuracy": given(f.search, f.correct),
        "direct_accuracy": given(not f.search, f.correct),
        "tool_use": given(f.search, f.calls > 0),
        # Unconditional: these three partition the search questions.
        "faithful": given(judged, good),
        "unfaithful": given(judged, looked and not good),
        "no_tool": given(judged, not looked),
        # Table 5: right, and for the right reason, over all search questions.
        "faithful_and_correct": given(judged and f.correct is not None, good and right),
        # Fig. 2: among right answers; and among those that came with a picture.
        "faithful_given_correct": given(right, good),
        "unfaithful_given_correct": given(right, looked and not good),
        "no_tool_given_correct": given(right, not looked),
        "faithful_given_correct_and_shown": given(right and looked, good),
        "faithful_per_call": given(judged, f.hits),  # per picture: the "57 % of tool calls"?
        "accuracy_given_faithful": given(judged and good, f.correct),
        # Against labelled boxes, whatever a judge says: 50 or 80 % of any, or all targets in view.
        "box_any_50": given(boxed, max(f.recalls, default=0) >= 0.5),
        "box_all_50": given(boxed, min(f.recalls, default=0) >= 0.5),
        "box_any_80": given(boxed, max(f.recalls, default=0) >= 0.8),
        "box_all_80": given(boxed, min(f.recalls, default=0) >= 0.8),
        "focus": given(boxed, f.focuses),
        "crop_area": given(f.search, f.areas),
        "calls": f.calls,
        "error_rate": f.failed > 0,
        "no_verdict": given(f.search, None in f.scores),
    }


NOBODY = dict.fromkeys(answers(Finding(False, None, (), 0, 0, (), ())))  # is asked anything


def count(findings: Iterable[Finding], draws: int = 0) -> dict[str, Rate]:
    """Every rate with its numerator and denominator, and, if draws > 0, its interval."""
    return means([(answers(f), f.cluster) for f in findings] or [(NOBODY, "")], draws)


def cross_table(counts: dict[str, Rate]) -> str:
    """correct x faithful, among search questions with both verdicts. "not" includes no tool."""
    both, n = counts["faithful_and_correct"].numerator, counts["faithful_and_correct"].denominator
    right = counts["faithful_given_correct"].denominator
    good = counts["accuracy_given_faithful"].denominator
    return plain_table([
        ("", "faithful", "not"),
        ("correct", f"{both:g}", f"{right - both:g}"),
        ("wrong", f"{good - both:g}", f"{n - right - good + both:g}"),
    ])  # fmt: skip


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
    r"|\bi(?:'ll| will)? (?:now )?(?:crop|zoom)\b|\.crop\(",
    re.IGNORECASE,
)


def kinds_of(turn: Turn) -> set[str]:
    found = {kind for kind, pattern in KINDS.items() if re.search(pattern, turn.code)}
    found |= {"crop"} if any(turn.observation.boxes) else set()
    return found or {"other" if turn.observation.images else "compute"}


def use_of(t: Trajectory) -> Answers:
    """What one trajectory answers about its use of tools."""
    turns, size = t.tool_turns, t.sample.image.size
    seen, kinds, n = [turn.observation for turn in turns], [*map(kinds_of, turns)], len(turns)
    sources, bad = [source for o in seen for source in o.sources], [*map(failed, seen)]
    areas = [share(box, size) for o in seen for box in o.boxes if box]
    words = " ".join(re.sub(r"(?s)<code>.*?</code>", "", turn.text) for turn in t.turns)
    answers: Answers = {f"{k} calls": n == k for k in range(5)} | {"5 or more calls": n > 4}
    for kind in (*KINDS, "compute", "other"):
        answers[f"{kind} (of calls)"] = [kind in own for own in kinds]
    for low, high in zip(AREAS, AREAS[1:]):
        answers[f"crops of {low:.0%} to {high:.0%}"] = [low < a <= high for a in areas]
    after = zip(bad, [*bad[1:], True])  # of each call: did it fail, and did the one behind it?
    return answers | {
        "failed calls": bad,
        "failed calls after which one ran": [not next for this, next in after if this],
        "repaired calls": [bool(o.notes) for o in seen],
        # Verified: the sandbox itself recorded the crop. Decorative: a look was claimed, in words
        # or in code that never ran, while no tool showed anything.
        "verified crops (of pictures)": [source == "crop" for source in sources],
        "edited crops (of pictures)": [source == "edited" for source in sources],
        "decorative crops": bool(CLAIM.search(words)) and not sources,
    }


def tool_use(trajectories: Iterable[Trajectory]) -> dict[str, Rate]:
    return means(((use_of(t), question_of(t.sample)) for t in trajectories), DRAWS)


# Perturbations (Table 6): what if the tools had shown something else?


def perturbed(name: str, seen: Observation, image: Image.Image, rng: Random) -> Observation:
    """What is shown instead of `seen`, which showed parts of `image`. The boxes stay: they say what
    the code asked for. empty: no tool output at all, neither pictures nor text. Where there is
    nothing to show instead, the observation is marked as a failure of ours (`environment`): the
    trajectory then leaves the study."""
    if name == "empty":
        return replace(seen, text="", images=[], error=None, notes=[])
    shown = [instead_of(p, name, box, image, rng) for p, box in zip(seen.images, seen.boxes)]
    if any(picture is None for picture in shown):
        return replace(seen, images=[], environment="there is no other crop of this size")
    return replace(seen, images=shown)


def up_to(policy: Policy, t: Trajectory, i: int) -> Trajectory:
    """A copy that ends with the i-th turn of the policy, before the sandbox has replied to it."""
    seen, end = [p for turn in t.turns[:i] for p in turn.observation.images], t.turns[i].end
    pictures = t.images[: t.prompt_images + len(seen)]
    pictures = pictures or policy.pictures([t.sample.image, *seen])  # one from a file has none
    turns = [*t.turns[:i], replace(t.turns[i], observation=None)]
    return replace(
        t, ids=t.ids[:end], acted=t.acted[:end], images=pictures, turns=turns, answer=None, ended=""
    )


def play_perturbed(
    policy: Policy, cases: list[tuple[Trajectory, int]], name: str, rules: Rules, seed: int
) -> list[Trajectory]:
    """Each trajectory played on after its i-th turn, with all perturbed that tools show from there
    on."""
    copies, live = [up_to(policy, *case) for case in cases], {}

    def restore(sandbox: Sandbox, copy: Trajectory) -> None:  # later code may need its variables
        for turn in copy.turns:
            sandbox.run(turn.code)

    def perturbing(sandbox: Sandbox, image: Image.Image, rng: Random) -> SimpleNamespace:
        run = lambda code: perturbed(name, sandbox.run(code), image, rng)  # noqa: E731
        return SimpleNamespace(run=run, close=sandbox.close)

    with ExitStack() as stack, ThreadPoolExecutor(rules.sandboxes) as pool:
        confine = rules.limits, rules.allow_weak_sandbox
        boxes = [stack.enter_context(Sandbox(t.sample.image, *confine)) for t in copies]
        list(pool.map(restore, boxes, copies))
        for copy, sandbox, (t, i) in zip(copies, boxes, cases):
            image, rng = t.sample.image, Random(f"{seed} {name} {t.sample.id}")
            seen = perturbed(name, t.turns[i].observation, image, rng)
            if listen(policy, copy, seen, policy.pictures(seen.images), rules):
                live[id(copy)] = perturbing(sandbox, image, rng)
        if live:
            left = [copy for copy in copies if id(copy) in live]
            play_on(policy, left, lambda t: live[id(t)], rules)
    return copies


def thoughts(turns: Sequence[Turn]) -> list[str]:
    """The words of some turns in lower case, without code, answer and tags."""
    hidden = r"(?s)<code>.*?(?:</code>|$)|<answer>.*?(?:</answer>|$)|</?think>"
    return " ".join(re.sub(hidden, " ", turn.text) for turn in turns).casefold().split()


def actions(turns: Sequence[Turn]) -> Counter:
    """The boxes that code looked at, or the code itself if it is no crop: a multiset."""
    seen = ((turn.observation.boxes, turn.code.split()) for turn in turns if turn.observation)
    return Counter(str(boxes if any(boxes) else words) for boxes, words in seen)


def is_right(t: Trajectory) -> bool:
    """By the rules alone: no judge is asked about an open answer."""
    return t.ended == "answered" and is_correct(t.answer, t.sample.answer, t.sample.options)


def perturb(
    policy: Policy, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], rules: Rules,
    names: Sequence[str] = PERTURBATIONS, seed: int = 0,
) -> dict[str, dict[str, dict[str, Rate]]]:  # fmt: skip
    """Table 6: the search questions on which a tool showed a picture, played again greedily from
    the first picture on, under each perturbation: {source: {perturbation: {measure: Rate}}}.

    How many change their later thoughts, actions and answer, and what becomes of accuracy, which
    is the test: a strange picture changes much even if the real one was not used. Where the crop
    was a hit and the answer cannot be guessed, accuracy should fall; a miss has little to lose.

    trajectories: greedy ones, under the same rules. Where there is nothing to show instead, the
    trajectory counts in no measure of that perturbation: see `possible`.
    """
    check_perturbations(names)
    if rules.temperature:
        raise ValueError(f"perturbed plays are greedy, got temperature {rules.temperature:g}")
    cases, units = [], defaultdict(lambda: defaultdict(list))
    for k, (t, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        shown = [i for i, x in enumerate(t.turns) if x.observation and x.observation.images]
        if shown and t.sample.kind == "search":
            cases.append((k, shown[0], finding(t, reward)))
    for wave in waves(policy, cases, rules):
        played = [(trajectories[k], i) for k, i, _ in wave]  # read now: images may be large
        for name in names:
            copies = play_perturbed(policy, played, name, rules, seed)
            for (t, i), copy, (_, _, found) in zip(played, copies, wave):
                unit = (changes(t, copy, i, found), found.cluster)
                for source in ("all", group_of(t.sample)):
                    units[source][name].append(unit)
    if len(units) == 2:  # one source: "all" would say the same
        del units["all"]
    return {
        source: {name: means(pairs, DRAWS, seed) for name, pairs in by_name.items()}
        for source, by_name in units.items()
    }


def group_of(sample: Sample) -> str:
    """What Table 6 is split by: a benchmark and its part; on the toy, out of prior or not."""
    return (
        "/".join(filter(None, (sample.source, sample.part)))
    ) + ", out of prior" * sample.against_prior


def waves(policy: Policy, cases: Sequence, rules: Rules) -> Iterator[Sequence]:
    """The cases, as many at a time as the KV cache has room for, and at most 64."""
    size = max(1, min(64, policy.rows_that_fit(rules.max_length, rules.kv_budget_gb)))
    return (cases[k : k + size] for k in range(0, len(cases), size))


def changes(t: Trajectory, copy: Trajectory, i: int, found: Finding) -> Answers:
    """What a trajectory and its perturbed copy answer, which part after the i-th turn."""
    before, after = t.turns[i + 1 :], copy.turns[i + 1 :]
    possible = not any(x.observation and x.observation.environment for x in copy.turns[i:])
    graded = possible and found.correct is not None
    judged, hits = graded and None not in found.scores, any(found.hits)
    words = [(x.answer or "").casefold().split() for x in (t, copy)]
    right, clean = is_right(copy), bool(found.correct)
    return {
        "possible": possible,
        "thoughts": thoughts(before) != thoughts(after) if possible else None,
        "actions": actions(before) != actions(after) if possible else None,
        "answers": words[0] != words[1] if possible else None,
        "accuracy": right if graded else None,
        "clean": clean if graded else None,
        "accuracy_hit": right if judged and hits else None,
        "clean_hit": clean if judged and hits else None,
        "accuracy_miss": right if judged and not hits else None,
        "clean_miss": clean if judged and not hits else None,
    }


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
    lines = ((name, f.look, str(r.scores)) for name, f, r in zip(cases, findings, rewards))
    counts = count(findings, draws=DRAWS)
    return "\n\n".join([plain_table(lines), listing(counts), cross_table(counts)])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(demo())
    else:  # the trajectories of any agent
        importlib.import_module("beyond.agents").main(sys.argv[1:])
