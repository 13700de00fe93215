#!/usr/bin/env python3
"""Whether the spectrum of the change of W_Q^T W_K tells of the failure of BF16 attention before the loss does.

    change_entropy.py > summary.csv
    change_entropy.py --rows > rows.csv

Trains the layer of `sigmascale stress low-precision`: 31 tokens, half of which occur three times, and four heads. In head 2
all values have the same sign, and all keys share a constant part. It is written in PyTorch's operations, with O in BF16
(`none`), with the output in f32 until delta is computed (`f32-output`) and all in f32 (`f32`), three seeds each. Every ten
steps a row for each head:

    entropy    -sum p ln p of p = s^2 / sum s^2, s the singular values of the change of W_Q^T W_K in ten steps: 0 if it has rank one
    one_sided  how far the tokens lie on one side of the first right singular vector of W_Q: 1 if all do, 0 if half do

The summary has the first step at which three rows in a row had an entropy below 0.1, all tokens on one side, or a logit above 1000,
and the step at which the mean of the last five losses is 10 % above the smallest such mean before. A run takes half a minute on one
core.
"""

import csv
import sys

import torch

TOKENS, D, CONSTANT, BATCH, HEADS, PLANTED = 31, 32, 16, 2, 4, 2
FEATURES, MASSIVE, GAP, RATE, STEPS = TOKENS + CONSTANT, 4.0, 0.1, 1e-3, 1600
FIELDS = "arithmetic,seed,step,loss,head,w_q,logit_max,entropy,one_sided".split(",")
SUMMARY = (
    "arithmetic,seed,head,loss_shows,entropy_below_0.1,all_on_one_side,logit_above_1000,least_entropy,last_w_q".split(
        ","
    )
)


def bf16(x):
    return x.bfloat16().float()


def planted(generator):
    """Weights ``(heads, [q, k, v], D, FEATURES)``, the token that each token looks for, and the values that it should find."""
    weights, partners, targets = torch.zeros(HEADS, 3, D, FEATURES), [], []
    signs = torch.tensor(
        [[1.0 if (a & (t + 1)).bit_count() % 2 == 0 else -1.0 for t in range(TOKENS)] for a in range(D)]
    )
    for head in range(HEADS):
        partner, noise = torch.randperm(TOKENS, generator=generator), torch.randn(TOKENS, D, generator=generator)
        target = -1.5 * (0.6 * noise).exp() if head == PLANTED else 1.5 * noise
        weights[head, 0, :, :TOKENS] = 1.73 * signs[:, partner]
        weights[head, 1, :, :TOKENS] = 1.73 * signs
        weights[head, 2, :, :TOKENS] = target.T
        partners.append(partner)
        targets.append(target)
    weights[PLANTED, :2, :, TOKENS:] = 1.0 / (CONSTANT * MASSIVE)
    return weights, torch.stack(partners), torch.stack(targets)


def drawn(generator):
    """Tokens ``(batch, n)``, and how often each of the 31 occurs."""
    ids, copies = [], []
    for _ in range(BATCH):
        order, count = torch.randperm(TOKENS, generator=generator), torch.ones(TOKENS, dtype=torch.long)
        count[order[: TOKENS // 2]] = 3
        tokens = torch.repeat_interleave(torch.arange(TOKENS), count)
        ids.append(tokens[torch.randperm(len(tokens), generator=generator)])
        copies.append(count)
    return torch.stack(ids), torch.stack(copies)


def step(weights, partners, targets, ids, copies, arithmetic):
    """The loss, the gradients of the weights, and the largest logit of each head."""
    n, cast = ids.shape[1], (lambda x: x) if arithmetic == "f32" else bf16
    constant = cast(weights[..., TOKENS:]).sum(-1)
    x = cast(cast(weights[..., :TOKENS]) + MASSIVE * constant[..., None])
    q, k, v = x[..., ids].permute(1, 0, 3, 4, 2)  # (heads, batch, n, D)
    logits = q @ k.transpose(-1, -2) * D**-0.5
    exponentials = torch.exp(logits - logits.amax(-1, keepdim=True))
    total = exponentials.sum(-1, keepdim=True)
    # The sum over keys is one tile, whose result is rounded.
    unrounded = cast(exponentials) @ v
    out = unrounded / total if arithmetic == "f32-output" else cast(cast(unrounded) / total)
    sought = partners[:, ids]
    target = torch.stack([targets[head][sought[head]] for head in range(HEADS)])
    repeated = torch.stack([torch.stack([copies[b][sought[h, b]] for b in range(BATCH)]) for h in range(HEADS)]) > 1
    miss = out - torch.where(repeated, 1 - GAP, 1 + GAP)[..., None] * target
    mean = 1.0 / (BATCH * n * HEADS)
    d_out = miss * mean / D
    p = exponentials / total
    # As flash attention does: delta from the output.
    d_logits = p * (d_out @ v.transpose(-1, -2) - (d_out * out).sum(-1, keepdim=True))
    d_q, d_k = d_logits @ k * D**-0.5, d_logits.transpose(-1, -2) @ q * D**-0.5
    d_x = torch.stack([d_q, d_k, cast(p).transpose(-1, -2) @ d_out]).permute(1, 0, 4, 2, 3).reshape(HEADS, 3, D, -1)
    gradients = torch.zeros_like(weights)
    gradients[..., :TOKENS].index_add_(3, ids.flatten(), d_x)
    gradients[..., TOKENS:] = MASSIVE * d_x.sum(-1, keepdim=True)
    return 0.5 * float(miss.square().sum()) * mean / D, gradients, logits.abs().amax((1, 2, 3))


def run(arithmetic, seed):
    """Rows of a run."""
    generator = torch.Generator().manual_seed(seed)
    weights, partners, targets = planted(generator)
    first, second, before = torch.zeros_like(weights), torch.zeros_like(weights), None
    inputs = torch.cat([torch.eye(TOKENS), torch.full((TOKENS, CONSTANT), MASSIVE)], dim=1)
    for number in range(STEPS):
        loss, gradients, largest = step(weights, partners, targets, *drawn(generator), arithmetic)
        if number % 10 == 0:
            interaction = weights[:, 0].transpose(-1, -2) @ weights[:, 1]
            if before is not None:
                squares = torch.linalg.svdvals(interaction - before).square()
                entropies = torch.special.entr(squares / squares.sum(-1, keepdim=True)).sum(-1)
                _, norms, right = torch.linalg.svd(weights[:, 0])
                sides = (right[:, 0] @ inputs.T > 0).float().mean(-1)
                for head in range(HEADS):
                    values = norms[head, 0], largest[head], entropies[head], (2 * sides[head] - 1).abs()
                    yield arithmetic, seed, number, f"{loss:.6g}", head, *(f"{float(value):.5g}" for value in values)
            before = interaction
        gradients = gradients * min(1.0 / float(gradients.norm()), 1.0)
        first = 0.9 * first + 0.1 * gradients
        second = 0.95 * second + 0.05 * gradients.square()
        rate = RATE * min((number + 1) / 100, 1.0)
        size = (second / (1 - 0.95 ** (number + 1))).sqrt() + 1e-8
        weights = weights - rate * first / (1 - 0.9 ** (number + 1)) / size


def lasting(values, holds):
    """The step of the third row in a row for which it holds."""
    count = 0
    for number, value in values:
        count = count + 1 if holds(value) else 0
        if count == 3:
            return number
    return ""


def summary(rows):
    """A row for each head of a run."""
    of = lambda head, field: [(int(row[2]), float(row[FIELDS.index(field)])) for row in rows if int(row[4]) == head]
    losses, least, shows = of(0, "loss"), float("inf"), ""
    for last in range(4, len(losses)):
        mean = sum(loss for _, loss in losses[last - 4 : last + 1]) / 5
        if mean > 1.1 * least:
            shows = losses[last][0]
            break
        least = min(least, mean)
    for head in range(HEADS):
        entropies = of(head, "entropy")
        steps = (
            lasting(entropies, lambda x: x < 0.1),
            lasting(of(head, "one_sided"), lambda x: x > 0.99),
            lasting(of(head, "logit_max"), lambda x: x > 1000),
        )
        yield *rows[0][:2], head, shows, *steps, f"{min(x for _, x in entropies):.3f}", of(head, "w_q")[-1][1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    every = sys.argv[1:] == ["--rows"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(FIELDS if every else SUMMARY)
    for seed in range(3):
        for arithmetic in ("none", "f32-output", "f32"):
            rows = list(run(arithmetic, seed))
            writer.writerows(rows if every else summary(rows))
            sys.stdout.flush()
