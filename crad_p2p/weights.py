"""Model tensors to snapshot bytes and back, with the checks that need the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from crad_p2p.foreign import printable
from crad_p2p.snapshot import SnapshotError

#: A weight beyond this is a broken or hostile model; trained ones stay below a few hundred.
MAX_MAGNITUDE = 1e6


def encode(tensors: dict[str, Tensor]) -> bytes:
    """Serialise tensors as safetensors; equal tensors give equal bytes."""
    return safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})


def decode(snapshot: bytes) -> dict[str, Tensor]:
    """Read tensors, on the CPU.

    Raises:
        SnapshotError: not a safetensors file.
    """
    try:
        return safetensors.torch.load(snapshot)
    except safetensors.SafetensorError as error:
        raise SnapshotError(f"not a safetensors file: {printable(str(error), 200)}") from None


def check_values(tensors: dict[str, Tensor]) -> None:
    """Refuse values that would poison a forward pass, some of them silently.

    Raises:
        SnapshotError: not finite, beyond :data:`MAX_MAGNITUDE`, a negative variance or batch count.
    """
    for name, value in tensors.items():
        if value.is_floating_point():
            # One pass: NaN and infinity survive amax of |value|, and fail the comparison.
            if value.numel() and not bool(value.abs().amax() <= MAX_MAGNITUDE):
                raise SnapshotError(f"tensor '{name}' holds values that are not finite or beyond {MAX_MAGNITUDE:g}")
            if name.endswith("running_var") and bool((value < 0).any()):
                raise SnapshotError(f"tensor '{name}' holds a negative variance")
        elif bool((value < 0).any()):
            raise SnapshotError(f"tensor '{name}' holds a negative count")


def as_function(skeleton: nn.Module, tensors: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """A model that computes with these tensors, without copying them into a module.

    Args:
        skeleton: a module of the architecture, its own tensors never used (device ``meta``); in eval mode here.
    """
    skeleton.eval()

    def forward(pixels: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(skeleton, tensors, (pixels,), strict=True)
        return logits

    return forward


def probe(teacher: Callable[[Tensor], Tensor], shape: Sequence[int], device: torch.device) -> None:
    """Run two images of noise through a teacher.

    Args:
        shape: channels, height and width of one image.

    Raises:
        SnapshotError: logits are not finite. An error while computing is this machine's: that the tensors fit has been
            looked at before.
    """
    pixels = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        logits = teacher(pixels)
    if not bool(torch.isfinite(logits).all()):
        raise SnapshotError("a probe batch gives logits that are not finite")
