"""Which device a learner computes on."""

from __future__ import annotations

import torch

from crad_p2p.errors import ConfigurationError
from crad_p2p.frozen import supports


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA, then MPS, then CPU; anything else is taken as given.

    Raises:
        ConfigurationError: no such device on this machine.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError(f"nothing can be trained on {device.type}")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"--device {name}: cannot be used ({reason}); use auto, cpu, cuda, cuda:1 or mps"
        ) from None
    return device


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """In what teachers compute. ``auto`` is bfloat16 where the device multiplies it faster than float32.

    What the device offers decides, and not a measurement: equal machines are to give equal bytes.

    Raises:
        ConfigurationError: no such precision, or not on this machine.
    """
    match name:
        case "auto":
            is_fast = _is_fast_in_bfloat16(device) and supports(torch.bfloat16, device)
            return torch.bfloat16 if is_fast else torch.float32
        case "bfloat16" if not supports(torch.bfloat16, device):
            raise ConfigurationError(f"--precision bfloat16: {device} cannot compute in it here; use auto or float32")
        case "float32" | "bfloat16":
            return getattr(torch, name)  # type: ignore[no-any-return]
        case _:
            raise ConfigurationError(f"--precision {name}: use auto, float32 or bfloat16")


def _is_fast_in_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a device's own memory that are free, and all of them; None where it shares the machine's."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None
