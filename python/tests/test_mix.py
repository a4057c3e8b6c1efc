"""Tests mixtures: their shares, labels and classes, states on other numbers of ranks, and wrong arguments."""

from __future__ import annotations

import pathlib
import pickle
import subprocess
from collections import Counter
from typing import Any

import pytest
from conftest import PROGRAM, content

import fdsl

SIDE, BATCH = 16, 12


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("mix")
    for name, words in {"a": "60 --store imagefolder --classes 6", "b": "14 --store shards --classes 4 --seed 3"}.items():
        command = f"{PROGRAM} --prepare {folder / name} --from synth --res 32 --samples {words}"
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    images = fdsl.Images(classes=5, res=SIDE, channels=3, count=1)
    return [fdsl.Folder(folder / "a"), fdsl.Shards(folder / "b"), images]


def mixed(sources: list[Any], **changes: Any) -> Any:
    words = {"labels": "offset", "num_classes": [None, 4, None], **changes}
    return fdsl.mix(sources, words.pop("weights", [0.5, 0.2, 0.3]), **words)


def batches(data: Any, world: int, state: Any = None, count: int = 20) -> tuple[list[tuple[bytes, bytes]], list[Any]]:
    """Returns the images and labels of the first batches of all ranks, joined, and the states after them."""
    joined = [(b"", b"")] * count
    states: list[Any] = []
    for rank in range(world):
        with fdsl.Loader(
            data, BATCH // world, rank=rank, world_size=world, seed=3, transforms=fdsl.Resize(SIDE), num_threads=2
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            taken = 0
            while taken < count:
                for images, labels in loader:
                    joined[taken] = (joined[taken][0] + content(images), joined[taken][1] + content(labels))
                    taken += 1
                    if rank == 0:
                        states.append(loader.state_dict())
                    if taken == count:
                        break
    return joined, states


def test_batches_stay_valid_in_a_list(sources: list[Any]) -> None:
    with fdsl.Loader(mixed(sources), BATCH, seed=3, transforms=fdsl.Resize(SIDE)) as loader:
        kept = list(loader)
        assert len(kept) == len(loader) == 10
    joined, _ = batches(mixed(sources), 1, count=10)
    assert [(content(images), content(labels)) for images, labels in kept] == joined


def labels_of(joined: list[tuple[bytes, bytes]]) -> list[int]:
    whole = b"".join(labels for _, labels in joined)
    return [int.from_bytes(whole[i : i + 8], "little", signed=True) for i in range(0, len(whole), 8)]


def test_an_epoch_has_each_sample_of_the_named_source_once(sources: list[Any]) -> None:
    data = mixed(sources, changes={4: [0.5, 0.3, 0.2]})
    assert len(data) == 120
    counts = Counter(labels_of(batches(data, 1, count=10)[0]))
    assert [counts[label] for label in range(6)] == [10] * 6
    assert sum(counts[label] for label in range(6, 10)) + sum(counts[label] for label in range(10, 15)) == 60
    data = mixed(sources, epoch=sources[1], labels="joined", weights=[1, 1, 2])
    assert len(data) == 4 * 14 and data.classes == [str(i) for i in data.sources[0].classes]


def test_states_continue_on_any_number_of_ranks(sources: list[Any]) -> None:
    data = mixed(sources, changes={4: [0.5, 0.3, 0.2]})
    whole, states = batches(data, 1)
    for world in 1, 2, 3, 4:
        for begin in 0, 3, 9, 10:
            assert batches(data, world, states[begin], 5)[0] == whole[begin + 1 : begin + 6]
    with fdsl.Loader(data, BATCH, seed=3, transforms=fdsl.Resize(SIDE)) as loader:
        loader.load_state_dict(states[4])
        with pickle.loads(pickle.dumps(loader)) as again:
            assert again.state_dict() == states[4]
    other = fdsl.Loader(mixed(sources), BATCH, seed=3, transforms=fdsl.Resize(SIDE))
    with pytest.raises(ValueError, match="data set"):
        other.load_state_dict(states[4])
    other.close()


def test_images_set_the_type(sources: list[Any]) -> None:
    images = fdsl.Images(classes=5, res=SIDE, channels=3, dtype="float32", count=9)
    with fdsl.Loader(fdsl.mix([sources[0], images], [1, 1]), 8, transforms=fdsl.Resize(SIDE)) as loader:
        assert loader.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"weights": [1, 1]}, ValueError, "weights: there are 2 weights for 3 sources"),
        ({"weights": "abc"}, TypeError, "weights: it must be a list"),
        ({"weights": [1, True, 1]}, TypeError, "weights: a weight must be a number"),
        ({"weights": [1, -1, 1]}, ValueError, "weights: -1 is not a weight"),
        ({"weights": [1, 1 / 3, 1]}, ValueError, "at most four decimals"),
        ({"weights": [0, 1, 1]}, ValueError, "weights: the weight of '0' is 0"),
        ({"labels": "other"}, ValueError, "labels: "),
        ({"num_classes": None}, ValueError, "offset"),
        ({"num_classes": [None]}, ValueError, "num_classes: there are 1 numbers for 3 sources"),
        ({"num_classes": [3, 4, None]}, ValueError, "^num_classes: source 0 has 6 classes, not 3"),
        ({"epoch": 3}, ValueError, "epoch: "),
        ({"epoch": 2}, ValueError, "^epoch: '2' has no end"),
        ({"epoch": "a"}, TypeError, "epoch: "),
        ({"changes": [1, 1, 1]}, TypeError, "changes: it must be a dict"),
        ({"changes": {0: [1, 1, 1]}}, ValueError, "changes: a step"),
        ({"changes": {5: [1, 1]}}, ValueError, "changes: step 5: there are 2 weights"),
        ({"changes": {5: [1, 1, 1]}}, ValueError, "^changes: the weights from step 5 on give '0' another share"),
        ({"changes": {5: [0.5, 0.2, 0.3]}}, ValueError, "^changes: .* the same shares as before"),
    ],
)
def test_wrong_arguments_are_refused(sources: list[Any], changes: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        mixed(sources, **changes)


def test_wrong_sources_are_refused(sources: list[Any], tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="sources: str is not a data set"):
        fdsl.mix([sources[0], "a"], [1, 1])
    with pytest.raises(TypeError, match="sources: it must be a list"):
        fdsl.mix(sources[0], [1])
    with pytest.raises(ValueError, match="sources: source 1 has other sources itself"):
        fdsl.mix([sources[0], mixed(sources)], [1, 1])
    with pytest.raises(ValueError, match="epoch: it is not one of the sources"):
        mixed(sources, epoch=fdsl.Images(classes=5, res=SIDE, count=1))
    with pytest.raises(ValueError, match="mixup: it has no effect on mixtures"):
        fdsl.Loader(mixed(sources), 8, transforms=[fdsl.Resize(SIDE), fdsl.MixUp(0.5)])
    with pytest.raises(ValueError, match="the images of source 2 of the mixture are"):
        fdsl.Loader(mixed(sources), 8, transforms=fdsl.Resize(SIDE + 1))
