"""Settings: which source wins, what a value may look like, and what an error says."""

from __future__ import annotations

import dataclasses
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving import zj
from zjournal import config, keys, loops
from zjournal.config import SETTINGS, Config, check_serving, load
from zjournal.errors import ConfigFault
from zjournal.link import wire

ENVIRON = {"HOME": "/home/ada"}
KEY = "correct-horse-battery"


def test_without_a_home_nothing_is_made_in_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run us as a user that no one has written down."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    settled = load({}, {}, Path("/nowhere"))
    assert settled.data_dir == Path("/nonexistent/.local/share/zjournal")


def test_a_key_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert keys.read(_key_file(tmp_path, f"\ufefflaptop:{KEY}\n")).name_of(KEY) == "laptop"


def test_defaults_follow_xdg() -> None:
    settled = load({}, ENVIRON, Path("/nowhere"))
    assert settled.data_dir == Path("/home/ada/.local/share/zjournal")
    assert settled.cache_dir == Path("/home/ada/.cache/zjournal")
    assert set(settled.origins.values()) == {"default"}
    moved = load(
        {}, {**ENVIRON, "XDG_DATA_HOME": "/srv/data", "XDG_CACHE_HOME": "relative/is/ignored"}, Path("/nowhere")
    )
    assert moved.data_dir == Path("/srv/data/zjournal")
    assert moved.cache_dir == Path("/home/ada/.cache/zjournal")


def test_each_source_beats_the_next(tmp_path: Path) -> None:
    (tmp_path / "zj.toml").write_text("# comment\nport = 1001\nmax_running = 3\nthreads = 2\n")
    environ = {**ENVIRON, "ZJ_PORT": "1002", "ZJ_MAX_RUNNING": "4"}
    settled = load({"port": "1003", "threads": None}, environ, tmp_path)
    assert (settled.port, settled.max_running, settled.threads, settled.context) == (1003, 4, 2, 0)
    assert settled.origins["port"] == "flag --port"
    assert settled.origins["max_running"] == "environment ZJ_MAX_RUNNING"
    assert settled.origins["threads"] == f"file {tmp_path}/zj.toml:4"
    assert settled.origins["context"] == "default"


@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_variable_counts_as_not_set(empty: str) -> None:
    settled = load({}, {**ENVIRON, "ZJ_PORT": empty, "ZJ_NO_SUCH_THING": empty}, Path("/nowhere"))
    assert settled.port == 8077
    assert settled.origins["port"] == "default"


def test_relative_paths_belong_to_where_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "my.toml").write_text('model = "scripted:turns.json"\ndata_dir = "data"\n')
    flags = {"config": "etc/my.toml", "cache_dir": "cache"}
    settled = load(flags, ENVIRON, tmp_path)
    assert settled.model == f"scripted:{tmp_path}/etc/turns.json"
    assert settled.data_dir == tmp_path / "etc" / "data"
    assert settled.cache_dir == tmp_path / "cache"
    assert load({}, {**ENVIRON, "ZJ_CONFIG": "etc/my.toml"}, tmp_path).data_dir == settled.data_dir


def test_model_names_stay_and_model_paths_are_settled() -> None:
    def model(text: str) -> str:
        return load({"model": text}, ENVIRON, Path("/home")).model

    assert model("smollm2") == "smollm2"
    assert model("m.gguf") == "/home/m.gguf"
    assert model("../m") == "/m"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 << 30),
        ("64mib", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("3M", 3 * 10**6),
        ("2097152", 2 << 20),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert load({"kv_memory": text}, ENVIRON, Path("/nowhere")).kv_memory == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604800), ("500ms", 0.5), ("1.5h", 5400), ("0", 0), ("90", 90), ("2w", 1209600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert load({"drain_timeout": text}, ENVIRON, Path("/nowhere")).drain_timeout == seconds


@pytest.mark.parametrize(
    ("text", "settled", "changed"),
    [
        ("on", "on", {}),
        (" off ", "off", None),
        ("run=512,tokens=2048", "on", {}),
        ("tokens = 99, run=0", "run=0,tokens=99", {"run": 0, "tokens": 99}),
    ],
)
def test_the_limits_of_the_guard(text: str, settled: str, changed: dict[str, int] | None) -> None:
    assert load({"guard": text}, ENVIRON, Path("/nowhere")).guard == settled
    defaults = {name: default for name, (default, _, _) in loops.LIMITS.items()}
    assert loops.limits(settled) == (() if changed is None else tuple((defaults | changed).values()))
    assert loops.fit(loops.limits(settled))
    assert tuple(loops.LIMITS) == wire.Guard.__struct_fields__


@given(st.integers(0, 1 << 50))
def test_size_reads_what_it_shows(size: int) -> None:
    assert config.parse_size(config.show_size(size)) == size


@given(st.integers(0, 10**9))
def test_duration_reads_what_it_shows(millis: int) -> None:
    assert config.parse_duration(config.show_duration(millis / 1000)) == pytest.approx(millis / 1000)


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"port": "http"}, {}, "--port: 'http' is not a whole number"),
        ({"port": "65536"}, {}, "--port: '65536' is not between 0 and 65535"),
        ({"kv_memory": "20Gb!"}, {}, "--kv-memory: '20Gb!' is not a size such as 20GiB"),
        ({"kv_memory": "1KiB"}, {}, "--kv-memory: '1KiB' is not between 1MiB and 16TiB"),
        (
            {},
            {"ZJ_UNSTORED_RETENTION": "a week"},
            "ZJ_UNSTORED_RETENTION: 'a week' is not a duration such as 7d or 30s",
        ),
        ({}, {"ZJ_PROT": "1"}, "environment: unknown variable ZJ_PROT; did you mean ZJ_PORT?"),
        (
            {"guard": "run=1,run=2"},
            {},
            "--guard: 'run=1,run=2' is not on, off, or limits, each once, of run, period, repeats, tokens, restarts, "
            "exclusions, values; such as run=256,tokens=1024",
        ),
        ({"guard": "run=-1"}, {}, "--guard: 'run=-1' has no whole number behind run"),
        ({"guard": "repeats=1"}, {}, "--guard: 'repeats=1' has a repeats that is not between 2 and 1048576"),
        ({"weights": "int8"}, {}, "--weights: 'int8' is not one of file, fp32"),
        ({"host": "a b"}, {}, "--host: 'a b' is not a host name or address"),
        ({"config": "absent.toml"}, {}, "/nowhere/absent.toml: no such file"),
    ],
)
def test_wrong_flags_and_variables_are_named(flags: dict[str, str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        load(flags, ENVIRON | environ, Path("/nowhere"))
    assert caught.value.message == said
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 1\n\nkv_memry = '1GiB'\n", "zj.toml:3: unknown key 'kv_memry'; did you mean kv_memory?"),
        ("[server]\nport = 1\n", "zj.toml:1: unknown key 'server'; known are host, port"),
        ("port = 1\nport = 2\n", "zj.toml:2: not TOML: Cannot overwrite a value"),
        ("port =\n", "zj.toml:1: not TOML: Invalid value"),
        ("\nport = true\n", "zj.toml:2: port: True is not a whole number"),
        ("model = ''\n", "zj.toml:1: model: '' is not a text"),
        ("insecure_bind = 'perhaps'\n", "zj.toml:1: insecure_bind: 'perhaps' is not true or false"),
        ("port = 1\n# \udcff\n", "zj.toml:2: not UTF-8"),
    ],
)
def test_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "zj.toml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigFault) as caught:
        load({}, ENVIRON, tmp_path)
    assert caught.value.message.startswith(f"{tmp_path}/{said}")


@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "zj.toml").write_bytes(raw)
    try:
        assert isinstance(load({}, ENVIRON, folder), Config)
    except ConfigFault as fault:
        assert str(folder / "zj.toml") in fault.message


def test_config_is_frozen_and_holds_each_setting_once() -> None:
    settled = load({}, ENVIRON, Path("/nowhere"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        settled.port = 1  # type: ignore[misc]
    fields = [field.name for field in dataclasses.fields(Config)]
    assert fields == [*(setting.name for setting in SETTINGS), "origins"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_serving(load({"host": host}, ENVIRON, Path("/nowhere")))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "box.example"])
def test_open_address_needs_keys_or_a_clear_word(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigFault, match="--api-key-file"):
        check_serving(load({"host": host}, ENVIRON, tmp_path))
    check_serving(load({"host": host, "insecure_bind": True}, ENVIRON, tmp_path))
    file = _key_file(tmp_path, f"laptop:{KEY}\n")
    check_serving(load({"host": host, "api_key_file": str(file)}, ENVIRON, tmp_path))


def test_keys_are_known_by_name_and_shown_nowhere(tmp_path: Path) -> None:
    known = keys.read(_key_file(tmp_path, f"# two keys of one owner\n\nlaptop: {KEY}\nlaptop:{KEY}-2\nci:{KEY}:3\n"))
    assert [known.name_of(k) for k in (KEY, f"{KEY}-2", f"{KEY}:3", "laptop", "")] == [
        "laptop",
        "laptop",
        "ci",
        None,
        None,
    ]
    assert known.names == ("ci", "laptop")
    assert KEY not in repr(vars(known))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (KEY, ":1: not of the form name:key"),
        (f"\na b:{KEY}", ":2: a name is"),
        ("a:short", ":1: a key has 16 to 512 characters, this one 5"),
        (f"a:{KEY} b", ":1: behind a key there may be requests=NUMBER"),
        (f"a:{KEY}é", ":1: a key is printable ASCII without spaces"),
        (f"a:{KEY} requests=0", ":1: requests is not between 1 and"),
        (f"a:{KEY} streams=1 streams=1", ":1: streams stands twice"),
        ("a:sha256:abc", ":1: sha256: needs 64 hexadecimal digits"),
        (f"a:{KEY} streams=1\na:{KEY}-2 streams=2", ":2: a has other limits above"),
        (f"a:{KEY}\nb:{KEY}", ":2: the same key stands twice"),
        ("# none\n", ": no keys in it"),
    ],
)
def test_wrong_key_files_are_named_without_the_key(tmp_path: Path, text: str, said: str) -> None:
    path = _key_file(tmp_path, text)
    with pytest.raises(ConfigFault) as caught:
        keys.read(path)
    assert caught.value.message.startswith(f"api_key_file {path}{said}")
    assert KEY not in caught.value.message


def test_key_file_that_others_can_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = _key_file(tmp_path, f"a:{KEY}", mode=0o640)
    with pytest.raises(ConfigFault, match=f"run: chmod 600 {path}"):
        keys.read(path)
    with pytest.raises(ConfigFault, match="No such file"):
        keys.read(tmp_path / "absent")


def test_serve_refuses_a_wrong_setting_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "zj.toml").write_text("prot = 1\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = zj("serve", "--config", str(tmp_path / "zj.toml"), "--data-dir", str(tmp_path / "data"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2, "of processor time"
    assert done.returncode == 78
    assert done.stderr == f"zj: {tmp_path}/zj.toml:1: unknown key 'prot'; did you mean port?\n"
    assert not os.path.exists(tmp_path / "data")


def _key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("smollm2", False),
        ("org/name", False),
        ("org/name@v1:a.gguf", False),
        ("org/there", True),
        ("org/model.gguf", True),
        ("./org/name", True),
        ("/org/name", True),
        ("a/b/c", True),
    ],
)
def test_a_model_on_the_hub_is_no_path_unless_there_is_one(tmp_path, text, is_path):
    (tmp_path / "org" / "there").mkdir(parents=True)
    expected = str(tmp_path / text) if is_path else text
    assert load({"model": text}, {}, tmp_path).model == expected


def test_rope_may_be_empty(tmp_path):
    assert load({}, {}, tmp_path).rope == ""
    assert load({"rope": " yarn:2 "}, {}, tmp_path).rope == "yarn:2"
    with pytest.raises(ConfigFault, match="rope"):
        load({"rope": 2}, {}, tmp_path)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (11_800_000, "11.3 MiB"),
        (1 << 30, "1.00 GiB"),
        (20 << 30, "20.0 GiB"),
        (3 << 50, "3072 TiB"),
    ],
)
def test_sizes_for_people(size: int, told: str) -> None:
    assert config.about_size(size) == told


@pytest.mark.parametrize("name", ["snapshot_limit", "host_cache"])
@pytest.mark.parametrize("value", ["20G!", "much", "-1", "", "1MiB2", "20 000", "1e9", "99999TiB", True, 1.5])
def test_sizes_of_the_tiers_are_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigFault) as refused:
        load({name: value}, {}, tmp_path)
    assert refused.value.message.startswith("--" + name.replace("_", "-") + ": ")
    assert refused.value.param == name


def test_more_host_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    settled = load({"host_cache": "15TiB"}, {}, tmp_path)
    with pytest.raises(ConfigFault, match=r"host_cache 15TiB \(flag --host-cache\) is more than the machine's memory"):
        check_serving(settled)
    check_serving(load({"host_cache": "1MiB"}, {}, tmp_path))
