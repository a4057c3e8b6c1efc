#!/usr/bin/env python3
"""Checks tests/data/train/updates.csv, which tests/test_updates.c compares with our optimizers, schedules and losses.

  scripts/check/optimizers.py            computes the values in float64 with NumPy, from the formulas of the papers
  scripts/check/optimizers.py --torch    computes them with PyTorch and timm instead; names what these do not have
  scripts/check/optimizers.py --write    writes the file (only from the formulas)

A network of six tensors takes STEPS updates with the gradients of gradient(). The file has one line per value: the case, the
tensor, the index in the tensor, and the value after the last update. With ema, the value is that of the moving average. Lines
of the tensor "rate" are learning rates of steps; those of "loss" and "delta" are losses and their derivatives by the logits.

Exit status: 0 all values agree, 1 some differ, 2 usage, 4 NumPy, PyTorch or timm is missing.
"""

import argparse
import csv
import functools
import math
import pathlib
import sys

try:
    import numpy as np
except ImportError as error:
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print(__doc__.strip())
        sys.exit()
    print(f"check/optimizers.py: {error}; install NumPy (python3-numpy)", file=sys.stderr)
    sys.exit(4)

FILE = pathlib.Path(__file__).resolve().parents[2] / "tests/data/train/updates.csv"
STEPS = 4
RATE, DECAY, MATRIX_RATE = 0.01, 0.05, 2.0  # MATRIX_RATE: of Muon's hidden matrices, relative to RATE

# Name, shape, whether it is a hidden matrix, whether it belongs to the last layer.
TENSORS = [
    ("stem.weight", (4, 2), False, False),
    ("stem.bias", (4,), False, False),
    ("tall.weight", (5, 3), True, False),
    ("conv.weight", (3, 2, 2, 1), True, False),
    ("head.weight", (3, 3), False, True),
    ("head.bias", (3,), False, True),
]

# Options of each case; names as those of fdsl-bench.
CASES = {
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "lamb": {"optimizer": "lamb"},
    "lamb-undecayed": {"optimizer": "lamb", "weight-decay": 0.0},
    "muon": {"optimizer": "muon"},
    "clip-norm": {"optimizer": "adamw", "clip-norm": 0.5},
    "clip-value": {"optimizer": "adamw", "clip-value": 0.3},
    "clip-adaptive": {"optimizer": "sgd", "clip-adaptive": 0.05},
    "lamb-clip-norm": {"optimizer": "lamb", "clip-norm": 1.0},
    "muon-clip-adaptive": {"optimizer": "muon", "clip-adaptive": 0.05},
    "ema-warmup": {"optimizer": "adamw", "ema": 0.55},
}

RATE_STEPS = 60
# Options in steps. All warm up over 6 steps from 0.001 to 0.1, and end after 50 steps at 0.002.
SCHEDULES = {
    "cosine": {"kind": "cosine"},
    "cosine-k": {"kind": "cosine", "k": 1.5},
    "cosine-cycles": {"kind": "cosine", "cycles": 2, "cycle-decay": 0.5},
    "cosine-mul": {"kind": "cosine", "cycles": 2, "cycle-decay": 0.5, "cycle-mul": 3},
    "polynomial-mul": {"kind": "polynomial", "power": 2.0, "k": 1.0, "cycles": 2, "cycle-mul": 3},
    "polynomial-k": {"kind": "polynomial", "power": 2.0, "k": 0.7},
    "tanh": {"kind": "tanh"},
    "step": {"kind": "step", "decay": 10.75, "gamma": 0.5},
}
WARM, WARM_FROM, TOP, END, LEAST = 6, 0.001, 0.1, 50, 0.002

LOGITS = [[-30.0, -1.25, 0.5, 8.0], [2.5, 40.0, -0.75, 0.0], [0.0, 1.0, -1.0, 3.0]]
LABELS, OTHERS, SHARE, SMOOTHING = [1, 3, 0], [2, 3, 1], 0.75, 0.1
LOSSES = {
    "bce": {},
    "bce-sum": {"sum": True},
    "bce-threshold": {"threshold": 0.2},
    "bce-pos-weight": {"positive": 3.0},
    "bce-all": {"sum": True, "threshold": 0.5, "positive": 0.5},
}


def drawn(index, step, tensor):
    """A number from -1 to 1 that C computes exactly."""
    return ((index * 7919 + step * 104729 + tensor * 1299709 + 12345) % 2003) / 1001.0 - 1


def values(step, scale):
    """One array per tensor."""
    arrays = []
    for t, (_, shape, _, _) in enumerate(TENSORS):
        count = math.prod(shape)
        arrays.append(scale * np.array([drawn(i, step, t) for i in range(count)]).reshape(shape))
    return arrays


def start():
    return values(0, 0.5)


def gradient(step):
    return values(step + 1, 1.0)


# ---- The formulas ----


def clip(case, parameters, gradients):
    if "clip-norm" in case:
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        return [g * min(1, case["clip-norm"] / (norm + 1e-6)) for g in gradients]
    if "clip-value" in case:
        return [np.clip(g, -case["clip-value"], case["clip-value"]) for g in gradients]
    if "clip-adaptive" not in case:
        return gradients
    clipped = []
    for (_, shape, _, head), p, g in zip(TENSORS, parameters, gradients):
        axes = tuple(range(1, len(shape))) or None
        most = np.maximum(np.sqrt((p * p).sum(axis=axes, keepdims=True)), 1e-3) * case["clip-adaptive"]
        norm = np.sqrt((g * g).sum(axis=axes, keepdims=True))
        clipped.append(g if head else np.where(norm < most, g, g * most / np.maximum(norm, 1e-6)))
    return clipped


def newton_schulz(matrix):
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def update(kind, decay, hidden, step, p, g, m, v):
    """Returns the new parameters, m and v of one tensor. The momentum is 0.9, the betas are 0.9 and 0.99."""
    if kind == "sgd":
        m = 0.9 * m + g + decay * p
        return p - RATE * m, m, v
    if kind == "muon" and hidden:
        m = 0.9 * m + 0.1 * g
        flat = (0.9 * m + 0.1 * g).reshape(p.shape[0], -1)
        scale = max(1, flat.shape[0] / flat.shape[1]) ** 0.5
        rate = RATE * MATRIX_RATE
        return p - rate * decay * p - rate * scale * newton_schulz(flat).reshape(p.shape), m, v
    if kind == "adam":
        g = g + decay * p
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    direction = m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.99 ** (step + 1))) + 1e-6)
    if kind == "lamb":
        direction = direction + decay * p
        norms = np.linalg.norm(p), np.linalg.norm(direction)
        trust = norms[0] / norms[1] if decay and norms[0] > 0 and norms[1] > 0 else 1
        return p - RATE * trust * direction, m, v
    if kind in ("adamw", "muon"):
        p = p - RATE * decay * p
    return p - RATE * direction, m, v


def train(case):
    parameters, decay = start(), case.get("weight-decay", DECAY)
    moments = [(np.zeros_like(p), np.zeros_like(p)) for p in parameters]
    averages = [p.copy() for p in parameters]
    for step in range(STEPS):
        gradients = clip(case, parameters, gradient(step))
        for t, (_, _, hidden, _) in enumerate(TENSORS):
            parameters[t], *moments[t] = update(
                case["optimizer"], decay, hidden, step, parameters[t], gradients[t], *moments[t]
            )
            keep = min(case.get("ema", 0), 1 - (1 + step) ** (-2 / 3))
            averages[t] = keep * averages[t] + (1 - keep) * parameters[t]
    return averages if "ema" in case else parameters


def rate(case, step):
    kind = case["kind"]
    if step < WARM:
        return WARM_FROM + step * (TOP - WARM_FROM) / WARM
    if kind == "step":
        return TOP * case["gamma"] ** (step // case["decay"])
    at, cycles, factor, number = step - WARM, case.get("cycles", 1), case.get("cycle-mul", 1), 0
    cycle = (END - WARM) / sum(factor**i for i in range(cycles))
    if step >= END:
        return LEAST
    while at >= cycle and number + 1 < cycles:
        at, cycle, number = at - cycle, cycle * factor, number + 1
    done = (at / cycle) ** case.get("k", 1)
    top = TOP * case.get("cycle-decay", 1) ** number
    part = {
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "polynomial": (1 - done) ** case.get("power", 1),
        "tanh": (1 - math.tanh(-7 * (1 - done) + 3 * done)) / 2,
    }[kind]
    return LEAST + (top - LEAST) * part


def targets():
    classes = len(LOGITS[0])
    one = np.full((len(LABELS), classes), SMOOTHING / classes)
    two = one.copy()
    for j, (label, other) in enumerate(zip(LABELS, OTHERS)):
        one[j, label] += 1 - SMOOTHING
        two[j, other] += 1 - SMOOTHING
    return SHARE * one + (1 - SHARE) * two


def loss(case):
    """Returns the loss of each sample, and its derivatives by the logits."""
    x, y = np.array(LOGITS), targets()
    if "threshold" in case:
        y = (y > case["threshold"]).astype(float)
    weight = case.get("positive", 1.0)
    soft = np.log1p(np.exp(-np.abs(x)))  # log(1 + exp(-|x|))
    each = weight * y * (soft + np.maximum(-x, 0)) + (1 - y) * (soft + np.maximum(x, 0))
    right = 1 / (1 + np.exp(-x))
    delta = (1 - y) * right - weight * y * (1 - right)
    divisor = 1 if case.get("sum") else x.shape[1]
    return each.sum(axis=1) / divisor, (delta / divisor).ravel()


def rows_of(train, rates, loss):
    """Returns the values of all cases, schedules and losses by (case, tensor, index). train() returns None for a case that it leaves
    out."""
    values = {}
    for name, case in CASES.items():
        for (tensor, *_), array in zip(TENSORS, train(case) or ()):
            values[name, tensor] = array.ravel()
    for name, case in SCHEDULES.items():
        values[name, "rate"] = rates(case)
    for name, case in LOSSES.items():
        values[name, "loss"], values[name, "delta"] = loss(case)
    return {(*key, i): float(x) for key, of_key in values.items() for i, x in enumerate(of_key)}


def computed():
    return rows_of(train, lambda case: [rate(case, step) for step in range(RATE_STEPS)], loss)


# ---- PyTorch and timm ----


def torch_optimizers(torch, case, parameters):
    """Returns the optimizers of a case: Muon has a second one for the other tensors. None: there is no such optimizer."""
    kind, decay = case["optimizer"], case.get("weight-decay", DECAY)
    adam = {"lr": RATE, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": decay}
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=decay)]
    if kind == "adam":
        return [torch.optim.Adam(parameters, **adam)]
    if kind == "adamw":
        return [torch.optim.AdamW(parameters, **adam)]
    if kind == "lamb":
        from timm.optim import Lamb

        return [Lamb(parameters, max_grad_norm=None, **adam)]
    if not hasattr(torch.optim, "Muon"):  # since PyTorch 2.9
        return None
    hidden = [p for p, tensor in zip(parameters, TENSORS) if tensor[2]]
    others = [p for p, tensor in zip(parameters, TENSORS) if not tensor[2]]
    matrices = {"lr": RATE * MATRIX_RATE, "weight_decay": decay, "momentum": 0.9, "nesterov": True, "adjust_lr_fn": "original"}
    return [torch.optim.Muon(hidden, **matrices), torch.optim.AdamW(others, **adam)]


def torch_train(torch, case):
    from timm.utils.agc import adaptive_clip_grad
    from timm.utils.model_ema import ModelEmaV3

    muon_flattens = case["optimizer"] == "muon"  # PyTorch's Muon accepts matrices only
    module = torch.nn.Module()
    for i, ((_, shape, hidden, _), array) in enumerate(zip(TENSORS, start())):
        flat = array.reshape(shape[0], -1) if hidden and muon_flattens else array
        module.register_parameter(f"p{i}", torch.nn.Parameter(torch.tensor(flat, dtype=torch.float64)))
    parameters = list(module.parameters())
    optimizers = torch_optimizers(torch, case, parameters)
    if optimizers is None:
        print(f"{next(name for name, other in CASES.items() if other is case)}: this PyTorch has no {case['optimizer']}; not compared")
        return None
    average = ModelEmaV3(module, decay=case["ema"], use_warmup=True) if "ema" in case else None
    for step in range(STEPS):
        for p, g in zip(parameters, gradient(step)):
            p.grad = torch.tensor(g.reshape(tuple(p.shape)), dtype=torch.float64)
        if "clip-norm" in case:
            torch.nn.utils.clip_grad_norm_(parameters, case["clip-norm"])
        if "clip-value" in case:
            torch.nn.utils.clip_grad_value_(parameters, case["clip-value"])
        if "clip-adaptive" in case:
            adaptive_clip_grad(parameters[:-2], case["clip-adaptive"])
        for optimizer in optimizers:
            optimizer.step()
        if average:
            average.update(module, step=step + 1)
    return [p.detach().numpy() for p in (average.module if average else module).parameters()]


def torch_rates(torch, case):
    """The schedules of timm, in steps. With warmup_prefix, they count from the end of the warm-up. Ours do, but `step` does not."""
    from timm import scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=TOP)
    warm = {"warmup_t": WARM, "warmup_lr_init": WARM_FROM, "t_in_epochs": False}
    cycles, factor = case.get("cycles", 1), case.get("cycle-mul", 1)
    cycle = {
        "t_initial": (END - WARM) // sum(factor**i for i in range(cycles)),
        "cycle_mul": float(factor),
        "lr_min": LEAST,
        "cycle_limit": cycles,
        "cycle_decay": case.get("cycle-decay", 1.0),
        "warmup_prefix": True,
    }
    if case["kind"] == "cosine":
        schedule = scheduler.CosineLRScheduler(optimizer, k_decay=case.get("k", 1.0), **cycle, **warm)
    elif case["kind"] == "polynomial":
        schedule = scheduler.PolyLRScheduler(optimizer, power=case["power"], k_decay=case["k"], **cycle, **warm)
    elif case["kind"] == "tanh":
        schedule = scheduler.TanhLRScheduler(optimizer, lb=-7.0, ub=3.0, **cycle, **warm)
    else:
        schedule = scheduler.StepLRScheduler(
            optimizer, decay_t=case["decay"], decay_rate=case["gamma"], warmup_prefix=False, **warm
        )
    rates = []
    for step in range(RATE_STEPS):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def torch_loss(torch, case):
    from timm.loss import BinaryCrossEntropy

    weight = torch.tensor(case["positive"], dtype=torch.float64) if "positive" in case else None
    criterion = BinaryCrossEntropy(
        smoothing=SMOOTHING, target_threshold=case.get("threshold"), sum_classes=case.get("sum", False), pos_weight=weight
    )
    losses, deltas = [], []
    for logits, target in zip(LOGITS, targets()):
        x = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
        value = criterion(x, torch.tensor(target[None], dtype=torch.float64))
        value.backward()
        losses.append(value.item())
        deltas.extend(x.grad.ravel().tolist())
    return losses, deltas


def torch_computed():
    try:
        import timm
        import torch
    except ImportError as error:
        print(f"optimizers.py: {error}; install torch and timm, or leave out --torch", file=sys.stderr)
        sys.exit(4)
    print(f"torch {torch.__version__}, timm {timm.__version__}")
    return rows_of(*(functools.partial(function, torch) for function in (torch_train, torch_rates, torch_loss)))


def read():
    with FILE.open(newline="") as file:
        return {(row["case"], row["tensor"], int(row["index"])): float(row["value"]) for row in csv.DictReader(file)}


def bound(key, torch):
    """PyTorch's Muon rounds matrices to bf16, of 8 bits: its steps differ by up to 2^-8 times the amplification of the
    iteration, of which the bound allows 16. Other values have 12 digits in the file."""
    hidden = {name for name, _, matrix, _ in TENSORS if matrix}
    if torch and CASES.get(key[0], {}).get("optimizer") == "muon" and key[1] in hidden:
        return STEPS * RATE * MATRIX_RATE * 16 / 256
    return 1e-6 if torch else 1e-10


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.torch and arguments.write:
        parser.error("--write writes the values of the formulas; drop --torch")
    rows = torch_computed() if arguments.torch else computed()
    if arguments.write:
        with FILE.open("w", newline="") as file:
            file.write("case,tensor,index,value\n")
            file.writelines(f"{case},{tensor},{index},{value:.13g}\n" for (case, tensor, index), value in rows.items())
        return 0
    kept = read()
    wrong = [key for key in rows if key not in kept or not abs(rows[key] - kept[key]) <= bound(key, arguments.torch)]
    wrong += [key for key in kept if key not in rows and not arguments.torch]
    for key in wrong[:10]:
        print(f"{' '.join(map(str, key))}: {rows.get(key)}, but the file has {kept.get(key)}")
    print(f"{len(rows)} values compared, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
