"""The use of a GPU over time: the share of time in which a kernel ran, by NVML, of both programs of a comparison.

fdsl-bench samples itself (--monitor). For PyTorch, nvidia-smi samples the GPU while a block of code runs. Both read the same counter
of NVML, whose averaging period is 1/6 s to 1 s, so a block should take at least two seconds."""

import csv
import math
import shutil
import statistics
import subprocess
import tempfile


def of_monitor(path):
    """Returns the mean use in percent during the timed runs in a file of fdsl-bench --monitor; NaN if there are no samples."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        return math.nan
    timed = [float(row["gpu_utilisation_percent"]) for row in rows if row["phase"] == "timed" and row["gpu_utilisation_percent"]]
    return statistics.mean(timed) if timed else math.nan


def shown(percent):
    return "-" if math.isnan(percent) else f"{percent:.0f}"


class GpuUse:
    """`with GpuUse(number) as use: ...; use.percent` is the mean use of a GPU while the block ran; NaN without a GPU."""

    def __init__(self, gpu):
        self.gpu, self.percent, self.process, self.samples = gpu, math.nan, None, None

    def __enter__(self):
        if self.gpu is not None and shutil.which("nvidia-smi"):
            self.samples = tempfile.TemporaryFile("w+", encoding="utf-8")
            self.process = subprocess.Popen(["nvidia-smi", f"--id={self.gpu}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits",
                                             "--loop-ms=100"], stdout=self.samples, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *failure):
        if not self.process:
            return
        self.process.terminate()
        self.process.wait()
        self.samples.seek(0)
        values = [float(line) for line in self.samples if line.strip().isdecimal()]
        # the first samples are from before the block
        self.percent = statistics.mean(values[len(values) // 4:]) if len(values) > 4 else math.nan
        self.samples.close()


def smi_id(device):
    """Returns how nvidia-smi names a CUDA device of PyTorch: its PCI bus id, as CUDA_VISIBLE_DEVICES may renumber devices. None for a
    CPU."""
    import torch
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    if not hasattr(about, "pci_bus_id"):  # PyTorch before 2.6
        return str(device.index or 0)
    return f"{about.pci_domain_id:08x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
