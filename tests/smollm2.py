"""The default model's header, tokenizer and template, read once for all tests that need them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from zjournal.checkpoint.gguf import Header, read_header
from zjournal.checkpoint.locate import locate
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer


@functools.cache
def path() -> Path:
    return locate(None, Path(tempfile.gettempdir()) / "zjournal-tests").path


@functools.cache
def header() -> Header:
    return read_header(path())


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_header(header())


@functools.cache
def template() -> Template:
    return Template.from_header(header(), tokenizer().special_texts)
