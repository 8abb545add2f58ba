"""What a network of the registry does in one step, counted on torch's meta device: no memory, no arithmetic.

Products (convolutions and linear layers) are what protect_ masks, but for those that are cheaper to compute in the
enclave than to mask and check (ops.place), which it keeps as this does. Everything else stays in the enclave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from darknight.models import build_model
from darknight.ops import BilinearOp, Conv, Linear
from darknight.ops.cost import Form, Rates, Sharing
from darknight.ops.place import STRUCTURE, stays_by_cost, stays_by_structure

MASKED = "masked"
ENCLAVE = "enclave"
PRODUCT = "a product with public weights"
CHEAP = "cheap, and not a product"  # the report of protect_ says so too

Shape = tuple[int, ...]

_PRODUCTS = {"convolution", "convolution_backward", "addmm", "mm"}
_OPERATIONS = {
    "batch norm": ("native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm"),
    "ReLU": ("relu", "relu_", "threshold_backward", "hardtanh", "hardtanh_", "hardtanh_backward"),
    "max pooling": ("max_pool2d_with_indices", "max_pool2d_with_indices_backward"),
    "average pooling": ("mean", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "avg_pool2d"),
    "addition": ("add", "add_"),
    "dropout": ("native_dropout", "native_dropout_backward", "bernoulli_"),
}
_KINDS = {name: kind for kind, names in _OPERATIONS.items() for name in names}
_REST = "copies, sums, scaling"


@dataclass(frozen=True, kw_only=True)
class Product:
    """A convolution or linear layer. Shapes are of one example.

    grad_input: whether its input has a gradient. stays: why the enclave computes it; empty if workers do.
    """

    name: str
    kind: str
    op: BilinearOp
    input_shape: Shape
    output_shape: Shape
    weight_shape: Shape
    grad_input: bool
    stays: str = ""

    def form(self, batch_size: int) -> Form:
        return Form(
            op=self.op,
            x_shape=(batch_size, *self.input_shape),
            w_shape=self.weight_shape,
            grad_input=self.grad_input,
        )

    def flops(self, batch_size: int, training: bool) -> int:
        """In the clear, of all passes of a step."""
        passes = 2 + self.grad_input if training else 1
        return passes * self.op.flops((batch_size, *self.input_shape), self.weight_shape)

    @property
    def inputs(self) -> int:
        return prod(self.input_shape)

    @property
    def outputs(self) -> int:
        return prod(self.output_shape)

    @property
    def weights(self) -> int:
        return prod(self.weight_shape)


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A layer with parameters that stays in the enclave."""

    name: str
    kind: str
    why: str = CHEAP


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Everything of one kind that torch does in the enclave in one step.

    bytes: that it reads and writes. flops: one for each number that it writes, which is the least it can take.
    """

    kind: str
    calls: int
    bytes: int
    flops: int
    why: str = CHEAP


@dataclass(frozen=True, kw_only=True)
class Network:
    """One network at work on batches of one size.

    layers: in the order in which they run. parameters: how many numbers are trained. saved_bytes: activations that
    autograd keeps until the backward pass, the input among them. rates: if products go where they are cheaper at these,
    with so many workers `elsewhere` (ops.cost.Sharing).
    """

    batch_size: int
    training: bool
    layers: tuple[Product | Resident, ...]
    operations: tuple[Operation, ...]
    parameters: int
    saved_bytes: int
    rates: Rates | None = None
    elsewhere: float = 0.0

    @property
    def products(self) -> tuple[Product, ...]:
        """Those that workers compute."""
        return tuple(layer for layer in self.layers if isinstance(layer, Product) and not layer.stays)

    @property
    def kept(self) -> tuple[Product, ...]:
        """Those that the enclave computes."""
        return tuple(layer for layer in self.layers if isinstance(layer, Product) and layer.stays)

    @cached_property
    def distinct(self) -> dict[Product, int]:
        """Products of workers of one form, by the first of them, and how many: what one costs, they all do."""
        forms: dict[Product, Product] = {}
        first = [forms.setdefault(replace(product, name=""), product) for product in self.products]
        return dict(Counter(first))

    def under(self, sharing: Sharing) -> Network:
        """The network under a scheme: what is cheaper to compute than to send under it stays."""
        if self.rates is None:
            return self
        sharing = replace(sharing, elsewhere=self.elsewhere)
        return replace(self, layers=tuple(self._placed(layer, sharing, self.rates) for layer in self.layers))

    def _placed(self, layer: Product | Resident, sharing: Sharing, rates: Rates) -> Product | Resident:
        if isinstance(layer, Resident):
            return layer
        return replace(layer, stays=stays_by_cost([layer.form(self.batch_size)], sharing, rates))


def count_network(
    name: str,
    *,
    shape: tuple[int, int, int],
    classes: int,
    batch_size: int,
    training: bool,
    place: str = STRUCTURE,
    rates: Rates | None = None,
    elsewhere: float = 0.0,
) -> Network:
    """One forward pass, and for training one backward pass, without the loss. place, rates: as in Request; elsewhere:
    as in Network.
    """
    with torch.device("meta"):
        model = build_model(name, shape=shape, classes=classes, seed=0).train(training)
        for module in model.modules():
            if isinstance(module, nn.ReLU6) and module.inplace:  # torch keeps a copy of its input, the enclave none
                module.forward = torch.relu_  # type: ignore[method-assign]
        layers: list[Product | Resident] = []
        _observe(model, layers, by_structure=place == STRUCTURE)
        batch, saved = torch.empty(batch_size, *shape), _Saved()
        with torch.set_grad_enabled(training), _Operations() as operations:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                scores = model(batch)
            if training:
                scores.backward(torch.empty_like(scores))
    trained = list(model.parameters())
    return Network(
        batch_size=batch_size,
        training=training,
        layers=tuple(layers),
        operations=operations.found(),
        parameters=sum(parameter.numel() for parameter in trained),
        saved_bytes=saved.bytes_without(trained) if training else batch.nbytes,
        rates=rates,
        elsewhere=elsewhere,
    )


def _observe(model: nn.Module, layers: list[Product | Resident], *, by_structure: bool) -> None:
    """Writes down every call of a layer that has parameters of its own."""

    def note(path: str, module: nn.Module) -> None:
        def hook(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            op = _op_of(module)
            if op is None:
                layers.append(Resident(name=path, kind=type(module).__name__))
                return
            weight_shape = tuple(module.get_parameter("weight").shape)
            layers.append(
                Product(
                    name=path,
                    kind=type(module).__name__,
                    op=op,
                    input_shape=tuple(given[0].shape[1:]),
                    output_shape=tuple(out.shape[1:]),
                    weight_shape=weight_shape,
                    grad_input=given[0].requires_grad,
                    stays=stays_by_structure(op, weight_shape) if by_structure else "",
                )
            )

        module.register_forward_hook(hook)

    for path, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            note(path, module)


def _op_of(module: nn.Module) -> BilinearOp | None:
    if isinstance(module, nn.Linear):
        return Linear()
    if isinstance(module, nn.Conv2d):
        return Conv.make(
            module.kernel_size,
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            padding_mode=module.padding_mode,
        )
    return None


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what torch reads and writes. Products are the workers' business, and views cost nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        read, written = list(_tensors(args)), list(_tensors([out]))
        if name not in _PRODUCTS and not func.is_view and read:
            kind = _KINDS.get(name, _REST)
            self._calls[kind] += 1
            self._bytes[kind] += sum(tensor.nbytes for tensor in (*read, *written))
            self._flops[kind] += sum(tensor.numel() for tensor in written)
        return out

    def found(self) -> tuple[Operation, ...]:
        """The largest first."""
        return tuple(
            Operation(kind=kind, calls=self._calls[kind], bytes=nbytes, flops=self._flops[kind])
            for kind, nbytes in self._bytes.most_common()
        )


class _Saved:
    """The tensors that autograd keeps, each piece of memory once."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        self._tensors[_memory(tensor)] = tensor
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor

    def bytes_without(self, parameters: Iterable[Tensor]) -> int:
        apart = {_memory(parameter) for parameter in parameters}
        return sum(_nbytes(tensor) for place, tensor in self._tensors.items() if place not in apart)


def _nbytes(tensor: Tensor) -> int:
    """As the enclave keeps it: which input of a pooling's window was the largest takes it a byte, and torch eight."""
    indices = tensor.dtype == torch.int64 and tensor.dim() == 4
    return tensor.numel() if indices else tensor.untyped_storage().nbytes()


def _memory(tensor: Tensor) -> int:
    """What tells two pieces of memory apart; on the meta device they have no addresses."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
