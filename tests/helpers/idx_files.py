"""MNIST's file names and its format, idx."""

import struct

import numpy as np

FILES = {
    "train_images": "train-images-idx3-ubyte", "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte", "test_labels": "t10k-labels-idx1-ubyte",
}  # fmt: skip


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    """The bytes of an idx file; kind 8: uint8, 13: float32."""
    content = array.astype({8: ">u1", 13: ">f4"}[kind]).tobytes()
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + content
