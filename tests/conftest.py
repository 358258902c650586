"""What all tests share: a tiny random policy, and a way to put words into its mouth."""

import copy
import json
import multiprocessing
import os
import runpy
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

# Read when transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # some tests fork, which a GPU does not survive
os.environ.setdefault("HF_DATASETS_CACHE", tempfile.gettempdir() + "/codev-tests")  # not at home

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import settings
from PIL import Image
from transformers import LogitsProcessorList

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kit.folder
import rollout
from beyond.tiny import tiny_policy
from data import TAGS, Sample, toy_questions
from kit.qwen import Policy
from rewards import crop
from rollout import Rules, Trajectory, play
from sandbox import Limits, Observation

# The first torch call of a process takes seconds: a deadline would call that a failure. Each night
# `python -m pytest --hypothesis-profile nightly` draws 500 new examples of every law.
settings.register_profile("every-day", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=500)
settings.load_profile("every-day")
torch.set_num_threads(1)
ssl.create_default_context = cache(ssl.create_default_context)  # each judge would read them all

# Makes a stand-in for the released checkpoint (its tokenizer and layout, random weights). It is no
# part of the project, so where it is missing the tests on it are skipped.
MAKE = Path(__file__).resolve().parent.parent.parent / "shared" / "standin" / "make_checkpoint.py"

RULES = Rules(turns=4, max_new_tokens=64, max_length=2048, limits=Limits(seconds=5))

FORKS = multiprocessing.get_context("fork")  # what this process has imported takes long


def _member(rank: int, n: int, folder: Path, port: int, task: Callable, words: tuple) -> None:
    sys.stdout = sys.stderr = told = open(folder / f"told-{rank}", "w", buffering=1)
    os.dup2(told.fileno(), 2)
    if n > 1:  # as torchrun would start it
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
        os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    AcceleratorState._reset_state(reset_partial_state=True)
    task(*words)


def together(n: int, task: Callable, *words) -> tuple[list[int], str]:
    """task(*words) in n processes that torchrun might have started. When one fails the others are
    told to end. Returns their exit codes, and what they said."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        args = n, Path(name), port, task, words
        members = [FORKS.Process(target=_member, args=(rank, *args)) for rank in range(n)]
        for member in members:
            member.start()
        while alive := [member for member in members if member.exitcode is None]:
            wait([member.sentinel for member in alive])
            if any(member.exitcode for member in members):
                for member in alive:
                    member.terminate()
        told = [file.read_text() for file in sorted(Path(name).glob("told-*"))]
    return [member.exitcode for member in members], "\n".join(told)


LONGEST = "train processes adapter gpu_branch mutants qwen".split()


def pytest_collection_modifyitems(items: list) -> None:
    """The longest files first, so that no core waits for the other at the end."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONGEST)


@pytest.fixture(scope="session")
def standin_folder(tmp_path_factory) -> Path:
    if not MAKE.exists():
        pytest.skip("no stand-in checkpoint beside the project")
    folder = tmp_path_factory.mktemp("standin")
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(sys, "argv", ["", str(folder)])
        runpy.run_path(str(MAKE), run_name="__main__")
    return folder


@pytest.fixture(scope="session")
def policy() -> Policy:
    """The tiny network with random weights, in fp32: exactness does not need a trained one."""
    return tiny_policy(seed=0)


def tied(policy: Policy) -> Policy:
    """Now with the token embeddings for lm_head, as in Qwen2.5-VL-3B."""
    policy.model.config.tie_word_embeddings = True
    policy.model.tie_weights()
    return policy


def copied(policy: Policy) -> Policy:
    """The same policy, with weights of its own."""
    return Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor, TAGS)


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return toy_questions(6, seed="tests")


@contextmanager
def scripted(policy: Policy, scripts: list[list[str]]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Inside, the i-th rollout that `play` begins says scripts[i], turn by turn, through the real
    generate. Yields {id(trajectory): [raw logits [tokens, V] of each of its turns]}."""
    original, heard, roles = rollout.continue_turns, {}, {}

    def forced(policy, players, rules, tally):
        for p in players:
            roles.setdefault(id(p.t), (p.t, scripts[len(roles) % len(scripts)]))
            heard.setdefault(id(p.t), [])
        said = [roles[id(p.t)][1][len(p.t.turns)] for p in players]
        whole = [policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
        rows = [words[len(p.said) :] for p, words in zip(players, whole)]
        generate = policy.model.generate

        def with_logits(**inputs):
            start = inputs["input_ids"].shape[1]

            def force(ids, scores):  # leaves one token possible per row: the next of its script
                next_ones = [words[min(ids.shape[1] - start, len(words) - 1)] for words in rows]
                only = torch.full_like(scores, float("-inf"))
                return only.scatter(1, torch.tensor(next_ones)[:, None], 0.0)

            inputs["generation_config"].output_logits = True
            inputs["generation_config"].return_dict_in_generate = True
            inputs["logits_processor"] = LogitsProcessorList([force, *inputs["logits_processor"]])
            output = generate(**inputs)
            for p, row, logits in zip(players, rows, torch.stack(output.logits, 1)):
                if p.said:  # the turn goes on
                    heard[id(p.t)][-1] = torch.cat([heard[id(p.t)][-1], logits[: len(row)]])
                else:
                    heard[id(p.t)].append(logits[: len(row)])
            return output.sequences

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy.model, "generate", with_logits)
            return original(policy, players, rules, tally)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "continue_turns", forced)
        yield heard


def performed(policy, samples, scripts, rules=RULES, **more) -> list[Trajectory]:
    """A trajectory for each script, the same number for each sample."""
    with scripted(policy, scripts):
        groups = play(policy, samples, len(scripts) // len(samples), rules, **more)
    return [t for group in groups for t in group]


def trained(*words) -> None:
    """The command line of training. Of each question one play looks, one answers well, one does
    not: --rollouts should be 3."""
    import train  # takes a second: for those who want it

    with scripted(None, [[LOOK, ANSWER], [ANSWER], [SHORT]]):
        train.main(train.parse_config([*map(str, words)]))


def killed(amid: str, *words) -> None:
    """trained(*words), with kill -9 amid saving the checkpoint of that name."""
    save = kit.folder.dcp.save

    def half(state, checkpoint_id):
        save(state, checkpoint_id=checkpoint_id)
        if checkpoint_id.name == amid:
            (checkpoint_id / ".metadata").unlink()  # it is written last
            next(checkpoint_id.glob("*.distcp")).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    kit.folder.dcp.save = half
    trained(*words)


def same_end(one: Path, other: Path) -> bool:
    """Have two runs the same log and the same weights, to the bit?"""
    files = "log.jsonl", "sft/model.safetensors", "rl/model.safetensors"
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def json_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.open()]


def fresh_logits(policy: Policy, trajectory: Trajectory) -> torch.Tensor:
    """Raw logits [L, V] of a whole trajectory: one row, no padding, no cache, and positions that
    the model works out by itself."""
    ids = torch.tensor([trajectory.ids])
    inputs = dict(input_ids=ids, mm_token_type_ids=(ids == policy.image_id).int(), use_cache=False)
    with torch.no_grad():
        return policy.model(**inputs, **policy.model_images(trajectory.images)).logits[0]


def fresh_logp(policy: Policy, t: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """log pi of every acted token, from a forward pass of its own."""
    logits = fresh_logits(policy, t) / temperature
    logits[:, policy.forbidden] = float("-inf")
    at = torch.tensor(t.acted).nonzero()[:, 0]
    return logits.log_softmax(-1)[at - 1, torch.tensor(t.ids)[at]]


def worst_difference(policy: Policy, trajectories: list[Trajectory], heard: dict) -> float:
    """max |log-prob of generation - log-prob of a fresh forward| over all turns and tokens."""
    worst = 0.0
    for t in trajectories:
        fresh = fresh_logits(policy, t).log_softmax(-1)
        for turn, said in zip(t.turns, heard[id(t)], strict=True):
            assert len(said) == turn.end - turn.start
            difference = said.log_softmax(-1) - fresh[turn.start - 1 : turn.end - 1]
            worst = max(worst, difference.abs().max().item())
    return worst


def gradient_of(policy: Policy) -> torch.Tensor:
    """The gradients of all weights that have one, as one vector."""
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return torch.cat([torch.zeros(1), *gradients])


# A question of visual search, and what code may have shown of it.
IMAGE = Image.linear_gradient("L").convert("RGB")  # 256 x 256: a row has one grey
SEARCH = Sample(
    "s1", IMAGE, "Which texture is on the red square ?", "checker", boxes=((76, 76, 120, 120),)
)
NEUTRAL = replace(SEARCH, id="n1", kind="neutral")
GOOD, WIDE = crop(SEARCH, (64, 64, 128, 128)), crop(SEARCH, (64, 64, 192, 192))
WRONG, FULL = crop(SEARCH, (0, 0, 64, 64)), crop(SEARCH, (0, 0, 256, 256))
AGAIN = replace(GOOD, red_lines=["no_op"])  # as the sandbox marks a crop shown before
TYPO = Observation(error="NameError: imag", red_lines=["sandbox_error"])
OURS = Observation(error="the worker did not start", environment="the worker did not start")
EMPTY, PRINTED = Observation(), Observation(text="checker")
DRAWN = Observation(images=[IMAGE], boxes=[None], sources=["show"])

LOOK = "<think> I need a closer look .</think><code>\nimage.crop((64,128,128,192)).show()\n</code>"
TWO = ("<code>\nimage.crop((0,0,64,64)).show()\nimage.crop((64,0,256,128)).show()\n"
       "print('two')\n</code>")  # fmt: skip
PRINT = "<code>\nprint(1 + 1)\n</code>"
FAIL = "<think> hm</think><code>\n1/0\n</code>"
ANSWER = "<think> The crop shows it .</think><answer>checker</answer>"
SHORT = "<answer>red</answer>"

# Rows of very different lengths that stop at different turns, with 0 to 3 images on the way.
SCRIPTS = [[LOOK, ANSWER], [SHORT], [TWO, PRINT, LOOK, SHORT],
           [FAIL, TWO, ANSWER], [ANSWER], [PRINT, PRINT, SHORT]]  # fmt: skip
