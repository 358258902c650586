"""
filters.py: what a data set holds, and the paper's three filters of its RL data.

Concept     A question teaches nothing if no image holds its answer, if its label is wrong, or if
            the policy is always right. The paper drops such questions. The last two filters cost
            hours of a model's time, so each finding becomes a line of a record at once.
Paper       CodeV, arXiv:2511.19661: how CodeV-RL-Data is made of ThinkLite-70K and DeepEyes-47K
In          a data set that load_rl reads (--describe also takes demonstrations); a judge; a model
Out         OUT.parquet, for the next filter or for training; OUT.txt, what was left out and why
Left out    a lower cut of difficulty, and a vote of the majority: the paper does not define them
Read next   data.load_rl (which rows can be used), rewards.ChatJudge (who checks labels)
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter, namedtuple
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase as LETTERS

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from data import Sample, load_rl
from kit.chat import picture_part, text_part
from kit.flags import knob, parse, refusals, shared
from kit.processes import actor_of
from kit.qwen import Policy
from kit.schemas import KINDS, cell_of, named
from kit.tables import Rows, Usable, image_bytes, read_rows
from rewards import ChatJudge, Lambdas, score
from rollout import Rules, check_fits, encode_prompt, load_policy, play
from sft import load_thyme
from train import Config

EXTERNAL = "okvqa"  # by commas: sources that need knowledge no image holds (the paper names one)
VERDICTS = ("keep", "drop", "unsure")


@dataclass(frozen=True)
class Options:
    """Look at a data set, or filter it as the paper does. WHERE is a file, a folder or a hub name.
    A filter writes OUT.parquet and OUT.txt. It keeps what it finds in OUT.jsonl, to go on from.
    Under accelerate launch --difficulty uses every GPU; run it once more without, to write OUT."""

    describe: str = knob(None, "rows, kinds, sizes, lengths, what is unusable", metavar="WHERE")
    drop_sources: str = knob(None, "drop sources of external knowledge", metavar="WHERE")
    check_labels: str = knob(None, "ask a judge; settle its doubts by hand", metavar="WHERE")
    difficulty: str = knob(None, "drop what a model (nearly) always gets right", metavar="WHERE")
    out: Path = knob(Path("filtered.parquet"), "what a filter writes")
    external: str = knob(EXTERNAL, "words in the names of sources to drop", "paper")
    judge_url: str = knob(None, "OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    judge_model: str = knob(None, "its model; the paper checks labels with Qwen2.5-VL-32B")
    judge_tokens: int = knob(2048, "most of its reply; a judge that thinks may need more", least=1)
    model: str = knob(None, "counts tokens, or plays; the paper: Qwen2.5-VL-7B-Instruct")
    max_pixels: int = knob(Config.max_pixels, "pixels of an image, as train.py's; 0: the model's")
    max_length: int = knob(Config.max_length, "tokens of a whole trajectory, as train.py's")
    max_new_tokens: int = knob(1024, "tokens of one turn")
    turns: int = knob(5, "turns of one try; 1: without tools")
    samples: int = knob(8, "tries per question", "paper", least=1)
    max_accuracy: float = knob(0.9, "share of right tries that is still kept", "paper")
    batch: int = knob(16, "questions that are played together", least=1)
    allow_weak_sandbox: bool = knob(False, "play on a system that cannot confine")


# The three filters

Verdict = namedtuple("Verdict", ("word", "reason"))  # word: of VERDICTS, or "no verdict"
UNASKED = Verdict("no verdict", "not asked yet, or no answer came: run the same command again")


def by_source(rows: Rows, keys: Sequence[int], external: str = EXTERNAL) -> list[Verdict]:
    """Drop sources of external knowledge. keys: the numbers of the rows to look at."""
    sources, words = [str(cell_of(rows[k], "source") or "") for k in keys], external.split(",")
    return [Verdict("drop" if named(s, words) else "keep", f"source {s}") for s in sources]


LABEL = """You check the label of a question about an image, for a training set. Look at the image
and answer the question by yourself; then compare with the label.
"keep"    the question can be answered from the image, and the label is right
"drop"    the label is wrong, or the question cannot be answered from this image
"unsure"  you cannot tell

Reply with one JSON object, nothing else: {"reason": "<one sentence>", "label": "<verdict>"}"""


class LabelJudge(ChatJudge):
    def check_label(self, sample: Sample) -> tuple[str, str] | None:
        """(one of VERDICTS, why): is the label of a question right? None: no verdict."""
        options = "".join(f"\n{letter}. {o}" for letter, o in zip(LETTERS, sample.options))
        words = f"Question: {sample.question}{options}\nLabel: {sample.answer}"
        content = [picture_part(sample.image), text_part(words)]
        return self.verdict(LABEL, content, "label", VERDICTS)


def by_label(samples: Sequence[Sample], judge: LabelJudge, record: Path) -> list[Verdict]:
    """Is the label right? Settle what is "unsure" by hand, in the record; then run this again."""

    def ask(batch: list[Sample]) -> list[dict | None]:
        with ThreadPoolExecutor(judge.concurrency) as pool:
            answers = pool.map(judge.check_label, batch)
            return [answer and dict(zip(("verdict", "reason"), answer)) for answer in answers]

    lines = asked_once(samples, ask, {"judge": judge.model}, record, 8 * judge.concurrency)
    return [Verdict(line["verdict"], line["reason"]) if line else UNASKED for line in lines]


def by_difficulty(
    samples: Sequence[Sample], policy: Policy, rules: Rules, options: Options, judge=None
) -> list[Verdict]:
    """Drop what the model answers right in more than max_accuracy of n tries: with the paper's 8
    and 0.9, 8 of 8. What it never answers right stays. A ChatJudge decides on open answers."""
    n = options.samples

    def ask(batch: list[Sample]) -> list[dict | None]:
        torch.manual_seed(0)  # play draws from it and the sample's id: batches do not matter
        groups = play(policy, batch, n, rules)
        graded = score(groups, "accuracy", judge, Lambdas(), random.Random(0))
        answers = [[reward.answer for reward in group] for group in graded]
        return [None if None in group else {"right": int(sum(group))} for group in answers]

    def verdict(right: int) -> Verdict:
        word = "drop" if right / n > options.max_accuracy else "keep"
        return Verdict(word, f"{right} of {n} right")

    decisive = ("model", "samples", "turns", "max_pixels", "max_new_tokens", "judge_model")
    setting = {name: getattr(options, name) for name in decisive}
    lines = asked_once(samples, ask, setting, options.out.with_suffix(".jsonl"), options.batch)
    return [verdict(line["right"]) if line else UNASKED for line in lines]


def asked_once(
    samples: Sequence[Sample], ask: Callable, setting: dict, record: Path, batch: int
) -> list[dict | None]:
    """What ask(some samples) finds of each, or None. A finding becomes a line of `record` at once,
    and is not asked for again: neither after a crash, nor by another run. Of several processes each
    asks about its own part, and writes a record of its own; whoever comes later reads them all."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = record.with_suffix(f".{rank}.jsonl") if world > 1 else record
    mine.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, dict] = {}
    for part in (record, *record.parent.glob(record.stem + ".*.jsonl")):
        known |= read_record(part, setting)
    share, keys = samples[rank::world], []
    with open(mine, "ab") as file, tqdm(total=len(share), desc=mine.stem, mininterval=5) as bar:
        file.truncate(len(whole_lines(mine)))  # a line that a crash cut short
        for start in range(0, len(share), batch):
            some = [(fingerprint(sample), sample) for sample in share[start : start + batch]]
            todo = {key: sample for key, sample in some if key not in known}
            for (key, s), finding in zip(todo.items(), ask([*todo.values()]) if todo else []):
                if finding is not None:
                    line = {"id": s.id, "question": s.question, "answer": s.answer} | finding
                    known[key] = line | {"setting": setting, "key": key}
                    file.write(json.dumps(known[key], ensure_ascii=False).encode() + b"\n")
            file.flush()
            keys += [key for key, _ in some]
            bar.update(len(some))
    return [known.get(key) for key in keys]


def read_record(file: Path, setting: dict) -> dict[str, dict]:
    """Its findings by key. People edit it, so a slip is named, and nothing is guessed."""
    known: dict[str, dict] = {}
    for number, text in enumerate(whole_lines(file).splitlines(), start=1):
        try:
            line = json.loads(text)
            if (made := line["setting"]) != setting:
                raise ValueError(f"it was made with {made}, and this is {setting}")
            if "right" not in line and (word := line.get("verdict")) not in VERDICTS:  # by_label's
                raise ValueError(f"expected a verdict of {', '.join(VERDICTS)}, got {word!r}")
            known[line["key"]] = line
        except (ValueError, LookupError, TypeError) as error:
            mend = "correct the line, or delete it; or give another --out"
            raise ValueError(f"{file}, line {number} is no finding ({error}): {mend}") from error
    return known


def whole_lines(file: Path) -> bytes:
    written = file.read_bytes() if file.exists() else b""
    return written[: written.rfind(b"\n") + 1]


def fingerprint(sample: Sample) -> str:
    asked = repr((sample.question, sample.options, sample.answer, sample.image.size))
    return hashlib.sha256(asked.encode() + sample.image.tobytes()).hexdigest()[:32]


def write_sieved(out: Path, samples: Usable, rows: Rows, verdicts: list[Verdict]) -> Counter:
    """What to keep as `out`, a parquet file that load_rl reads, with the images' own bytes; and
    beside it, as .txt, a list for people of all that was not kept, and why."""
    texts = dict.fromkeys(("id", "question", "answer", "kind", "data_source"), pa.string())
    lists = {"options": pa.list_(pa.string()), "boxes": pa.list_(pa.list_(pa.int64()))}
    image = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    schema = pa.schema(texts | lists | image)

    def line(k: int) -> dict:  # of the fields of a Sample, the schema takes what it knows
        encoded = image_bytes(cell_of(rows[samples.keys[k]], "image"), rows.folder)
        fields = vars(samples[k])
        return fields | {"image": {"bytes": encoded}, "data_source": fields["source"]}

    counts = Counter(verdict.word for verdict in verdicts)
    kept = [k for k, verdict in enumerate(verdicts) if verdict.word == "keep"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(part := out.with_suffix(".part"), schema) as writer:
        for start in range(0, len(kept), 50):  # few pictures are in memory at a time
            lines = [line(k) for k in kept[start : start + 50]]
            writer.write_table(pa.Table.from_pylist(lines, schema))
    os.replace(part, out)
    text = f"keep: {len(kept)}\n"
    for word in [word for word in counts if word != "keep"]:
        text += f"\n{word}: {counts[word]}\n\n"
        for s, verdict in ((samples[k], v) for k, v in enumerate(verdicts) if v.word == word):
            text += f"{s.id}  {verdict.reason}\n    {s.question!r}  answer: {s.answer!r}\n"
    text += f"\nunusable: {len(samples.skipped)}\n\n"
    text += "".join(f"row {bad.row}, {bad.field}: {bad.reason}\n" for bad in samples.skipped)
    out.with_suffix(".txt").write_text(text)
    return counts


def check_out(out: Path, where: str) -> None:
    """A filter must not write over what it reads."""
    if out.suffix != ".parquet" or out.is_dir():
        raise ValueError(f"--out {out}: expected the name of a file that ends in .parquet")
    source = Path(where if Path(where).exists() else where.rsplit(":", 1)[0]).resolve()
    for file in (out, out.with_suffix(".jsonl"), out.with_suffix(".txt")):
        if file.resolve().is_relative_to(source):
            raise ValueError(f"give another --out: {file} would lie over or in the input {where}")


def describe(where: str, policy: Policy | None, rules: Rules) -> str:
    """Rows, sources, kinds, answers, image sizes, lengths, and the rows that would be left out.
    Lengths need a policy, whose image processor holds the pixel budget; not its weights."""
    columns = list(read_rows(where)[0])
    if "response" in columns:
        if policy is None:
            raise ValueError("demonstrations are read by their tokens: give --model")
        usable, _ = load_thyme(policy, where, "all", rules)
        played = (usable.make(k, pixels=False) for k in usable.keys)
        items = ((t.sample, len(t.ids), f"{len(t.turns) - 1} in a row") for t in played)
    else:
        usable = load(where, policy, rules)
        items = ((s, len(encode_prompt(policy, s, False).ids) if policy else 0, "") for s in usable)

    forms = {r"\(?[A-Z]\)?": "a letter", r"[-+]?[\d.,]+%?": "a number", r"[\s\S]*": "a text"}
    count = {name: Counter() for name in ("source", "answers", "programs")}
    tokens, sizes = [], []
    for sample, length, programs in tqdm(items, where, len(usable), mininterval=5, leave=False):
        width, height = sample.image.size
        sizes.append((width * height, f"{width}x{height}"))
        tokens.append(length)
        words = "" if named(sample.source, KINDS) or programs else ", assumed"
        words += ", external knowledge" if named(sample.source, EXTERNAL.split(",")) else ""
        count["source"][f"{sample.source or 'not named'} ({sample.kind}{words})"] += 1
        count["answers"][next(w for p, w in forms.items() if re.fullmatch(p, sample.answer))] += 1
        count["programs"].update([programs] if programs else [])

    def spread(values: list) -> str:
        at = {"least": 0, "middle": len(values) // 2, "95 %": len(values) * 95 // 100, "most": -1}
        return ", ".join(f"{word} {values[i]}" for word, i in at.items()) if values else "none"

    bad, lengths = usable.skipped, "give --model to see lengths"
    if policy:
        budget = policy.image_processor.size["longest_edge"]
        lengths = f"{spread(sorted(tokens))}; an image has at most {budget} pixels"
    reasons = Counter(f"{x.field}: {x.reason}" for x in bad).most_common(5)
    lines = [
        f"rows      {len(usable)} usable + {len(bad)} left out",
        f"columns   {', '.join(columns)}",
        *(f"{name:<9} {word}: {n}" for name in count for word, n in count[name].most_common()),
        f"images    {spread([name for _, name in sorted(sizes)])}",
        f"tokens    {lengths}",
        *(f"left out  row {x.row}, {x.field}: {x.reason}" for x in bad[:20]),
        *(f"          and {n} rows in all for {why}" for why, n in reasons if n > 1),
    ]
    return "\n".join(lines)


def load(where: str, policy: Policy | None, rules: Rules) -> Usable:
    """load_rl; with a policy, without the questions that are too long for it to play."""

    def fits(sample: Sample) -> None:
        check_fits(policy, sample, encode_prompt(policy, sample, pixels=False), rules)

    key = policy and (policy.version(), rules.max_length, rules.max_new_tokens)
    return load_rl(where, "skip", policy and fits, key)


# The command line


def main(argv: list[str]) -> None:
    options = parse(Options, argv)
    with refusals():
        print(run(options))


def run(options: Options) -> str:
    commands = options.describe, options.drop_sources, options.check_labels, options.difficulty
    given, plays = [where for where in commands if where is not None], bool(options.difficulty)
    if len(given) != 1 or not (where := given[0]):
        what = "one of --describe, --drop-sources, --check-labels and --difficulty, with a WHERE"
        raise ValueError(f"expected {what}: a file, a folder or a hub name")
    if options.check_labels and not (options.judge_url and options.judge_model):
        raise ValueError("--check-labels needs --judge-url and --judge-model")
    if plays and not options.model:
        raise ValueError("--difficulty needs --model")
    if not options.describe:
        check_out(options.out, where)
    rules, policy, judge = shared(options, Rules), None, None
    if options.model:
        place = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        policy = load_policy(options.model, place, options.max_pixels or None, weights=plays)
        policy = actor_of(policy) if plays else policy  # on a GPU it plays in bf16
    if options.describe:
        return describe(where, policy, rules)
    if options.judge_url:
        judge = LabelJudge(options.judge_url, options.judge_model, max_tokens=options.judge_tokens)
    samples, rows = load(where, policy if plays else None, rules), read_rows(where)
    if options.drop_sources:
        verdicts = by_source(rows, samples.keys, options.external)
    elif options.check_labels:
        verdicts = by_label(samples, judge, options.out.with_suffix(".jsonl"))
    else:
        verdicts = by_difficulty(samples, policy, rules, options, judge)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return f"one part is done: run the same command once more, alone, to write {options.out}"
    counts = write_sieved(options.out, samples, rows, verdicts)
    found = ", ".join(f"{word} {n}" for word, n in counts.most_common())
    return f"{len(rows)} rows: {found}, unusable {len(samples.skipped)}; see {options.out} and .txt"
