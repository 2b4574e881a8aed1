"""How much memory a step of training takes beyond the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from crad_p2p.architectures import build_model
from crad_p2p.federation import Federation
from crad_p2p.synthesis import WIDTH

#: Side and number of the images that are run to find out. What is kept is in proportion to their pixels, within a few
#: per cent, so that images of any size take milliseconds.
_SIDE, _IMAGES = 16, 2


def kept_by_step(federation: Federation, arch: str, *, classes: int, image_shape: Sequence[int]) -> int:
    """Bytes that the largest step of a peer keeps until its backward pass, the model's own tensors left out.

    Args:
        image_shape: channels, height, width.
    """
    batch_size = federation.training.batch_size
    if federation.method.aggregates:  # the models of all at once
        archs = Counter(peer.arch for peer in federation.peers)
        return sum(
            count * kept_for_backward(each, classes=classes, image_shape=image_shape, batch_size=batch_size)
            for each, count in archs.items()
        )
    batch = kept_for_backward(arch, classes=classes, image_shape=image_shape, batch_size=batch_size)
    if federation.method.making is None:
        return batch
    # Beside the own images as many others, or the generator that makes those.
    return batch + max(batch, kept_by_generator(image_shape, batch_size))


def kept_by_generator(image_shape: Sequence[int], batch_size: int) -> int:
    """Bytes of what :mod:`crad_p2p.synthesis` keeps of its generator for a batch: what goes into and comes out of its
    convolutions and norms, at full size and a half of it.
    """
    _, height, width = image_shape
    return 4 * batch_size * height * width * (5 * WIDTH + 7 * WIDTH // 4)


def kept_for_backward(arch: str, *, classes: int, image_shape: Sequence[int], batch_size: int) -> int:
    """Bytes that a forward pass of one batch keeps until its backward pass, the model's own tensors left out.

    What the convolutions take for themselves meanwhile is not in it; that depends on the device.

    Args:
        image_shape: channels, height, width.
    """
    channels, height, width = image_shape
    model = build_model(arch, classes=classes, channels=channels).train()
    own = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(
            torch.zeros(_IMAGES, channels, _SIDE, _SIDE)
        )  # its graph keeps them alive: no address comes twice
    total = sum(nbytes for address, nbytes in kept.items() if address not in own)
    del output
    return round(total / (_IMAGES * _SIDE * _SIDE) * batch_size * height * width)
