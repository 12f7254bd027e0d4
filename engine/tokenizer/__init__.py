"""Text to token ids and back, from GGUF metadata alone; streaming text; chat templates."""

from engine.tokenizer.chat import BUILTIN_TEMPLATES, ChatTemplate
from engine.tokenizer.stream import StopStrings, TextStream
from engine.tokenizer.tokenizer import NoTokenizer, Tokenizer

__all__ = ["BUILTIN_TEMPLATES", "ChatTemplate", "NoTokenizer", "StopStrings", "TextStream", "Tokenizer"]
