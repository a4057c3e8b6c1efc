"""Tests full batches on a GPU: in flight, on changing streams, and alternating with replays of a graph.

    make lib && python3 -m pytest -s python/tests/test_gpu_full.py
"""

from __future__ import annotations

from typing import Any, Iterator

import pytest
from test_gpu import busy, expected, gpu, with_torch

import fdsl

# The C generator launches a full batch on a stream of default priority as one CUDA graph. For smaller batches, streams
# of other priorities, and streams that are being captured, it launches single kernels.

FULL_BATCHES = 5
FORMATS: dict[str, dict[str, Any]] = {  # lane: scratch memory and a stream for one slice of a batch (cuda/synth/fused.cu)
    "one lane": {"batch": 16},
    "two lanes": {
        "batch": 96, "out_res": 48, "dtype": "float16", "channels": 3, "layout": "nhwc", "mean": 0.485, "std": 0.25,
    },
    "reduced": {"batch": 64, "res": 512, "out_res": 3, "dtype": "float32"},
}  # fmt: skip


class Full:
    """A generator, and FULL_BATCHES batches of its images and labels, generated in smaller batches."""

    def __init__(self, torch: Any, g: fdsl.Generator) -> None:
        self.torch, self.g, self.total, step = torch, g, FULL_BATCHES * g.batch, g.batch * 2 // 5
        parts = []
        for first in range(0, self.total, step):
            images, labels = self.output(min(step, self.total - first))
            g.fill(images, labels, first)
            torch.cuda.synchronize()
            parts.append((images, labels))
        self.images, self.labels = (torch.cat(tensors) for tensors in zip(*parts))
        self.numbers = torch.arange(self.total, device="cuda:0")

    def output(self, count: int) -> tuple[Any, Any]:
        """Returns new tensors, filled with values that no call writes to all elements."""
        images = self.torch.full((count, *self.g.shape), 77, dtype=getattr(self.torch, self.g.dtype), device="cuda:0")
        return images, self.torch.full((count,), -1, dtype=self.torch.int64, device="cuda:0")

    def outputs(self, number: int = FULL_BATCHES) -> list[tuple[Any, Any]]:
        """Returns new tensors for full batches. Calls on any stream may use them immediately."""
        tensors = [self.output(self.g.batch) for _ in range(number)]
        self.torch.cuda.synchronize()
        return tensors

    def check(self, images: Any, labels: Any, numbers: Any) -> None:
        assert self.torch.equal(images, self.images[numbers])
        assert labels is None or self.torch.equal(labels, self.labels[numbers])


@pytest.fixture(scope="module", params=list(FORMATS))
def full(request: Any) -> Iterator[Full]:
    torch = with_torch()
    changes = FORMATS[request.param]
    images, labels = expected(0, changes["batch"], **changes)
    with gpu(**changes) as g:
        full = Full(torch, g)
        assert (full.images[: g.batch].cpu().numpy() == images).all()
        assert (full.labels[: g.batch].cpu().numpy() == labels).all()
        yield full
        torch.cuda.synchronize()


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("selection", ["first", "numbers", "next"])
@pytest.mark.parametrize("priority", [None, 0, -1])  # None: the default stream
def test_full_batches_in_flight(full: Full, priority: Any, selection: str, labelled: bool) -> None:
    torch, g, outputs = full.torch, full.g, full.outputs()
    order = full.numbers.flip(0) if selection == "numbers" else full.numbers
    batches = order.split(g.batch)
    counter = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    stream = torch.cuda.default_stream() if priority is None else torch.cuda.Stream(priority=priority)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(torch)
        for call, (images, labels) in enumerate(outputs):
            words = {
                "first": {"first": call * g.batch}, "numbers": {"numbers": batches[call]}, "next": {"next": counter}
            }[selection]  # fmt: skip
            g.fill(images, labels if labelled else None, **words)
        assert not stream.query(), "all calls must be in flight"
    torch.cuda.synchronize()
    for numbers, (images, labels) in zip(batches, outputs):
        full.check(images, labels if labelled else None, numbers)
        assert labelled or (labels == -1).all()
    assert counter.item() == (full.total if selection == "next" else 0)


def test_full_and_smaller_batches_on_changing_streams(full: Full) -> None:
    torch, g = full.torch, full.g
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.Stream()]
    calls = []
    for call, (images, labels) in enumerate(full.outputs(24)):
        count, first = g.batch - call // 2 % 3, call % FULL_BATCHES * g.batch  # full, full, 1 less, 1 less, 2 less, ...
        g.fill(images[:count], labels[:count], first, stream=streams[call % 4])
        calls.append((images, labels, first, count))
    torch.cuda.synchronize()
    for images, labels, first, count in calls:
        full.check(images[:count], labels[:count], full.numbers[first : first + count])
        assert (images[count:] == 77).all() and (labels[count:] == -1).all()


def test_full_batches_of_several_generators_at_once(full: Full) -> None:
    torch, g = full.torch, full.g
    with fdsl.Generator(**g.config) as second, fdsl.Generator(**g.config) as third:
        streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
        outputs = [full.outputs() for _ in streams]
        for call in range(FULL_BATCHES):
            for generator, stream, own in zip((g, second, third), streams, outputs):
                with torch.cuda.stream(stream):
                    generator.fill(*own[call], call * g.batch)
        torch.cuda.synchronize()
        for own in outputs:
            for numbers, (images, labels) in zip(full.numbers.split(g.batch), own):
                full.check(images, labels, numbers)


def test_full_batches_alternate_with_replays(full: Full) -> None:
    torch, g = full.torch, full.g
    batches, stream = full.numbers.split(g.batch), torch.cuda.Stream()
    ((captured, captured_labels),) = full.outputs(1)
    replayed, outside = full.outputs(2 * FULL_BATCHES), full.outputs(2 * FULL_BATCHES)
    counter = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    torch.cuda.synchronize()
    for begin in (0, FULL_BATCHES):  # the second capture follows calls that were not captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            g.fill(captured, captured_labels, next=counter)
        with torch.cuda.stream(stream):
            counter.zero_()
            for call in range(begin, begin + FULL_BATCHES):
                graph.replay()
                replayed[call][0].copy_(captured)
                replayed[call][1].copy_(captured_labels)
                g.fill(*outside[call], (call * 3 + 1) % FULL_BATCHES * g.batch)
        torch.cuda.synchronize()
    for call in range(2 * FULL_BATCHES):
        full.check(*replayed[call], batches[call % FULL_BATCHES])
        full.check(*outside[call], batches[(call * 3 + 1) % FULL_BATCHES])
