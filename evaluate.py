"""
evaluate.py: how often is the policy right, and had it looked in the right place?

Concept     Play questions, score every look once, and keep the episodes: a rate that nobody can
            check against pictures persuades nobody.
Paper       CodeV, arXiv:2511.19661, Tables 3 and 4 (the benchmarks), Fig. 5 and Table 5 (the rates)
In          a policy and samples; or a checkpoint folder and the name of a benchmark
Out         summary.json, trajectories.jsonl with its pictures, report.html; a table, curves
Left out    language models that read an answer out of free prose: our answers stand in a tag
Read next   faithfulness.py (what each rate means), train.py (who calls this after each stage)

    python evaluate.py --model runs/toy/rl --bench toy --out runs/eval    play, score, show
    torchrun --nproc-per-node 8 evaluate.py --model DIR --bench vstar     the same on 8 GPUs
    python evaluate.py --compare runs/toy runs/accuracy --out runs        runs side by side
    python evaluate.py --bench mmmu --data FILE --check                   can all rows be scored?
    python evaluate.py --film runs/eval --out build                       one episode as a picture
    python evaluate.py --study rewards --out runs/study                   what each reward teaches

trajectories.jsonl has one JSON object a line, in the order of the questions (K lines a question
with --avg-at K), with the names of the types that a line holds:

    sample    id, question, options, kind, source (the data set), part, cycle, against_prior; answer
              (the reference), boxes (the targets: x0, y0, x1, y1 in pixels), image (a PNG file;
              paths are relative to the .jsonl). Its benchmark's rule is code, and is not written
    answer    what the policy answered, or null
    ended     answered, turns, length or no_action
    correct   true or false; null: the judge of open answers had no verdict
    look      faithful, unfaithful or no tool
    failed    the number of calls that failed by the policy's own fault
    reward    its parts: answer, tools, format, scores, total
    steps     one a turn: text (all that the policy wrote), code or null, start and end (its tokens
              are ids[start:end]), score (null: none), and observation: null if no code ran, else
              text (the log), images (PNG files), boxes (the part of the sample's image that each
              shows, or null), sources, error, notes, red_lines, ... as in sandbox.Observation
    acted     who chose the tokens, in runs: [[false, 80], [true, 12], ...]; true is the policy
    ids       the tokens; the first `prompt` of them, with `prompt_images` images, are the question
    seed      the text that seeds its sampling
    run       a hash of policy, questions and settings: two evaluations do not mix
"""

import hashlib
import importlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from matplotlib.figure import Figure
from tabulate import tabulate
from tqdm import tqdm

from data import Sample, out_of_prior_questions, toy_questions
from faithfulness import DRAWS, HALF, Rate, count, cross_table, finding, listing, tool_use
from kit.benchmarks import BENCHES, Questions, published
from kit.flags import knob, parse, refusals, shared, through_door
from kit.page import report
from kit.perturbations import PERTURBATIONS, check_perturbations
from kit.processes import actor_of, gathered, processes
from kit.qwen import Policy, check_checkpoint
from kit.records import Records, Unusable, file_of, join, opened, waves_left, write
from kit.tables import Usable
from rewards import BoxJudge, ChatJudge, Judge, Lambdas, Reward, score
from rollout import Rules, TooLong, Trajectory, Turn, load_policy, play
from sandbox import Observation

GREEDY = Rules(turns=10, temperature=0.0)
EPISODES = "trajectories.jsonl"


def load_toy(n: int = 256, seed: int = 0, shortcut: float = 1.0) -> list[Sample]:
    """`n` questions of the toy world, then half as many on which its prior is always wrong."""
    against = out_of_prior_questions(n // 2, f"against-{seed}")
    return toy_questions(n, f"evaluation-{seed}", shortcut) + against


def load_bench(name: str, where: str | None = None, first: int | None = None) -> Usable:
    """The Samples of a benchmark, or the `first` so many of them. Images are decoded when asked
    for, all else is checked now. Raises ValueError for a row that cannot be used."""
    questions = Questions(name, where, first)

    def sample(i: int) -> Sample:
        image, kind = questions.picture(i), questions.bench.kind
        return Sample(image=image, source=name, kind=kind, **questions.fields(i))

    return questions.usable(sample)


# Play and measure


def evaluate(
    policy: Policy, samples: Sequence[Sample], judge: Judge, *, rules: Rules = GREEDY,
    seed: int = 0, out: Path | None = None, rollouts: int = 1, wave: int = 512,
) -> tuple[dict, Sequence[Trajectory], list[Reward]]:  # fmt: skip
    """Play every sample `rollouts` times and score every turn once: (metrics, episodes, rewards).

    `wave` samples are played at a time. With `out` their episodes go to a file and leave memory. A
    wave whose file is there is not played again: so a killed evaluation goes on, and only verdicts
    that it lacks are asked for. All processes share the waves, and process 0 joins the files.
    Without `out` this process plays alone. None of this changes a number.

    Raises Unusable if `out` holds episodes of another evaluation, ValueError without samples.
    """
    if not len(samples):
        raise ValueError("nothing to evaluate: expected at least one sample, got none")
    who = getattr(judge, "model", type(judge).__name__), getattr(judge, "prompt", "")
    run = fingerprint(policy, samples, rules, seed, rollouts, wave, who)
    (rank, world), file = processes() if out else (0, 1), out and out / EPISODES
    waves = [samples[i : i + wave] for i in range(0, len(samples), wave)]
    left = waves_left(file, run, len(waves)) if file else range(len(waves))
    todo = [i for i in left if i % world == rank]
    trajectories, rewards, findings, n = [], [], [], len(samples) * rollouts
    bar = tqdm(todo, "waves", disable=rank > 0 or len(todo) < 2, leave=False)
    for i in bar:
        played, paid = play_wave(policy, waves[i], judge, rules, seed, rollouts)
        if file:
            write_trajectories(file_of(file, i), played, paid, run)
        else:
            trajectories, rewards = trajectories + played, rewards + paid
        findings += map(finding, played, paid)
        rates = count(findings)
        bar.set_postfix_str(f"accuracy {rates['accuracy']}, faithful {rates['faithful']}")
    if file:
        gathered(rank)  # all have written
        if rank == 0:
            join(file, len(waves))
            old = {i: i // rollouts for i in range(n) if i // rollouts // wave not in left}
            ask_again(file, old, samples, judge, run)
        gathered(rank)
        trajectories, rewards = read_trajectories(file)
        if len(rewards) != n:
            raise Unusable(f"{file} should have {n} lines, but has {len(rewards)}: delete it")
    return measure(trajectories, rewards, rollouts), trajectories, rewards


def fingerprint(policy: Policy, samples: Sequence[Sample], *settings: object) -> str:
    """A hash of the policy (a few weights of every tensor), the questions and the settings."""
    few = [p.detach().flatten()[:: max(1, p.numel() // 8)][:8] for p in policy.model.parameters()]
    weights = torch.cat(few).double().cpu().numpy().tobytes()
    ends = (len(samples), samples[0].id, samples[-1].id)
    return hashlib.sha256(weights + repr((ends, settings)).encode()).hexdigest()[:16]


def play_wave(
    policy: Policy, samples: Sequence[Sample], judge: Judge, rules: Rules, seed: int, rollouts: int
) -> tuple[list[Trajectory], list[Reward]]:
    gpus = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # an evaluation amid training leaves no trace in it
        torch.manual_seed(seed)
        groups = play(policy, samples, rollouts, rules)
    rewards = score(groups, "tapo", judge, Lambdas(), random.Random(seed))
    return sum(groups, []), sum(rewards, [])


def ask_again(file: Path, old: dict[int, int], samples, judge: Judge, run: str) -> None:
    """Score those episodes of a file again that lack a verdict, without playing them. old: the
    number of an episode -> that of its sample."""
    played, before = read_trajectories(file)
    paid = [*before]
    for i in (i for i, reward in enumerate(before) if reward.total is None and i in old):
        again = replace(played[i], sample=samples[old[i]])  # the file's has no rule
        ((paid[i],),) = score([[again]], "tapo", judge, Lambdas(), random.Random())
    if paid != before:
        write_trajectories(file, played, paid, run)


def measure(
    trajectories: Iterable[Trajectory], rewards: Iterable[Reward], rollouts: int = 1
) -> dict:
    """The rates of faithfulness.py, and a benchmark's own score with its parts; while answers lack
    a verdict (`ungraded`) its bounds instead, as if all these were wrong, and as if all were right.
    Out-of-prior questions count for `ood_accuracy` and, after a hit, `ood_given_faithful`."""
    findings, answers, against, read, ungraded, bench = [], [], [], [], 0, None
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        sample = trajectory.sample
        if reward.answer is None:
            ungraded += 1
        elif sample.against_prior:
            against.append(reward.answer)
            read += [reward.answer] * any(finding(trajectory, reward).hits)
        else:
            findings.append(finding(trajectory, reward))
        answers.append((sample.part, sample.cycle, reward.answer))
        bench = BENCHES.get(sample.source)
    rates = count(findings, draws=DRAWS)
    metrics = {"n": len(findings) // rollouts} | {name: rate.value for name, rate in rates.items()}
    metrics["rates"] = {name: vars(rate) for name, rate in rates.items()}
    metrics["correct_by_faithful"] = cross_table(rates)
    if ungraded:
        metrics["ungraded"] = ungraded
    if against:
        metrics["ood_accuracy"] = sum(against) / len(against)
        metrics["ood_given_faithful"] = sum(read) / len(read) if read else None
    if bench:
        filled = ([(*a, guess if r is None else r) for *a, r in answers] for guess in (0.0, 1.0))
        parts, most = (published(each, bench.mean_of_parts) for each in filled)
        low, high = parts.pop("all"), most["all"]
        bounds = {"score_bounds": [low, high], "score_least": low, "score_most": high}
        metrics |= bounds if ungraded else {"score": low, "parts": parts}
    return metrics


# Keep the episodes

AS_IT_IS = ("ids", "prompt", "prompt_images", "answer", "ended", "seed")  # of a Trajectory


def write_trajectories(
    path: Path, trajectories: Iterable[Trajectory], rewards: Iterable[Reward], run: str = ""
) -> None:
    """Write a file in one motion, and its pictures; see the head of this module."""

    def record(t: Trajectory, reward: Reward) -> dict:
        counted, scores = finding(t, reward), iter(reward.scores)
        return {
            "sample": {name: value for name, value in vars(t.sample).items() if name != "rule"},
            **{name: getattr(t, name) for name in AS_IT_IS},
            "steps": [vars(x) | {"score": x.observation and next(scores)} for x in t.turns],
            "acted": [(who, len(list(tokens))) for who, tokens in itertools.groupby(t.acted)],
            "reward": reward,
            "correct": counted.correct,
            "look": counted.look,
            "failed": counted.failed,
            "run": run,
        }

    write(path, itertools.starmap(record, zip(trajectories, rewards, strict=True)))


def read_trajectories(
    path: Path, first: int | None = None
) -> tuple[Sequence[Trajectory], list[Reward]]:
    """What write_trajectories wrote: all of it, or the `first` so many episodes. A trajectory is
    made when it is asked for, without the model's image inputs. Raises FileNotFoundError, and
    Unusable for a line that is no trajectory."""
    return Records(path, trajectory_of)[:first], list(Records(path, reward_of)[:first])


def reward_of(record: dict, folder: Path) -> Reward:
    return Reward(**record["reward"] | {"scores": tuple(record["reward"]["scores"])})


def trajectory_of(record: dict, folder: Path) -> Trajectory:
    def turn(step: dict) -> Turn:
        del step["score"]  # the reward has it
        if fields := step["observation"]:
            fields["images"] = [opened(folder, name) for name in fields["images"]]
            fields["boxes"] = [box and tuple(box) for box in fields["boxes"]]
            step["observation"] = Observation(**fields)
        return Turn(**step)

    sample, turns = record["sample"], list(map(turn, record["steps"]))
    boxes, options = tuple(map(tuple, sample["boxes"])), tuple(sample["options"])
    sample |= {"image": opened(folder, sample["image"]), "boxes": boxes, "options": options}
    acted = [who for who, tokens in record["acted"] for _ in range(tokens)]
    others = {name: record[name] for name in AS_IT_IS}
    return Trajectory(Sample(**sample), acted=acted, turns=turns, **others)


# One table, one figure

# The rows of every table: the name of a number in summary.json, and what a reader sees.
LABELS = {
    "n": "questions", "ungraded": "answers without verdict", "score": "benchmark score",
    "score_least": "benchmark score, at least", "score_most": "benchmark score, at most",
    "accuracy": "accuracy", "ood_accuracy": "out-of-prior accuracy", "tool_use": "tool use",
    "faithful": "faithful", "unfaithful": "unfaithful", "no_tool": "no tool",
    "faithful_and_correct": "correct and faithful", "calls": "calls per question",
    "faithful_given_correct": "faithful, if correct", "crop_area": "crop area",
    "error_rate": "errors",
}  # fmt: skip


def lines(columns: dict[str, dict]) -> list[list[str]]:
    """The head of a table, then a label and a cell for each column. What was not measured stays
    empty. columns: {its name: the metrics of `measure`}."""
    cells = [["", *columns]]
    for name, label in LABELS.items():
        values = [metrics.get(name) for metrics in columns.values()]
        texts = [f"{value:.3f}" if isinstance(value, float) else f"{value}" for value in values]
        if set(texts) - {"None"}:
            cells.append([label, *(text.replace("None", "") for text in texts)])
    return cells


def table(columns: dict[str, dict]) -> str:
    """The stages side by side in plain text."""
    align = ["left", *["right"] * len(columns)]
    return tabulate(lines(columns), tablefmt="plain", colalign=align, disable_numparse=True)


# Okabe and Ito's palette, for the colour-blind; lines and markers differ too, for print.
COLORS = ("#0072B2", "#D55E00", "#000000", "#CC79A7", "#009E73", "#E69F00", "#56B4E9")
LINES, MARKERS = ("-", "--", ":", "-.", "-", "--", ":"), "os^DvPX"
PANELS = {  # label of the axis: names of its curves in log.jsonl
    "share": ("tool_use", "faithful", "crop_area"),
    "mean reward, unweighted": ("answer", "tools", "format"),
}


def curves(log_lines: Sequence[dict], path: Path) -> None:
    """curves.png: what the policy does and what it is paid for, over the steps of training."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    for axes, (label, names) in zip(figure.subplots(2, 1, sharex=True), PANELS.items()):
        for name, color, dashes, marker in zip(names, COLORS, LINES, MARKERS):
            if points := [(line["step"], line[name]) for line in log_lines if name in line]:
                style = {"color": color, "linestyle": dashes, "marker": marker}
                every = len(points) // 8 + 1
                axes.plot(*zip(*points), label=name.replace("_", " "), markevery=every, **style)
                axes.legend()
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylim(-0.02, 1.02)
    figure.axes[1].set_xlabel("training step" if axes.lines else "training step: nothing logged")
    figure.savefig(path, dpi=120)


# Command line

DOORS = {name: f"beyond.{name[2:]}" for name in ("--check", "--compare", "--film", "--study")}
PRESETS = {"toy": {"limit": 256, "max_new_tokens": 64, "max_length": 2048, "wave": 128}}


@dataclass(frozen=True)
class Options:
    """Play a benchmark, and show where the policy looked. If it is stopped or killed, the same
    command goes on where it was."""

    model: str = knob(None, "checkpoint: a folder or a hub name", metavar="DIR", required=True)
    bench: str = knob("toy", "which questions", choices=("toy", *BENCHES))
    data: str | None = knob(None, "the benchmark's files; else those of the hub", metavar="PATH")
    out: Path = knob(Path("runs/eval"), "where results go", metavar="DIR")
    limit: int | None = knob(None, "questions; toy: and half as many out of its prior", least=1)
    shortcut: float = knob(1.0, "toy: share of squares that follow the prior", least=0, most=1)
    turns: int = knob(GREEDY.turns, "how often the policy may speak", least=1)
    temperature: float | None = knob(None, "0 is greedy; 1 if --avg-at is above 1", least=0)
    avg_at: int = knob(1, "mean over K samples of each question", metavar="K", least=1)
    max_new_tokens: int = knob(1024, "of one turn", least=1)
    max_length: int = knob(16384, "tokens of a whole episode", least=1)
    max_pixels: int | None = knob(None, "budget of one image; else the checkpoint's own", least=1)
    wave: int = knob(32, "questions at a time: memory, and what a kill costs", least=1)
    seed: int = knob(0, "of the toy's questions and of sampling")
    judge_url: str | None = knob(None, "server that judges pictures without boxes, open answers")
    judge_model: str | None = knob(None, "its model's name on that server")
    judge_tokens: int = knob(2048, "most of its reply; a judge that thinks may need more", least=1)
    judge_prompt: str = knob("evaluation", "what it sees; _original: also the whole image",
                             choices=("evaluation", "evaluation_original"))  # fmt: skip
    perturb: str = knob(
        "none", "play again, tools perturbed (Table 6): all, or " + ",".join(PERTURBATIONS)
    )
    ablation: bool = knob(False, "play again without tools: what was each call worth?")


def check(options: Options) -> None:
    """What can be refused before a model loads is refused here."""
    if (options.out / "state.json").exists():
        raise ValueError(f"{options.out} holds a training run: give --out another folder")
    if options.bench == "toy" and options.data:
        raise ValueError(f"the toy world is drawn, not read: drop --data {options.data}")
    if options.avg_at > 1 and not options.temperature:
        raise ValueError("--avg-at: K greedy plays are one play, so raise --temperature")
    if (names := names_of(options.perturb)) and options.temperature:
        raise ValueError("--perturb compares greedy plays: drop --avg-at and --temperature")
    check_perturbations(names)
    if bool(options.judge_url) != bool(options.judge_model):
        raise ValueError("a judge needs both --judge-url and --judge-model: give the other too")
    check_checkpoint(options.model)
    options.out.mkdir(parents=True, exist_ok=True)


def names_of(perturb: str) -> Sequence[str]:
    return {"all": PERTURBATIONS, "none": ()}.get(perturb, perturb.split(","))


def judges_of(options: Options, boxed: bool) -> tuple[Judge, Judge | None]:
    """(the judge, a second one to compare it with, or None). Boxes judge where they are labelled,
    else the served judge, which also grades open answers where the benchmark asks for that."""
    boxes, bench = BoxJudge() if options.bench == "toy" else HALF, BENCHES.get(options.bench)
    if not options.judge_url:
        if bench and bench.judged:
            print(options.bench, "has open answers: without --judge-url, rules grade them")
        if bench and bench.kind == "search" and not boxed:
            print(options.bench, "has no boxes: without --judge-url nobody says what is faithful")
        return boxes, None
    how = {"prompt": options.judge_prompt, "cache": options.out / "verdicts"}
    how |= {"max_tokens": options.judge_tokens, "max_pixels": options.max_pixels}
    served = ChatJudge(options.judge_url, options.judge_model, **how)
    if boxed:
        return boxes, served
    return (served if bench.judged or bench.kind == "search" else boxes), None


def studies(options: Options, policy: Policy, rules: Rules, played, paid, second) -> None:
    """What can be said of the episodes beyond rates: printed as it comes, and kept in studies.json
    beside what earlier calls said about the same evaluation."""
    file, run = options.out / "studies.json", Records(options.out / EPISODES)[0]["run"]
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept = kept if kept.get("run") == run else {"run": run}
    kept["tool_use"] = tool_use(played)
    print("", listing(kept["tool_use"]), "", sep="\n")
    names, ablate = names_of(options.perturb), options.ablation
    if names or ablate or second:
        evidence = importlib.import_module("beyond.evidence")
        kept |= evidence.studies(policy, played, paid, rules, options.seed, names, ablate, second)
    file.write_text(json.dumps(kept, indent=2, default=vars), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if through_door(argv, DOORS):
        return
    options = parse(Options, argv, DOORS, PRESETS, by="bench")
    if options.temperature is None:
        options = replace(options, temperature=float(options.avg_at > 1))
    with refusals():
        check(options)
        cpu = not torch.cuda.is_available()
        state = PartialState(cpu, timeout=timedelta(days=7))  # long: they wait for the slowest
        if options.bench == "toy":
            samples = load_toy(options.limit, options.seed, options.shortcut)
        else:
            samples = load_bench(options.bench, options.data, options.limit)
        judge, second = judges_of(options, options.bench == "toy" or bool(samples[0].boxes))
        policy = actor_of(load_policy(options.model, state.device, options.max_pixels))

    started = time.monotonic()
    rules = shared(options, Rules)
    with refusals(Unusable, TooLong):  # other errors are ours, and keep their traceback
        metrics, *episodes = evaluate(
            policy, samples, judge, rules=rules, seed=options.seed, out=options.out,
            rollouts=options.avg_at, wave=options.wave,
        )  # fmt: skip
    if not state.is_main_process:
        return
    stages, seconds = {options.bench: metrics}, round(time.monotonic() - started, 1)
    config = vars(options) | {"precision": policy.model.dtype}  # bf16 on a GPU, as in training
    summary = {"config": config, "seconds": {options.bench: seconds}, "stages": stages}
    rates = {name: Rate(**rate) for name, rate in metrics["rates"].items()}
    parts = [f"{part:40} {value:.3f}" for part, value in metrics.get("parts", {}).items()]
    shown = table(stages), listing(rates), metrics["correct_by_faithful"], "\n".join(parts)
    print(*filter(None, shown), sep="\n\n")
    studies(options, policy, rules, *episodes, second)
    # Last, since it says to others, such as beyond/study.py, that all has ended.
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2, default=str), "utf-8")
    print(report(options.out, lines(stages)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # Ctrl-C
        print("\nstopped; to go on: the same command")
        sys.exit(130)
