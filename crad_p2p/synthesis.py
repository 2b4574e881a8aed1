"""Images from a model alone: a generator is trained until the model's batch norms see what they saw in training.

After the official code of TARGET (Zhang et al., ICCV 2023). Its own:

* noise of 256 numbers, a linear layer to 128 channels of a quarter of the side, twice made twice as large and
  convolved, with batch norm and LeakyReLU, and a last convolution with a sigmoid;
* the loss 10 L_BN + 0.5 CE. L_BN is the sum over the model's batch norms of the distances between mean and variance of
  what comes in and the running ones; CE is towards labels drawn at random. The model is in eval mode, and not changed;
* Adam with betas 0.5 and 0.999, at rate 0.002 for the generator and 0.01 for the noise, which is learned, too;
* of all steps the images of the least loss are kept, as uint8.

Ours: labels are drawn from the classes that the peer can vouch for (:func:`classes_held`). A generator begins anew
every time, and goes on from batch to batch; the source takes it along by meta-learning, for 10 batches of 10 steps
each, and as many steps as these are the default for one batch. Batch statistics are not smoothed over the steps.
Images are not augmented on their way into the model, so that all draws are made before the first step. A batch is as
large as one of training, so that it fits where that does. Sides that are no multiple of four are cut from the next
larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adam import adam

from crad_p2p.architectures import give_room
from crad_p2p.randomness import generator, torch_seed

#: Called with (steps done, steps in all).
Progress = Callable[[int, int], None]

NOISE, WIDTH = 256, 64
BN_WEIGHT, CE_WEIGHT = 10.0, 0.5
GENERATOR_RATE, NOISE_RATE = 0.002, 0.01
_SLOPE, _BETAS = 0.2, (0.5, 0.999)


class ImageGenerator(nn.Module):
    """Noise [B, 256] to images [B, C, H, W] in [0, 1]. Made on a device of its own; :func:`begin` sets its values."""

    def __init__(self, image_shape: Sequence[int]) -> None:
        """
        Args:
            image_shape: channels, height, width.
        """
        super().__init__()
        channels, self.height, self.width = image_shape
        # At least two, so that batch norm has something to compare in a batch of a single image.
        self.start = (2 * WIDTH, *(max(2, -(-side // 4)) for side in (self.height, self.width)))
        self.linear = nn.Linear(NOISE, self.start[0] * self.start[1] * self.start[2])
        self.norm = nn.BatchNorm2d(2 * WIDTH)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1, 1, bias=False) for a, b in ((2 * WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (2 * WIDTH, WIDTH))
        self.last = nn.Conv2d(WIDTH, channels, 3, 1, 1, bias=False)

    def forward(self, noise: Tensor) -> Tensor:
        x = self.norm(self.linear(noise).view(-1, *self.start))
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = F.leaky_relu(norm(convolution(x)), _SLOPE)
        return torch.sigmoid(self.last(x))[..., : self.height, : self.width]


def begin(image_shape: Sequence[int], seed: int, device: torch.device) -> ImageGenerator:
    """A generator with start values drawn by a seed, the same ones on every device."""
    with torch.device("meta"):
        made = ImageGenerator(image_shape)
    give_room(made, "cpu")
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, a=_SLOPE, generator=draws)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=NOISE**-0.5, generator=draws)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
    return made.to(device)


def classes_held(validated: Sequence[int], trained: Sequence[int], min_support: int) -> tuple[int, ...]:
    """The classes of which images are made: those of which a peer has ``min_support`` validation images, so that it
    knows how well its model knows them. Without any such class all that it trains on.

    Args:
        validated, trained: images of every class.
    """
    held = tuple(c for c, n in enumerate(validated) if n >= min_support)
    return held or tuple(c for c, n in enumerate(trained) if n > 0)


class Matching:
    """Watches what comes into a model's batch norms.

    Use as a context manager: it hangs on the model meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        self._distances: list[Tensor] = []

    def __enter__(self) -> Matching:
        self._handles = [norm.register_forward_pre_hook(self._see) for norm in self._norms]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def loss(self) -> Tensor:
        """L_BN of the forward pass since the last call, a scalar."""
        seen, self._distances = self._distances, []
        return torch.stack(seen).sum()

    def _see(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        variance, mean = torch.var_mean(inputs[0], (0, 2, 3), correction=0)
        apart = (mean - norm.running_mean).norm() + (variance - norm.running_var).norm()
        self._distances.append(apart)


def make_images(
    model: nn.Module,
    count: int,
    classes: Sequence[int],
    *,
    image_shape: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    steps: int,
    batch_size: int,
    seed: int,
    peer: int,
    round_number: int,
    device: torch.device,
    progress: Progress = lambda *_: None,
) -> Tensor:
    """Images that a model takes for such as it was trained on: uint8 [count, C, H, W] on the CPU.

    Args:
        model: in eval mode, its parameters without gradients, on ``device``.
        classes: of which images are made.
        image_shape: channels, height, width.
        mean, std: per channel, of images scaled to [0, 1].
        steps: for each batch.
    """
    draw = {"peer": peer, "round_number": round_number}
    painter = begin(image_shape, torch_seed(seed, "image generator", **draw), device).train()
    noise = torch.from_numpy(generator(seed, "image noise", **draw).standard_normal((count, NOISE))).float().to(device)
    drawn = generator(seed, "image targets", **draw).integers(len(classes), size=count)
    targets = torch.tensor(classes, device=device)[torch.from_numpy(drawn).to(device)]
    center, scale = (torch.tensor(each, device=device).float().reshape(-1, 1, 1) for each in (mean, std))
    weights = _Adam(list(painter.parameters()), GENERATOR_RATE)
    batches = [slice(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
    made = []
    with Matching(model) as matching:
        for number, batch in enumerate(batches):
            z = noise[batch].clone().requires_grad_()
            learned = _Adam([z], NOISE_RATE)
            best, least = torch.empty(0), torch.inf
            for step in range(steps + 1):
                images = painter(z)
                logits = model((images - center) / scale)
                loss = BN_WEIGHT * matching.loss() + CE_WEIGHT * F.cross_entropy(logits, targets[batch])
                value = float(loss.detach())
                if step == 0 or value < least:  # the first in any case, should no loss be a number
                    best, least = images.detach(), value if value < torch.inf else torch.inf
                if step == steps:
                    break
                gradients = torch.autograd.grad(loss, [*weights.parameters, *learned.parameters])
                weights.step(gradients[: len(weights.parameters)])
                learned.step(gradients[len(weights.parameters) :])
                progress(number * steps + step + 1, len(batches) * steps)
            made.append((best * 255).round().to(torch.uint8).cpu())
    return torch.cat(made)


class _Adam:
    """The step of ``torch.optim.Adam``, in its functional form: to make one imports torch's compiler."""

    def __init__(self, parameters: Sequence[Tensor], rate: float) -> None:
        self.parameters = list(parameters)
        self._rate = rate
        self._means = [torch.zeros_like(each) for each in parameters]
        self._squares = [torch.zeros_like(each) for each in parameters]
        self._steps = [torch.zeros(()) for _ in parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        adam(
            self.parameters,
            list(gradients),
            self._means,
            self._squares,
            [],
            self._steps,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=self._rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
