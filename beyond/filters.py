"""
filters.py: the paper's filters of its RL data, and a description of any data set.

Concept     The paper's filters of its RL data, and a description of any data set.
Paper       nothing
In          
Out         
Left out    
Read next   
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from data import Sample, load_rl
from kit.chat import picture_part, text_part
from kit.qwen import Policy
from kit.schemas import KINDS, cell_of, named
from kit.tables import Rows, image_bytes, read_rows
from kit.usable import Usable
from rewards import ChatJudge, Lambdas, score
from rollout import Rules, check_fits, encode_prompt, load_policy, play
from sft import load_thyme

# The paper's filters of its RL data: sources, labels, difficulty

EXTERNAL = ("okvqa",)  # sources whose questions need knowledge no image holds (the paper names one)
VERDICTS = ("keep", "drop", "unsure")


class Verdict(NamedTuple):
    word: str  # one of VERDICTS, or "no verdict"
    reason: str


UNASKED = Verdict("no verdict", "not asked yet, or no answer came: run the same command again")


def by_source(rows: Rows, keys: Sequence[int], external: Sequence[str] = EXTERNAL) -> list[Verdict]:
    """Drop sources of external knowledge. keys: the rows to look at."""
    sources = [str(cell_of(rows[k], "source") or "") for k in keys]
    return [Verdict("drop" if named(s, external) else "keep", f"source {s}") for s in sources]


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


def by_label(samples: Sequence[Sample], judge, record: Path) -> list[Verdict]:
    """Is the label right? judge: a LabelJudge, or anything with its check_label. A person settles
    what it left "unsure": edit the word in the record and run the filter again."""

    def ask(asked: list[Sample]) -> list[dict | None]:
        with ThreadPoolExecutor(judge.concurrency) as pool:
            told = pool.map(judge.check_label, asked)
            return [said and dict(zip(("verdict", "reason"), said)) for said in told]

    lines = asked_once(samples, ask, {"judge": judge.model}, record, batch=8 * judge.concurrency)
    return [Verdict(x["verdict"], x["reason"]) if x else UNASKED for x in lines]


def by_difficulty(
    samples: Sequence[Sample], policy: Policy, rules: Rules, record: Path, name: str, n: int = 8,
    max_accuracy: float = 0.9, answer_judge=None, batch: int = 16,
) -> list[Verdict]:  # fmt: skip
    """Drop what the model answers right in more than max_accuracy of n tries: with the paper's 8
    and 0.9, 8 of 8. What it never answers right stays (the paper names no lower cut). name: the
    model's, for the record. answer_judge: a ChatJudge for open answers; else texts are compared."""
    def ask(asked: list[Sample]) -> list[dict | None]:
        torch.manual_seed(0)  # play draws from it and the sample's id: batches do not matter
        groups = play(policy, asked, n, rules)
        graded = score(groups, "accuracy", answer_judge, Lambdas(), random.Random(0))
        told = [[reward.answer for reward in group] for group in graded]
        return [None if None in of_one else {"right": int(sum(of_one))} for of_one in told]

    setting = {"model": name, "n": n, "turns": rules.turns, "max_pixels": budget_of(policy),
               "max_new_tokens": rules.max_new_tokens,
               "answer_judge": answer_judge and answer_judge.model}  # fmt: skip

    def verdict(right: int) -> Verdict:
        return Verdict("drop" if right / n > max_accuracy else "keep", f"{right} of {n} right")

    lines = asked_once(samples, ask, setting, record, batch)
    return [verdict(line["right"]) if line else UNASKED for line in lines]


def asked_once(
    samples: Sequence[Sample], ask: Callable[[list[Sample]], list[dict | None]], setting: dict,
    record: Path, batch: int,
) -> list[dict | None]:  # fmt: skip
    """ask(samples) -> what was found of each, or None for nothing. Every finding becomes a line of
    `record` at once, and is not asked for again: neither after a crash, nor by another run.

    Under torchrun or accelerate launch every process asks about its own part, returns that, and
    writes a record of its own; whoever comes later reads them all.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    own = record.with_suffix(f".{rank}.jsonl") if world > 1 else record
    own.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, dict] = {}
    for part in {own, record, *record.parent.glob(record.stem + ".*.jsonl")}:
        known |= read_record(part, setting)
    mine, keys = samples[rank::world], []
    with open(own, "ab") as file, tqdm(total=len(mine), desc=own.stem, mininterval=5) as bar:
        file.truncate(len(whole_lines(own)))  # a line that a crash cut short
        for start in range(0, len(mine), batch):
            some = [(fingerprint(sample), sample) for sample in mine[start : start + batch]]
            todo = {key: sample for key, sample in some if key not in known}
            findings = ask([*todo.values()]) if todo else []
            for (key, s), finding in zip(todo.items(), findings):
                if finding is not None:
                    told = dict(id=s.id, question=s.question, answer=s.answer) | finding
                    known[key] = told | dict(setting=setting, key=key)
                    file.write(json.dumps(known[key], ensure_ascii=False).encode() + b"\n")
            file.flush()
            keys += [key for key, _ in some]
            bar.update(len(some))
    return [known.get(key) for key in keys]


def read_record(file: Path, setting: dict) -> dict[str, dict]:
    known: dict[str, dict] = {}
    for number, text in enumerate(whole_lines(file).splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is no JSON: {error}. Correct the line, or "
                             f"delete it: its question is then asked again") from error  # fmt: skip
        if not isinstance(line, dict) or not {"setting", "key"} <= set(line):
            raise ValueError(f"{file} is no record of a filter: give another --out, or move it")
        if line["setting"] != setting:
            raise ValueError(f"{file} was made with {line['setting']}, and this is {setting}: give "
                             f"another --out, or delete it")  # fmt: skip
        if "right" not in line and line.get("verdict") not in VERDICTS:  # right: by_difficulty's
            raise ValueError(f"{file}, line {number}: expected a verdict of {', '.join(VERDICTS)}, "
                             f"got {line.get('verdict')!r}: correct the word")  # fmt: skip
        known[line["key"]] = line
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
    texts = {name: pa.string() for name in ("id", "question", "answer", "kind", "data_source")}
    lists = {"options": pa.list_(pa.string()), "boxes": pa.list_(pa.list_(pa.int64()))}
    image = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    schema = pa.schema(texts | lists | image)

    def line(k: int) -> dict:
        s, row = samples[k], rows[samples.keys[k]]
        image = {"bytes": image_bytes(cell_of(row, "image"), rows.folder)}
        return dict(id=s.id, image=image, question=s.question, answer=s.answer, kind=s.kind,
                    options=s.options, boxes=s.boxes, data_source=s.source)  # fmt: skip

    places: dict[str, list[int]] = {"keep": []}
    for k, verdict in enumerate(verdicts):
        places.setdefault(verdict.word, []).append(k)
    out.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(part := out.with_suffix(".part"), schema) as writer:
        for start in range(0, len(places["keep"]), 50):  # few pictures are in memory at a time
            lines = [line(k) for k in places["keep"][start : start + 50]]
            writer.write_table(pa.Table.from_pylist(lines, schema))
    os.replace(part, out)
    text = f"keep: {len(places.pop('keep'))}\n"
    for word, others in places.items():
        text += f"\n{word}: {len(others)}\n\n"
        for s, verdict in ((samples[k], verdicts[k]) for k in others):
            text += f"{s.id}  {verdict.reason}\n    {s.question!r}  answer: {s.answer!r}\n"
    text += f"\nunusable: {len(samples.skipped)}\n\n"
    text += "".join(f"row {bad.row}, {bad.field}: {bad.reason}\n" for bad in samples.skipped)
    out.with_suffix(".txt").write_text(text)
    return Counter(verdict.word for verdict in verdicts)


# What does a data set hold?


def describe(where: str, policy: Policy | None, rules: Rules) -> str:
    """Rows, sources, kinds, answers, image sizes, lengths, and the rows that would be left out.
    Lengths need a policy, whose image processor holds the pixel budget; not its weights."""
    columns = list(read_rows(where)[0])
    if "response" in columns:
        if policy is None:
            raise ValueError("demonstrations are read by their tokens: give --model")
        usable, _ = load_thyme(policy, where, "all", rules)
        played = (usable.make(k, pixels=False) for k in usable.keys)
        items = ((t.sample, len(t.ids), len(t.turns) - 1) for t in played)
    else:
        encode = policy and (lambda s: encode_prompt(policy, s, pixels=False))
        fits = policy and (lambda s: check_fits(policy, s, encode(s), rules))
        usable = load_rl(where, fits=fits)
        items = ((s, len(encode(s).ids) if policy else 0, None) for s in usable)

    forms = {r"\(?[A-Z]\)?": "a letter", r"[-+]?[\d.,]+%?": "a number", r"[\s\S]*": "a text"}
    count: dict[str, Counter] = {"source": Counter(), "answers": Counter(), "programs": Counter()}
    tokens, sizes = list[int](), list[tuple[int, str]]()
    for sample, length, ran in tqdm(items, where, len(usable), mininterval=5, leave=False):
        width, height = sample.image.size
        sizes.append((width * height, f"{width}x{height}"))
        tokens.append(length)
        words = "" if named(sample.source, KINDS) or ran is not None else ", assumed"
        words += ", external knowledge" if named(sample.source, EXTERNAL) else ""
        count["source"][f"{sample.source or 'not named'} ({sample.kind}{words})"] += 1
        count["answers"][next(w for p, w in forms.items() if re.fullmatch(p, sample.answer))] += 1
        count["programs"].update([] if ran is None else [f"{ran} in a row"])

    def spread(values: list) -> str:
        at = {"least": 0, "middle": len(values) // 2, "95 %": len(values) * 95 // 100, "most": -1}
        return ", ".join(f"{word} {values[i]}" for word, i in at.items()) if values else "none"

    bad = usable.skipped
    reasons = Counter(f"{x.field}: {x.reason}" for x in bad)
    lines = [
        f"rows      {len(usable)} usable + {len(bad)} left out",
        f"columns   {', '.join(columns)}",
        *(f"{name:<9} {word}: {n}" for name in count for word, n in count[name].most_common()),
        f"images    {spread([name for _, name in sorted(sizes)])}",
        f"tokens    {spread(sorted(tokens))}; an image has at most {budget_of(policy)} pixels"
        if policy else "tokens    give --model (and --max-pixels) to see lengths",
        *(f"left out  row {x.row}, {x.field}: {x.reason}" for x in bad[:20]),
        *(f"          and {n} rows in all for {why}" for why, n in reasons.most_common(5) if n > 1),
    ]  # fmt: skip
    return "\n".join(lines)


def budget_of(policy: Policy) -> int:
    return policy.image_processor.size["longest_edge"]


# The command line


def check_out(out: Path, where: str) -> None:
    """A filter must not write over what it reads."""
    if out.suffix != ".parquet" or out.is_dir():
        raise ValueError(f"--out {out}: expected the name of a file that ends in .parquet")
    source = Path(where if Path(where).exists() else where.rsplit(":", 1)[0]).resolve()
    for file in (out, out.with_suffix(".jsonl"), out.with_suffix(".txt")):
        if file.resolve().is_relative_to(source):  # it is the input, or lies in that folder
            raise ValueError(f"--out {out} would write {file} over its input {where}, or into it: "
                             f"give another --out")  # fmt: skip


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "data.py", allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Look at a data set, or filter it as the paper does. WHERE is a file, a folder "
        "or a hub name. Filters write OUT.parquet, to be filtered further or trained on, and "
        "OUT.txt, what they left out and why; they keep what they found in OUT.jsonl, and go on "
        "from there when they are run again. Under accelerate launch the difficulty filter uses "
        "every GPU; run it once more without, to write OUT.",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    for flag, help in {
        "describe": "rows, kinds, sizes, lengths, and what cannot be used",
        "drop-sources": "drop sources of external knowledge",
        "check-labels": "ask the judge server about labels; settle its doubts by hand",
        "difficulty": "drop what a model (nearly) always answers right",
    }.items():
        what.add_argument("--" + flag, metavar="WHERE", help=help)
    add = parser.add_argument
    add("--out", type=Path, default=Path("filtered.parquet"), help="what a filter writes")
    add("--external", default=",".join(EXTERNAL), help="words in the names of sources to drop")
    add("--judge-url", help="OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    add("--judge-model", help="its model; the paper checks labels with Qwen2.5-VL-32B")
    add("--model", help="checkpoint that counts tokens or plays; the paper: Qwen2.5-VL-7B-Instruct")
    add("--max-pixels", type=int, help="pixel budget of one image; none: the checkpoint's")
    add("--max-length", type=int, default=16384, help="tokens of a whole trajectory")
    add("--max-new-tokens", type=int, default=1024, help="tokens of one turn")
    add("--turns", type=int, default=5, help="turns of one try; 1: without tools")
    add("--samples", type=int, default=8, help="tries per question")
    add("--max-accuracy", type=float, default=0.9, help="share of right tries that is still kept")
    add("--batch", type=int, default=16, help="questions that are played together")
    add("--allow-weak-sandbox", action="store_true", help="play on a system that cannot confine")
    options = parser.parse_args(argv)
    try:
        print(run(options))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"data.py: {error}") from error


def run(options: argparse.Namespace) -> str:
    if options.check_labels and not (options.judge_url and options.judge_model):
        raise ValueError("--check-labels needs --judge-url and --judge-model")
    if options.difficulty and not options.model:
        raise ValueError("--difficulty needs --model")
    given = (options.describe, options.drop_sources, options.check_labels, options.difficulty)
    where = next(word for word in given if word is not None)
    if not where:
        raise ValueError("WHERE is empty: expected a file, a folder or a hub name")
    for name, number in (("samples", options.samples), ("batch", options.batch)):
        if number < 1:
            raise ValueError(f"--{name} is at least 1, got {number}")
    if not options.describe:
        check_out(options.out, where)
    rules = Rules(turns=options.turns, max_length=options.max_length,
                  max_new_tokens=options.max_new_tokens,
                  allow_weak_sandbox=options.allow_weak_sandbox)  # fmt: skip
    policy = None
    if options.model:
        place = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        plays = options.difficulty is not None
        policy = load_policy(options.model, place, options.max_pixels, weights=plays)
        if plays and place != "cpu":
            policy.model.to(torch.bfloat16)
    if options.describe:
        return describe(options.describe, policy, rules)
    judge = LabelJudge(options.judge_url, options.judge_model) if options.judge_url else None
    fits = options.difficulty and (
        lambda s: check_fits(policy, s, encode_prompt(policy, s, False), rules)
    )
    samples, rows = load_rl(where, fits=fits), read_rows(where)
    record = options.out.with_suffix(".jsonl")
    if options.drop_sources:
        verdicts = by_source(rows, samples.keys, options.external.split(","))
    elif options.check_labels:
        verdicts = by_label(samples, judge, record)
    else:
        verdicts = by_difficulty(samples, policy, rules, record, options.model, options.samples,
                                 options.max_accuracy, judge, options.batch)  # fmt: skip
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return f"one part is done: run the same command once more, alone, to write {options.out}"
    counts = write_sieved(options.out, samples, rows, verdicts)
    said = ", ".join(f"{word} {n}" for word, n in counts.most_common())
    return f"{len(rows)} rows: {said}, unusable {len(samples.skipped)}; see {options.out} and .txt"
