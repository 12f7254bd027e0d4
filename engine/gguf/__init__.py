"""GGUF files: read in place, written whole, and the NumPy meaning of the block formats they hold."""

from engine.gguf.quants import dequantize, quantize
from engine.gguf.reader import GgufFile, Metadata, TensorInfo, read_gguf
from engine.gguf.writer import write_gguf

__all__ = ["GgufFile", "Metadata", "TensorInfo", "dequantize", "quantize", "read_gguf", "write_gguf"]
