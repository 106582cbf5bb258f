"""The model as the API process knows it: names, tokenizer, template, dialect; never its weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from zjournal import errors
from zjournal.checkpoint import decoder, locate
from zjournal.checkpoint.checkpoint import check_tensors, open_checkpoint
from zjournal.checkpoint.script import read_script
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects import choose as dialects
from zjournal.dialects import stability
from zjournal.dialects.base import Dialect
from zjournal.sessions import vocabulary
from zjournal.sessions.fences import Fences
from zjournal.sessions.reading import Model

SCRIPTED = "scripted:"
CLAUDE = "claude-"  # clients of Anthropic ask for such names whatever is served


class ModelChoice(msgspec.Struct, frozen=True):
    """What `--model` means: what the engine loads, and the model that tokenizer and template come from."""

    path: Path  # a GGUF, a Hugging Face folder, or the JSON of a scripted model
    scripted: bool
    file: locate.ModelFile
    context: int  # tokens; what the model was made for, or what `rope` makes of it
    context_limit: int = 0  # what it may be raised to; 0: not at all

    @property
    def id(self) -> str:
        return "scripted" if self.scripted else self.file.name

    @property
    def aliases(self) -> tuple[str, ...]:
        return ("default",) if self.scripted else self.file.aliases


def choose(model: str, cache_dir: Path, rope: str = "", fetch: locate.Fetch | None = None) -> ModelChoice:
    """Settles `--model`, so far as headers tell: what the engine would refuse seconds later is refused here.

    `fetch` brings what is on the hub only. Raises ModelFault, and ConfigFault for `rope`, which takes the place of the
    model's own RoPE scaling.
    """
    if not model.startswith(SCRIPTED):
        file = locate.locate(model, cache_dir, fetch)
        checkpoint = open_checkpoint(file.path)
        told = decoder.override(checkpoint.model(), rope)
        check_tensors(checkpoint, told)
        checkpoint.template({})  # base models have none, and cannot be talked to
        return ModelChoice(file.path, False, file, told.decoder.context, decoder.context_limit(told.decoder))
    if rope:
        raise errors.ConfigFault("rope is set, and a scripted model has none", param="rope")
    path = Path(model.removeprefix(SCRIPTED))
    return ModelChoice(path, True, locate.locate(None, cache_dir), read_script(path).context)


class Served:
    """The API side of the one model that is served."""

    def __init__(self, choice: ModelChoice, tokenizer: Tokenizer, template: Template, dialect: Dialect) -> None:
        self.id = choice.id
        self.aliases = choice.aliases
        self.created = int(choice.path.stat().st_mtime)
        self.context = choice.context  # the model's own; the engine's Ready tells the one in force
        self.tokenizer = tokenizer
        self.template = template
        self.dialect = dialect
        self.guessed = False  # whether the dialect is one that nothing in the model speaks for
        self.fences = Fences(dialect, tokenizer.control)
        self.end_tokens = frozenset(tokenizer.eos_ids)
        self.model = Model.today(tokenizer, dialect, self.end_tokens)  # what reads its answers
        texts = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
        self.vocabulary = vocabulary.pack(texts, self.model.control)
        self.unstable = stability.exceptions(stability.prove(template, tokenizer, dialect))
        self._path = str(choice.path)

    @classmethod
    def load(cls, choice: ModelChoice, dialect: str = "auto") -> Served:
        """Reads tokenizer and template; takes about a second. `dialect` as in the settings. Raises ModelFault."""
        checkpoint = open_checkpoint(choice.file.path)
        tokenizer = checkpoint.tokenizer()
        rows = checkpoint.model().decoder.vocab
        if tokenizer.vocab_size > rows:
            raise errors.ModelFault(f"{choice.path}: {tokenizer.vocab_size} tokens, and an embedding of {rows}")
        template = checkpoint.template(tokenizer.special_texts)
        if choice.scripted and dialect == "auto":
            return cls(choice, tokenizer, template, dialects.named(read_script(choice.path).dialect, tokenizer))
        served = cls(choice, tokenizer, template, dialects.settled(dialect, template, tokenizer))
        served.guessed = dialect == "auto" and dialects.guessed(template, tokenizer)
        return served

    def accepts(self, name: str) -> bool:
        """Whether a client that asks for `name` means this model: its id, an alias, its path, or any `claude-`."""
        names = {self.id.casefold(), *(alias.casefold() for alias in self.aliases)}
        return name.casefold() in names or name == self._path or name.startswith(CLAUDE)
