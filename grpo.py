"""
grpo.py: from the rewards of one group to one gradient step.

Concept     Score K rollouts of one question against each other (no value network), and learn from
            them in one row: the prompt once, then K branches that see the prompt and themselves,
            never each other. Same sharing as in rollout.py, same numbers as K separate rows.
Paper       CodeV, arXiv:2511.19661, Eqs. 1, 3 and 4, and the group baseline between them
In          groups of Trajectories, their rewards, the policy, the reference (the SFT model)
Out         one optimiser step, and the numbers worth plotting
Left out    value network; a rule that credits single turns (the paper has none)
Read next   rollout.py (where `acted` comes from), rewards.py (where R comes from)

Shapes      G groups   K rollouts each   M = G * K   B rows   L slots of a row   P of its prompt
            N acted tokens of a batch   n of one row or chunk   H hidden width   V vocabulary
Symbols     R reward   A advantage   ratio = pi_new / pi_old   eps clip range   beta KL weight
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data import IMAGE
from kit.caches import packed
from kit.processes import clip_gradient, gathered, level, parts, processes
from kit.qwen import Picture, Policy
from rollout import Trajectory

# Compare: each rollout against the others of its own question


def advantage_mean(reward: Tensor, verdict: Tensor) -> Tensor:
    """Group baseline b(g) = 1/K sum R; A = R - b(g), one for a whole rollout. [G, K] -> [G, K]

    As in the paper, not divided by the group's deviation (README, "Where the paper is silent").
    verdict [G, K]: False where the judge gave none; b(g) leaves such a rollout out, its A is 0.

    >>> advantage_mean(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool))
    tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """
    reward = reward.masked_fill(~verdict, 0.0)
    baseline = reward.sum(-1, keepdim=True) / verdict.sum(-1, keepdim=True).clamp(min=1)
    # Equal rewards give exactly 0: the rounding of a mean is no signal.
    high = reward.masked_fill(~verdict, -torch.inf).amax(-1, keepdim=True)
    low = reward.masked_fill(~verdict, torch.inf).amin(-1, keepdim=True)
    return (reward - baseline).masked_fill(~verdict | (high - low < 1e-6), 0.0)


def advantage_std(reward: Tensor, verdict: Tensor) -> Tensor:
    """GRPO's usual form: advantage_mean / (deviation + 1e-4), as in the TRL library; the deviation
    divides by K - 1. Fig. 3's caption says "normalized within the group", the text does not divide.

    >>> advantage_std(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.ones(1, 4, dtype=torch.bool))
    tensor([[ 0.8659, -0.8659, -0.8659,  0.8659]])
    """
    A = advantage_mean(reward, verdict)
    variance = A.square().sum(-1, keepdim=True) / (verdict.sum(-1, keepdim=True) - 1).clamp(min=1)
    return A / (variance.sqrt() + 1e-4)


ADVANTAGES = {"none": advantage_mean, "std": advantage_std}


# The objective, token by token. Only acted tokens get here: there is no mask to forget.


def clipped_surrogate(logp_new: Tensor, logp_anchor: Tensor, A: Tensor, eps: float) -> Tensor:
    """Eq. 4, first term: min(r A, clip(r, 1 - eps, 1 + eps) A), never above r A. [N] -> [N]"""
    ratio = (logp_new - logp_anchor).exp()  # Eq. 3; anchor: pi_old, or pi_ref as in notes
    return torch.minimum(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A)


def kl_k3(logp_new: Tensor, logp_ref: Tensor) -> Tensor:
    """KL(pi || pi_ref) of Eqs. 1 and 4 by the k3 estimate: never negative, 0 at equality. [N]
    Its mean over tokens of pi is that KL. Its gradient, as a loss, is that of KL(pi_ref || pi): the
    same close to pi_ref, not far from it."""
    gap = logp_ref - logp_new
    return gap.exp() - gap - 1


def weights_token(lengths: Tensor) -> Tensor:
    """[M] acted tokens of each rollout -> [M] what one of them weighs. Over all tokens: 1 in sum.
    Eq. 4 averages over all tokens of the step, so that a long rollout weighs more."""
    return torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)


def weights_sequence(lengths: Tensor) -> Tensor:
    """GRPO's older form: a mean over each rollout's tokens, then over rollouts. [M] -> [M]"""
    per_token = torch.where(lengths > 0, 1 / lengths.clamp(min=1), 0.0)
    return per_token / (lengths > 0).sum().clamp(min=1)


LOSS_AVERAGES = {"token": weights_token, "sequence": weights_sequence}


# One row per group


@dataclass
class Row:
    """A prompt and some of its branches as one sequence of L slots.

    ids        prompt ...  branch 0 ...  branch 1 ...
    segment      0 0 0        1 1 1         2 2 2      a slot sees 0 and its own, up to itself
    positions  every branch goes on where the prompt ended, as if it were alone
    """

    ids: Tensor  # [L]
    segment: Tensor  # [L]
    positions: Tensor  # [3, L] time, row and column of multimodal RoPE
    keep: Tensor  # [n] the slot that predicts each acted token: the one before it in its branch
    labels: Tensor  # [n] the acted tokens
    owner: Tensor  # [n] who chose each of them: the caller's index of its trajectory
    pictures: list[Picture]
    sampled: Tensor  # [n] log pi of each of them, as it was sampled; nan: it was not sampled


def group_row(policy: Policy, branches: list[tuple[int, Trajectory]]) -> Row:
    """branches: (the caller's index, trajectory) of one group; all share their prompt."""
    first = branches[0][1]
    P = first.prompt
    ids, segment, pictures = first.ids[:P], [0] * P, first.images[: first.prompt_images]
    positions, keep, labels, owner, sampled = [], [], [], [], []
    for b, (index, t) in enumerate(branches, start=1):
        if t.ids[:P] != first.ids[:P]:
            raise ValueError(f"{t.sample.id}: the rollouts of a group must share one prompt")
        alone = torch.tensor([t.ids])
        where = policy.positions(alone, torch.ones_like(alone), [p.grid for p in t.images])
        where = where[1:, 0].cpu()  # [3, P + branch] without the text row, which is for generate
        positions.append(where if b == 1 else where[:, P:])
        acted = [k for k in range(P, len(t.ids)) if t.acted[k]]
        # A branch's first token is predicted by the prompt's last slot, wherever the branch is.
        keep += [P - 1 if k == P else len(ids) + k - P - 1 for k in acted]
        labels += [t.ids[k] for k in acted]
        owner += [index] * len(acted)
        sampled += t.sampled or [torch.nan] * len(acted)
        ids += t.ids[P:]
        segment += [b] * (len(t.ids) - P)
        pictures += t.images[t.prompt_images :]
    of_slots, of_acted = torch.tensor([ids, segment]), torch.tensor([keep, labels, owner]).long()
    positions, sampled = torch.cat(positions, -1), torch.tensor(sampled)  # [3, L], [n]
    return Row(*of_slots, positions, *of_acted, pictures, sampled)  # [2, L], [3, n]


def group_rows(policy: Policy, group: list[tuple[int, Trajectory]], row_tokens: int) -> list[Row]:
    """A group as one row, or as several if prompt and branches exceed `row_tokens` slots: the
    mask has L^2 cells. Any split gives the same gradient. A branch is never cut."""

    def slots(part: list[tuple[int, Trajectory]]) -> int:
        return part[0][1].prompt + sum(len(t.ids) - t.prompt for _, t in part)

    return [group_row(policy, part) for part in packed(group, slots, row_tokens)]


def micro_batches(rows: list[Row], row_tokens: int) -> Iterator[list[Row]]:
    """Rows of similar length side by side, at most `row_tokens` slots, padding included."""
    by_length = sorted(rows, key=lambda row: len(row.ids))  # the last of a batch is its longest
    return packed(by_length, lambda batch: len(batch) * len(batch[-1].ids), row_tokens)


CHUNK = 1024  # acted tokens whose logits exist at the same time


class LogProbs(nn.Module):
    """Rows -> log pi(token | history) of their acted tokens, as the sampler had it: control
    tokens are forbidden and logits are divided by the temperature, here as there. Logits exist
    only for acted tokens and only CHUNK at a time: with Qwen's vocabulary those of 8,000 slots
    take 5 GB, and autograd keeps copies. It is a module so that `shard` can wrap it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self.forbidden = torch.tensor(policy.forbidden, device=policy.device)

    def logp(self, hidden: Tensor, labels: Tensor, temperature: float) -> Tensor:
        logits = self.model.lm_head(hidden).float() / temperature  # [n, V]
        logits = logits.index_fill(-1, self.forbidden, float("-inf"))
        return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]  # [n]

    def forward(self, keep: Tensor, labels: Tensor, temperature: float, **inputs: Tensor) -> Tensor:
        """keep [N]: which of the B * L slots predict the acted tokens labels [N]. Returns [N]."""
        hidden = self.model.model(use_cache=False, **inputs)[0]  # [B, L, H]
        return self.chunked(hidden.flatten(0, 1)[keep], labels, temperature)

    def chunked(self, hidden: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """[N, H], [N] -> [N]. The backward pass computes a chunk's logits again."""
        chunks = zip(hidden.split(CHUNK), labels.split(CHUNK))
        logp = [checkpoint(self.logp, h, y, temperature, use_reentrant=False) for h, y in chunks]
        return torch.cat(logp)


def log_probs(policy: Policy, rows: list[Row], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log pi of every acted token of some rows, and who chose it: ([N], [N]). Stage 1, stage 2
    and the reference all use this one function."""
    B, L, device = len(rows), max(len(row.ids) for row in rows), policy.device
    ids = torch.full((B, L), policy.pad_id)
    segment = torch.full((B, L), -1, device=device)  # padding: a segment that no other looks at
    positions = torch.zeros(3, B, L, dtype=torch.long)
    for b, row in enumerate(rows):
        n = len(row.ids)
        ids[b, :n], segment[b, :n], positions[:, b, :n] = row.ids, row.segment, row.positions
    before = torch.ones(L, L, dtype=torch.bool, device=device).tril()  # [L, L]
    own = segment[:, :, None] == segment[:, None, :]  # [B, L, L]
    # s_t of Eq. 3, what a token is chosen on: slot i may look at slot j.
    sees = before & (own | (segment == 0)[:, None, :])  # [B, L, L]
    module = policy.sharded or LogProbs(policy)
    logp = module(
        temperature=temperature,
        keep=torch.cat([b * L + row.keep for b, row in enumerate(rows)]).to(device),
        labels=torch.cat([row.labels for row in rows]).to(device),
        input_ids=ids.to(device),
        attention_mask=sees[:, None],
        position_ids=positions.to(device),
        **policy.model_images([picture for row in rows for picture in row.pictures]),
    )
    return logp, torch.cat([row.owner for row in rows]).to(device)


def blank_row(policy: Policy) -> Row:
    """A picture and nothing to learn: what `level` fills up micro-batches with."""
    blank = Trajectory(sample=None)
    blank.observe(policy.encode(IMAGE, policy.pictures([Image.new("RGB", (56, 56))])))
    return group_row(policy, [(0, blank)])


# Learn


@dataclass(frozen=True)
class Objective:
    """The constants of Eq. 4 and the forks that the paper leaves open (README)."""

    eps: float = 0.2  # clip range
    beta: float = 1e-3  # KL weight; without a reference the term is 0
    temperature: float = 1.0  # of the rollouts: what was sampled is what is scored
    ratio_anchor: str = "old"  # "old": the sampler; "ref": the SFT model, as in notes
    loss_agg: str = "token"  # a key of LOSS_AVERAGES
    # Mini-o3's over-turn masking, a deviation: rollouts that ran out of turns or length stay
    # in the baseline of their group, but none of their tokens is learnt from.
    mask_truncated: bool = False
    updates: int = 1  # steps per rollout batch; if several, pi_old is scored before the first
    row_tokens: int = 8192  # slots of one row and of one micro-batch
    max_grad_norm: float = 1.0


def lesson(
    policy: Policy, groups: list[list[Trajectory]], advantage: Tensor, objective: Objective
) -> tuple[list[list[Row]], Tensor, Tensor]:
    """The micro-batches of a step; and of each rollout its A and what one of its acted tokens
    weighs in the loss, [M] each."""
    masked = ("turns", "length") if objective.mask_truncated else ()
    flat = [t for group in groups for t in group]
    lengths = torch.tensor([0 if t.ended in masked else sum(t.acted) for t in flat]).float()  # [M]
    everyone = gathered(lengths)  # those of each process: the average is over the rollouts of all
    weight = LOSS_AVERAGES[objective.loss_agg](torch.cat(everyone))
    weight = weight.split([len(theirs) for theirs in everyone])[processes()[0]]  # [M]
    A = advantage.flatten()  # [M]

    # Without a KL term a rollout with A = 0 has no gradient: it need not be scored.
    teaches = (lengths > 0) & ((A != 0) | (objective.beta > 0))  # [M]
    K, batches = len(groups[0]), []
    members = [
        [(i, t) for i, t in enumerate(group, start=g * K) if teaches[i]]
        for g, group in enumerate(groups)
    ]
    for part in parts(members):
        rows = [row for group in part for row in group_rows(policy, group, objective.row_tokens)]
        batches += micro_batches(rows, objective.row_tokens)
    return level(policy, batches, blank_row), A.to(policy.device), weight.to(policy.device)


def gradient_of_J(
    logp_new: Tensor, logp_anchor: Tensor, logp_ref: Tensor, A: Tensor, weight: Tensor, c: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 4 for the N acted tokens of one micro-batch, [N] each; c holds its constants.

        J = sum of weight * (min(r A, clip(r, 1 - eps, 1 + eps) A) - beta KL)

    The weights of a step sum to 1, so that J over all its micro-batches is the mean of Eq. 4.
    Adds the gradient of the loss -J to .grad. Returns the loss, the surrogate and the KL.
    """
    surrogate = clipped_surrogate(logp_new, logp_anchor, A, c.eps)  # [N]
    kl = kl_k3(logp_new, logp_ref)  # [N]
    loss = -(weight * (surrogate - c.beta * kl)).sum()  # -J
    loss.backward()
    return loss.detach(), surrogate.detach(), kl.detach()


MEANS = (
    "kl",
    "entropy",
    "clip_fraction",
    "gap",
)  # over the tokens that were scored, weighted alike


def learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: list[list[Trajectory]],
    advantage: Tensor,
    reference: Policy | None,
    objective: Objective,
) -> dict[str, float | None]:
    """Eqs. 1, 3 and 4: steps on the objective J. advantage [G, K]: one for each rollout.

    J is one weighted sum over all acted tokens of the step, so rows and micro-batches can be
    cut anywhere. With one step per rollout batch pi_old is pi_new: the ratio is 1, the loss
    hovers around 0, and its gradient is A * grad log pi all the same. Each of several processes
    brings its own groups; their gradients are added up to that of all groups together.

    The report is of the last step. kl (None without a reference), entropy, clip_fraction and gap
    are means over the tokens that were scored, weighted as in the loss. gap is |log pi as learnt
    from - log pi as sampled|, before any step; what is left out hangs on who spoke together. A step
    whose loss or gradient is not finite is skipped and reported, and no further step follows.
    """
    if objective.ratio_anchor == "ref" and reference is None:
        raise ValueError("--ratio-anchor ref divides by pi_ref: expected a reference, got None")
    policy.model.train()
    batches, A_of, weight_of = lesson(policy, groups, advantage, objective)
    olds = log_probs_of(policy, batches, objective) if objective.updates > 1 else None
    refs = log_probs_of(reference, batches, objective) if reference else None
    anchors = refs if objective.ratio_anchor == "ref" else olds
    for _ in range(objective.updates):
        optimizer.zero_grad()
        # broken: questions in a micro-batch of no finite loss; largest: of the gaps
        sums, broken, largest = Counter(), set(), 0.0
        for b, batch in enumerate(batches):
            logp, owner = log_probs(policy, batch, objective.temperature)  # [N]
            now, A, weight = logp.detach(), A_of[owner], weight_of[owner]  # [N]
            anchor, ref = anchors[b] if anchors else now, refs[b] if refs else now  # [N]
            loss, surrogate, kl = gradient_of_J(logp, anchor, ref, A, weight, objective)
            if not loss.isfinite():
                broken |= {groups[i // len(groups[0])][0].sample.id for i in owner.tolist()}
            clipped = surrogate < (now - anchor).exp() * A  # [N] the clip changed it
            sampled = torch.cat([row.sampled for row in batch]).to(now)
            gap = ((olds[b] if olds else now) - sampled).abs().nan_to_num()  # [N]
            largest = max([largest, *gap.tolist()])
            sums["loss"] += loss.item()
            sums["scored"] += weight.sum().item()
            for name, of_token in zip(MEANS, (kl, -now, clipped, gap)):
                sums[name] += (weight * of_token).sum().item()
        broken = set().union(*gathered(broken))
        norm = None if broken else apply_gradient(policy.model, optimizer, objective.max_grad_norm)
        if norm is None:
            what = f"the loss of a batch with {sorted(broken)}" if broken else "the gradient's norm"
            logging.getLogger(__name__).error("step skipped: %s is not finite", what)
            break
    report = {name: sum(gathered(sums[name]), 0.0) for name in ("loss", "scored", *MEANS)}
    scored = report.pop("scored")  # the weight of all tokens that were scored
    report |= {name: report[name] / scored if scored else None for name in MEANS}
    if reference is None:
        report["kl"] = None
    report["gap"] = round(report["gap"] or 0.0, 5)
    report["largest_gap"] = round(max(gathered(largest)), 4)
    return report | {"grad_norm": norm, "skipped": int(norm is None)}


@torch.no_grad()
def log_probs_of(policy: Policy, batches: list[list[Row]], objective: Objective) -> list[Tensor]:
    return [log_probs(policy, batch, objective.temperature)[0] for batch in batches]  # [N] each


def apply_gradient(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
) -> float | None:
    """Clip the gradient and apply it. Returns its norm before clipping; None if that is not
    finite, and then the weights stay as they were."""
    norm = clip_gradient(model, max_grad_norm)
    if not math.isfinite(norm):
        return None
    optimizer.step()
    return norm


if __name__ == "__main__":
    R = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.2, 1.0, 1.0, -0.2]])
    known = torch.ones_like(R, dtype=torch.bool)
    print("R                   ", R.tolist())
    print("A = R - mean        ", advantage_mean(R, known).tolist())
    print("A over deviation    ", advantage_std(R, known).round(decimals=2).tolist())
    for A in (1.0, -1.0):
        ratios = torch.tensor([0.5, 1.0, 1.5])
        gain = clipped_surrogate(ratios.log(), torch.zeros(3), torch.tensor(A), eps=0.2)
        print(f"A = {A:+}: ratio {ratios.tolist()} -> {[round(g, 2) for g in gain.tolist()]}")
