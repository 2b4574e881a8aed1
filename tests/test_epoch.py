"""One local epoch: order, augmentation and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from crad_p2p.data.epoch import LocalEpoch, draw_epoch, plain_batches

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def shard(n: int, size: tuple[int, int] = (8, 16), channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Distinct images without black pixels, so that padding shows; the label is the index."""
    rng = np.random.default_rng(n)
    return rng.integers(1, 256, (n, channels, *size), dtype=np.uint8), np.arange(n)


def epoch(n: int = 50, *, augmentation: str = "none", batch_size: int = 8, seed: int = 3, **options: Any) -> LocalEpoch:
    images, labels = shard(n, **options)
    channels = images.shape[1]
    return draw_epoch(
        images,
        labels,
        batch_size=batch_size,
        augmentation=augmentation,
        mean=MEAN[:channels],
        std=STD[:channels],
        generator=np.random.default_rng(seed),
        device=CPU,
    )


def test_every_sample_comes_once_with_its_label_in_a_new_order() -> None:
    images, _ = shard(50)
    drawn = epoch()
    assert drawn.images.dtype == torch.uint8
    assert drawn.labels.dtype == torch.int64
    order = drawn.labels.numpy()
    assert sorted(order) == list(range(50))
    assert list(order) != list(range(50))
    np.testing.assert_array_equal(drawn.images.numpy(), images[order])
    assert not np.array_equal(epoch(seed=4).labels.numpy(), order)


@pytest.mark.parametrize("augmentation", ["none", "crop", "crop_hflip", "hvflip"])
def test_the_same_generator_gives_the_same_epoch_whatever_the_batch_size(augmentation: str) -> None:
    one, two = epoch(augmentation=augmentation), epoch(augmentation=augmentation, batch_size=32)
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.labels, two.labels)


@pytest.mark.parametrize("augmentation", ["none", "crop", "crop_hflip", "hvflip"])
def test_the_shard_itself_is_left_alone(augmentation: str) -> None:
    images, labels = shard(50)
    before = images.copy()
    images.setflags(write=False)
    draw_epoch(
        images,
        labels,
        batch_size=8,
        augmentation=augmentation,
        mean=MEAN,
        std=STD,
        generator=np.random.default_rng(1),
        device=CPU,
    )
    np.testing.assert_array_equal(images, before)


def crops(image: np.ndarray, vertical: int, horizontal: int) -> dict[bytes, tuple[int, int]]:
    """All windows of the zero-padded image, by their bytes."""
    _, height, width = image.shape
    padded = np.pad(image, ((0, 0), (vertical, vertical), (horizontal, horizontal)))
    return {
        padded[:, y : y + height, x : x + width].tobytes(): (y, x)
        for y in range(2 * vertical + 1)
        for x in range(2 * horizontal + 1)
    }


@pytest.mark.parametrize("flip", [False, True])
def test_crop_takes_any_window_of_the_padded_image_with_equal_chance(flip: bool) -> None:
    images, _ = shard(900, (8, 16))
    drawn = epoch(900, augmentation="crop_hflip" if flip else "crop")
    offsets, flipped = [], 0
    for image, label in zip(drawn.images.numpy(), drawn.labels.tolist(), strict=True):
        windows = crops(images[label], 1, 2)  # an eighth of 8 and of 16
        straight = windows.get(image.tobytes())
        mirrored = windows.get(image[:, :, ::-1].tobytes())
        assert (straight is None) != (mirrored is None)
        flipped += mirrored is not None
        offsets.append(mirrored or straight)
    frequency = np.unique(np.array(offsets), axis=0, return_counts=True)[1]
    assert len(frequency) == 3 * 5
    assert frequency.min() > 900 / 15 * 0.6
    assert 400 < flipped < 500 if flip else flipped == 0


def test_hvflip_mirrors_both_axes_independently() -> None:
    images, _ = shard(800)
    drawn = epoch(800, augmentation="hvflip")
    seen = np.zeros((2, 2), int)
    for image, label in zip(drawn.images.numpy(), drawn.labels.tolist(), strict=True):
        original = images[label]
        matches = [
            (v, h) for v in (0, 1) for h in (0, 1) if np.array_equal(image, original[:, :: 1 - 2 * v, :: 1 - 2 * h])
        ]
        assert len(matches) == 1
        seen[matches[0]] += 1
    assert seen.min() > 150


def test_augmentation_of_tiny_grey_images() -> None:
    drawn = epoch(20, augmentation="crop_hflip", size=(4, 4), channels=1)
    assert drawn.images.shape == (20, 1, 4, 4)
    assert drawn.pixels(drawn.batches[0]).shape == (8, 1, 4, 4)


def test_an_unknown_augmentation_is_an_error() -> None:
    with pytest.raises(ValueError, match="auto"):
        epoch(augmentation="auto")


def sizes(batches: tuple[slice, ...]) -> list[int]:
    return [batch.stop - batch.start for batch in batches]


@pytest.mark.parametrize(
    ("n", "training", "plain"),
    [
        (0, [], []),
        (1, [], [1]),
        (2, [2], [2]),
        (8, [8], [8]),
        (9, [8], [8, 1]),
        (10, [8, 2], [8, 2]),
        (17, [8, 8], [8, 8, 1]),
    ],
)
def test_only_a_last_batch_of_one_is_dropped_and_only_in_training(
    n: int, training: list[int], plain: list[int]
) -> None:
    for augmentation in ("none", "crop_hflip", "hvflip"):
        drawn = epoch(n, augmentation=augmentation)
        assert sizes(drawn.batches) == training
        assert drawn.images.shape == (n, 3, 8, 16)
        assert len(drawn.labels) == n
    images, labels = shard(n)
    whole = plain_batches(images, labels, batch_size=8, mean=MEAN, std=STD, device=CPU)
    assert sizes(whole.batches) == plain
    for batches in (drawn.batches, whole.batches):
        starts = [batch.start for batch in batches]
        assert starts == [8 * i for i in range(len(batches))]


def test_plain_batches_keep_file_order() -> None:
    images, labels = shard(20)
    whole = plain_batches(images, labels, batch_size=8, mean=MEAN, std=STD, device=CPU)
    np.testing.assert_array_equal(whole.images.numpy(), images)
    np.testing.assert_array_equal(whole.labels.numpy(), labels)


def test_pixels_are_normalised_per_channel_and_leave_the_images_alone() -> None:
    images, labels = shard(20)
    whole = plain_batches(images, labels, batch_size=8, mean=MEAN, std=STD, device=CPU)
    for _ in range(2):
        pixels = whole.pixels(whole.batches[1])
        assert pixels.dtype == torch.float32
        expected = (images[8:16] / 255 - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
        np.testing.assert_allclose(pixels.numpy(), expected, rtol=0, atol=1e-5)
    assert whole.images.dtype == torch.uint8
