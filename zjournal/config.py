"""One frozen Config: flag over environment over file over default, and each value knows where it came from.

`SETTINGS` is the whole list; flags, `ZJ_*` variables, keys of zj.toml and the table in docs/config.md are all
made from it. Reading is one pure function of the three sources, so that a test needs no process and nothing
else in the program looks at the environment. A wrong value is a ConfigFault that names its source.

What a value means belongs to whoever uses it: the data directory to the journal, the model to checkpoint.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zjournal import keys, loops
from zjournal.errors import ConfigFault

CONFIG_FILE = "zj.toml"
KEY_VARIABLE = "ZJ_API_KEY"  # clients take their key from it (`zj client`); no setting
CONFIG_BYTES_MAX = 1 << 20
THREADS_MAX = 1024
CONTEXT_MAX = 1 << 24  # tokens
RUNNING_MAX = 1024
REQUESTS_MAX = 65_536
SPECULATION_MAX = 64
KV_BYTES_MIN = 1 << 20
KV_BYTES_MAX = 1 << 44
SNAPSHOT_BYTES_MIN = 1 << 20
WAL_BYTES_MIN = 1 << 20
WAL_BYTES_MAX = 1 << 40
BODY_BYTES_MIN = 1 << 10
BODY_BYTES_MAX = 1 << 32
DIALECTS = ("chatml", "glm-4.5", "glm-4.7", "dsml-v3.2", "dsml-v4", "dsml-v4.1", "qwen-xml", "llama3")
NO_HOME = "/nonexistent"  # what Debian calls it
PAUSE_SECONDS_MIN = 0.1
SECONDS_MAX = 100 * 366 * 86400.0

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B?)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)(@[\w./-]+)?(:[^:]+\.gguf)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting, settled. Sizes are bytes and durations seconds; `origins` tells the source of each value."""

    host: str
    port: int
    data_dir: Path
    cache_dir: Path
    model: str  # smollm2, the path of a GGUF file or folder, a name on the hub, or scripted:PATH
    weights: str
    device: str  # auto, cpu or cuda
    fast: bool
    threads: int  # 0: all cores
    context: int  # tokens; 0: the model's own
    rope: str  # RoPE scaling in place of the model's own; empty: the model's own
    kv_dtype: str  # auto, bf16 or fp8; the last two on cuda alone
    kv_memory: int  # 0: what the device leaves, on the CPU 2 GiB
    max_running: int
    max_requests: int
    speculation: int  # most tokens guessed for one step; 0: none
    dialect: str  # auto, or one of DIALECTS
    reasoning_replay: str  # auto, all or off: which thoughts of earlier answers are in a prompt
    attribution_line: str  # ignore or keep: what becomes of a system prompt's line that only says who asks
    guard: str  # against loops: on, off, or the limits that are not the default; see loops.limits
    snapshots: str  # on or off: whether KV is kept on disk
    snapshot_limit: int
    snapshot_codec: str  # raw, zstd, or auto: whichever proves faster
    snapshot_restore: str  # measured: where reading is faster than computing; or always
    host_cache: int  # 0: none
    api_key_file: Path | None
    insecure_bind: bool
    checkpoint: str  # own or external: who empties the journal's write-ahead log
    wal_max: int
    unstored_retention: float
    journal_max_bytes: int  # 0: no limit
    journal_max_age: float  # 0: no limit
    websocket: str  # on or off: whether Responses are served over WebSocket
    keep_alive: float
    reader_timeout: float
    drain_timeout: float
    body_max: int
    log_level: str
    log_format: str
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Reject(ValueError):
    """A parser's word on a bad value; `load` adds where it came from."""


def parse_size(value: object) -> int:
    """Bytes of `20GiB`, `64MiB`, `512KB` or a plain number. GiB counts in 1024s, GB in 1000s. Raises Reject."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise Reject("is not a size such as 20GiB")
    unit = (match[2] or "B").upper()
    power = "BKMGT".index(unit[0])
    return int(float(match[1]) * (1024 if "I" in unit else 1000) ** power)


def parse_duration(value: object) -> float:
    """Seconds of `7d`, `30s`, `1.5h`, `500ms` or a plain number. Raises Reject."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise Reject("is not a duration such as 7d or 30s")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def show_size(size: int) -> str:
    """The shortest exact spelling of a number of bytes: 1GiB, 1536MiB, 1000."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)


def about_size(size: int) -> str:
    """A number of bytes for people, to three digits: 11.8 MiB."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def show_duration(seconds: float) -> str:
    """The shortest exact spelling of a duration: 7d, 90s, 500ms."""
    for unit in ("d", "h", "m", "s"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{int(seconds // _SECONDS[unit])}{unit}"
    return f"{round(seconds * 1000)}ms" if seconds else "0"


def _whole(low: int, high: int) -> Callable[[object, Path], int]:
    def parse(value: object, base: Path) -> int:
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise Reject("is not a whole number")
        return _within(value, low, high, str)

    return parse


def _size(low: int, high: int) -> Callable[[object, Path], int]:
    return lambda value, base: _within(parse_size(value), low, high, show_size)


def _kv_memory(value: object, base: Path) -> int:
    """0 is auto."""
    return 0 if value == "auto" else _within(parse_size(value), KV_BYTES_MIN, KV_BYTES_MAX, show_size)


def _show_kv_memory(size: int) -> str:
    return show_size(size) if size else "auto"


def _duration(value: object, base: Path) -> float:
    return _within(parse_duration(value), 0.0, SECONDS_MAX, show_duration)


def _pause(value: object, base: Path) -> float:
    return _within(parse_duration(value), PAUSE_SECONDS_MIN, SECONDS_MAX, show_duration)


def _within(value: Any, low: Any, high: Any, show: Callable[[Any], str]) -> Any:
    if not low <= value <= high:
        raise Reject(f"is not between {show(low)} and {show(high)}")
    return value


def _choice(*words: str) -> Callable[[object, Path], str]:
    def parse(value: object, base: Path) -> str:
        if value not in words:
            raise Reject(f"is not one of {', '.join(words)}")
        return str(value)

    return parse


def _switch(value: object, base: Path) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if not isinstance(value, str) or value.strip().lower() not in words:
        raise Reject("is not true or false")
    return words[value.strip().lower()]


def _word(value: bool) -> str:
    return "true" if value else "false"


def _text(value: object, base: Path) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise Reject("is not a text")
    return value.strip()


def _path(value: object, base: Path) -> Path:
    if isinstance(value, Path):
        value = str(value)
    return Path(os.path.normpath(base / os.path.expanduser(_text(value, base))))


def _rope(value: object, base: Path) -> str:
    """What it may be is checked where the model is known; empty means the model's own."""
    if not isinstance(value, str) or "\0" in value:
        raise Reject("is not a text")
    return value.strip()


def _guard(value: object, base: Path) -> str:
    try:
        return loops.parse(_text(value, base))
    except Reject:
        raise
    except ValueError as error:
        raise Reject(str(error)) from None


def _host(value: object, base: Path) -> str:
    host = _text(value, base)
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not re.fullmatch(r"[0-9A-Za-z_.:%-]+", host):
        raise Reject("is not a host name or address")
    return host


def _model(value: object, base: Path) -> str:
    """A bare name stays as it is; what looks like a path is settled against the folder it was written in.

    `org/name` may be either: it is a path if there is something, and else a name on the hub.
    """
    text = _text(value, base)
    if text.startswith("scripted:"):
        return "scripted:" + str(_path(text.removeprefix("scripted:"), base))
    if _ON_HUB.fullmatch(text) and not os.path.exists(base / text):
        return text
    return str(_path(text, base)) if "/" in text or text.lower().endswith(".gguf") else text


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: its name in zj.toml (as a flag with dashes, as a variable ZJ_ and capitals) and its meaning."""

    name: str
    parse: Callable[[object, Path], Any]  # (value, folder for relative paths); raises Reject
    default: object  # as a user would write it; None: not set
    help: str
    show: Callable[[Any], str] = str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "ZJ_" + self.name.upper()


SETTINGS = (
    Setting("host", _host, "127.0.0.1", "Address to listen on."),
    Setting("port", _whole(0, 65535), 8077, "Port to listen on; 0 takes a free one."),
    Setting("data_dir", _path, "$XDG_DATA_HOME/zjournal", "Where the journal is kept; one server owns it."),
    Setting("cache_dir", _path, "$XDG_CACHE_HOME/zjournal", "Where downloaded models and their checksums are kept."),
    Setting("model", _model, "smollm2", "Model: smollm2, a GGUF file, a folder, ORG/NAME of the hub, scripted:FILE."),
    Setting("weights", _choice("file", "fp32"), "file", "file: as stored in the GGUF; fp32: expanded to exact values."),
    Setting("device", _choice("auto", "cpu", "cuda"), "auto", "Where the model runs: auto, cpu or cuda."),
    Setting("fast", _switch, False, "On cuda, matrix products whose bits depend on the batch; see kernels.md.", _word),
    Setting("threads", _whole(0, THREADS_MAX), 0, "Threads of the engine; 0: all cores."),
    Setting("context", _whole(0, CONTEXT_MAX), 0, "Context window in tokens; 0: the model's own."),
    Setting("rope", _rope, "", "RoPE in place of the model's: linear:FACTOR, yarn:FACTOR or base:NUMBER."),
    Setting("kv_dtype", _choice("auto", "bf16", "fp8"), "auto", "How KV is held on cuda; auto: bf16, on the CPU fp32."),
    Setting(
        "kv_memory", _kv_memory, "auto", "Memory for KV; auto: what a card leaves, 2GiB on the CPU.", _show_kv_memory
    ),
    Setting("max_running", _whole(1, RUNNING_MAX), 8, "Requests that are computed at the same time."),
    Setting("max_requests", _whole(1, REQUESTS_MAX), 256, "Requests that wait or are computed; one more gets a 429."),
    Setting("speculation", _whole(0, SPECULATION_MAX), 5, "Tokens guessed from what was said before; 0: none."),
    Setting("dialect", _choice("auto", *DIALECTS), "auto", "How the model writes tools; auto: as its template says."),
    Setting(
        "reasoning_replay",
        _choice("auto", "all", "off"),
        "auto",
        "Earlier thoughts in prompts: auto, where the dialect keeps them; all; off: only those that clients send.",
    ),
    Setting(
        "attribution_line",
        _choice("ignore", "keep"),
        "ignore",
        "Whether a coding agent's billing line enters the prompt: ignore or keep.",
    ),
    Setting("guard", _guard, "on", "Stops answers that loop: on, off, or limits such as run=256,tokens=1024."),
    Setting("snapshots", _choice("on", "off"), "on", "Whether KV is kept on disk, in the data directory: on or off."),
    Setting(
        "snapshot_limit",
        _size(SNAPSHOT_BYTES_MIN, KV_BYTES_MAX),
        "20GiB",
        "Most disk for KV; 256MiB of the disk stay free.",
        show_size,
    ),
    Setting("snapshot_codec", _choice("auto", "raw", "zstd"), "auto", "How KV is stored: auto, raw or zstd."),
    Setting(
        "snapshot_restore",
        _choice("measured", "always"),
        "measured",
        "When KV is read back: measured, if that is faster than computing it, or always.",
    ),
    Setting("host_cache", _size(0, KV_BYTES_MAX), "0", "Memory in front of the disk for KV; 0: none.", show_size),
    Setting("api_key_file", _path, None, "File of accepted keys, mode 0600; see zj keys."),
    Setting("insecure_bind", _switch, False, "Allow an address other than loopback without keys.", _word),
    Setting("checkpoint", _choice("own", "external"), "own", "Who empties the write-ahead log: own or external."),
    Setting("wal_max", _size(WAL_BYTES_MIN, WAL_BYTES_MAX), "1GiB", "Log size that stops new requests.", show_size),
    Setting("unstored_retention", _duration, "7d", "How long store:false turns stay in the journal.", show_duration),
    Setting(
        "journal_max_bytes",
        _size(0, KV_BYTES_MAX),
        "0",
        "Delete the least recently used sessions while the journal holds more; 0: never.",
        show_size,
    ),
    Setting("journal_max_age", _duration, "0", "Delete sessions unused for so long; 0: never.", show_duration),
    Setting("websocket", _choice("on", "off"), "on", "Whether Responses are served over WebSocket: on or off."),
    Setting("keep_alive", _pause, "10s", "Silence after which streams tell that they live.", show_duration),
    Setting("reader_timeout", _pause, "60s", "How long a client may read nothing of its answer.", show_duration),
    Setting("drain_timeout", _duration, "30s", "How long SIGTERM waits for running requests.", show_duration),
    Setting("body_max", _size(BODY_BYTES_MIN, BODY_BYTES_MAX), "64MiB", "Largest request body.", show_size),
    Setting("log_level", _choice("debug", "info", "warning", "error"), "info", "Least severity that is logged."),
    Setting("log_format", _choice("text", "json"), "text", "Log lines as text or as one JSON object each."),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def load(flags: Mapping[str, object], environ: Mapping[str, str], cwd: Path) -> Config:
    """Settles every setting.

    `flags` maps setting names to values, None meaning not given; the extra name `config` is the file to read, which
    must then exist. Relative paths are taken from `cwd`, those in the file from the file's folder.
    Raises ConfigFault for an unknown name, a value that cannot be, or a file that cannot be read.
    """
    assert set(flags) <= {*_BY_NAME, "config"}, flags.keys()
    given = {name: value for name, value in flags.items() if value is not None}
    variables = {name: value for name, value in environ.items() if name.startswith("ZJ_") and value.strip()}
    for name in variables:
        if name not in ("ZJ_CONFIG", KEY_VARIABLE) and name.removeprefix("ZJ_").lower() not in _BY_NAME:
            raise ConfigFault(f"environment: unknown variable {name}{_nearest(name, [s.variable for s in SETTINGS])}")
    variables.pop(KEY_VARIABLE, None)
    wanted = given.pop("config", None) or variables.pop("ZJ_CONFIG", None)
    file = cwd / os.path.expanduser(str(wanted or CONFIG_FILE))
    table, lines = _read_file(file, must_exist=wanted is not None)

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        name, base = setting.name, cwd
        if name in given:
            value, origin = given[name], f"flag {setting.flag}"
        elif setting.variable in variables:
            value, origin = variables[setting.variable], f"environment {setting.variable}"
        elif name in table:
            value, origin, base = table[name], f"file {file}:{lines[name]}", file.parent
        else:
            value, origin = _default(setting, environ), "default"
        values[name] = None if value is None else _parse(setting, value, origin, base)
        origins[name] = origin
    return Config(**values, origins=origins)


def check_serving(config: Config) -> None:
    """Refuses what is safe to read but not to serve: an open address without keys, a key file that others can read.

    And memory that the machine does not have. Raises ConfigFault.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.host_cache > memory:
        raise ConfigFault(
            f"host_cache {show_size(config.host_cache)} ({config.origins['host_cache']}) is more than the machine's "
            f"memory, which is {about_size(memory)}",
            param="host_cache",
        )
    if config.api_key_file is not None:
        keys.read(config.api_key_file)
    elif not is_loopback(config.host) and not config.insecure_bind:
        raise ConfigFault(
            f"host {config.host} can be reached from other machines and there is no api_key_file: anyone could use "
            "this server; set --api-key-file, or --insecure-bind if that is meant",
            param="host",
        )


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; other names are not looked up."""
    import ipaddress  # here, because zj --help must not pay for it

    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client_key(environ: Mapping[str, str]) -> str | None:
    """The key that clients of the server use, where one is set."""
    return environ.get(KEY_VARIABLE, "").strip() or None


def sqlite_temporary_dir(environ: Mapping[str, str]) -> Path:
    """The folder that SQLite takes for temporary files."""
    named = [environ[name] for name in ("SQLITE_TMPDIR", "TMPDIR") if environ.get(name)]
    for folder in (*named, "/var/tmp", "/usr/tmp", "/tmp"):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder)
    return Path(".")


def version() -> str:
    """The installed version, or 0+checkout where the package runs without having been installed."""
    from importlib import metadata  # here, because zj --help must not pay for it

    try:
        return metadata.version("zjournal")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def _default(setting: Setting, environ: Mapping[str, str]) -> object:
    """The XDG rules: an unset, empty or relative variable counts as the usual folder below the home directory."""
    for variable, usual in (("XDG_DATA_HOME", "~/.local/share"), ("XDG_CACHE_HOME", "~/.cache")):
        if isinstance(setting.default, str) and setting.default.startswith(f"${variable}"):
            home = environ.get("HOME") or os.path.expanduser("~")
            if not os.path.isabs(home):  # a user that no one has written down, in a container: nothing to guess
                home = NO_HOME
            folder = environ.get(variable, "")
            root = folder if os.path.isabs(folder) else usual.replace("~", home, 1)
            return root + setting.default.removeprefix(f"${variable}")
    return setting.default


def _parse(setting: Setting, value: object, origin: str, base: Path) -> Any:
    source = origin.split(" ", 1)[-1]
    try:
        return setting.parse(value, base)
    except Reject as reject:
        label = source if source in (setting.flag, setting.variable) else f"{source}: {setting.name}"
        raise ConfigFault(f"{label}: {value!r} {reject}", param=setting.name) from None


def _read_file(file: Path, *, must_exist: bool) -> tuple[dict[str, object], dict[str, int]]:
    """The settings of a zj.toml and the line of each; empty if there is none and none was asked for."""
    try:
        with open(file, "rb") as stream:
            raw = stream.read(CONFIG_BYTES_MAX + 1)
    except FileNotFoundError:
        if must_exist:
            raise ConfigFault(f"{file}: no such file", param="config") from None
        return {}, {}
    except OSError as error:
        raise ConfigFault(f"{file}: {error.strerror}", param="config") from None
    if len(raw) > CONFIG_BYTES_MAX:
        raise ConfigFault(f"{file}: larger than {show_size(CONFIG_BYTES_MAX)}", param="config")
    import tomllib  # here, because zj --help must not pay for it

    try:
        text = raw.decode()
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigFault(f"{file}:{line}: not UTF-8", param="config") from None
    except tomllib.TOMLDecodeError as error:
        place = re.fullmatch(r"(.*) \(at line (\d+), column \d+\)", str(error), re.DOTALL)
        where, what = (f"{file}:{place[2]}", place[1]) if place else (str(file), str(error))
        raise ConfigFault(f"{where}: not TOML: {what}", param="config") from None
    lines = {name: _line_of(name, text) for name in table}
    for name in table:
        if name not in _BY_NAME:
            near = _nearest(name, list(_BY_NAME))
            raise ConfigFault(f"{file}:{lines[name]}: unknown key {name!r}{near}", param=name)
    return table, lines


def _line_of(name: str, text: str) -> int:
    """The line where a top-level key or table of this name starts; tomllib keeps no positions."""
    start = re.compile(rf"\s*\[*\s*[\"']?{re.escape(name)}[\"']?\s*[\].=]")
    return next((number for number, line in enumerate(text.splitlines(), 1) if start.match(line)), 1)


def _nearest(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else f"; known are {', '.join(known)}"
