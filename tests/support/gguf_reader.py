"""A reader of GGUF files that shares nothing with MLX: the reference for the conversion."""

import struct

import numpy as np


def read_gguf(path):
    """Metadata and dequantized float32 tensors of a GGUF file, by its published layout."""
    data = path.read_bytes()
    position = 4

    def read(code):
        nonlocal position
        (value,) = struct.unpack_from("<" + code, data, position)
        position += struct.calcsize(code)
        return value

    def string():
        nonlocal position
        length = read("Q")
        position += length
        return data[position - length : position].decode()

    def value(kind):
        if kind == 8:
            return string()
        if kind == 9:
            kind = read("I")
            return [value(kind) for _ in range(read("Q"))]
        return read({10: "Q", 11: "q", 12: "d"}.get(kind) or "BbHhIif?"[kind])

    read("I")
    num_tensors, num_fields = read("Q"), read("Q")
    info = {string(): value(read("I")) for _ in range(num_fields)}
    entries = []
    for _ in range(num_tensors):
        name = string()
        shape = [read("Q") for _ in range(read("I"))][::-1]
        entries.append((name, shape, read("I"), read("Q")))
    start = -(-position // 32) * 32
    tensors = {
        name: dequantize(data, start + offset, shape, kind) for name, shape, kind, offset in entries
    }
    return info, tensors


def dequantize(data, offset, shape, kind):
    size = int(np.prod(shape))
    if kind == 0:
        return np.frombuffer(data, np.float32, size, offset).reshape(shape)
    num_blocks = size // 32
    if kind == 8:
        block = np.dtype([("scale", "<f2"), ("q", "i1", 32)])
        blocks = np.frombuffer(data, block, num_blocks, offset)
        values = blocks["q"] * blocks["scale"].astype(np.float32)[:, None]
    else:
        assert kind == 3
        block = np.dtype([("scale", "<f2"), ("low", "<f2"), ("q", "u1", 16)])
        blocks = np.frombuffer(data, block, num_blocks, offset)
        q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
        values = q * blocks["scale"].astype(np.float32)[:, None]
        values += blocks["low"].astype(np.float32)[:, None]
    return values.reshape(shape)
