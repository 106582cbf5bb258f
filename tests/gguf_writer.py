"""A tiny GGUF writer of the tests' own, so that the reader meets files that are small, odd or damaged."""

from __future__ import annotations

import struct

KINDS = {"u8": (0, "<B"), "u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def field(key: str, kind: str, value: object) -> bytes:
    """One metadata entry; `kind` is of KINDS, `str`, or `[kind]` for an array."""
    if kind.startswith("["):
        inner = kind[1:-1]
        number = 8 if inner == "str" else KINDS[inner][0]
        start = string(key) + struct.pack("<IIQ", 9, number, len(value))
        return start + b"".join(_value(inner, element) for element in value)
    return string(key) + struct.pack("<I", 8 if kind == "str" else KINDS[kind][0]) + _value(kind, value)


def _value(kind: str, value: object) -> bytes:
    return string(value) if kind == "str" else struct.pack(KINDS[kind][1], value)


def tensor(name: str, extents: tuple[int, ...], number: int, offset: int) -> bytes:
    """One entry of the tensor table; `extents` as in the file, fastest first."""
    form = f"<I{len(extents)}QIQ"
    return string(name) + struct.pack(form, len(extents), *extents, number, offset)


def gguf(fields: list[bytes], tensors: list[bytes] = (), data: bytes = b"", version: int = 3, align: int = 32) -> bytes:
    start = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(fields)) + b"".join([*fields, *tensors])
    return start + b"\0" * (-len(start) % align) + data


def small() -> bytes:
    """A file with every kind of thing in it: 2 tensors, scalars, arrays."""
    fields = [
        field("general.architecture", "str", "llama"),
        field("llama.block_count", "u32", 2),
        field("eps", "f32", 0.5),
        field("flag", "bool", True),
        field("words", "[str]", ["a", "", "日本"]),
        field("numbers", "[i32]", [1, -2, 3]),
    ]
    tensors = [tensor("w", (32, 2), 3, 0), tensor("b", (4,), 0, 64)]
    return gguf(fields, tensors, bytes(range(40)) + b"\0" * 24 + struct.pack("<4f", 1, 2, 3, 4))
