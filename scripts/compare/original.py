#!/usr/bin/env python3
"""Compares training as the published scripts do it with optimised training, per model, on one GPU.

  scripts/compare/original.py --models vit-tiny --out results/original.csv
  scripts/compare/original.py --models vit-tiny,vit-base,resnet50

Three ways, with the same network, batch and kind of images, which stay on the GPU:

  original    PyTorch as it comes: eager, fp32
  compiled    PyTorch optimised: torch.compile, autocast to bf16, fused optimizer; resnet50 in channels-last
  fdsl-bench  train-vit or train-resnet, and infer-vit or infer-resnet

The columns: time of an epoch of --images images, from the median rate; use of the GPU while training (NVML: the share of time in which a
kernel ran); time of one inference with a batch of 1, from call to result; largest batch that trains in the GPU's memory. fdsl-bench
finds the largest batch by trying (--batch max). For PyTorch it is computed from the memory of one step: (memory of the GPU - memory
besides the activations) / activations per image. For `original`, it is confirmed by a step, and lowered by 3 % until one succeeds;
for `compiled`, whose step would be compiled again, it is a prediction (~). The networks are those of timm and torchvision if these
are installed, otherwise networks of the same layers.

Exit status: 0 done, 1 a failure, 2 usage, 4 no PyTorch or no GPU.
"""

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time

sys.pycache_prefix = f"{sys.path[0]}/../../build/pycache"
import shared  # noqa: E402  (in this folder)
try:
    import torch
    from torch.nn import functional
    import resnet_torch
    import vit_timm
    import gpu_use
except ImportError as error:
    shared.end_without("compare/original.py", __doc__, error)

fail = shared.failing("compare/original.py")
COLUMNS = ("time_utc", "revision", "model", "way", "device", "torch", "batch", "images", "images_per_s", "epoch_s", "gpu_use_percent", "infer_s", "largest_batch",
           "largest_batch_is")
RES, CLASSES = 224, 1000
EPOCHS, WARMUPS, BLOCKS = 6, 5, 5
USE_S = 4  # the use of the GPU is the mean over at least this time, because NVML averages it over up to a second
USE_STEPS = 100  # steps per epoch of fdsl-bench, for the same reason


# ---- PyTorch ----

class Torch:
    """Training and inference of one model in one way."""

    def __init__(self, model, way, batch, device):
        self.device, self.batch, self.half = device, batch, way == "compiled"
        residual = model.startswith("resnet")
        self.layout = torch.channels_last if residual and self.half else torch.contiguous_format
        if residual:
            net = resnet_torch.network(model, 3, CLASSES)
        else:
            shape = {**dict(zip(vit_timm.SHAPE, vit_timm.MODELS[model][0])), "img_size": RES, "in_chans": 3}
            net = (vit_timm.VisionTransformer or vit_timm.Vit)(**shape, num_classes=CLASSES)
        self.net = net.to(device).to(memory_format=self.layout)
        fused = {"fused": True} if self.half and device.type == "cuda" else {}
        self.optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, **fused) if residual else \
            torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.05, **fused)
        self.forward = torch.compile(self.loss) if self.half else self.loss
        self.logits = torch.compile(self.predict) if self.half else self.predict

    def images(self, count):
        return torch.randn(count, 3, RES, RES, device=self.device).to(memory_format=self.layout)

    def predict(self, images):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return self.net(images)

    def loss(self, images, labels):
        return functional.cross_entropy(self.predict(images).float(), labels)

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def step(self, images, labels):
        self.optimizer.zero_grad(set_to_none=True)
        self.forward(images, labels).backward()
        self.optimizer.step()

    def train(self, steps):
        """Returns the images per second, the use of the GPU in percent, and the memory of a step: all of it, and that besides the
        activations."""
        self.net.train()
        images, labels = self.images(self.batch), torch.randint(CLASSES, (self.batch,), device=self.device)
        for _ in range(WARMUPS):
            self.step(images, labels)
        self.wait()
        rates, memory = [], (0, 0)
        with gpu_use.GpuUse(gpu_use.smi_id(self.device)) as use:
            while len(rates) < BLOCKS or self.batch * steps * sum(1 / rate for rate in rates) < USE_S:
                begin = time.perf_counter()
                for _ in range(steps):
                    self.step(images, labels)
                self.wait()
                rates.append(self.batch * steps / (time.perf_counter() - begin))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            rest = torch.cuda.memory_allocated(self.device) - images.nbytes
            self.step(images, labels)
            memory = torch.cuda.max_memory_allocated(self.device), rest
        return statistics.median(rates), use.percent, memory

    def infer(self, runs=50):
        """Returns the median seconds of an inference with a batch of 1."""
        self.net.eval()
        times, images = [], self.images(1)
        with torch.inference_mode():
            for number in range(WARMUPS + runs):
                begin = time.perf_counter()
                self.logits(images).argmax().item()
                if number >= WARMUPS:
                    times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def fits(self, batch):
        """Returns whether a step of this batch fits into the memory."""
        self.net.train()
        try:
            self.step(self.images(batch), torch.randint(CLASSES, (batch,), device=self.device))
            self.wait()
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()

    def largest(self, memory):
        """Returns the largest batch, and how it is known."""
        if self.device.type != "cuda":
            return "", ""
        peak, rest = memory
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        batch = int((free + torch.cuda.memory_reserved(self.device) - rest) / ((peak - rest) / self.batch))
        if self.half:
            return batch, "predicted"
        while batch > 1 and not self.fits(batch):
            batch = int(0.97 * batch)
        return batch, "tried"


def torch_row(model, way, options, device):
    run = Torch(model, way, options.batch, device)
    rate, use, memory = run.train(options.steps)
    infer_s = run.infer()
    batch, known = run.largest(memory)
    return {"way": way, "revision": f"torch {torch.__version__}", "images_per_s": rate, "gpu_use_percent": use, "infer_s": infer_s, "largest_batch": batch, "largest_batch_is": known}


# ---- fdsl-bench ----

def run_ours(options, arguments):
    return shared.run_bench(fail, [options.bench, "--format", "csv", *arguments], named=True)


def our_row(model, options, device):
    kind = "omp" if device.type == "cpu" else "resnet" if model.startswith("resnet") else "vit"
    optimizer = ["--optimizer", "sgd", "--lr", "0.01"] if model.startswith("resnet") else \
        ["--optimizer", "adamw", "--lr", "0.001", "--weight-decay", "0.05"]
    data = ["--data", "synth", "--res", str(RES), "--out-res", str(RES), "--channels", "3", "--classes", str(CLASSES)]
    training = ["--variant", f"train-{kind}", "--model", model, *data, "--test-size", "1", "--feed", "constant", *optimizer]
    steps = options.steps if device.type == "cpu" else max(options.steps, USE_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        monitor = ["--monitor", f"{folder}/monitor.csv:100"] if device.type == "cuda" else []
        rows = run_ours(options, [*training, "--batch", str(options.batch), "--train-size", str(options.batch * steps), "--epochs",
                                  str(EPOCHS), "--export", f"{folder}/net.safetensors", *monitor])
        use = gpu_use.of_monitor(f"{folder}/monitor.csv") if monitor else math.nan
        infer = run_ours(options, ["--variant", f"infer-{kind}", "--checkpoint", f"{folder}/net.safetensors", *data, "--test-size", "64",
                                   "--batch", "1", "--loops", "50"])
    largest = run_ours(options, [*training, "--batch", "max", "--train-size", str(options.largest), "--epochs", "1"])[0]["batch"] \
        if device.type == "cuda" else ""
    known = "" if not largest else "limited" if int(largest) == options.largest else "tried"
    return {"way": "fdsl-bench", "revision": rows[0]["revision"], "images_per_s": statistics.median(float(row["items_per_s"]) for row in rows[1:]), "gpu_use_percent": use,
            "infer_s": float(infer[0]["time_median_s"]), "largest_batch": largest, "largest_batch_is": known}


# ---- Table ----

def print_table(rows):
    print(f"{'model':10} {'way':10} {'batch':>6} {'epoch s':>9} {'images/s':>9} {'ratio':>6} {'GPU %':>6} {'infer ms':>9} {'largest batch':>13}")
    for row in rows:
        original = next(other for other in rows if other["model"] == row["model"])
        about = {"predicted": "~", "limited": ">="}.get(row["largest_batch_is"], "")
        print(f"{row['model']:10} {row['way']:10} {row['batch']:>6} {row['epoch_s']:9.2f} {row['images_per_s']:9.1f} "
              f"{row['images_per_s'] / original['images_per_s']:6.2f} {gpu_use.shown(row['gpu_use_percent']):>6} {1e3 * row['infer_s']:9.3f} "
              f"{about + str(row['largest_batch'] or '-'):>13}")
    print(f"epoch: {rows[0]['images']} images of {RES} x {RES} pixels; infer: batch 1; ~: predicted from the memory of a step; >=: limited by --largest; {rows[0]['device']}, "
          f"PyTorch {rows[0]['torch']}")


def texts(row):
    return {name: "" if isinstance(value, float) and math.isnan(value) else f"{value:.9g}" if isinstance(value, float) else value
            for name, value in row.items()}


def number(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*(name for name in vit_timm.MODELS if name != "vit-micro"), "resnet50"]
    parser.add_argument("--models", default="vit-tiny", help=f"separated by commas, from {', '.join(known)} (default vit-tiny)")
    parser.add_argument("--batch", type=number, default=256, help="images per step (default 256)")
    parser.add_argument("--steps", type=number, default=20, help="steps per timed block, of which there are 5 (default 20)")
    parser.add_argument("--images", type=number, default=1_000_000, help="images per epoch (default 1000000)")
    parser.add_argument("--largest", type=number, default=16384, help="largest batch that fdsl-bench tries (default 16384)")
    parser.add_argument("--ways", default="original,compiled,fdsl-bench", help="separated by commas; original must be the first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: train-omp, for a trial of this script (default cuda)")
    parser.add_argument("--bench", default=shared.PROGRAM, help="path of fdsl-bench")
    parser.add_argument("--out", help="CSV file to append the rows to")
    options = parser.parse_args()
    models, ways = options.models.split(","), options.ways.split(",")
    if not set(models) <= set(known):
        fail(f"--models {options.models}: not from {', '.join(known)}", 2)
    if ways[0] != "original" or not set(ways) <= {"original", "compiled", "fdsl-bench"}:
        fail(f"--ways {options.ways}: give original, then compiled, fdsl-bench or both", 2)
    if options.device == "cuda" and not torch.cuda.is_available():
        fail("PyTorch sees no GPU; --device cpu is a trial of this script", 4)
    device, rows = torch.device(options.device), []
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    for model in models:
        for way in ways:
            print(f"compare/original.py: {model}, {way} ...", file=sys.stderr)
            row = our_row(model, options, device) if way == "fdsl-bench" else torch_row(model, way, options, device)
            gc.collect()
            torch.cuda.empty_cache()
            row.update({"time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "model": model, "device": name, "torch": torch.__version__, "batch": options.batch, "images": options.images,
                        "epoch_s": options.images / row["images_per_s"]})
            rows.append({column: row[column] for column in COLUMNS})
            if options.out:
                shared.append_rows(options.out, [texts(rows[-1])], COLUMNS)
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
