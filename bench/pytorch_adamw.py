#!/usr/bin/env python3
"""Terrace's AdamW beside PyTorch's: the same model, initial weights and batches in float32.

    scripts/sample-data
    python3 -m venv venv && venv/bin/pip install torch numpy
    venv/bin/python bench/pytorch_adamw.py [--steps N] [--data FOLDER]

Trains `moe-110m` without router noise by `build/release/bin/terrace` under the policy adamw, reads
the weights that it began with and the batches that it drew, and takes the same steps by
torch.optim.AdamW; and takes them once more from weights that are all moved to a neighbouring float,
which shows how far rounding alone takes two runs apart. Prints losses by step, and how far the
gradients of the first step are apart. Exits with 1 where the first steps differ by more than
rounding, or later ones by ten times what rounding does.

Clipping is by a norm added up in float64, as Terrace's: that of torch.nn.utils.clip_grad_norm_ is
off by some 1e-4 on this model, since it adds up millions of squares in float32.
"""
import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch

import pytorch_train_step as reference

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM, CONFIG = ROOT / "build/release/bin/terrace", ROOT / "configs/moe-110m.toml"
SEQUENCES, LENGTH, SEED = 4, 128, 1
RATE, BETAS, EPS, DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
# Relative differences. Of the first step's gradients, by tensor and as norms: tens of roundings of
# float32, 6e-8 each. Of losses: of the first steps a few roundings; of all, times what they are
# between two runs of PyTorch.
GRADIENT_BAR, FIRST_STEPS, FIRST_BAR, BAR = 5e-6, 3, 1e-6, 10


# --- Terrace's run
def train(data, out, steps, rate):
    settings = {"model.router.noise_scale": 0, "data.folder": data, "training.steps": steps,
                "training.precision": "f32", "training.micro_batch_size": SEQUENCES,
                "training.sequence_length": LENGTH, "training.seed": SEED,
                "training.eval_interval": 0, "training.checkpoint_interval": 0, "training.keep": 1,
                "optimizer.policy": "adamw", "optimizer.learning_rate": rate,
                "optimizer.schedule": "constant", "optimizer.warmup_fraction": 0,
                "optimizer.clipping": "global_norm", "optimizer.max_norm": MAX_NORM}
    assignments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([PROGRAM, "train", CONFIG, "-o", out, *assignments], check=True,
                   stdout=sys.stderr)


def metrics(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "loss" in line}


def tensors(path):
    """A safetensors file of float32."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + length + begin:8 + length + end], np.float32)
        yield name, torch.from_numpy(values.reshape(entry["shape"]).copy())


# --- The batches that it draws (src/core/rng.h, src/data/batches.cpp)
MASK, GOLDEN = (1 << 64) - 1, 0x9e3779b97f4a7c15


def mix(x):
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & MASK
    x = (x ^ x >> 27) * 0x94d049bb133111eb & MASK
    return x ^ x >> 31


def mix_keys(first, *rest):
    key = mix(first + GOLDEN & MASK)
    for word in rest:
        key = mix(key ^ (word + GOLDEN & MASK))
    return key


def random_bits(key, counter):
    return mix(key + mix(counter + GOLDEN & MASK) & MASK)


def permute(key, size, index):
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for number in range(6):
            left, right = right, left ^ (mix_keys(key, number, right) & low)
        index = left << half | right
        if index < size:
            return index


class Batches:
    def __init__(self, folder):
        shards = sorted(pathlib.Path(folder).glob("train-*.bin"))
        self.tokens = np.concatenate([self.shard(path) for path in shards])
        self.windows = (len(self.tokens) - 1) // LENGTH

    @staticmethod
    def shard(path):
        data = path.read_bytes()
        return np.frombuffer(data[64:], {2: np.uint16, 4: np.uint32}[data[12]]).astype(np.int64)

    def batch(self, index):
        spare = len(self.tokens) - 1 - self.windows * LENGTH
        rows = []
        for sequence in range(index * SEQUENCES, (index + 1) * SEQUENCES):
            epoch, at = divmod(sequence, self.windows)
            place = permute(mix_keys(SEED, 0x77696e646f77, epoch), self.windows, at)
            phase = random_bits(mix_keys(SEED, 0x7068617365), epoch) % (spare + 1)
            first = place * LENGTH + phase
            rows.append(self.tokens[first:first + LENGTH + 1])
        rows = torch.from_numpy(np.stack(rows))
        return rows[:, :-1], rows[:, 1:]


# --- PyTorch's run
def name_in_pytorch(name):
    for ours, theirs in (("tok_emb.", "tokens."), ("pos_emb.", "positions."),
                         ("layers.", "blocks."), (".attn.", ".attention."), (".ff.", ".ffn."),
                         ("norm_f.", "norm.")):
        name = name.replace(ours, theirs)
    return name


def model_of(checkpoint, nudged=False):
    reference.NOISE = 0
    model = reference.Model()
    model.load_state_dict({name_in_pytorch(name): values
                           for name, values in tensors(checkpoint / "model.safetensors")})
    if nudged:
        torch.manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.copysign(torch.tensor(math.inf),
                                                          torch.randn_like(p))))
    return model


def steps_of(model, batches, steps):
    norms = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                                   {"params": norms, "weight_decay": 0}],
                                  lr=RATE, betas=BETAS, eps=EPS)
    for step in range(steps):
        optimizer.zero_grad()
        total = model(*batches.batch(step))
        total.backward()
        balance = sum(block.ffn.loss for block in model.blocks
                      if isinstance(block.ffn, reference.Moe))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        torch._foreach_mul_(gradients, min(1, MAX_NORM / norm))
        optimizer.step()
        yield (total - balance).item(), norm


def largest_gradient_difference(checkpoint, model):
    """Of the first step: by then the momentum is (1 - beta1) times the clipped gradient."""
    parameters = dict(model.named_parameters())
    largest = 0
    for name, momentum in tensors(checkpoint / "optimizer.safetensors"):
        if name.endswith(".momentum"):
            theirs = parameters[name_in_pytorch(name[:-len(".momentum")])].grad
            ours = momentum / (1 - BETAS[0])
            if theirs is None:  # an expert without tokens
                largest = max(largest, ours.abs().max().item())
            else:
                largest = max(largest, ((ours - theirs).norm() / theirs.norm()).item())
    return largest


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--data", default="runs/quickstart-data")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        # A rate at which float32 weights stay as they are.
        train(arguments.data, folder / "initial", 1, 1e-30)
        train(arguments.data, folder / "run", arguments.steps, RATE)
        ours = metrics(folder / "run")
        initial = folder / "initial/checkpoints/step-1"
        batches = Batches(arguments.data)
        nudged = list(steps_of(model_of(initial, nudged=True), batches, arguments.steps))

        model = model_of(initial)
        gradients = first = largest = rounding = 0.0
        print(f"{'step':>4} {'loss':>11} {'PyTorch':>11} {'difference':>11} {'nudged':>11} "
              f"{'norm':>10} {'PyTorch':>10}")
        for step, (loss, norm) in enumerate(steps_of(model, batches, arguments.steps), 1):
            difference = ours[step]["loss"] / loss - 1
            by_rounding = nudged[step - 1][0] / loss - 1
            # Whatever is not a number is no agreement.
            largest = max(largest, abs(difference) if math.isfinite(difference) else math.inf)
            rounding = max(rounding, abs(by_rounding))
            if step == 1:
                gradients = largest_gradient_difference(initial, model)
            if step <= FIRST_STEPS:
                first = largest
            print(f"{step:4} {ours[step]['loss']:11.7f} {loss:11.7f} {difference:11.1e} "
                  f"{by_rounding:11.1e} {ours[step]['gradient_norm']:10.6f} {norm:10.6f}",
                  flush=True)
    print(f"largest relative differences: gradients of step 1 {gradients:.1e} (bar "
          f"{GRADIENT_BAR:.0e}), losses {first:.1e} in the first {FIRST_STEPS} steps (bar "
          f"{FIRST_BAR:.0e}), {largest:.1e} in all {arguments.steps} (bar: {BAR} times the "
          f"{rounding:.1e} of rounding)")
    agrees = gradients <= GRADIENT_BAR and first <= FIRST_BAR and largest <= BAR * rounding
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
