"""Files of named tensors, safetensors, with a few words about them and a digest over everything."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from darknight.errors import DataError, UsageError, other_format

FORMAT = 1
_WORDS, _DIGEST = "darknight", "sha256"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], words: Mapping[str, Any]) -> str:
    """Write the file, wait until it is on the disk, and return its digest. An OSError is for the caller."""
    plain = _separate(tensors)
    text = dump_json({"format": FORMAT, **words})
    digest = _digest(plain, text)
    try:
        save_file(plain, path, metadata={_WORDS: text, _DIGEST: digest})
    except SafetensorError as error:  # it wraps the system's errors in words of its own
        raise OSError(None, f"the tensors could not be written ({error})", str(path)) from error
    sync(path)
    return digest


def tensors_as_bytes(tensors: Mapping[str, Tensor], words: Mapping[str, Any]) -> tuple[bytes, str]:
    """What `write_tensors` would write, and its digest, for whoever may not write it as it is."""
    plain = _separate(tensors)
    text = dump_json({"format": FORMAT, **words})
    digest = _digest(plain, text)
    return save(plain, metadata={_WORDS: text, _DIGEST: digest}), digest


def tensors_from_bytes(data: bytes, place: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """As `read_tensors`; `place` is where they came from, for errors."""
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{place}: damaged or cut short.") from error
    return _looked_at(tensors, metadata, place)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The tensors, the words and the digest; DataError for a file that is not as it was written."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{path}: damaged or cut short. Remove it, or take an earlier one.") from error
    return _looked_at(tensors, metadata, path)


def _looked_at(
    tensors: dict[str, Tensor], metadata: Mapping[str, str], path: Path
) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    if _WORDS not in metadata:
        raise DataError(f"{path}: not a file of DarKnight. Use one that `darknight train` wrote.")
    words = load_json(metadata[_WORDS], path)
    check_format(words, path)
    if metadata.get(_DIGEST) != _digest(tensors, metadata[_WORDS]):
        raise DataError(f"{path}: damaged, its contents do not fit its digest. Remove it, or take an earlier one.")
    return tensors, words, metadata[_DIGEST]


def check_format(words: Mapping[str, Any], path: Path) -> None:
    """Files of other versions of the format are refused before anything else of them is looked at."""
    if (found := words.get("format")) != FORMAT:
        raise UsageError(f"{path}: {other_format(found, reads=FORMAT)}.")


def dump_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def load_json(text: str | bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged or cut short, it is not JSON. Remove it, or take an earlier one.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a file of DarKnight. Use one that `darknight train` wrote.")
    return value


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and no two in the same memory: tied weights are written twice."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        one = tensor.detach().contiguous()
        place = one.untyped_storage().data_ptr()
        plain[name] = one.clone() if place in seen else one
        seen.add(place)
    return plain


def _digest(tensors: Mapping[str, Tensor], words: str) -> str:
    digest = hashlib.sha256(words.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        digest.update(np.ascontiguousarray(tensor.reshape(-1).view(torch.uint8).numpy()).data)
    return digest.hexdigest()
