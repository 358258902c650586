"""
evidence.py: was the tool needed, and was its evidence used? `evaluate.py --ablation`

Concept     Perturbations ask whether an answer follows the picture. Two further questions: would
            the policy have answered as well without the tool, and how much does what the tool
            showed raise the probability of the right answer? And do two judges agree on it?
Paper       nothing: the ablation, the values of a call and the agreement of judges are ours. The
            table of perturbations is CodeV's, arXiv:2511.19661, Table 6
In          trajectories, their rewards, the policy that played them
Out         rates with intervals, printed, and kept in studies.json
Left out    what a further thought would have made of a crop: the answer follows at once
Read next   faithfulness.py (rates and perturbations), docs/faithfulness.md (how to read them)
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from types import SimpleNamespace

import torch

from beyond.audit import kappa
from faithfulness import DRAWS, Answers, Rate, is_right, listing, means, perturb, perturbed
from faithfulness import plain_table, question_of, up_to, waves
from grpo import Objective, group_row, group_rows, log_probs
from kit.qwen import Encoded, Policy
from rewards import Judge, Lambdas, Reward, tapo
from rollout import Rules, Trajectory, begin, encode_observation, play_on
from sandbox import Observation

Played, Paid = Sequence[Trajectory], Sequence[Reward]


def agreement(played: Played, first: Paid, second: Paid) -> tuple[Counter, Rate, float | None]:
    """Two judges on the same calls. Is it a hit (a score of 1)? A table of (first, second), or of
    None where one of them had no verdict; how often they agree; Cohen's kappa, None if chance alone
    would always agree. Calls that showed no picture, or crossed a red line, were not judged."""
    table: Counter[tuple[bool, bool] | None] = Counter()
    for t, a, b in zip(played, first, second, strict=True):
        for turn, *pair in zip(t.tool_turns, a.scores, b.scores, strict=True):
            if turn.observation.images and -1.0 not in pair:
                table[None if None in pair else (pair[0] >= 1, pair[1] >= 1)] += 1
    cells = [table[a, b] for a in (True, False) for b in (True, False)]
    agree, above_chance = Rate(cells[0] + cells[3], sum(cells)), kappa(*cells)
    return table, agree, None if math.isnan(above_chance) else above_chance


def answer_now(policy: Policy, t: Trajectory, i: int) -> Trajectory:
    """A copy that keeps the thought of its i-th turn, and must answer where the code began."""
    copy, words = up_to(policy, t, i), t.turns[i].text.split("<code>")[0]
    words += "</think>" * (words.count("<think>") - words.count("</think>")) + "<answer>"
    del copy.ids[t.turns[i].start :], copy.acted[t.turns[i].start :], copy.turns[i:]
    copy.observe(policy.encode(words, []))
    return copy


def without_tools(policy: Policy, played: Played, rules: Rules) -> Iterator[Trajectory]:
    """The same policy and the same first thought, but where its first code would begin it has to
    answer. Trajectories without code come back as they are."""
    refusing = SimpleNamespace(run=lambda code: Observation(error="no tools"), close=lambda: None)
    once = replace(rules, turns=1, temperature=0.0)
    for wave in waves(policy, range(len(played)), rules):
        direct = {k: played[k] for k in wave}
        cut = {k: answer_now(policy, t, 0) for k, t in direct.items() if t.tool_turns}
        if cut:
            play_on(policy, [*cut.values()], lambda t: refusing, once)
        for t in cut.values():
            answer, closed, _ = t.turns[-1].text.partition("</answer>")  # (answer_now opened it)
            t.answer, t.ended = (answer.strip(), "answered") if closed else (None, "length")
        yield from (direct | cut).values()


def ablation(played: Iterable[Trajectory], direct: Iterable[Trajectory]) -> dict[str, Rate]:
    """Is the tool worth it? Search questions with tools, and without (`direct`, from
    without_tools): how many are right, and how many only one way solves: the tool's gain and its
    harm. Then the same of the out-of-prior questions alone."""
    names, units = ("with tools", "without tools", "tool gain", "tool harm"), []
    for t, d in zip(played, direct, strict=True):
        if t.sample.kind == "search":
            a, b = is_right(t), is_right(d)
            answers: Answers = dict(zip(names, (a, b, a > b, a < b)))
            against = {f"{n}, out of prior": v if t.sample.against_prior else None
                       for n, v in answers.items()}  # fmt: skip
            units.append((answers | against, question_of(t.sample)))
    return means(units, DRAWS)


@torch.no_grad()
def evidence(policy: Policy, played: Played, paid: Paid, rules: Rules, seed=0) -> dict[str, Rate]:
    """What the calls on search questions were worth: ln pi(reference answer) after the tool, less

    evidence value   its mean after four random crops of the same size
    decision value   what it would have been where the code began: had the policy answered there

    A call is used if the first exceeds 0.1, needed if the second does. The history is fixed, and
    the answer follows at once: a further thought might give away what the crop showed. Calls that
    showed nothing, a picture without a box, or a crop with no room for another, are not measured.
    """
    units = []
    for t, reward in zip(played, paid, strict=True):
        if t.sample.kind != "search":
            continue
        rng = Random(f"{seed} {t.sample.id}")
        calls = [i for i, turn in enumerate(t.turns) if turn.observation]
        for i, score in zip(calls, reward.scores, strict=True):
            seen, gain, decision, used, needed = t.turns[i].observation, *[None] * 4
            others = [perturbed("random", seen, t.sample.image, rng) for _ in range(4)]
            if measured := bool(seen.images) and not any(o.environment for o in (seen, *others)):
                real, *rest, direct = answer_log_probs(policy, t, i, [seen, *others], rules)
                gain, decision = real - fmean(rest), real - direct
                used, needed = gain > 0.1, decision > 0.1
            answers: Answers = {
                "measured": measured,
                "evidence value": gain,
                "decision value": decision,
                "evidence value of a hit": gain if score is not None and score >= 1 else None,
                "evidence value of a miss": gain if score is not None and score < 1 else None,
                "used": used,
                "needed": needed,
                "needed and used": needed and used,
            }
            units.append((answers, question_of(t.sample)))
    return means(units, DRAWS, seed)


def answer_log_probs(
    policy: Policy, t: Trajectory, i: int, shown: list[Observation], rules: Rules
) -> list[float]:
    """log pi(reference answer) after the i-th turn and each of `shown`, then without the call.
    One history, several futures: a row of grpo.py, with the log-probabilities of stage 2."""
    base, branches = up_to(policy, t, i), []
    for seen in shown:
        branch = begin(t.sample, Encoded(base.ids[:], base.images[:]))
        closed, pictures = base.ids[-1] == policy.end_id, policy.pictures(seen.images)
        branch.observe(encode_observation(policy, seen, pictures, closed, rules.max_log_chars))
        branch.observe(policy.encode("<answer>", []))
        branches.append(branch)
    branches.append(answer_now(policy, t, i))
    for branch in branches:
        branch.act(policy.encode(policy.neutralise(t.sample.answer) + "</answer>", []).ids)
    *after, direct = enumerate(branches)
    scores = torch.zeros(len(branches))  # [branches]
    for row in (*group_rows(policy, after, Objective.row_tokens), group_row(policy, [direct])):
        logp, owner = log_probs(policy, [row])  # [N], [N] of the answer's N tokens in all branches
        scores.index_add_(0, owner.cpu(), logp.float().cpu())
    return scores.tolist()


def perturb_table(study: dict[str, dict[str, dict[str, Rate]]]) -> str:
    """Table 6 as plain text, in %. possible: how many trajectories had something else to show."""
    if not study:
        return "no tool showed a picture on any search question: there is nothing to perturb"
    rows = [["", "possible", "thoughts", "actions", "answers", "accuracy", "clean"]]
    rows[0] += ["after a hit", "clean", "after a miss", "clean"]
    for source, by_name in study.items():
        rows.append([source])
        for name, measures in by_name.items():
            (_, n), *others = measures.items()
            rows.append([f"  {name}", f"{n.numerator:g}/{n.denominator:g}"])
            for measure, rate in others:
                cell = "-" if rate.value is None else f"{rate.value:.1%}"
                if measure == "accuracy" and rate.interval:
                    cell += " [{:.1%}, {:.1%}]".format(*rate.interval)
                rows[-1].append(cell.replace("%", ""))
    return plain_table(rows)


def studies(
    policy: Policy, played: Played, paid: Paid, rules: Rules,
    seed: int, names: Sequence[str], ablate: bool, second: Judge | None,
) -> dict:  # fmt: skip
    """What `evaluate.py` prints and keeps beside the rates: the perturbations in `names`; whether
    tools were needed and used, if `ablate`; how far the judge and a `second` one agree."""
    found: dict = {}
    if second:
        theirs = [tapo([t], second, Lambdas(), Random(0))[0] for t in played]
        cells, *agree = agreement(played, paid, theirs)
        found["judges"] = dict(zip(("agree", "kappa"), agree))
        print("boxes and judge agree: {}, kappa {};".format(*agree), dict(cells), end="\n\n")
    if names:
        found["perturb"] = perturb(policy, played, paid, rules, names, seed)
        print(perturb_table(found["perturb"]), end="\n\n")
    if ablate:
        found["ablation"] = ablation(played, without_tools(policy, played, rules))
        found["evidence"] = evidence(policy, played, paid, rules, seed)
        print(listing(found["ablation"]), "", listing(found["evidence"]), "", sep="\n")
    return found
