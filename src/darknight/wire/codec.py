"""Messages as bytes: a header in JSON, and the raw bytes of tensors in chunks.

A frame is a header (a JSON object of at most HEADER_LIMIT bytes) or a chunk of a tensor. A message is one header and
then, for each of its tensors, ceil(bytes / CHUNK) chunks: little-endian, contiguous, all of CHUNK bytes but the last.
A task may have a seed in the place of its tensor, in the header; no chunks follow then.
A transport adds keys of its own to a header (the ticket, the place in shared memory) and takes them out again.

Guarantees: what comes out of `unpack`, `message_from` and `reply_from` has every field, no other field, and each one of
its type and range; anything else is BadFrame. Nothing here runs the sender's code or allocates by the sender's word:
a header says what its tensor would be (`form_of`), and the reader decides before it makes room. Contract tests:
tests/wire/test_codec.py, tests/wire/test_fuzz.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from darknight.types import (
    Answer,
    BackwardTask,
    Forget,
    ForwardTask,
    Message,
    OpSpec,
    Pass,
    Refusal,
    Reply,
    Seed,
    Weights,
)
from darknight.wire import fields
from darknight.wire.fields import HEADER_LIMIT, BadFrame, Header, pack, unpack
from darknight.wire.seeds import KEY_BYTES

__all__ = [
    "CHUNK",
    "DTYPES",
    "HEADER_LIMIT",
    "BadFrame",
    "Form",
    "Header",
    "a_pass",
    "check_answer",
    "check_message",
    "chunks_of",
    "form_header",
    "form_of",
    "has_seed",
    "header_of",
    "is_refusal",
    "message_from",
    "nbytes_of",
    "pack",
    "parts_of",
    "reply_forms",
    "reply_from",
    "reply_header",
    "unpack",
    "with_tensor",
]

CHUNK = 1 << 20
DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}
Form = tuple[torch.dtype, tuple[int, ...]]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_BYTES = 1 << 48
_INT32 = 1 << 31  # primes, and the settings of ops
_NONE = torch.empty(0, device="meta")  # where a message is looked at before its tensor is there

if sys.byteorder != "little":
    raise ImportError("DarKnight sends tensors as they are in memory, and this machine is not little-endian.")


# --- tensors --------------------------------------------------------------------------------------------------------
def nbytes_of(form: Form) -> int:
    dtype, shape = form
    return prod(shape) * dtype.itemsize


def form_of(header: Header) -> Form | None:
    """Dtype and shape of the tensor that comes with a message; None for a message without one."""
    if header.get("kind") == "forget":
        return None
    return _form(header)


def reply_forms(header: Header) -> dict[Pass, Form]:
    """Dtype and shape of each tensor that comes with a reply, in the order in which they come."""
    if header.get("kind") == "refusal":
        return {}
    found = fields.an_object(header.get("tensors"))
    return {a_pass(name): _form(fields.an_object(form)) for name, form in found.items()}


def chunks_of(nbytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each chunk of a tensor."""
    for begin in range(0, nbytes, CHUNK):
        yield begin, min(begin + CHUNK, nbytes)


def _form(header: Header) -> Form:
    name = header.get("dtype")
    if type(name) is not str or name not in DTYPES:
        raise BadFrame(f"a dtype that is none of {', '.join(DTYPES)}")
    form = DTYPES[name], fields.shape(header.get("shape"))
    if prod(max(1, n) for n in form[1]) * form[0].itemsize >= _MOST_BYTES:  # strides overflow even if one axis is empty
        raise BadFrame(f"a tensor of {_MOST_BYTES} bytes or more")
    return form


def form_header(dtype: torch.dtype, shape: tuple[int, ...]) -> Header:
    """A tensor as a header describes it. Raises BadFrame for one that the wire does not carry."""
    if dtype not in _NAMES:
        raise BadFrame(f"a tensor of {dtype}; the wire carries {', '.join(DTYPES)}")
    return {"dtype": _NAMES[dtype], "shape": list(shape)}


def _form_header(tensor: Tensor) -> Header:
    return form_header(tensor.dtype, tuple(tensor.shape))


def _fits(tensor: Tensor | None, form: Form) -> Tensor:
    if tensor is None or (tensor.dtype, tuple(tensor.shape)) != form:
        raise BadFrame("a tensor that is not what its header says")
    return tensor


# --- messages -------------------------------------------------------------------------------------------------------
def header_of(message: Message) -> Header:
    """A message without its tensor."""
    match message:
        case Weights():
            op: Header = {
                "name": message.op.name,
                "settings": [[name, v if isinstance(v, str) else list(v)] for name, v in message.op.settings],
            }
            return {
                "kind": "weights",
                "layer": message.layer,
                "version": message.version,
                "op": op,
                "prime": message.prime,
                **_form_header(message.tensor),
            }
        case ForwardTask():
            return {
                "kind": "forward",
                "layer": message.layer,
                "call": message.call,
                "version": message.version,
                "compute": message.compute,
                "keep": message.keep,
                **_form_header(message.tensor),
                **_seed_header(message.seed),
            }
        case BackwardTask():
            return {
                "kind": "backward",
                "layer": message.layer,
                "call": message.call,
                "version": message.version,
                "passes": [kind.value for kind in message.passes],
                "x_shape": list(message.x_shape),
                "row": None if message.row is None else list(message.row),
                **_form_header(message.tensor),
                **_seed_header(message.seed),
            }
        case Forget():
            return {
                "kind": "forget",
                "calls": list(message.calls),
                "weights": [list(key) for key in message.weights],
                "everything": message.everything,
            }


def _seed_header(seed: Seed | None) -> Header:
    return {} if seed is None else {"seed": {"key": seed.key.hex(), "prime": seed.prime}}


def has_seed(header: Header) -> bool:
    """Whether a message brings a seed in the place of its tensor."""
    return "seed" in header


_KEYS = {
    "weights": {"kind", "layer", "version", "op", "prime", "dtype", "shape"},
    "forward": {"kind", "layer", "call", "version", "compute", "keep", "dtype", "shape"},
    "backward": {"kind", "layer", "call", "version", "passes", "x_shape", "row", "dtype", "shape"},
    "forget": {"kind", "calls", "weights", "everything"},
    "answer": {"kind", "layer", "call", "seconds", "tensors"},
    "refusal": {"kind", "message"},
}
_OPTIONAL = {"forward": {"seed"}, "backward": {"seed"}}


def check_message(header: Header) -> Message:
    """The message without its tensor; `with_tensor` adds it.

    Raises BadFrame unless the header is one of a message in every field: to be known before the tensor is read.
    """
    return _message(header, _NONE)


def with_tensor(checked: Message, tensor: Tensor) -> Message:
    """The message with the tensor that came with it."""
    return checked if isinstance(checked, Forget) else replace(checked, tensor=tensor)


def message_from(header: Header, tensor: Tensor | None) -> Message:
    """The message of a header and the tensor that came with it."""
    form = form_of(header)
    if form is None and tensor is not None:
        raise BadFrame("a tensor with a message that has none")
    return _message(header, _NONE if form is None else _fits(tensor, form))


def _message(header: Header, tensor: Tensor) -> Message:
    kind = _kind(header, ("weights", "forward", "backward", "forget"))
    if kind == "forget":
        return Forget(
            calls=tuple(fields.number(call) for call in fields.a_list(header["calls"])),
            weights=tuple(_key(key) for key in fields.a_list(header["weights"])),
            everything=fields.flag(header["everything"]),
        )
    _form(header)
    layer, version = fields.text(header["layer"]), fields.number(header["version"])
    if kind == "weights":
        prime = header["prime"]
        return Weights(
            layer=layer,
            version=version,
            op=_op(fields.an_object(header["op"])),
            prime=None if prime is None else fields.number(prime, least=2, limit=_INT32),
            tensor=tensor,
        )
    call, seed = fields.number(header["call"]), _seed(header)
    if kind == "forward":
        flags = {name: fields.flag(header[name]) for name in ("compute", "keep")}
        return ForwardTask(layer=layer, call=call, version=version, tensor=tensor, seed=seed, **flags)
    passes = tuple(a_pass(name) for name in fields.a_list(header["passes"]))
    if len(set(passes)) != len(passes):
        raise BadFrame("a pass that is asked for twice")
    if seed is not None and header["row"] is not None:
        raise BadFrame("a seed in the place of gradients in the clear")
    return BackwardTask(
        layer=layer,
        call=call,
        version=version,
        tensor=tensor,
        passes=passes,
        x_shape=fields.shape(header["x_shape"]),
        row=None if header["row"] is None else tuple(fields.real(value) for value in fields.a_list(header["row"])),
        seed=seed,
    )


def parts_of(message: Forget) -> Iterator[Forget]:
    """The same in messages that fit a header each, however many calls there are."""
    calls, weights = message.calls, message.weights
    if message.everything or (len(calls) <= 1000 and len(weights) <= 4):
        yield message if not message.everything else Forget(everything=True)
        return
    for begin in range(0, len(calls), 1000):
        yield Forget(calls=calls[begin : begin + 1000])
    for begin in range(0, len(weights), 4):
        yield Forget(weights=weights[begin : begin + 4])


# --- replies --------------------------------------------------------------------------------------------------------
def reply_header(reply: Reply) -> Header:
    """A reply without its tensors; they follow in the order of its "tensors"."""
    if isinstance(reply, Refusal):
        return {"kind": "refusal", "message": reply.message[: fields.NAME_LIMIT].encode(errors="replace").decode()}
    return {
        "kind": "answer",
        "layer": reply.layer,
        "call": reply.call,
        "seconds": reply.seconds,
        "tensors": {kind.value: _form_header(tensor) for kind, tensor in reply.tensors.items()},
    }


def is_refusal(header: Header) -> bool:
    """Raises BadFrame unless the header is one of a reply, in its keys."""
    return _kind(header, ("answer", "refusal")) == "refusal"


def check_answer(header: Header) -> dict[Pass, Form]:
    """Its `reply_forms`. Raises BadFrame unless the header is one of an answer in every field.

    To be known before its tensors are read.
    """
    _answer(header, {})
    return reply_forms(header)


def reply_from(header: Header, tensors: Mapping[Pass, Tensor]) -> Reply:
    """The reply of a header and the tensors that came with it. Words of a worker come out printable."""
    if is_refusal(header):
        return Refusal(message=fields.printable(fields.text(header["message"])))
    forms = reply_forms(header)
    if forms.keys() != tensors.keys():
        raise BadFrame("tensors that are not what their header says")
    return _answer(header, {kind: _fits(tensors[kind], form) for kind, form in forms.items()})


def _answer(header: Header, tensors: Mapping[Pass, Tensor]) -> Answer:
    return Answer(
        layer=fields.text(header["layer"]),
        call=fields.number(header["call"]),
        tensors=tensors,
        seconds=fields.seconds(header["seconds"]),
    )


# --- parts -----------------------------------------------------------------------------------------------------------
def _kind(header: Header, known: tuple[str, ...]) -> str:
    kind = header.get("kind")
    if type(kind) is not str or kind not in known:
        raise BadFrame(f"a header of none of these kinds: {', '.join(known)}")
    if header.keys() != _KEYS[kind] and header.keys() - _OPTIONAL.get(kind, set()) != _KEYS[kind]:
        raise BadFrame(f"a {kind} header with other keys than {', '.join(sorted(_KEYS[kind]))}")
    return kind


def _seed(header: Header) -> Seed | None:
    if not has_seed(header):
        return None
    value = fields.an_object(header["seed"])
    if value.keys() != {"key", "prime"}:
        raise BadFrame("a seed with other keys than key, prime")
    if header["dtype"] != "int32":
        raise BadFrame("a seed of something else than int32")
    prime = fields.number(value["prime"], least=2, limit=_INT32)
    return Seed(key=fields.hexadecimal(value["key"], KEY_BYTES), prime=prime)


def a_pass(value: object) -> Pass:
    try:
        return Pass(value)
    except ValueError:
        raise BadFrame("something else where the name of a pass is due") from None


def _key(value: object) -> tuple[str, int]:
    pair = fields.a_list(value)
    if len(pair) != 2:
        raise BadFrame("something else where a layer and a version are due")
    return fields.text(pair[0]), fields.number(pair[1])


def _op(value: Header) -> OpSpec:
    if value.keys() != {"name", "settings"}:
        raise BadFrame("an op with other keys than name, settings")
    settings: list[tuple[str, str | tuple[int, ...]]] = []
    for pair in fields.a_list(value["settings"]):
        match pair:
            case [str(name), str(word)]:
                settings.append((fields.text(name, 100), fields.text(word, 100)))
            case [str(name), list(numbers)] if len(numbers) <= 2 * fields.AXES:
                values = tuple(fields.number(n, least=-_INT32, limit=_INT32) for n in numbers)
                settings.append((fields.text(name, 100), values))
            case _:
                raise BadFrame("an op's setting that is neither a word nor a few whole numbers")
    return OpSpec(fields.text(value["name"], 100), tuple(settings))
