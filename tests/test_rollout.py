"""python -m pytest tests/test_rollout.py      the game, its one mask, its exactness"""

import gc
import math
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import ANSWER, LOOK, PRINT, RULES, SCRIPTS, SHORT, TWO
from conftest import fresh_logp, performed, scripted, worst_difference
from hypothesis import example, given
from hypothesis import strategies as st

import rollout
from data import parse
from kit.grammar import endings
from kit.qwen import Encoded
from rollout import Player, Rules, SeededSampling, TooLong, Trajectory, Turn, encode_prompt, play
from sandbox import Observation, Sandbox


# --- who chose this token? -------------------------------------------------------------------
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 300), max_size=9))))
def test_any_interleaving_marks_exactly_what_was_acted(pieces):
    trajectory = Trajectory(sample=None)
    for by_policy, ids in pieces:
        trajectory.act(ids) if by_policy else trajectory.observe(Encoded(ids, []))
    acted = [i for i, a in zip(trajectory.ids, trajectory.acted, strict=True) if a]
    assert acted == [i for by_policy, ids in pieces for i in (ids if by_policy else [])]


def test_every_sampled_token_is_acted_and_nothing_else(policy, samples):
    for t, script in zip(performed(policy, samples[:2], SCRIPTS), SCRIPTS, strict=True):
        acted = [i for i, a in zip(t.ids, t.acted, strict=True) if a]
        said = [policy.encode(text, []).ids for text in script]
        assert acted == sum(said, [])  # the closing tag of every turn included
        assert [t.ids[turn.start : turn.end] for turn in t.turns] == said


SOUP = ["<think>", "</think>", "<code>", "</code>", "<answer>", "</answer>", "<|im_end|>", "x = 1",
        "red", "\n", "'", "1", "2", "8"]  # fmt: skip
soup = st.lists(st.sampled_from(SOUP), min_size=1, max_size=9)
shown = st.lists(st.sampled_from([*SOUP, "<|image_pad|>", "<|im_start|>"]), max_size=5).map("".join)
turns = st.lists(st.tuples(soup | soup.map("<code> x </code>".split().__add__), shown), min_size=1)


@given(turns, st.integers(90, 200))
@example([(["<think><code>1</code>", "<|im_end|>"], ""), (["</think>", "<answer>", "a"], "")], 200)
@example([(["1", "2", "8"], "")], 200)
def test_whatever_is_said_and_shown_ids_acted_and_turns_stay_tiled(policy, samples, turns, room):
    """What the policy said is acted, and turns tile it; what was shown forges neither. Ids are
    never decoded and encoded again: "1", "2", "8" sampled apart stay three tokens."""
    t = rollout.begin(samples[0], prompt := encode_prompt(policy, samples[0]))
    rules, said, world = Rules(turns=3, max_new_tokens=30, max_length=room), [], len(t.ids)
    for words, log in turns:
        said.append(sum((policy.encode(word, []).ids for word in words), []))
        code = rollout.speak(policy, t, said[-1])
        assert (code is None) == bool(t.ended) and t.turns[-1].code == code
        if not t.ended:
            closed = t.ids[-1] == policy.end_id
            piece = rollout.listen(policy, t, Observation(text=log), [], rules)
            assert (piece is None) == bool(t.ended)
            if piece:  # the message of the policy ends once, and so does the world's
                assert piece.ids.count(policy.end_id) == 2 - closed
                world += len(piece.ids)
        if t.ended:
            break
    assert [t.ids[turn.start : turn.end] for turn in t.turns] == said
    marks = [any(turn.start <= k < turn.end for turn in t.turns) for k in range(len(t.ids))]
    assert t.acted == marks and t.acted.count(False) == world
    assert t.ids[: t.prompt] == prompt.ids and t.ids.count(policy.image_id) == 16 * t.prompt_images
    again = endings(turn.text for turn in t.turns)[:-1]  # the last may have been cut
    assert [end.code for end in again] == [turn.code for turn in t.turns[:-1]]


# --- exactness -------------------------------------------------------------------------------
@pytest.mark.parametrize("name, size", [("STRIDE", 128), ("STRIDE", 7), ("READ", 1)])
def test_log_probs_of_a_rollout_equal_a_fresh_forward(policy, samples, monkeypatch, name, size):
    """Shared prefill, kept cache, cut tails, new images, rows that left: none may be felt. Nor
    that turns are spoken a few tokens at a time, beside others that begin, and that pictures and
    prompts are read in several passes."""
    monkeypatch.setattr(rollout, name, size)
    policy.model.train()  # as learning leaves it: with what recomputes activations
    with scripted(policy, SCRIPTS) as heard:
        flat = sum(play(policy, samples[:2], 3, RULES), [])
    assert worst_difference(policy, flat, heard) <= 1e-5 and not policy.model.training
    assert [[turn.text for turn in t.turns] for t in flat] == SCRIPTS


def test_whole_groups_join_as_soon_as_there_is_room(policy, samples, monkeypatch):
    """Five rows fit, so two groups of two play. When two rows have left, the third group begins
    beside those that are in their second turn, and nobody feels it. What a turn kept is gone in the
    next: rows that left hold no memory, and the others have read more."""
    calls, kept, go_on = [], [], rollout.continue_turns

    def noting(policy, players, *rest):
        gc.collect()
        assert not any(keys() is not None for keys in kept)
        calls.append([f"{p.t.sample.id[-1]}:{len(p.t.turns)}" for p in players])
        ended = go_on(policy, players, *rest)
        kept.extend(weakref.ref(p.kept[0][0]) for p in players)
        return ended

    monkeypatch.setattr(rollout, "continue_turns", noting)
    # 2 (keys, values) * 2 layers * 1 head * 32 wide * 4 bytes a slot, 1024 slots a row, 5 rows
    budget = 5.5 * 2 * 2 * 32 * 4 * 1024 / 1e9
    rules = replace(RULES, max_length=1024, kv_budget_gb=budget, patience=60.0)
    assert policy.rows_that_fit(rules.max_length, rules.kv_budget_gb) == 5
    scripts = [[SHORT], [LOOK, PRINT, SHORT], [SHORT], [LOOK, SHORT], [TWO, SHORT], [SHORT]]
    with scripted(policy, scripts) as heard:
        groups = play(policy, samples[:3], 2, rules)
    assert calls[:2] == [["0:0", "0:0", "1:0", "1:0"], ["0:1", "1:1", "2:0", "2:0"]]
    assert [[t.sample.id for t in group] for group in groups] == [[s.id] * 2 for s in samples[:3]]
    assert worst_difference(policy, sum(groups, []), heard) <= 1e-5


def test_a_slow_program_delays_its_own_row_only(policy, samples, monkeypatch):
    """Two programs end only after the third row has answered; no row loses anything, and while
    one of the two still runs, the main thread sleeps."""
    slow = "<code>\nslow = True\nimage.crop((0,0,64,64)).show()\n</code>"
    rules = replace(RULES, patience=0.5, max_new_tokens=96)
    turns, answered, last = [], threading.Event(), threading.Lock()
    speak, run, waits = rollout.speak, rollout.Sandbox.run, mock.Mock(side_effect=rollout.wait)

    def noting(policy, t, reply):
        code = speak(policy, t, reply)
        turns.append("slow" if "slow" in t.turns[0].code else "quick")
        if t.ended:
            answered.set()
        return code

    def waiting(sandbox, code):
        if "slow" in code:
            answered.wait(60)
            with last:  # the second of them ends a while after the first
                time.sleep(0.3)
        return run(sandbox, code)

    monkeypatch.setattr(rollout, "wait", waits)
    monkeypatch.setattr(rollout, "speak", noting)
    monkeypatch.setattr(rollout.Sandbox, "run", waiting)
    with scripted(policy, [[slow, SHORT], [slow, SHORT], [LOOK, PRINT, LOOK, SHORT]]) as heard:
        (group,) = play(policy, samples[:1], 3, rules)
    assert turns[3:] == ["quick", "quick", "quick", "slow", "slow"] and waits.call_count < 20
    assert [t.answer for t in group] == ["red"] * 3 and [len(t.images) for t in group] == [2, 2, 3]
    assert worst_difference(policy, group, heard) <= 1e-5


def test_who_watches_is_told_of_what_was_shown_and_of_answers(policy, samples):
    seen = []
    watch = lambda t: seen.append((len(t.tool_turns), t.ended))  # noqa: E731
    performed(policy, samples[:1], [[LOOK, PRINT, SHORT]], watch=watch)
    assert seen == [(1, ""), (2, ""), (2, "answered")]


def test_sandboxes_confine_as_the_rules_say_and_even_an_error_leaves_none_open(
    policy, samples, monkeypatch
):
    made, closed, close = mock.Mock(side_effect=Sandbox), set(), Sandbox.close
    monkeypatch.setattr(rollout, "Sandbox", made)
    monkeypatch.setattr(Sandbox, "close", lambda box: closed.add(box) or close(box))
    performed(policy, samples[:1], [[LOOK, SHORT], [SHORT], [SHORT]])
    assert len(closed) == 3
    monkeypatch.setattr(rollout, "listen", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        performed(policy, samples[:1], [[LOOK], [SHORT], [PRINT]])
    told = mock.call(samples[0].image, RULES.limits, RULES.allow_weak_sandbox)
    assert made.call_args_list == [told] * 6 and RULES.limits != Rules().limits
    assert len(closed) == 6


def test_a_group_that_does_not_fit_in_memory_is_refused(policy, samples):
    rules = Rules(turns=1, max_new_tokens=2, max_length=512, kv_budget_gb=9.2e-4)
    with pytest.raises(ValueError, match="room for 3 rows of --max-length 512, but a group has 4"):
        play(policy, samples[:1], 4, rules)


def test_the_tally_counts_what_was_computed_and_every_image_is_encoded_once(policy, samples):
    tally, seen = Counter(prefill_seconds=9, decode_seconds=9, sandbox_seconds=9), []
    hook = policy.model.model.visual.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    flat = performed(policy, samples[:2], SCRIPTS, tally=tally)
    hook.remove()
    assert tally["generated_tokens"] == sum(sum(t.acted) for t in flat)
    shown = sum(len(t.ids) - t.prompt - sum(t.acted) for t in flat)
    assert tally["prefilled_tokens"] == flat[0].prompt + flat[3].prompt + shown
    crops = sum(len(t.images) - 1 for t in flat)
    assert tally["images"] == sum(seen) == 2 + crops  # one a prompt, not one a rollout
    assert all(tally[f"{stage}_seconds"] > 9 for stage in ("prefill", "decode", "sandbox"))


# --- sampling --------------------------------------------------------------------------------
def test_what_a_rollout_samples_does_not_hang_on_its_company(policy, samples, monkeypatch):
    """The same three questions together, one after the other, and apart in another order; and
    when every turn is spoken in three parts."""
    rules = Rules(turns=1, max_new_tokens=12, max_length=512)

    def sampled(samples, rollouts=2, seed=3, **budget):
        torch.manual_seed(seed)
        flat = sum(play(policy, samples, rollouts, replace(rules, **budget)), [])
        for t in flat:  # it knows how likely each of its tokens was
            assert t.sampled == pytest.approx(fresh_logp(policy, t).tolist(), abs=1e-4)
        return {t.seed: t.ids[t.prompt :] for t in flat}

    together = sampled(samples[:3])
    slot = 2 * 2 * 32 * 4  # bytes of keys and values of the tiny model, one slot
    assert sampled(samples[:3], kv_budget_gb=2.5 * 512 * slot / 1e9) == together
    assert sampled(samples[2::-1], 1).items() <= together.items()
    assert len(set(map(tuple, together.values()))) == 6
    assert not sampled(samples[:3], seed=4).keys() & together.keys()
    monkeypatch.setattr(rollout, "STRIDE", 5)
    assert sampled(samples[:3]) == together


def test_each_turn_of_each_trajectory_draws_anew_and_whoever_sits_beside_it(policy):
    turn = Turn("", None, None, 0, 0)
    live = [Trajectory(None, seed=s, turns=[turn] * n) for s in ("a", "b") for n in range(3)]

    def draws(live, said=0):
        players = [Player(t, None, said=[0] * said) for t in live]
        return SeededSampling(policy, players, 4, Rules(max_new_tokens=5)).draws.tolist()

    assert len({tuple(row) for row in draws(live)}) == 6
    assert draws(live[::-2]) == draws(live)[::-2]
    assert [row[:3] for row in draws(live, said=2)] == [row[2:] for row in draws(live)]


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.sampled_from([0.5, 1.0, 2.0]),
       st.integers(0, 99))  # fmt: skip
@example([0.0, -1e9, -1e9], 1.0, 0)
def test_a_token_is_the_first_whose_cumulated_probability_exceeds_the_draw(policy, scores, T, seed):
    player, rules = Player(Trajectory(None, seed=f"{seed}"), None), Rules(temperature=T)
    sampling = SeededSampling(policy, [player] * 2, 4, replace(rules, max_new_tokens=3))
    chosen = sampling(torch.zeros(2, 6), torch.tensor([scores] * 2))[1].argmax().item()  # its third
    weights = [math.exp((score - max(scores)) / T) for score in scores]
    draw, below = sampling.draws[0, 2].item(), sum(weights[:chosen]) / sum(weights)
    assert below - 1e-6 <= draw <= below + weights[chosen] / sum(weights) + 1e-6
    assert weights[chosen] > 0
    logp = math.log(weights[chosen] / sum(weights))
    assert sampling.logp[-1][1].item() == pytest.approx(logp, abs=1e-4)


# --- endings ---------------------------------------------------------------------------------
def test_endings(policy, samples):
    stray = "oops</answer>"  # closes what was never opened
    cut = "<code>\n" + "print(1)\n" * 80  # by the length limit: half a program is none
    half = "<think>hm<code>\nprint(77)\n<|im_end|>"  # by the policy, which ended its message
    scripts = [[LOOK] * 4, [ANSWER], ["no tag at all<|im_end|>"], ["word " * 80], [stray], [cut],
               [half, "no <answer>A</answer></think>" + PRINT, SHORT]]  # fmt: skip
    group = performed(policy, samples[:1], scripts, replace(RULES, max_log_chars=1))
    ended = ["turns", "answered", "no_action", "length", "no_action", "length", "answered"]
    assert [t.ended for t in group] == ended
    assert [len(t.tool_turns) for t in group] == [4, 0, 0, 0, 0, 0, 2]
    assert [t.answer for t in group] == [None, "checker", *[None] * 4, "red"]
    assert len(group[3].ids) - group[3].prompt == RULES.max_new_tokens
    first = group[6].turns[0]  # control tokens are no part of its text
    assert (first.observation.text.strip(), first.text + "<|im_end|>") == ("77", half)
    assert "<sandbox_output>7 ...<" in policy.tokenizer.decode(group[6].ids)


def test_an_observation_is_whole_or_absent(policy, samples):
    """Whatever the length limit, an image block is never cut, and the limit is never passed."""
    script = [LOOK, TWO, ANSWER]
    (full,) = performed(policy, samples[:1], [script])
    shown = [turn.observation for turn in full.tool_turns]
    ends = set()
    for limit in range(full.prompt + 64, len(full.ids) + 65):
        rules = replace(RULES, max_length=limit)
        t = rollout.begin(samples[0], encode_prompt(policy, samples[0]))
        for text, seen in zip(script, [*shown, None]):
            rollout.speak(policy, t, policy.encode(text, []).ids)
            if not t.ended:
                rollout.listen(policy, t, seen, policy.pictures(seen.images), rules)
            if t.ended:
                break
        ends.add((t.ended, len(t.images)))
        read = [turn.start + rules.max_new_tokens <= limit for turn in full.turns[1:]]
        assert len(t.turns) == 1 + sum(read)  # to the token
        assert t.ids == full.ids[: len(t.ids)] and len(t.ids) <= limit
        assert t.ids.count(policy.image_id) == sum(int(p.grid.prod()) // 4 for p in t.images)
        assert (t.ended == "answered") == (len(t.ids) == len(full.ids))
    assert ends == {("length", 1), ("length", 2), ("answered", 4)}


def test_a_prompt_that_does_not_fit_is_refused_by_name(policy, samples):
    room = len(encode_prompt(policy, samples[0]).ids) + 1
    ((t,),) = play(policy, samples[:1], 1, Rules(max_new_tokens=1, max_length=room))
    assert len(t.ids) == room
    words = rf"toy-tests-0.*tokens \(16 of them.*--max-length {room - 1}"
    with pytest.raises(TooLong, match=words):
        play(policy, samples[:1], 1, Rules(max_new_tokens=1, max_length=room - 1))


@given(st.text(), st.text())
def test_what_is_written_is_read_back(text, answer):
    """Any text as a string of code, tags and quotes included; any answer without tags."""
    code, answer = f"print({text!r})", answer.replace("<", "")
    assert parse(f"<think>t</think><code>{code}</code>", False) == (code, None)
    assert parse(f"<think>t</think><answer>{answer}</answer>", False) == (None, answer.strip())
