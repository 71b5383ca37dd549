#!/usr/bin/env python3
"""Training steps of the preset moe-110m in PyTorch, beside Terrace's, by turns in one run.

    python3 -m venv venv && venv/bin/pip install torch numpy
    venv/bin/python bench/pytorch_train_step.py [--precision f32|bf16] [--rounds N]

The model is what a careful user would write: fused attention, tokens sorted by expert, one product
an expert, fused AdamW, clipping by the global norm. Terrace's figure is that of
`build/release/bin/bench_train_step` (scripts/setup builds it). Prints a line of JSON a figure, as
scripts/bench does: PyTorch's tokens/s, Terrace's, and their ratio in each round.
"""
import argparse
import json
import math
import pathlib
import statistics
import subprocess
import time

import torch
import torch.nn.functional as F
from torch import nn

# As `preset = "moe-110m"` (src/model/presets.cpp) and bench/bench_train_step.cpp.
VOCABULARY, POSITIONS, WIDTH, LAYERS = 8192, 128, 512, 4
HEADS, KV_HEADS, FFN_WIDTH, EXPERTS, TOP_K = 8, 2, 1024, 32, 2
AUX_COEFFICIENT, Z_COEFFICIENT, NOISE = 0.05, 1e-4, 0.5
SEQUENCES, LENGTH = 16, 128
STEPS_PER_ROUND = 3
PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "build/release/bin/bench_train_step"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        head = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, HEADS * head, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * head, bias=False)
        self.out_proj = nn.Linear(HEADS * head, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (projection(x).view(batch, length, heads, -1).transpose(1, 2)
                   for projection, heads in ((self.q_proj, HEADS), (self.k_proj, KV_HEADS),
                                             (self.v_proj, KV_HEADS)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, -1))


class SwiGlu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, FFN_WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, FFN_WIDTH, bias=False)
        self.down_proj = nn.Linear(FFN_WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(SwiGlu() for _ in range(EXPERTS))
        self.loss = 0

    def forward(self, x):
        shape, x = x.shape, x.view(-1, WIDTH)
        logits = F.linear(x.float(), self.router.weight.float())
        logits = logits + NOISE * torch.randn_like(logits)
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        self.loss = (AUX_COEFFICIENT * EXPERTS
                     * (probabilities.mean(0) * counts / chosen.numel()).sum()
                     + Z_COEFFICIENT * logits.logsumexp(-1).square().mean())
        order = chosen.flatten().argsort(stable=True)
        tokens = order // TOP_K
        rows = x[tokens].split(counts.tolist())
        out = torch.cat([expert(row) for expert, row in zip(self.experts, rows) if len(row)])
        out = out * weights.flatten()[order, None].to(out.dtype)
        return torch.zeros_like(x).index_add_(0, tokens, out).view(shape)


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.ffn = nn.LayerNorm(WIDTH), Moe() if layer % 2 else SwiGlu()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight[:inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.flatten())
        return loss + sum(block.ffn.loss for block in self.blocks if isinstance(block.ffn, Moe))


def words():
    """Token ids by Zipf's law, as text has them."""
    ranks = torch.exp(torch.rand(SEQUENCES, LENGTH) * math.log(VOCABULARY)) - 1
    return ranks.long().clamp_(max=VOCABULARY - 1)


def figure(name, value, unit, conditions):
    print(json.dumps({"name": name, "value": float(f"{value:.4g}"), "unit": unit, "bar": None,
                      "conditions": conditions}), flush=True)


def terrace_tokens_per_second(precision):
    lines = subprocess.run([PROGRAM, precision], check=True, capture_output=True, text=True).stdout
    figures = {line["name"]: line["value"] for line in map(json.loads, lines.splitlines())}
    return figures[f"train_step.moe-110m.{precision}.tokens"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    torch.manual_seed(1)
    model = Model().to(torch.bfloat16 if arguments.precision == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step():
        optimizer.zero_grad()
        model(words(), words()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(2):
        step()
    conditions = (f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
                  f"{SEQUENCES} x {LENGTH} tokens, fused AdamW; Terrace with skewadam")
    ratios, theirs, ours = [], [], []
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            step()
        theirs.append(STEPS_PER_ROUND * SEQUENCES * LENGTH / (time.perf_counter() - start))
        ours.append(terrace_tokens_per_second(arguments.precision))
        ratios.append(ours[-1] / theirs[-1])
    name = f"train_step.moe-110m.{arguments.precision}"
    figure(name + ".pytorch", statistics.median(theirs), "tokens/s", conditions)
    figure(name + ".terrace", statistics.median(ours), "tokens/s", conditions)
    figure(name + ".ratio", statistics.median(ratios), "ratio",
           conditions + "; of each round: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
