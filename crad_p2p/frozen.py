"""Frozen models made fast: what their convolutions are followed by is folded into them.

A frozen model in eval mode is mostly convolutions with something cheap in between. Its architecture is read once (by
torch.fx), and bound to the tensors of every snapshot that comes:

* a batch norm after a convolution becomes part of its weights and bias;
* a sum and a ReLU after it are done while its result is in the cache (oneDNN, on CPUs);
* weights are laid out for it once, and images are channels last;
* it may compute in bfloat16, adding up in float32; modules that are no convolutions compute in float32.

What was read is compared with the model itself, on values drawn at random, before it is used: whatever an architecture
does that this cannot know of (a hook, an operation in place) shows there. One that differs computes as it is, and one
that differs in bfloat16 alone computes in float32.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from crad_p2p.architectures import build_model
from crad_p2p.snapshot import SnapshotError
from crad_p2p.weights import as_function

#: Pixels float32 [B, C, H, W] to logits float32 [B, classes].
Forward = Callable[[Tensor], Tensor]

#: How far an output may be from the model's own, in parts of the largest of its outputs.
_ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.2}
#: Not a power of two, so that no two rows of a weight are the same piece of it.
_BLOCK = 65_521
_RELU = (F.relu, torch.relu, "relu")
_ADD = (operator.add, operator.iadd, torch.add, "add")


@dataclass(frozen=True)
class _Chain:
    """A convolution and what follows it: relu(norm(convolution(x)) + other)."""

    convolution: str
    norm: str | None
    is_rectified: bool
    is_last: bool  # no other convolution needs its result
    input_shape: tuple[int, ...]  # [C, H, W]


class Frozen:
    """An architecture, ready to be bound to tensors."""

    def __init__(self, skeleton: nn.Module, image_shape: Sequence[int]) -> None:
        """Read it. No other thread may run a module meanwhile: torch.fx replaces what calling one does.

        Args:
            skeleton: a module of the architecture, its own tensors never used (device ``meta``).
            image_shape: channels, height and width.
        """
        self._skeleton = skeleton.eval()
        self._layout = _layout_of(skeleton.state_dict())
        self._chains: dict[str, _Chain] = {}
        self._sound: frozenset[torch.dtype] = frozenset()
        self._graph = self._read(image_shape)

    def bind(
        self, tensors: Mapping[str, Tensor], precision: torch.dtype = torch.float32, batch_size: int = 32
    ) -> Forward:
        """The model that computes with these tensors, on the device where they are.

        Args:
            tensors: of a snapshot, all of them, float32.
            precision: of the convolutions: float32 or bfloat16, where it gives what the model gives.
            batch_size: of most of the batches to come; others give the same, a little slower.

        Raises:
            SnapshotError: they are not those of the architecture.
        """
        if _layout_of(tensors) != self._layout:
            raise SnapshotError("snapshot does not fit its architecture: other names, shapes or dtypes")
        if self._graph is None:
            return as_function(copy.deepcopy(self._skeleton), dict(tensors))
        return self._bound(self._graph, tensors, precision if precision in self._sound else torch.float32, batch_size)

    def _bound(
        self, graph: fx.Graph, tensors: Mapping[str, Tensor], precision: torch.dtype, batch_size: int
    ) -> _Program:
        modules: dict[str, Callable[..., Any]] = {}
        for name in {str(node.target) for node in graph.nodes if node.op == "call_module"}:
            if name in self._chains:
                modules[name] = self._convolution(self._chains[name], tensors, precision, batch_size)
            else:
                modules[name] = _in_float32(self._skeleton.get_submodule(name), _part(tensors, name))
        return _Program(graph, modules)

    def _read(self, image_shape: Sequence[int]) -> fx.Graph | None:
        """The folded graph; None if the model cannot be read as one."""
        try:
            traced = fx.symbolic_trace(self._skeleton)
            kinds = Counter(node.op for node in traced.graph.nodes)
            if kinds["get_attr"] or kinds["placeholder"] != 1:  # tensors that no module of torch's owns, more inputs
                return None
            tensors, pixels = _any_tensors(self._layout), _any_values((2, *image_shape))
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                self._bound(traced.graph, tensors, torch.float32, 2)(pixels.clone(), _note_shape)
                graph = self._fold(traced)
                expected = as_function(copy.deepcopy(self._skeleton), tensors)(pixels.clone())
                self._sound = frozenset(
                    precision
                    for precision, allowed in _ALLOWED.items()
                    if self._deviation(graph, tensors, pixels, precision, expected) <= allowed
                )
        except Exception:  # of any kind: it is somebody's own code that is read here, and works as it is
            return None
        return graph if torch.float32 in self._sound else None

    def _deviation(
        self, graph: fx.Graph, tensors: Mapping[str, Tensor], pixels: Tensor, precision: torch.dtype, expected: Tensor
    ) -> float:
        """How far the graph's output is from what is expected, in parts of its largest; infinite if it has none."""
        try:
            found = self._bound(graph, tensors, precision, len(pixels))(pixels.clone())
        except Exception:
            if precision == torch.float32:
                raise
            return torch.inf
        deviation = float((found - expected).abs().amax() / expected.abs().amax())
        return deviation if deviation >= 0 else torch.inf  # not a number, either

    def _fold(self, traced: fx.GraphModule) -> fx.Graph:
        """The graph with one node for every chain, which is called by the name of its convolution."""
        graph, modules = traced.graph, dict(traced.named_modules())
        for node in list(graph.nodes):
            convolution = modules.get(str(node.target)) if node.op == "call_module" else None
            if not isinstance(convolution, nn.Conv2d) or not _is_plain(convolution) or len(node.args) != 1:
                continue
            name, norm, end, other = str(node.target), None, node, None
            if name in self._chains or any(each.target == node.target for each in graph.nodes if each is not node):
                continue  # used twice
            following = _only_user(end)
            if following is not None and isinstance(modules.get(str(following.target)), nn.BatchNorm2d):
                norm, end = str(following.target), following
                following = _only_user(end)
            if following is not None and _is(following, _ADD) and (other := _other_operand(following, end)) is not None:
                end = following
                following = _only_user(end)
            is_rectified = following is not None and (
                _is(following, _RELU) or isinstance(modules.get(str(following.target)), nn.ReLU)
            )
            if is_rectified:
                assert following is not None
                end = following
            self._chains[name] = _Chain(name, norm, is_rectified, False, (_shape(node.args[0]) or ())[1:])
            with graph.inserting_before(end):
                operands = (node.args[0],) if other is None else (node.args[0], other)
                folded = graph.call_module(name, operands)
            folded.meta = dict(end.meta)
            end.replace_all_uses_with(folded)
        graph.eliminate_dead_code()
        graph.lint()
        self._mark_last(graph)
        return graph

    def _mark_last(self, graph: fx.Graph) -> None:
        feeds_convolution: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if any(user in feeds_convolution or str(user.target) in self._chains for user in node.users):
                feeds_convolution.add(node)
            elif str(node.target) in self._chains:
                name = str(node.target)
                self._chains[name] = replace(self._chains[name], is_last=True)

    def _convolution(
        self, chain: _Chain, tensors: Mapping[str, Tensor], precision: torch.dtype, batch_size: int
    ) -> _Convolution:
        convolution = self._skeleton.get_submodule(chain.convolution)
        assert isinstance(convolution, nn.Conv2d)
        own = _part(tensors, chain.convolution)
        weight, bias = own["weight"], own.get("bias")
        if chain.norm is not None:
            norm, statistics = self._skeleton.get_submodule(chain.norm), _part(tensors, chain.norm)
            assert isinstance(norm, nn.BatchNorm2d)
            scale = torch.rsqrt(statistics["running_var"] + norm.eps) * statistics.get("weight", 1.0)
            shift = statistics.get("bias", 0.0) - statistics["running_mean"] * scale
            bias = shift if bias is None else bias * scale + shift
            weight = weight * scale.reshape(-1, 1, 1, 1)
        size = (batch_size, *chain.input_shape)
        return _Convolution(
            convolution, chain, weight.to(precision), None if bias is None else bias.to(precision), size
        )


@functools.cache
def frozen(arch: str, classes: int, image_shape: tuple[int, int, int]) -> Frozen:
    """The architecture of an id, read once in a process; see :class:`Frozen` for when."""
    return Frozen(build_model(arch, classes=classes, channels=image_shape[0], device="meta"), image_shape)


def supports(precision: torch.dtype, device: torch.device) -> bool:
    """Whether convolutions can compute so on this machine, which the libraries beneath have the last word on."""
    chain = _Chain("", None, is_rectified=False, is_last=True, input_shape=(8, 4, 4))
    try:
        with torch.no_grad():
            weight = torch.zeros(8, 8, 3, 3, device=device, dtype=precision)
            convolution = _Convolution(nn.Conv2d(8, 8, 3, device="meta"), chain, weight, None, (1, *chain.input_shape))
            convolution(torch.zeros(1, *chain.input_shape, device=device))
    except RuntimeError:
        return False
    return True


def _layout_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def _any_tensors(layout: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Values with which every part of a model matters, and whose signals neither vanish nor explode."""
    tensors = {}
    for name, (shape, dtype) in layout.items():
        values = _any_values(tuple(shape))
        if not dtype.is_floating_point:
            values = torch.zeros(shape, dtype=dtype)
        elif len(shape) > 1:
            values *= (2 / values[0].numel()) ** 0.5
        elif not name.endswith(("bias", "running_mean")):
            values = values.abs().add_(0.5)
        tensors[name] = values
    return tensors


def _any_values(shape: tuple[int, ...]) -> Tensor:
    """Standard normal, from one block that is repeated: drawing the millions of a model would take its time."""
    block, count = _block(), math.prod(shape)
    return block.repeat(-(-count // _BLOCK))[:count].reshape(shape).clone()


@functools.cache
def _block() -> Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))


class _Program:
    """Runs a graph with these modules, and keeps each result for as long as it is needed.

    Not an ``fx.GraphModule``: that is a cycle of references, whose tensors stay until somebody collects garbage.
    """

    def __init__(self, graph: fx.Graph, modules: Mapping[str, Callable[..., Any]]) -> None:
        self._nodes = tuple(graph.nodes)
        self._modules = modules
        self._dead_after: dict[fx.Node, list[fx.Node]] = {node: [] for node in self._nodes}
        seen: set[fx.Node] = set()
        for node in reversed(self._nodes):
            for each in {node, *node.all_input_nodes} - seen:
                self._dead_after[node].append(each)
                seen.add(each)

    def __call__(self, pixels: Tensor, note: Callable[[fx.Node, Any], None] = lambda *_: None) -> Tensor:
        values: dict[fx.Node, Any] = {}
        for node in self._nodes:
            arguments = fx.node.map_arg(node.args, values.__getitem__)
            options = fx.node.map_arg(node.kwargs, values.__getitem__)
            match node.op:
                case "placeholder":
                    result = pixels
                case "call_module":
                    result = self._modules[node.target](*arguments, **options)
                case "call_method":
                    result = getattr(arguments[0], node.target)(*arguments[1:], **options)
                case "call_function":
                    result = node.target(*arguments, **options)
                case _:  # output
                    return arguments[0].float()  # type: ignore[no-any-return]
            values[node] = result
            note(node, result)
            for each in self._dead_after[node]:
                del values[each]
        raise ValueError("a model without output")


class _Convolution:
    """relu(convolution(x) + other), the last two if the chain has them."""

    def __init__(
        self, like: nn.Conv2d, chain: _Chain, weight: Tensor, bias: Tensor | None, size: tuple[int, ...]
    ) -> None:
        self._geometry = (like.padding, like.stride, like.dilation, like.groups)
        self._chain = chain
        self._is_fused = weight.device.type == "cpu" and _HAS_FUSED
        if self._is_fused:
            weight = torch.ops.mkldnn._reorder_convolution_weight(weight, *self._geometry, size)
        else:
            weight = weight.contiguous(memory_format=torch.channels_last)
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x.to(self._weight.dtype, memory_format=torch.channels_last)
        out = self._fused(x, other) if self._is_fused else self._plain(x, other)
        return out.float() if self._chain.is_last else out

    def _fused(self, x: Tensor, other: Tensor | None) -> Tensor:
        relu = "relu" if self._chain.is_rectified else None
        operands = (self._weight, self._bias, *self._geometry)
        if other is None:
            fused: Tensor = torch.ops.mkldnn._convolution_pointwise(x, *operands, relu or "none", [], "")
            return fused
        other = other.to(x.dtype, memory_format=torch.channels_last)
        summed: Tensor = torch.ops.mkldnn._convolution_pointwise.binary(
            x, other, *operands, "add", None, relu, [], None
        )
        return summed

    def _plain(self, x: Tensor, other: Tensor | None) -> Tensor:
        padding, stride, dilation, groups = self._geometry
        out = F.conv2d(x, self._weight, self._bias, stride, padding, dilation, groups)
        if other is not None:
            out = out.add_(other)
        return out.relu_() if self._chain.is_rectified else out


def _in_float32(module: nn.Module, tensors: dict[str, Tensor]) -> Callable[..., Any]:
    """Any other module, with these tensors in place of its own."""
    if not tensors:
        return module
    own = copy.deepcopy(module)  # of meta tensors; others may compute with the same architecture at the same time
    own.load_state_dict(tensors, assign=True)

    def call(*inputs: Any, **options: Any) -> Any:
        return own(*(each.float() if isinstance(each, Tensor) else each for each in inputs), **options)

    return call


#: oneDNN's, as torch's own compiler uses them.
_HAS_FUSED = torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
    hasattr(torch.ops.mkldnn, name) for name in ("_reorder_convolution_weight", "_convolution_pointwise")
)


def _part(tensors: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    prefix = f"{module}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _is_plain(convolution: nn.Conv2d) -> bool:
    return convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is(node: fx.Node, functions: tuple[Any, ...]) -> bool:
    return node.op in ("call_function", "call_method") and node.target in functions


def _other_operand(addition: fx.Node, one: fx.Node) -> fx.Node | None:
    """What is added to one operand, if that is all that happens and the two have one shape."""
    if len(addition.args) != 2 or set(addition.kwargs) - {"inplace"}:
        return None
    others = [each for each in addition.args if each is not one]
    if len(others) != 1 or not isinstance(others[0], fx.Node) or _shape(others[0]) != _shape(one):
        return None
    return others[0]


def _note_shape(node: fx.Node, result: Any) -> None:
    node.meta["shape"] = tuple(result.shape) if isinstance(result, Tensor) else None


def _shape(node: Any) -> tuple[int, ...] | None:
    shape: tuple[int, ...] | None = node.meta["shape"] if isinstance(node, fx.Node) else None
    return shape
