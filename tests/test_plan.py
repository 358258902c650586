"""python -m pytest tests/test_plan.py      seconds: would it fit?"""

import pytest

from beyond.plan import main


@pytest.mark.parametrize("node, code, words", [
    ("8x80", 0, ["8,292,166,656", "reference       4.1", "54 rows of 10240", "it fits"]),
    ("4x24", 2, ["it does not fit", "room for 0 rows, a group has 8", "lower, in this"]),
    ("1x24 --preset codev-3b", 0, ["3,754,622,976", "one\n  adapter         0.2   fp32, rank 32",
                                   "25 rows of 10240", "acting 20.4, learning 15.8"]),
    ("1x48 --preset codev-7b-lora", 0, ["vision 676,550,144 (frozen)", "learning 26.9"]),
    ("2x24 --preset codev-7b-lora", 2, ["loading takes 33.2 of 22.8 GB"]),  # each has all weights
    ("1x80 --model Qwen/Qwen2.5-VL-3B-Instruct", 2, ["learning takes 95.3 of 76.0 GB", "--lora-rank 32"]),
    ("eight", 2, ["--plan wants GPUs x GB"]),
    ("8x80 --kv-budget-gb 60", 2, ["acting takes 95.7 of 76.0 GB", "--kv-budget-gb (acting)"]),
])  # fmt: skip
def test_a_plan_says_what_fits_and_what_to_lower(node, code, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--preset", "codev-7b", "--plan", *node.split()])
    assert stopped.value.code == code
    said = "".join(capsys.readouterr())
    assert all(word in said for word in words), said
