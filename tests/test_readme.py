"""python -m pytest tests/test_readme.py      about 5 s: the README tells the truth"""

import importlib
import inspect
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from train import Config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = (
    "sandbox",
    "data",
    "rollout",
    "rewards",
    "grpo",
    "sft",
    "faithfulness",
    "evaluate",
    "train",
)
MAP = re.findall(r"^\| ((?:Eq|Sec|Fig|Appendix)[^|]*) \| [^|]* \| ([^|]*) \|$", README, re.M)


def equations(text: str) -> set[int]:
    """Eq. 3 -> {3}; Eqs. 1, 3 and 4 -> {1, 3, 4}"""
    found = re.findall(r"Eqs?\. ((?:\d+(?:, | and )?)+)", text)
    return {int(n) for numbers in found for n in re.findall(r"\d+", numbers)}


def test_every_equation_is_mapped_and_every_mapped_equation_is_tagged_in_the_code():
    mapped = equations(" ".join(paper for paper, _ in MAP))
    tagged = set().union(*(equations((ROOT / f"{m}.py").read_text()) for m in MODULES))
    assert mapped == tagged == {1, 2, 3, 4, 5, 6}


def test_every_mapped_function_exists_and_carries_its_tag():
    assert len(MAP) >= 8
    for paper, code in MAP:
        for name in re.findall(r"`(\w+)\.(\w+)`", code):
            if name[1] == "py":
                continue
            module = importlib.import_module(name[0])
            assert hasattr(module, name[1]), f"{name} stands in the README, not in the code"
        for n in equations(paper):
            module, name = re.findall(r"`(\w+)\.(\w+)`", code)[0]
            source = inspect.getsource(getattr(importlib.import_module(module), name))
            assert n in equations(source), f"Eq. {n} leads to {name}, which does not carry its tag"


def test_tests_named_in_the_readme_exist():
    written = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    named = re.findall(r"`(test_\w+)(\.py)?`", README)
    assert len(named) > 15
    for name, file in named:
        exists = (ROOT / "tests" / f"{name}.py").exists() if file else f"def {name}(" in written
        assert exists, name


def test_flags_named_in_the_readme_exist():
    known = {"--" + f.name.replace("_", "-") for f in fields(Config)} | {"--resume", "--help"}
    other = {"--self-test", "--only", "--trl", "--reuid", "--regid", "--clear-groups"}
    for flag in re.findall(r"--[a-z][a-z-]+", README):
        assert flag in known | other, flag


def test_every_module_is_in_the_reading_order_and_is_the_only_kind_of_module():
    order = README[README.index("## Reading order") : README.index("## The toy")]
    assert re.findall(r"`(\w+)\.py`", order) == list(MODULES)
    assert sorted(p.stem for p in ROOT.glob("*.py")) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES[:-2])
def test_every_module_shows_its_concept_as_a_script(module, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{module}.py"])
    runpy.run_path(f"{module}.py", run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 1
