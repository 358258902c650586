"""python -m pytest tests/test_plan.py      would it fit, and does torch count alike?"""

import pytest

import beyond.plan
import beyond.simulate
from beyond.plan import QWEN_3B, geometry, main

NODES = [
    ("8x80", 0, ["8,292,166,656", "reference       4.1", "48 rows of 10240", "it fits"]),
    ("4x80", 2, ["loading takes 77.1 of 76.0 GB", "28 rows of 10240", "number    5 of such GPUs"]),
    ("4x24", 2, ["it does not fit", "room for 0 rows, a group has 8", "lower, in this",
                 "least number    none of such GPUs"]),
    ("1x24 --preset codev-3b", 0, ["3,754,622,976", "adapter         0.2   fp32, rank 32"]),
    ("1x48 --preset codev-7b-lora", 0, ["vision 676,550,144 (frozen)", "it fits"]),
    ("2x24 --preset codev-7b-lora", 2, ["loading takes 35.7 of 22.8 GB"]),  # each has all weights
    ("eight", 2, ["--plan wants GPUs x GB"]),
    ("8x80 --kv-budget-gb 60", 2, ["it does not fit: acting takes", "--kv-budget-gb (acting)"]),
    (f"1x80 --model {QWEN_3B}", 2, ["--lora-rank 32", "least number    2 of such GPUs"]),
]  # fmt: skip


@pytest.mark.parametrize("node, code, words", NODES)
def test_a_plan_says_what_fits_and_what_to_lower(node, code, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--preset", "codev-7b", "--plan", *node.split()])
    assert stopped.value.code == code
    said = "".join(capsys.readouterr())
    assert all(word in said for word in words), said


def test_torch_counts_what_the_plan_counts(monkeypatch, capsys):
    """The 3B with two of its layers and of its eye's, on two GPUs: docs/lab.md has whole ones."""
    small = geometry(QWEN_3B)
    small.text_config.num_hidden_layers = small.vision_config.depth = 2
    small.vision_config.fullatt_block_indexes = [1]
    monkeypatch.setattr(beyond.simulate, "geometry", lambda _: small)
    flags = "--preset codev-7b --row-tokens 4096 --kv-budget-gb 2 --simulate 2x80"
    with pytest.raises(SystemExit) as stopped:
        beyond.simulate.main(flags.split())
    assert stopped.value.code in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    ratios = {line.split()[0]: float(line.split()[-1]) for line in lines[2:]}
    exact = [ratios.pop(name) for name in ("weights", "optimiser", "gradients")]
    assert exact == [1.0, 1.0, 1.0] and ratios.keys() == {"loading", "acting", "learning"}
    assert all(0.8 < ratio < 1.25 for ratio in ratios.values()), ratios
