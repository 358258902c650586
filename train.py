"""
train.py: the whole method as a story. Act, judge, compare, learn, report.

Concept     Stage 1 (SFT) teaches the policy to speak the format; stage 2 (TAPO) teaches it to look
            where the evidence is. `main` is the table of contents; every verb has its own file.
Paper       CodeV, arXiv:2511.19661, the method and its training
In          the command line, which is the Config below and nothing else
Out         a folder with config.json, log.jsonl, summary.json, curves.png, report.html, sft/, rl/
Left out    generation by another engine than transformers; several judges
Read next   rollout.py, rewards.py, grpo.py: the verbs in their order

    python train.py                              the toy: SFT, TAPO, one table; minutes on 2 cores
    python train.py --reward accuracy            pay for right answers alone: the paper's warning
    python train.py --resume runs/toy            go on after a crash, to the same end
    python train.py --preset tiny-base --out tiny    make the committed base checkpoint again
    python train.py --preset codev-7b --plan 8x80    would it fit on 8 GPUs of 80 GB?
    accelerate launch train.py --preset codev-7b --judge-url http://host:8000/v1    the real thing

Everything random is drawn from (seed, stage, step, question), never from what happened before or
on which process: a resumed run needs no saved generator states to end exactly where the
uninterrupted one does, and two processes play the same games as one.
"""

import gc
import importlib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from data import HABITS, Sample, demonstrations, load_rl, toy_questions
from evaluate import curves, evaluate, lines, load_toy, table
from faithfulness import count, finding
from grpo import ADVANTAGES, LOSS_AVERAGES, LogProbs, Objective, Row, learn, micro_batches
from kit.adapter import adapted
from kit.chat import VerdictWatch
from kit.flags import knob, overrides, parse, refusals, shared, through_door
from kit.folder import Run, check_new, read_config, write_json
from kit.page import report
from kit.processes import actor_of, assemble, gathered, merged, mine, parts, shard, sync
from kit.qwen import Policy, freeze_vision
from rewards import BoxJudge, ChatJudge, Judge, Lambdas, asked_early, reward_named, score, summary
from rollout import Rules, check_fits, encode_prompt, load_policy, play
from sandbox import Limits
from sft import TRAIN_ROUNDS, imitate, load_thyme, mean_logp, replay_all, rows_of, shuffled

SOURCES = ("paper", "notes", "verl", "thyme", "ours")  # of a default; see Config
paper, notes, verl, thyme, ours = (partial(knob, source=name) for name in SOURCES)
TRACKERS, FROZEN = ("none", "tensorboard", "wandb", "trackio"), ("none", "sft", "rl", "both")
DOORS = {"--plan": "beyond.plan", "--simulate": "beyond.simulate"}
THYME = "Kwai-Keye/Thyme-SFT:wo_thinking+2round"  # all but its rows on computation
DATA = dict(sft_data=THYME, rl_data="RenlyH/CodeV-RL-Data")
PUBLIC = DATA | dict(save_every=20, sft_save_every=500, keep=2)
# A deviation, for one GPU. Schulman et al. ("LoRA Without Regret", 2025) found ten times the full
# learning rate best, whatever the rank. Their service, Tinker, begins with rank 32.
ADAPTER = PUBLIC | dict(lora_rank=32, sft_lr=1e-4, rl_lr=1e-5)
PRESETS = {
    # all ours: measured on the toy, with no claim beyond it
    "toy": dict(
        threads=1, max_pixels=0, freeze_vision="none", sft_steps=320, sft_batch=32, sft_lr=4e-3,
        sft_warmup=0.03, rl_steps=60, questions=12, turns=3, max_new_tokens=32, max_length=1024,
        max_log_chars=96, rl_lr=1.5e-4, beta=0.02, kv_budget_gb=1.0, patience=60.0,
        activation_checkpointing=False,
    ),
    # the paper's run: all else is as in Config, where each default has its source
    "codev-7b": PUBLIC | dict(model="Qwen/Qwen2.5-VL-7B-Instruct", out="runs/codev-7b"),
    "codev-7b-lora": ADAPTER | dict(model="Qwen/Qwen2.5-VL-7B-Instruct", out="runs/codev-7b-lora"),
    "codev-3b": ADAPTER | dict(model="Qwen/Qwen2.5-VL-3B-Instruct", out="runs/codev-3b"),
    "tiny-base": dict(threads=1, seed=2, out="tiny"),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Every field is a flag, and is saved beside each run. The word before its default says who the
    default of the 7B run is from: the paper, notes by others on it, verl (a library for RL), Thyme
    (data and code for SFT), or us. The presets above say where other runs differ."""

    preset: str = ours("toy", "a set of defaults", choices=PRESETS)
    model: str = ours("tiny", "checkpoint folder or hub name to start from")
    out: str = ours("runs/toy", "folder for everything this run writes")
    seed: int = ours(0, "the same seed on the same machine repeats a CPU run exactly")
    threads: int = ours(0, "CPU threads of torch; 0: torch chooses", least=0)
    save_every: int = ours(10, "steps between two checkpoints to resume from", least=1)
    sft_save_every: int = ours(0, "the same in stage 1; 0: as --save-every", least=0)
    keep: int = ours(1, "newest checkpoints that are kept, beside the best", least=1)
    timeout: float = ours(1800.0, "seconds to wait for a process that does not come", least=1)
    tracker: str = ours("none", "also send the log to this", choices=TRACKERS)
    transcript_every: int = ours(10, "steps between two episodes written out as text", least=1)

    sft_data: str = ours("", "demonstrations like Thyme-SFT's: file, folder or hub name; else toy")
    rl_data: str = ours("", "questions: a file, folder or hub name; empty: the toy's")
    on_bad: str = ours("skip", "a row that cannot be used", choices=("skip", "stop"))
    max_pixels: int = thyme(3_211_264, "pixels of an image (RL: ours); 0: the model's own", least=0)
    judge_url: str = ours("", "OpenAI-compatible server of the judge, or several by commas")
    judge_model: str = notes("Qwen/Qwen2.5-VL-32B-Instruct", "the judge's name there")
    judge_tokens: int = ours(2048, "most of its reply; a judge that thinks may need more", least=1)
    judge_concurrency: int = ours(8, "questions to the judge at a time, per process", least=1)
    habit: str = ours("careless", "toy: how its demonstrator looks", choices=tuple(HABITS))
    shortcut: float = ours(1.0, "toy: share of squares in their usual texture", least=0, most=1)

    sft_steps: int = ours(-1, "steps of SFT; -1: --sft-epochs; 0: --model has had it", least=-1)
    sft_epochs: float = paper(3.0, "passes over --sft-data", above=0)
    sft_batch: int = thyme(128, "demonstrations per step", least=1)
    sft_lr: float = thyme(1e-5, "peak learning rate of stage 1", above=0)
    sft_warmup: float = thyme(0.05, "share of stage 1 in which the learning rate rises", least=0)
    sft_demos: int = ours(2500, "toy: demonstrations in all", least=1)
    train_rounds: str = thyme("last_code_and_answer", "turns to learn from", choices=TRAIN_ROUNDS)
    freeze_vision: str = thyme("sft", "stages that leave the vision tower alone", choices=FROZEN)
    lora_rank: int = paper(0, "rank of an adapter, a deviation; 0: all weights learn", least=0)

    rl_steps: int = paper(200, "steps of stage 2", least=0)
    questions: int = paper(256, "questions per step, those of all processes together", least=1)
    rollouts: int = paper(8, "K, rollouts per question, to compare with each other", least=2)
    turns: int = ours(5, "T, turns of one rollout, in training and in its evaluation", least=1)
    temperature: float = paper(1.0, "of the sampler, and of every log-probability", above=0)
    max_new_tokens: int = ours(1024, "tokens of one turn", least=1)
    max_length: int = thyme(10240, "tokens of a whole trajectory (in RL: ours)")
    max_log_chars: int = ours(2000, "characters of a program's output; errors stay whole", least=0)

    reward: str = paper("tapo", "tapo, accuracy, tool_bonus, random, a rival, my_file.my_reward")
    lambda_acc: float = ours(1.0, "weight of a right answer, Eq. 5", above=0)
    lambda_tool: float = ours(0.2, "weight of what the tools showed, Eq. 5")
    lazy: float = ours(2.5, "price of a look at nothing, times its share of the image", least=0)
    lambda_fmt: float = ours(0.2, "weight of the format; 0 gives the printed Eq. 5", least=0)
    adv_norm: str = paper("none", "divide by the group's deviation?", choices=ADVANTAGES)
    ratio_anchor: str = ours("old", "denominator of Eq. 3; notes have ref", choices=("old", "ref"))
    loss_agg: str = verl("token", "mean over all tokens, or over rollouts", choices=LOSS_AVERAGES)
    eps: float = verl(0.2, "clip range of Eq. 4", least=0)
    beta: float = verl(1e-3, "KL weight of Eq. 4; at 0 no reference model is loaded", least=0)
    mask_truncated: bool = ours(False, "a deviation: cut-off rollouts teach nothing")
    updates: int = verl(1, "optimiser steps per batch of rollouts", least=1)
    rl_lr: float = paper(1e-6, "learning rate of stage 2", above=0)
    max_grad_norm: float = verl(1.0, "gradient clipping", above=0)
    row_tokens: int = ours(8192, "most tokens in a row or micro-batch: sets memory", least=1)
    activation_checkpointing: bool = ours(True, "recompute activations: time for memory")

    kv_budget_gb: float = ours(0.0, "GB for the KV cache; 0: 70 % of what is free", least=0)
    patience: float = ours(1.0, "seconds for slow code; if none is late, a run repeats", least=0)
    sandboxes: int = ours(8, "programs that run at the same time, per process", least=1)
    sandbox_seconds: float = thyme(10.0, "wall-clock limit of one program", least=0.1)
    allow_weak_sandbox: bool = ours(False, "run code that this system cannot fully confine")
    eval_every: int = ours(0, "steps between evaluations of every 4th question; 0: none", least=0)
    eval_questions: int = ours(512, "at most a tenth of --rl-data; toy: half as many more", least=4)


@dataclass(frozen=True)
class Command(Config):
    """Train with TAPO. Defaults are those of the preset; [...] says where the 7B's are from."""

    resume: str | None = knob(None, "go on with the run in DIR, by its own config", metavar="DIR")


# What --resume takes beside it: these change memory, speed and what is told, but not the method.
FREE = "activation_checkpointing judge_concurrency judge_url keep kv_budget_gb patience row_tokens"
FREE += " sandboxes save_every sft_save_every threads timeout tracker transcript_every"


def parse_config(argv: list[str]) -> Config:
    """The command line -> Config; or the end, with one line that says what is wrong with it."""
    if through_door(argv, DOORS):
        sys.exit()
    command = parse(Command, argv, DOORS, PRESETS)
    with refusals():
        if command.resume is None:
            config = shared(command, Config)
            check_new(Path(config.out))
        else:
            changed = overrides(argv, command, FREE.split(), "--resume")
            config = replace(read_config(Path(command.resume), Config), **changed)
        lambdas(config), reward_named(config.reward)  # both refuse what they do not know
    return config


def lambdas(config: Config) -> Lambdas:
    return Lambdas(config.lambda_acc, config.lambda_tool, config.lambda_fmt, config.lazy)


def rules(config: Config) -> Rules:
    return shared(config, Rules, limits=Limits(seconds=config.sandbox_seconds))


@dataclass
class World:
    """Questions, and who judges."""

    questions: Callable[[int], list[Sample]]  # this process's share of a step's questions
    measured: Sequence[Sample]  # the questions of the evaluation
    judge: Judge
    examiner: Judge  # the judge of the evaluation; a served one is given another prompt


def world_of(run: Run, config: Config) -> World:
    """What cannot be read, judged or played is refused here, before weights are loaded."""
    if config.rl_data and not config.judge_url:
        raise ValueError("--rl-data has no boxes to judge by: give --judge-url, a served model")
    if config.questions < run.n:
        raise ValueError(f"--questions {config.questions} for {run.n} processes: raise it")
    start = config.model if run.state["stage"] == "sft" else run.folder / "sft"
    policy = load_policy(start, max_pixels=config.max_pixels or None, weights=False)
    if config.sft_steps and start == config.model:
        run.check_data("sft_data", config.sft_data)
    run.check_data("rl_data", config.rl_data)
    if config.rl_data:
        return data_world(run, config, policy)
    measured = load_toy(config.eval_questions, shortcut=config.shortcut)
    fits(policy, config, measured[0])  # stands for all: their prompts are alike

    def questions(step: int) -> list[Sample]:
        return mine(toy_questions(config.questions, f"{config.seed}-{step}", config.shortcut))

    return World(questions, measured, BoxJudge(), BoxJudge())


def fits(policy: Policy, config: Config, sample: Sample) -> None:
    check_fits(policy, sample, encode_prompt(policy, sample, pixels=False), rules(config))


def data_world(run: Run, config: Config, policy: Policy) -> World:
    """--rl-data: a few questions held out for the evaluation, epochs over the others."""
    asked = dict(url=config.judge_url, model=config.judge_model, cache=run.folder / "judge")
    asked |= dict(max_tokens=config.judge_tokens, concurrency=config.judge_concurrency)
    judge, examiner = ChatJudge(**asked), ChatJudge(**asked, prompt="evaluation")
    key = policy.version(), config.max_length, config.max_new_tokens
    data = load_rl(config.rl_data, config.on_bad, partial(fits, policy, config), key)
    run.tell_skipped(len(data), data.skipped, "skipped-rl.jsonl")
    held = min(config.eval_questions, max(1, len(data) // 10))
    everything = shuffled(len(data), len(data), f"held out {config.seed}")(0)
    own, measured = everything[held:], [data[i] for i in everything[:held]]
    if len(own) < config.questions:
        told = f"{config.rl_data} has {len(data)} usable questions, {held} of them held out"
        raise ValueError(f"{told}: give more, or lower --questions {config.questions}")
    order = shuffled(len(own), config.questions, config.seed)

    def questions(step: int) -> list[Sample]:
        return [data[own[i]] for i in mine(order(step))]

    return World(questions, measured, judge, examiner)


# The two stages


def opened(run: Run, config: Config, stage: str) -> tuple[Policy, Policy, torch.optim.Optimizer]:
    """(policy, actor, optimizer), from the checkpoint if the run has one. The policy learns, in
    fp32, cut over all processes; the actor, a whole copy, plays."""
    gc.collect()  # frees the last stage's policy, whose hooks refer to each other
    start = config.model if stage == "sft" else run.folder / "sft"
    lr, second = (config.sft_lr, 0.98) if stage == "sft" else (config.rl_lr, 0.95)
    with run.phase("load"):
        policy = load_policy(start, run.device, config.max_pixels or None)
        if config.freeze_vision in (stage, "both"):
            freeze_vision(policy)
        policy = adapted(policy, config.lora_rank, f"adapter {config.seed} {stage}")
        actor = actor_of(policy)
        if config.activation_checkpointing:
            policy.checkpoint_activations()
        shard(policy, LogProbs(policy))
        learnt = [p for p in policy.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learnt, lr, betas=(0.9, second), weight_decay=0.0)
        if run.state["checkpoint"]:
            run.restore(policy, optimizer, run.state["checkpoint"])
        sync(policy, actor)
    return policy, actor, optimizer


def demonstration_rows(run: Run, config: Config, policy: Policy) -> tuple[Sequence, list]:
    """(the demonstrations to learn from, this process's share of those that are only measured)"""
    if config.sft_data:
        how = config.train_rounds, rules(config), config.on_bad
        demos, skipped = load_thyme(policy, config.sft_data, *how)
        run.tell_skipped(len(demos), skipped, "skipped-sft.jsonl")
        held = min(100, len(demos) // 10)
    else:
        scripts, held = demonstrations(config.sft_demos + 100, config.seed, config.habit), 100
        played = replay_all(policy, scripts, rules(config))
        bar = tqdm(played, "playing demonstrations", len(scripts), mininterval=5)
        demos = [t for t in bar if t.ended == "answered"]  # others are too long: left out, not cut
        print(f"{len(demos)} of {len(scripts)} demonstrations fit into --max-length")
    if (n := len(demos) - held) < 1:
        told = f"{len(demos)} usable demonstrations less {held} held out leave none to learn from"
        raise SystemExit(f"{told}: raise --max-length, or see {run.folder}/skipped-sft.jsonl")
    rows = rows_of(policy, demos)
    return rows[:n], list(mine(rows[n:]))


def stage_1(run: Run, config: Config, world: World) -> None:
    """SFT: imitate demonstrations, the mean log-probability of their acted tokens."""
    policy, actor, optimizer = opened(run, config, "sft")
    steps = config.sft_steps
    with run.phase("demonstrations"):
        rows, held_out = demonstration_rows(run, config, policy) if steps else ([], [])
    batch = min(config.sft_batch, len(rows))
    steps = math.ceil(config.sft_epochs * len(rows) / batch) if steps < 0 else steps
    order = shuffled(len(rows), batch, config.seed)

    def batched(rows: list[Row]) -> list[list[Row]]:
        return [b for part in parts(rows) for b in micro_batches(part, config.row_tokens)]

    def batches_of(i: int) -> list[list[Row]]:
        return batched([rows[k] for k in mine(order(i))])

    def rate(i: int) -> float:  # the learning rate: up to its peak, then down to 2 % of it
        left = 1 - 0.98 * (i + 1) / steps
        return config.sft_lr * min(1.0, (i + 1) / max(1, round(config.sft_warmup * steps))) * left

    def after(i: int, loss: float, grad_norm: float | None) -> None:
        line = {"stage": "sft", "step": i + 1, "loss": loss, "grad_norm": grad_norm}
        if (i + 1) % 50 == 0 and sum(gathered(len(held_out))):
            line["held_out"] = -mean_logp(policy, batched(held_out), learn=False)
        run.log(line)
        run.check_weights(policy)
        if (i + 1) % (config.sft_save_every or config.save_every) == 0 or i + 1 == steps:
            run.save(policy, optimizer, i + 1)

    with run.phase("sft"):
        imitate(policy, optimizer, batches_of, range(run.state["step"], steps), rate, after)
    sync(policy, actor)
    metrics = measure_policy(run, config, world, actor, out=run.folder / "sft-episodes")
    run.end_stage(actor, metrics, following="rl")


def reference_of(run: Run, config: Config, policy: Policy) -> Policy | None:
    """pi_ref of Eqs. 1, 3 and 4: the SFT model, if anything is compared with it. If the policy has
    an adapter, the SFT model is there already: it is the policy without it."""
    if config.beta == 0 and config.ratio_anchor == "old":
        return None
    if policy.base:
        return policy.base
    reference = load_policy(run.folder / "sft", run.device, config.max_pixels or None)
    shard(reference, LogProbs(reference))
    return reference


# Measure and report. What comes in has the names that it has in `main`.


def measure_policy(run, config, world, actor, out=None, every=1) -> dict:
    """Metrics on the same questions with the same sampling seed in every run; on the toy at
    temperature 1, where shares mirror the policy: greedy play shows only its likeliest ways.

    out: the folder of a stage's episodes, of which none is played twice. Without it, amid training,
    all processes share one question of `every` so many, and the next time replaces this one."""
    with run.phase("evaluation"):
        asked = world.measured[::every]
        wave, temperature = (32, 0.0) if config.rl_data else (512, 1.0)
        wave = wave if out else math.ceil(len(asked) / run.n)
        how = dict(rules=replace(rules(config), temperature=temperature), wave=wave)
        how["out"] = out or run.emptied("evaluation")
        metrics = evaluate(actor, asked, world.examiner, **how)[0]
        # A benchmark's score is of all its questions: these are some of a training set.
        return {k: v for k, v in metrics.items() if not k.startswith("score") and k != "parts"}


def report_step(run, config, world, step, groups, rewards, learnt, tally) -> None:
    """One line of the log and one on the screen; every name is in docs/log.md. Each
    process looks at its own rollouts, and the processes exchange numbers."""
    judged = rewards  # faithfulness is measured by tapo's turn scores, whatever is paid for
    if config.reward != "tapo":
        judged = score(groups, "tapo", world.judge, lambdas(config), random.Random(0))
    found = [list(map(finding, *pair)) for pair in zip(groups, judged)]
    turns = [turn for group in groups for t in group for turn in t.tool_turns]
    tally["environment"] = sum(bool(turn.observation.environment) for turn in turns)
    seconds = {name: tally.pop(name) for name in [*tally] if name.endswith("_seconds")}
    run.spent({name.removesuffix("_seconds"): n for name, n in seconds.items()})

    rewards, found = zip(*merged(gathered([*zip(rewards, found)])))
    found, tally = sum(found, []), sum(gathered(tally), Counter())
    line = {"stage": "rl", "step": step}
    line |= summary(rewards, sum(f.calls for f in found), tally.pop("environment", 0)) | learnt
    line["useful_calls"] = sum((s or 0) > 0 for f in found for s in f.scores) / len(found)
    looks = ("tool_use", "faithful", "crop_area", "error_rate")
    line |= {name: rate.value for name, rate in count(found).items() if name in looks}
    line |= tally
    words = [f"step {step:>4}"]
    for name in ("reward", "answer", "tools", "tool_use", "faithful", "calls", "kl", "grad_norm"):
        words.append(f"{name} {'-' if line[name] is None else format(line[name], '.3f'):>6}")
    took = sum(run.lap[phase] for phase in ("act", "judge", "learn"))
    tqdm.write("  ".join([*words, f"{took:6.1f} s"]))
    run.log(line)


def finish(run, config, world, policy, actor, optimizer) -> None:
    """Measure and export stage 2, unless that is done. Then one table, one page and a figure; the
    numbers are in summary.json."""
    if run.state["stage"] == "rl":
        sync(policy, actor)
        metrics = measure_policy(run, config, world, actor, out=run.folder)
        run.end_stage(actor, metrics, following="done")
    run.export_best(policy, actor, optimizer, config.rl_steps)
    if not run.first:
        return
    names = {"sft": "SFT", "rl": "TAPO" if config.reward == "tapo" else config.reward}
    columns = {names[stage]: metrics for stage, metrics in run.state["stages"].items()}
    curves(run.log_lines("rl"), run.folder / "curves.png")
    page = report(run.folder, lines(columns), ["curves.png"])
    numbers = {"config": asdict(config)} | {k: run.state[k] for k in ("seconds", "stages")}
    write_json(run.folder / "summary.json", numbers)
    print(f"\n{table(columns)}\n\n{page}\n{run.folder / 'summary.json'}")


def main(config: Config) -> None:
    torch.set_num_threads(config.threads or torch.get_num_threads())
    if config.preset == "tiny-base":
        tiny = importlib.import_module("beyond.tiny")
        return tiny.pretrain_tiny(config.seed, config.row_tokens, print).save(config.out)
    folder, values = Path(config.out), asdict(config)
    team = assemble(folder, values, config.timeout, config.tracker)
    with refusals():
        run = Run(folder, values, config.timeout, config.keep, team)
        world = world_of(run, config)

    # Stage 1, SFT. Speak the format.                                         sft.py
    if run.state["stage"] == "sft":
        stage_1(run, config, world)

    # Stage 2, TAPO. Look where the evidence is.
    policy, actor, optimizer = opened(run, config, "rl")
    reference = reference_of(run, config, policy)
    watch, early = VerdictWatch(), asked_early(world.judge)

    for step in tqdm(run.steps_left(config.rl_steps), "rl", mininterval=5):
        done, tally, key = step + 1, Counter(), f"{config.seed}-{step}"
        torch.manual_seed(random.Random(f"sampling {key}").getrandbits(63))
        questions = world.questions(step)

        # 1. Act. K rollouts of every question, tool calls and all.           rollout.py, Eq. 2
        with run.phase("act"):
            sync(policy, actor)
            groups = play(actor, questions, config.rollouts, rules(config), tally, early)

        # 2. Judge. Was it right, and did the tools show the evidence?        rewards.py, Eqs. 5, 6
        with run.phase("judge"):
            rng = random.Random(f"reward {key}")
            rewards = score(groups, config.reward, world.judge, lambdas(config), rng)
            watch([r.total for group in merged(gathered(rewards)) for r in group], world.judge)

        # 3. Compare. Each rollout against the others of its own question.    grpo.py
        total = torch.tensor([[r.total or 0.0 for r in group] for group in rewards])  # [G, K]
        verdict = torch.tensor([[r.total is not None for r in group] for group in rewards])
        advantage = ADVANTAGES[config.adv_norm](total, verdict)  # [G, K]

        # 4. Learn. One clipped step towards the better rollouts.             grpo.py, Eqs. 1, 3, 4
        for group in optimizer.param_groups:
            group["lr"] = config.rl_lr * min(1.0, done / 5)  # warm-up over five steps
        with run.phase("learn"):
            how = shared(config, Objective)
            learnt = learn(policy, optimizer, groups, advantage, reference, how)
            optimizer.zero_grad()  # the next KV cache needs the memory of the gradients

        # 5. Report. Where did it look, and what did it cost?                 faithfulness.py
        report_step(run, config, world, done, groups, rewards, learnt, tally)
        if run.first and done % config.transcript_every == 0:
            run.write_transcript(done, actor, groups[0][0].ids, rewards[0][0])
        run.check_weights(policy)
        if config.eval_every and done % config.eval_every == 0 and done < config.rl_steps:
            sync(policy, actor)
            metrics = measure_policy(run, config, world, actor, every=4)
            run.log({"stage": "evaluation", "step": done} | metrics)
        if done % config.save_every == 0 or done == config.rl_steps:
            run.save(policy, optimizer, done)

    finish(run, config, world, policy, actor, optimizer)
    team.end_training()


if __name__ == "__main__":
    chosen = parse_config(sys.argv[1:])
    try:
        main(chosen)
    except KeyboardInterrupt:  # Ctrl-C
        print(f"\nstopped; to go on: python train.py --resume {chosen.out}")
        sys.exit(130)
