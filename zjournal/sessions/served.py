"""The model as the API process knows it: names, tokenizer, template, dialect; never its weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from zjournal import errors
from zjournal.checkpoint import gguf, locate
from zjournal.checkpoint.script import read_script
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects.base import Dialect
from zjournal.dialects.chatml import ChatML
from zjournal.sessions import vocabulary

SCRIPTED = "scripted:"
SUPPORTED_ARCHITECTURES = ("llama",)


class ModelChoice(msgspec.Struct, frozen=True):
    """What `--model` means: the file the engine loads, and the GGUF that tokenizer and template come from."""

    path: Path  # a GGUF, or the JSON of a scripted model
    scripted: bool
    file: locate.ModelFile
    context: int  # tokens; what the model was made for

    @property
    def id(self) -> str:
        return "scripted" if self.scripted else self.file.name

    @property
    def aliases(self) -> tuple[str, ...]:
        return ("default",) if self.scripted else self.file.aliases


def choose(model: str, cache_dir: Path) -> ModelChoice:
    """Settles `--model`, so far as a header tells. Raises ModelFault."""
    if not model.startswith(SCRIPTED):
        file = locate.locate(model, cache_dir)
        return ModelChoice(file.path, False, file, _check(gguf.read_header(file.path)))
    path = Path(model.removeprefix(SCRIPTED))
    return ModelChoice(path, True, locate.locate(None, cache_dir), read_script(path).context)


def _check(header: gguf.Header) -> int:
    """Refuses what the engine would refuse seconds later; returns the model's context."""
    architecture = header.value("general.architecture", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise errors.ModelFault(f"{header.path}: the architecture {architecture} is not supported, only {known}")
    gguf.check_types(header)
    return header.value(f"{architecture}.context_length", int)


class Served:
    """The API side of the one model that is served."""

    def __init__(self, choice: ModelChoice, tokenizer: Tokenizer, template: Template) -> None:
        self.id = choice.id
        self.aliases = choice.aliases
        self.created = int(choice.path.stat().st_mtime)
        self.context = choice.context  # the model's own; the engine's Ready tells the one in force
        self.tokenizer = tokenizer
        self.template = template
        self.dialect: Dialect = ChatML()
        self.end_tokens = frozenset(tokenizer.eos_ids)
        self.vocabulary = vocabulary.pack(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
        self._path = str(choice.path)

    @classmethod
    def load(cls, choice: ModelChoice) -> Served:
        """Reads tokenizer and template; takes about a second. Raises ModelFault."""
        header = gguf.read_header(choice.file.path)
        tokenizer = Tokenizer.from_header(header)
        template = Template.from_header(header, tokenizer.special_texts)
        return cls(choice, tokenizer, template)

    def accepts(self, name: str) -> bool:
        """Whether a client that asks for `name` means this model: its id, an alias, or its path."""
        names = {self.id.casefold(), *(alias.casefold() for alias in self.aliases)}
        return name.casefold() in names or name == self._path
