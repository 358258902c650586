"""python -m pytest tests/test_readme.py      about 10 s: the README tells the truth"""

import importlib
import inspect
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import evaluate
from train import Config, parse_config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = "sandbox data rollout rewards grpo sft faithfulness evaluate train".split()
SOURCES = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
TESTS = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))


def section(title: str) -> str:
    """The text under "## title"."""
    return re.split(r"^## ", README.split(f"\n## {title}\n")[1], flags=re.M)[0]


def tags(text: str) -> set[str]:
    """Places of the paper: "Eqs. 1, 3 and 4; Fig. 2" -> {"Eq. 1", "Eq. 3", "Eq. 4", "Fig. 2"}"""
    found = set()
    for kind, numbers in re.findall(
        r"(Eq|Fig|Table|Appendi)\w*\.? ?((?:\d+(?:, and |, | and )?)+)", text
    ):
        found |= {f"{kind} {n}" for n in re.findall(r"\d+", numbers)}
    return found


MAP = [
    (tags(paper), re.findall(r"`(\w+)\.(\w+)`", code), re.findall(r"`(test_\w+)`", tests))
    for paper, code, tests in re.findall(
        r"^\| ((?:Eq|Fig|Table|Appendi)[^|]*) \| [^|]* \| ([^|]*) \| ([^|]*) \|$",
        section("Equation map"), re.M,
    )
]  # fmt: skip


def test_the_map_holds_exactly_the_places_that_the_sources_name():
    mapped = set().union(*(paper for paper, _, _ in MAP))
    assert mapped == tags("\n".join(SOURCES.values()))
    assert {f"Eq {n}" for n in range(1, 7)} <= mapped


@pytest.mark.parametrize("paper, code, tests", MAP, ids=lambda x: " ".join(sorted(map(str, x))))
def test_a_row_of_the_map_leads_to_code_that_carries_its_tag_and_to_tests(paper, code, tests):
    named = [(getattr(importlib.import_module(m), name), SOURCES[m]) for m, name in code]
    carried = set().union(*(tags(inspect.getsource(function)) for function, _ in named))
    for _, source in named:  # a whole file may stand for an appendix or a figure, not an equation
        carried |= {t for t in tags(source.split('"""')[1]) if not t.startswith("Eq")}
    assert code and paper <= carried
    assert tests and all(f"def {name}(" in TESTS for name in tests)


def test_tests_named_in_the_readme_exist():
    named = re.findall(r"`(test_\w+)(\.py)?`", README)
    assert len(named) > 30
    for name, file in named:
        exists = (ROOT / "tests" / f"{name}.py").exists() if file else f"def {name}(" in TESTS
        assert exists, name


COMMANDS = re.findall(
    r"(?:python|launch|torchrun[^\n]*?|--\S+) ((?:\w+|tests/\w+)\.py)((?: [^\n#`|&]*)?)", README
)


def test_flags_named_in_the_readme_exist():
    own = {"--" + f.name.replace("_", "-") for f in fields(Config)} | {"--resume", "--help"}
    own |= {"--" + f.name.replace("_", "-") for f in fields(evaluate.Options)} | {*evaluate.DOORS}
    others = "".join(SOURCES.values()) + TESTS + (ROOT / "tests/benchmark.py").read_text()
    foreign = {"--reuid", "--regid", "--clear-groups", "--nproc-per-node", "--num-machines",
               "--num-processes", "--machine-rank", "--main-process-ip"}  # fmt: skip
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", README):
        known = flag in own | foreign or f'"{flag}"' in others or flag.startswith("--no-")
        assert known or flag in VLLM, flag


VLLM = {"--tensor-parallel-size", "--port", "--max-model-len", "--limit-mm-per-prompt"}


@pytest.mark.parametrize("file, words", sorted(set(COMMANDS)))
def test_a_command_of_the_readme_is_understood(file, words, capsys):
    """Its words are parsed; --help then ends it before it does anything."""
    assert (ROOT / file).exists()
    main = {"train.py": parse_config, "evaluate.py": evaluate.main}.get(file)
    if main:
        with pytest.raises(SystemExit) as ended:
            main([*words.split(), "--help"])
        assert ended.value.code == 0, capsys.readouterr().err


def test_every_module_is_in_the_reading_order_with_its_length():
    order = re.findall(r"^\| `(\w+)\.py` \| (\d+) \|", section("Reading order"), re.M)
    assert [name for name, _ in order] == list(MODULES)
    assert sorted(p.stem for p in ROOT.glob("*.py")) == sorted(MODULES)
    for name, told in order:
        lines = len(SOURCES[name].splitlines())
        assert abs(int(told) - lines) <= 0.1 * lines, f"{name}.py has {lines} lines"


@pytest.mark.parametrize("module", MODULES[:-2])
def test_every_module_shows_its_concept_as_a_script(module, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{module}.py"])
    runpy.run_path(f"{module}.py", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 1
