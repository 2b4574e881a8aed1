"""Teachers, one at a time: each runs over the whole local epoch as it arrives, and only its posteriors stay.

Algorithm 1 of the paper holds all N-1 teachers and runs each on every training batch. The order of the loops does not
matter to the targets, since teachers are frozen: here the outer loop is over teachers, so memory is flat in N and the
pass can start before the last snapshot has arrived.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from crad_p2p.data.epoch import LocalEpoch
from crad_p2p.frozen import Forward
from crad_p2p.snapshot import SnapshotError

#: Called with (steps done, steps in all).
Progress = Callable[[int, int], None]

#: Pixels of one forward pass without gradients: 32 images of 32x32 on a CPU, where more leaves the cache, and a
#: thousand on anything else, which less does not fill.
_CPU_PIXELS, _OTHER_PIXELS = 32 * 32 * 32, 1024 * 32 * 32


class PosteriorStore:
    """The teachers' posteriors over one local epoch, float32 [samples, classes] in one file a teacher.

    They live in files, read back batch by batch through a memory map, so that memory grows neither with the number of
    teachers nor with the shard.
    """

    def __init__(self, folder: Path, epoch: LocalEpoch, classes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._epoch = epoch
        self._classes = classes
        self._maps: dict[int, np.ndarray] = {}

    @torch.no_grad()
    def run(
        self,
        peer: int,
        teacher: Forward,
        temperature: float,
        *,
        batch_size: int | None = None,
        progress: Progress = lambda *_: None,
    ) -> None:
        """Run one teacher over the epoch and keep softmax(logits / temperature).

        Args:
            teacher: a frozen model in eval mode.
            batch_size: samples of one forward pass, by default :func:`inference_batch`. Frozen batch norm makes the
                samples of a batch independent, so it changes the result by rounding only.

        Raises:
            SnapshotError: the teacher's word on some sample is not finite; learning from it would spoil the student.
        """
        count = len(self._epoch.labels)
        step = batch_size or inference_batch(self._epoch.images, self._epoch.images.device)
        path = self._folder / f"{peer}.f32"
        self._maps.pop(peer, None)  # of an earlier run, whose file is overwritten
        with path.open("wb") as file:
            for start in range(0, count, step):
                batch = slice(start, min(start + step, count))
                posterior = posterior_of_logits(teacher(self._epoch.pixels(batch)), temperature).cpu()
                if not bool(torch.isfinite(posterior).all()):
                    raise SnapshotError("predictions on this peer's images are not finite")
                file.write(posterior.numpy().tobytes())
                progress(batch.stop, count)
        shape = (count, self._classes)
        # An empty file cannot be mapped.
        self._maps[peer] = np.memmap(path, np.float32, "r", shape=shape) if count else np.empty(shape, np.float32)

    def batch(self, peers: Sequence[int], batch: slice) -> Tensor:
        """Posteriors of some teachers on one batch, in the order of ``peers``: float32 [J, B, C] on the CPU."""
        return torch.from_numpy(np.stack([self._maps[peer][batch] for peer in peers]))

    def close(self) -> None:
        """Forget and delete the posteriors."""
        self._maps.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def inference_batch(images: Tensor | np.ndarray, device: torch.device) -> int:
    """Samples of one forward pass without gradients, for images [n, C, H, W] and a model on this device."""
    pixels = _CPU_PIXELS if device.type == "cpu" else _OTHER_PIXELS
    return max(1, pixels // (images.shape[2] * images.shape[3]))


def posterior_of_logits(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T) in float32, [B, C]."""
    return torch.softmax(logits.float() / temperature, dim=-1)
