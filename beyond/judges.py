"""
judges.py: how good must a judge be? TAPO with judges that err, and TAPO without its parts.

Concept     The toy's judge knows where the target is; a model that judges does not. So we let an
            exact judge err, at random or with a system, and look at what the policy learns. And we
            take TAPO's parts away one at a time: what of the effect is the judge's?
Paper       nothing: CodeV compares two judges by what they teach, but gives no rates of error
In          the folder of the study. An error has a name: `--reward beyond.judges.crop_25_50`
Out         judges.json, judges.png, and tables in Markdown
Left out    judges that err like a model: here they err by a hash, or by a rule that we made up
Read next   study.py (which trains), docs/judge.md (what came out)
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from matplotlib.figure import Figure

from beyond.study import CONTROLS, HOME, NAMES, Job, known, markdown, run_all, told
from data import CELL, SIZE
from evaluate import COLORS, LABELS, MARKERS
from faithfulness import Rate
from kit.boxes import recall, share
from kit.folder import read_json
from kit.perturbations import PERTURBATIONS
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


PARTS = {"added": lambda t, scores: sum(known(scores)),  # over turns: without the mean of Eq. 6
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


# The study


@dataclass(frozen=True)
class Greedy:
    """What stands for a run in which the model that a job ends with plays greedily, as the paper's
    does; after the default habit, with seed 0, it is lied to as well."""

    start: Job
    world: str = ""  # its questions are no run's

    @property
    def name(self) -> str:
        return f"{self.start.name}-greedy"

    def command(self, study: Path) -> list[str]:
        model = study / self.start.name / ("sft" if self.start.reward == "sft" else "rl")
        flags = {"--model": model, "--limit": 512, "--out": study / self.name}
        flags["--perturb"] = "none" if self.start.seed or "--habit" in self.start.more else "all"
        return ["evaluate.py", *(str(word) for pair in flags.items() for word in pair)]


RATES = (0, 25, 50)  # percent of misses, and of false alarms
SYSTEM = ("size", "color", "corner")
NOISE = [f"crop_{miss}_{alarm}" for miss in RATES for alarm in RATES if miss + alarm]
COLUMNS = ("faithful", "ood_accuracy", "ood_given_faithful", "tool_use", "accuracy", "crop_area",
           "calls")  # fmt: skip
HEAD = [LABELS.get(name, "read what it saw") for name in COLUMNS]
Table = dict[str, list[Job]]  # name of a row: its runs, one for each seed


def named(reward: str, *more: str, seeds: Sequence[int] = (0,)) -> list[Job]:
    own = f"beyond.judges.{reward}" if reward.split("_")[0] in {*PARTS, *KINDS} else reward
    return [Job(own, HOME, seed, more) for seed in seeds]


def study_tables(quick: bool) -> dict[str, Table]:
    """Title -> table, the controls first. A run that stands in two of them is run once."""
    asked, seeds = ("sft", *CONTROLS), (0,) if quick else (0, 1, 2)
    found = {"The controls": {NAMES.get(r, "SFT"): named(r, seeds=seeds) for r in asked}}
    if quick:
        return found | {"Errors at random": {r: named(r) for r in ("crop_50_0", "crop_0_50")}}
    one, longer = {"`tapo`": named("tapo")}, ("--rl-steps", "120")
    found["Twice the steps"] = {NAMES[r]: named(r, *longer, seeds=seeds) for r in CONTROLS[:2]}
    for flag, value in (("--habit", "careful"), ("--habit", "eager"), ("--shortcut", "0.95")):
        own = asked[flag == "--shortcut" : -1]  # SFT is the same in every world
        rows = {NAMES.get(r, "SFT"): named(r, flag, value) for r in own}
        found[f"`{flag} {value}`"] = rows
    away = {f"`{r}`": named(r) for r in ("blind", *PARTS)}
    away["`--lazy 0`"] = named("tapo", "--lazy", "0")
    found["TAPO without one of its parts"] = one | away
    found["Errors at random"] = one | {f"`{r}`": named(r) for r in (*NOISE, "call_25_25")}
    found["Errors with a system"] = {f"`{r}`, {KINDS[r]}": named(r) for r in SYSTEM}
    weighed = itertools.product(("tapo", "crop_25_25"), ("0.1", "0.4"))
    rows = {f"`{r}`, λ_tool {w}": named(r, "--lambda-tool", w) for r, w in weighed}
    return found | {"Other weights of what programs showed": rows}


def study_judges(study: Path, quick: bool) -> str:
    """Writes judges.json and judges.png, and returns the tables."""
    tables = study_tables(quick)
    jobs = [job for table in tables.values() for row in table.values() for job in row]
    few = [*tables.values()][:3]
    greedy = [Greedy(job) for table in few for row in table.values() for job in row]
    starts = [job.start for job in jobs if job.start]
    run_all([*dict.fromkeys([*starts, *jobs, *greedy])], study)
    return shown(study, tables)


def shown(study: Path, tables: dict[str, Table]) -> str:
    """The tables in Markdown, with what has ended by now. What has not is an empty cell."""
    head = ["", "seeds", *HEAD, "greedily: faithful", "out-of-prior accuracy"]
    parts, numbers = [], {}
    for title, table in tables.items():
        rows = []
        for name, jobs in table.items():
            both = jobs, [*map(Greedy, jobs)]
            ends, greedy = ({j.name: m for j in each if (m := end_of(study, j))} for each in both)
            asked = [(ends, c) for c in COLUMNS] + [(greedy, c) for c in COLUMNS[:2]]
            cells = [told([m[c] for m in of.values()], len(jobs) > 1) for of, c in asked]
            rows.append([name, f"{len(ends)}", *cells])
            numbers |= {job: {c: m[c] for c in COLUMNS} for job, m in (ends | greedy).items()}
        parts.append(markdown(f"{title}:", head, rows))
    (study / "judges.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    draw_judges(numbers, study / "judges.png")
    parts += over_time(study, tables["The controls"]), lies(study, tables), places(study)
    return "\n\n".join(parts)


def end_of(study: Path, job: Job | Greedy) -> dict:
    """The metrics at the end of a job; {} if it has not ended."""
    file = study / job.name / "summary.json"
    return list(read_json(file)["stages"].values())[-1] if file.exists() else {}


def over_time(study: Path, table: Table) -> str:
    """Looked, or used? Both over the steps, from evaluations of every fourth question."""
    rows = []
    for name, jobs in table.items():
        logs = [f for job in jobs if (f := study / job.name / "log.jsonl").exists()]
        lines = [json.loads(line) for f in logs for line in f.read_text("utf-8").splitlines()]
        own = [line for line in lines if line["stage"] == "evaluation"]
        for step in sorted({line["step"] for line in own}):
            at = [line for line in own if line["step"] == step]
            rows.append([name, f"{step}", *(told([m[c] for m in at], True) for c in COLUMNS[:3])])
    return markdown("Looked, or used:", ["", "step", *HEAD[:3]], rows)


def lies(study: Path, tables: dict[str, Table]) -> str:
    """The lies of Table 6 before training, in the middle and later: what becomes, out of prior, of
    the greedy answers that follow a hit."""
    rows, head = [], ["", "hits", *PERTURBATIONS]
    for job in (jobs[0] for title in [*tables][:2] for jobs in tables[title].values()):
        if (file := study / Greedy(job).name / "studies.json").exists():
            found = read_json(file)["perturb"].get("toy, out of prior", {})
            rates = [Rate(**found[lie]["accuracy_hit"]) for lie in found]
            hits = f"{rates[0].denominator:.0f}" if rates else "0"
            row = [job.name.removesuffix("-guessing-0"), hits, *(told([r.value]) for r in rates)]
            rows.append(row + [""] * (len(head) - len(row)))
    return markdown("Lied to after a hit:", head, rows)


def places(study: Path) -> str:
    """What systematic errors and the eager habit teach: where the policy looks at the end, and how
    many crops it has shown before, on search questions."""
    rows, jobs = [], [*map(named, ("tapo", "whole", *SYSTEM))]
    jobs += [named(reward, "--habit", "eager") for reward in ("sft", *CONTROLS[:-1])]
    for job in (job for (job,) in jobs if end_of(study, job)):
        found, boxes, again = {True: [], False: []}, [], []
        for line in open(study / job.name / "trajectories.jsonl", encoding="utf-8"):
            t = json.loads(line)
            if t["sample"]["kind"] == "search":
                found[COLOR in t["sample"]["question"].split()].append(t["look"] == "faithful")
                seen = (step["observation"] for step in t["steps"] if step["observation"])
                own = [box for one in seen for box in one["boxes"] if box]
                boxes, again = boxes + own, again + [b in own[:i] for i, b in enumerate(own)]
        corner = [recall(box, CORNER) == 1 and share(box, (SIZE, SIZE)) < 0.9 for box in boxes]
        large = [share(box, (SIZE, SIZE)) > 0.9 for box in boxes]
        numbers = (found[True], found[False], corner, large, again)
        rows.append([job.name.removesuffix("-guessing-0"), *map(told, numbers)])
    head = ["", f"faithful on {COLOR}", "on other colours", "crops of a1", "whole images", "again"]
    return markdown("Where the policy looks:", head, rows)


def draw_judges(numbers: dict[str, dict], path: Path) -> None:
    """Faithful and out-of-prior accuracy over contrast, 1 - misses - false alarms, beside TAPO,
    blind and SFT."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2, sharey=True), COLUMNS):
        for name in (*NOISE, "call_25_25"):
            kind, miss, alarm = [int(word) if word.isdigit() else word for word in name.split("_")]
            if metrics := numbers.get(named(name)[0].name):
                n, at = RATES.index(alarm), (1 - (miss + alarm) / 100, metrics[column])
                fill = "none" if kind == "call" else "full"
                axes.plot(*at, MARKERS[n], color=COLORS[n], fillstyle=fill)
                axes.annotate(f" {miss}, {alarm}", at)
        for reward, line in {"tapo": "-", "blind": "--", "sft": ":"}.items():
            if metrics := numbers.get(f"{reward}-guessing-0"):
                axes.axhline(metrics[column], color="#777777", linestyle=line, label=reward)
        axes.set(xlabel="contrast (labels: misses, false alarms in %)", title=LABELS[column])
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
