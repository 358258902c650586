"""python -m pytest tests/test_film.py      about 5 s: one episode as a picture"""

from dataclasses import replace

import pytest
from conftest import RULES, SHORT, scripted
from PIL import Image

from beyond.film import film
from data import toy_questions
from evaluate import evaluate, main, write_trajectories
from kit.records import Records
from rewards import BoxJudge, Reward
from rollout import Trajectory


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_first_right_and_faithful_episode_is_drawn_as_a_film_strip(policy, tmp_path, capsys):
    """Of an episode that guesses and one that looks in the right place."""
    samples = toy_questions(2, seed="film", neutral_share=0.0)
    x0, y0, x1, y1 = samples[1].boxes[0]
    look = f"<code>\nimage.crop(({x0},{y0},{x1},{y1})).show()\n</code>"
    right = f"<answer>{samples[1].answer}</answer>"
    with scripted(policy, [[SHORT], [look, right]]):
        rules = replace(RULES, temperature=0.0)
        evaluate(policy, samples, BoxJudge(), rules=rules, out=(two := tmp_path))
    main(["--film", str(two), "--out", str(two / "new")])
    assert capsys.readouterr().out.strip() == str(two / "new" / "film.png")
    three = Image.open(two / "new" / "film.png").convert("RGB")  # question, look, answer
    film(Records(two / "trajectories.jsonl")[0], two, two / "film.png")
    short = Image.open(two / "film.png")  # question, answer
    assert three.width / short.width == pytest.approx(1.5, abs=0.1)
    width, half = three.width, three.height // 2
    box, bar = ((0, 0, width // 3, half), (0, half, width, three.height))
    blue = [dict(map(reversed, three.crop(x).getcolors(1 << 20)))[0, 114, 178] for x in (box, bar)]
    assert blue[0] > 300 and blue[1] > 1000  # where the look was, and what the policy chose
    # Where no episode is right and faithful, the first is drawn.
    text = (two / "trajectories.jsonl").read_text()
    (two / "trajectories.jsonl").write_text(text.replace('"faithful"', '"unfaithful"'))
    main(["--film", str(two), "--out", str(two / "new")])
    assert (two / "new" / "film.png").read_bytes() == (two / "film.png").read_bytes()


def test_a_dollar_begins_no_formula_and_an_episode_may_be_without_a_token(tmp_path):
    (sample,) = toy_questions(1, seed="film")
    odd = replace(sample, question="$\\x$ ^ {", options=("$", "\\frac{", "%"))
    for acted in ([True], []):
        odd_one = Trajectory(odd, acted=acted, answer="$\\x$")
        write_trajectories(tmp_path / "x.jsonl", [odd_one], [Reward(None, 0.0, 0.0)])
        film(Records(tmp_path / "x.jsonl")[0], tmp_path, tmp_path / "x.png")
