"""The device's runner beside its kernels: leases, what the draw is told, memory, and which device is taken."""

from __future__ import annotations

import logging
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.engine import interpreted, toy
from tests.kernels.quicker import (  # noqa: F401 (fixtures of all tests here)
    interpreter_leaves_memory_where_it_is,
    interpreter_prepares_the_language_once,
)
from zjournal.checkpoint.checkpoint import open_checkpoint
from zjournal.engine import device_memory, device_runner, devices, loading, reach
from zjournal.engine.cache.staging import Direct
from zjournal.engine.decoding.steering import Choice
from zjournal.engine.device import Host
from zjournal.engine.device_runner import RESERVE_BYTES, DeviceRunner, _kv_bytes, _singles, _warm, draws
from zjournal.engine.graphs import WIDTH_MIN, Graphs, buckets
from zjournal.engine.models import forward as passes
from zjournal.engine.models.decoder import Batch
from zjournal.engine.runner import Runner
from zjournal.engine.sequence import Sampled, Slice
from zjournal.errors import EngineFailed, EngineStartFault
from zjournal.kernels import matmul, rmsnorm
from zjournal.kernels import sample as sampling
from zjournal.kernels.blocks import gather, scatter
from zjournal.link import wire
from zjournal.snapshots.format import CHUNK_BLOCKS

GREEDY = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
BLOCK = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture(scope="module")
def runner(path: Path):
    one = interpreted.load(path)
    yield one
    one.close()


# --- leases ---------------------------------------------------------------------------------------------


@pytest.fixture
def stages() -> device_memory.DeviceStages:
    pages = torch.arange(40 * BLOCK, dtype=torch.int32).to(torch.uint8).view(40, BLOCK)
    return device_memory.DeviceStages(Host(), pages, gather, scatter)


def test_what_goes_out_is_the_blocks_as_they_were(stages: device_memory.DeviceStages) -> None:
    stages.pages[3] = 7
    lease = stages.out([5, 3])
    assert lease is not None
    stages.pages[3] = 9
    assert [bytes(view) for view in lease.views()] == [bytes(stages.pages[5].tolist()), bytes([7] * BLOCK)]
    assert all(view.nbytes == BLOCK for view in lease.views())
    lease.close()


def test_no_more_goes_out_at_once_than_there_is_room_for(stages: device_memory.DeviceStages) -> None:
    leases = [stages.out([block]) for block in range(device_memory.OUT_STAGES)]
    assert None not in leases
    assert stages.out([9]) is None
    leases[0].close()
    again = stages.out([9])
    assert again is not None
    assert bytes(again.views()[0]) == bytes(stages.pages[9].tolist())


def test_what_comes_in_is_there_when_it_is_stored_and_not_before(stages: device_memory.DeviceStages) -> None:
    before = stages.pages.clone()
    lease = stages.into([8, 2])
    with lease.open() as views:
        for view, value in zip(views, (1, 2), strict=True):
            view[:] = bytes([value] * BLOCK)
        assert torch.equal(stages.pages, before)
        lease.store()
    before[8], before[2] = 1, 2
    assert torch.equal(stages.pages, before)
    assert stages.free.qsize() == device_memory.INTO_STAGES


def test_a_read_that_fails_gives_its_room_back_and_changes_nothing(stages: device_memory.DeviceStages) -> None:
    before = stages.pages.clone()
    lease = stages.into(range(CHUNK_BLOCKS))
    with pytest.raises(OSError, match="bad"), lease.open() as views:
        views[0][:] = bytes(BLOCK)
        raise OSError("bad")
    assert torch.equal(stages.pages, before)
    assert stages.free.qsize() == device_memory.INTO_STAGES


def test_blocks_in_memory_are_their_own_lease() -> None:
    memory = [memoryview(bytearray(4)) for _ in range(3)]
    direct = Direct(memory.__getitem__)
    with direct.into([2]).open() as views:
        views[0][:] = b"abcd"
    assert bytes(direct.out([1, 2]).views()[1]) == b"abcd"


# --- the draw -------------------------------------------------------------------------------------------


def slice_of(sampling: wire.Sampling, drafts: int = 0, index: int = 0, request: str = "a", steer=None) -> Slice:
    return Slice(request, [1] * (drafts + 1), 0, [0], sampling, index, drafts=drafts, steer=steer)


def test_what_no_row_asks_for_is_not_computed() -> None:
    told = draws([slice_of(GREEDY)], {}, 131)
    assert (told.top_k, told.top_p, told.min_p, told.mask) == (None, None, None, None)
    assert told.temperature.tolist() == [0.0]


def test_each_row_has_its_own_number_and_its_requests_settings() -> None:
    hot = wire.Sampling(temperature=0.5, top_p=0.9, top_k=500, seed=(1 << 64) - 1, min_p=0.1)
    one = wire.Sampling(temperature=2.0, top_p=1.0, top_k=1, seed=-1)
    told = draws([slice_of(hot, drafts=1, index=4), slice_of(one, request="b")], {}, 131)
    assert told.temperature.tolist() == [0.5, 0.5, 0.0]
    assert told.top_k is not None and told.top_k.tolist() == [131, 131, 0]
    assert told.number.tolist() == [4, 5, 0]
    assert told.seed.tolist() == [-1, -1, -1]
    assert told.min_p is not None and told.min_p.dtype == np.float32


def test_masks_are_what_may_come_and_rows_without_one_are_free() -> None:
    allowed = np.zeros(8, dtype=np.uint32)
    allowed[[0, 4]] = 0b1011, 1
    rows = {"a": [Choice(allowed=allowed, banned=[1]), Choice(banned=[130, 64])], "b": [Choice(forced=7)]}
    hot = wire.Sampling(temperature=0.5, top_p=1.0, top_k=0, seed=0)
    told = draws([slice_of(hot, drafts=1), slice_of(hot, request="b"), slice_of(hot, request="c")], rows, 131)
    assert told.mask is not None and told.mask.shape == (4, 5)
    bits = np.unpackbits(told.mask.view(np.uint8), axis=1, bitorder="little")[:, :131]
    assert np.flatnonzero(bits[0]).tolist() == [0, 3, 128]
    assert np.flatnonzero(bits[1] == 0).tolist() == [64, 130]
    assert bits[2:].all()
    assert told.temperature.tolist() == [0.5, 0.5, 0.0, 0.5]
    assert allowed[0] == 0b1011, "what the fence has made is its own"


def test_a_step_answers_as_the_sampler_on_the_host_does(runner: DeviceRunner) -> None:
    told = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, logprobs=2)
    biased = wire.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, logit_bias=((77, 1000.0),))
    parts = [
        Slice("a", [5, 6, 7], 0, [1], GREEDY, 0),
        Slice("b", [5, 6, 7], 0, [2], told, 0),
        Slice("c", [5, 6, 7], 0, [3], biased, 0),
        Slice("d", [5, 6, 7], 0, [4], None, 0),
    ]
    best = int(runner.logits(parts[:1])[0].argmax())
    plain, with_logprobs, forced = runner.step(parts)
    assert plain == Sampled((best,))
    assert isinstance(with_logprobs, Sampled) and with_logprobs.tokens == (best,) and with_logprobs.logprobs
    assert forced == Sampled((77,))
    assert runner.step(parts[3:]) == []


class Steer:
    """Says the same of each row."""

    computes, ready, fault, reason = True, True, None, ""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def choices(self, drafts: list[int]) -> list[Choice]:
        return [self._choice] * (len(drafts) + 1)

    def advance(self, tokens: list[int]) -> list[wire.Looped]:
        return []


def test_a_fence_binds_the_draw_on_the_device(runner: DeviceRunner) -> None:
    allowed = np.zeros(5, dtype=np.uint32)
    allowed[1] = 0b101
    rows = [Choice(allowed=allowed), Choice(allowed=allowed, banned=[32]), Choice(forced=99), Choice(allowed * 0)]
    hot = wire.Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5)
    parts = [
        Slice(str(at), [5, 6], 0, [at], hot, 0, steer=Steer(choice), end_tokens=frozenset({1}))
        for at, choice in enumerate(rows)
    ]
    first, second, third, none = runner.step(parts)
    assert isinstance(first, Sampled) and first.tokens[0] in (32, 34)
    assert (second, third) == (Sampled((34,)), Sampled((99,)))
    assert none == Sampled((), end="fence")


def test_logits_that_are_no_numbers_fail_their_request_alone(runner: DeviceRunner) -> None:
    good = runner.step([Slice("b", [1, 2], 0, [1], GREEDY, 0)])
    runner._pages[0] = torch.nan
    parts = [Slice("a", [1], 3, [0], GREEDY, 0), Slice("b", [1, 2], 0, [1], GREEDY, 0)]
    bad, same = runner.step(parts)
    runner._pages[0] = 0
    assert isinstance(bad, EngineFailed)
    assert [same] == good


def test_a_device_that_fails_tells_the_shape_of_the_step(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "logits", fails)
    parts = [Slice(str(at), [5, 6, 7], at, [1], GREEDY, 0) for at in range(34)]
    with caplog.at_level(logging.ERROR, "zjournal.engine"), pytest.raises(RuntimeError, match="illegal memory access"):
        runner.step(parts)
    (said,) = caplog.messages
    assert said.startswith("interpreted failed in a step of 34 slices: 3 at 0, 3 at 1, ")
    assert said.endswith("3 at 31 and 2 more")


def test_a_step_that_does_not_end_is_told_of_with_its_shape(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def hangs(*_: object) -> torch.Tensor:
        assert ended.wait(60)
        raise RuntimeError("it was let go")

    monkeypatch.setattr(runner, "logits", hangs)
    monkeypatch.setattr(device_runner, "STEP_SECONDS_MAX", 0.05)
    monkeypatch.setattr(runner, "_watchdog", None)
    runner.watch(ended.set)
    with caplog.at_level(logging.CRITICAL, "zjournal.engine"), pytest.raises(RuntimeError, match="let go"):
        runner.step([Slice("a", [5, 6, 7], 8, [1, 2], GREEDY, 0)])
    assert caplog.messages == ["interpreted does not end a step of 1 slices: 3 at 8; this process does"]
    runner._watchdog.close()


def test_a_draw_depends_on_seed_and_position_only(runner: DeviceRunner) -> None:
    def draw(seed: int, index: int, company: int) -> int:
        hot = wire.Sampling(temperature=30.0, top_p=0.95, top_k=0, seed=seed)
        others = [Slice(str(i), [i + 1], 0, [10 + i], GREEDY, 0) for i in range(company)]
        (*_, one) = runner.step([*others, Slice("a", [1, 2], 0, [3], hot, index)])
        assert isinstance(one, Sampled)
        return one.tokens[0]

    alone = [draw(0, 0, 0), draw(0, 1, 0), draw(1, 0, 0)]
    assert draw(0, 1, 2) == alone[1]
    assert len(set(alone)) == 3


# --- a step's numbers -----------------------------------------------------------------------------------


def numbers(*values: list) -> list[torch.Tensor]:
    return [torch.tensor(one, dtype=torch.int32) for one in values]


def test_what_goes_up_in_one_copy_comes_apart_as_it_was() -> None:
    token, position, sequence, want = numbers([9, 8, 7, 6, 5], [40, 3, 0, 1, 2], [0, 1, 2, 2, 2], [0, 1, 4])
    (table,) = numbers([[1, 2, 3], [4, 0, 0], [5, 0, 0]])
    sizes, packed = passes.pack(token, position, sequence, table, want)
    step = passes.unpack(sizes, packed)
    assert (sizes.rows, sizes.sequences, sizes.singles, sizes.width, sizes.wanted) == (5, 3, 2, 3, 3)
    for given, found in ((token, step.token), (position, step.position), (table, step.table), (want, step.want)):
        assert torch.equal(given, found)
    assert (step.lengths.tolist(), step.starts.tolist()) == ([41, 4], [0, 3])
    offsets = [part.storage_offset() for part in step if isinstance(part, torch.Tensor)]
    assert all(offset % passes.ALIGN == 0 for offset in offsets)


def test_short_slices_are_rows_of_their_own_while_there_is_memory_for_them() -> None:
    token, position, sequence, want = numbers([1] * 13, [7, 8, 0, *range(10)], [0, 0, 1, *[2] * 10], [0, 1, 2])
    (table,) = numbers([[1, 2], [3, 0], [4, 5]])
    batch = Batch(token, position, sequence, table, want)
    made = _singles(batch, 3)
    assert made.sequence.tolist() == [0, 1, 2, *[3] * 10]
    assert made.table.tolist() == [[1, 2], [1, 2], [3, 0], [4, 5]]
    assert _singles(batch, 2) is batch


# --- memory ---------------------------------------------------------------------------------------------


def test_kv_takes_what_is_left_or_what_was_asked_for() -> None:
    free = 20 << 30
    assert _kv_bytes(0, free, 1 << 30, 2 << 30) == (16 << 30) - RESERVE_BYTES
    assert _kv_bytes(5 << 30, free, 1 << 30, 2 << 30) == 5 << 30
    with pytest.raises(EngineStartFault, match=r"no room for 17\.0 GiB \(kv_memory\): 20\.0 GiB are free"):
        _kv_bytes(17 << 30, free, 1 << 30, 2 << 30)
    with pytest.raises(EngineStartFault, match="no room for KV"):
        _kv_bytes(0, RESERVE_BYTES, 0, 0)


def test_the_pool_is_as_large_as_the_device_leaves_it(path: Path) -> None:
    free = RESERVE_BYTES + device_memory.staging_bytes(interpreted.BLOCK_BYTES) + 9 * interpreted.BLOCK_BYTES + 1
    start = interpreted.start(path, kv_bytes=0)
    one = DeviceRunner.load(start, Host(free), interpreted.kernels(), lambda _: None, step_tokens=0)
    assert (one.block_count, one.block_bytes, one.vocab_size) == (9, interpreted.BLOCK_BYTES, toy.VOCAB)
    one.close()


def test_a_step_takes_the_narrowest_graph_that_holds_it_and_gets_the_same_bits_from_each(path: Path) -> None:
    model = interpreted.decoder(path)
    pages = model.new_pages(13).fill_(torch.nan)
    pages[[12, 5, 0]] = 0
    graphs = Graphs(Host(), model.loaded, pages, 2, WIDTH_MIN + 5)
    assert len(graphs) == 4
    token, position = numbers([7, 9], [20, 3])
    (narrow,) = numbers([[12, 5], [0, 1]])
    wide = torch.nn.functional.pad(narrow, (0, WIDTH_MIN - 1))
    found = [graphs.run(token, position, table) for table in (narrow, wide)]
    assert found[0] is not None and found[1] is not None
    assert found[0].data_ptr() != found[1].data_ptr() and torch.equal(found[0], found[1])
    alone = graphs.run(token[:1], position[:1], narrow[:1])
    assert alone is not None and torch.equal(alone, found[0][:1]) and alone.isfinite().all()
    assert graphs.run(token, position, torch.nn.functional.pad(wide, (0, 5))) is None
    assert pages[[1, 2, 3, 4, *range(6, 12)]].isnan().all()


class Shapes:
    """A model that computes nothing: which steps it was asked for, and what their products would need compiled."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def tiles(self, rows: int, wanted: int = 0) -> set[matmul.Tile]:
        return {matmul.tile_for(rows, n) for n in (576, 4096, 28672)}

    def new_pages(self, blocks: int) -> torch.Tensor:
        return torch.empty(blocks)

    def forward(self, batch: Batch, pages: torch.Tensor) -> None:
        assert batch.want.max() < len(batch.token)
        self.rows.append(len(batch.token))


def test_no_request_waits_for_a_tile_to_be_compiled() -> None:
    model = Shapes()
    _warm(Host(), model, 8192, 2048, 8, 8)
    wanted = set().union(*(model.tiles(rows) for rows in range(1, 2049)))
    assert set().union(*(model.tiles(rows) for rows in model.rows)) == wanted == set(matmul.TILES)
    assert len(model.rows) <= len(wanted) + 2


@pytest.mark.parametrize(
    ("most", "first", "factor", "expected"),
    [(1, 1, 2, [1]), (8, 1, 2, [1, 2, 4, 8]), (6, 1, 2, [1, 2, 4, 6]), (100, 256, 4, [100]), (512, 256, 4, [256, 512])],
)
def test_graphs_are_made_for_a_few_sizes_and_for_the_largest(
    most: int, first: int, factor: int, expected: list[int]
) -> None:
    assert buckets(most, first, factor) == expected


# --- which device ---------------------------------------------------------------------------------------


def test_a_card_is_refused_with_the_numbers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = interpreted.start(path, kv_bytes=1 << 30)
    found = loading.opened(start)
    assert devices.refusal(devices.Card("A card", 3 << 30, (9, 0)), start, found) == ""
    told = devices.refusal(devices.Card("A card", 2 << 30, (9, 0)), start, found)
    assert told == "A card has 2.00 GiB free, and the model needs 2.00 GiB"
    assert (devices.VOCAB_MAX, devices.HIDDEN_MAX) == (sampling.VOCAB_MAX, rmsnorm.WIDTH_MAX)
    half = interpreted.start(path, kv_bytes=1 << 30, kv_dtype="fp8")
    assert "has no fp8 (kv_dtype)" in devices.refusal(devices.Card("A card", 3 << 30, (8, 6)), half, found)
    monkeypatch.setattr(devices, "HIDDEN_MAX", 64)
    told = devices.refusal(devices.Card("A card", 3 << 30, (9, 0)), start, found)
    assert told == "the model's hidden size is 96, and the kernels take up to 64"


def test_weights_are_counted_as_they_are_held(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    values = sum(int(np.prod(info.shape)) for info in checkpoint.tensors.values())
    assert devices.weight_bytes(checkpoint, packed=False) == 2 * values
    assert devices.weight_bytes(checkpoint, packed=True) < 1.2 * values


@pytest.fixture
def without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "look", lambda: "torch sees no CUDA device")


def test_a_card_without_a_compiler_beside_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (
        ("is_available", True),
        ("get_device_name", "A card"),
        ("get_device_capability", (9, 0)),
        ("mem_get_info", (5, 9)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(reach, "_start", lambda: None)
    assert devices.look() == devices.Card("A card", 5, (9, 0)), "it has kept what it needs"

    def fails(error: Exception) -> str:
        def start() -> None:
            raise error

        monkeypatch.setattr(reach, "_start", start)
        found = devices.look()
        assert isinstance(found, str)
        return found

    missing = RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
    assert fails(missing) == "there is no C compiler (gcc or clang), which triton needs"
    broken = subprocess.CalledProcessError(1, ["gcc"])
    told = "triton does not reach the card: Command '['gcc']' returned non-zero exit status 1"
    assert fails(broken) == told
    monkeypatch.setattr(reach.sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
    assert fails(broken) == told + " (there is no /nowhere/Python.h: the package is often called python3-dev)"
    assert "libcuda.so cannot found!" in fails(AssertionError("libcuda.so cannot found!\nPlease"))


def test_why_a_driver_or_a_card_is_no_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuses)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = "The NVIDIA driver on your system is too old (found version 11040)"
    assert devices.look() == f"torch sees no CUDA device: {told}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", refuses)
    assert devices.look() == f"the card cannot be used: {told}"


def test_a_start_that_fails_on_the_card_ends_on_the_cpu_unless_the_card_was_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> DeviceRunner:
        raise EngineStartFault("The device has no room for KV.")

    monkeypatch.setattr(devices, "look", lambda: devices.Card("A card", 1 << 40, (9, 0)))
    monkeypatch.setattr(devices, "_on_cuda", fails)
    with caplog.at_level(logging.INFO, "zjournal.engine"):
        loaded = devices.load(wire.Start(model=str(path), device="auto", kv_bytes=1 << 22), lambda _: None)
    assert isinstance(loaded, Runner)
    assert "the model runs on the CPU: The device has no room for KV" in caplog.messages
    loaded.close()
    with pytest.raises(EngineStartFault, match="no room for KV"):
        devices.load(wire.Start(model=str(path), device="cuda", kv_bytes=1 << 22), lambda _: None)


def test_a_card_that_a_kernel_has_broken_is_left_for_the_cpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(*_: object) -> DeviceRunner:
        raise EngineStartFault("The kernels do not run.")

    monkeypatch.setattr(devices, "look", lambda: devices.Card("A card", 1 << 40, (9, 0)))
    monkeypatch.setattr(devices, "_on_cuda", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    loaded = devices.load(wire.Start(model=str(path), device="auto", kv_bytes=1 << 22), lambda _: None)
    assert isinstance(loaded, Runner)
    loaded.close()


@pytest.mark.parametrize(
    "error",
    [subprocess.CalledProcessError(1, ["gcc"]), PermissionError(13, "no", "/cache"), RuntimeError("CUDA error")],
)
def test_what_a_compiler_or_its_folder_does_is_a_fault(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object) -> int:
        raise error

    monkeypatch.setattr(device_runner, "_warm", broken)
    with pytest.raises(EngineStartFault, match="The kernels do not run on interpreted"):
        DeviceRunner.load(interpreted.start(path), Host(), interpreted.kernels(), lambda _: None)


def test_kernels_that_do_not_run_are_a_fault(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OutOfResources(1, 0, "shared memory")

    monkeypatch.setattr(device_runner, "_warm", broken)
    with pytest.raises(EngineStartFault, match="The kernels do not run on interpreted: out of resource: shared"):
        DeviceRunner.load(interpreted.start(path), Host(), interpreted.kernels(), lambda _: None)


@pytest.mark.usefixtures("without_a_card")
def test_without_a_card_auto_is_the_cpu_and_says_why(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zjournal.engine"):
        loaded = devices.load(wire.Start(model=str(path), device="auto", kv_bytes=1 << 22), lambda _: None)
    assert isinstance(loaded, Runner)
    assert "the model runs on the CPU: torch sees no CUDA device" in caplog.messages
    assert (loaded.parts["device"], loaded.stages, loaded.step_tokens) == ("cpu", None, 0)
    loaded.close()


@pytest.mark.usefixtures("without_a_card")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "cuda"}, r"The device cuda cannot be used: torch sees no CUDA device\."),
        ({"device": "auto", "fast": True}, "fast is for a CUDA device, and the model would run on the CPU: torch sees"),
        ({"device": "cpu", "fast": True}, "fast is for a CUDA device"),
        ({"device": "auto", "kv_dtype": "fp8"}, "kv_dtype=fp8 is for a CUDA device, and on the CPU KV is fp32"),
        ({"device": "auto", "kv_dtype": "fp16"}, "kv_dtype=fp16 is none of auto, bf16, fp8"),
        ({"device": "tpu"}, "tpu is none of auto, cpu, cuda"),
    ],
)
def test_what_cannot_be_had_is_a_fault(path: Path, changed: dict, reason: str) -> None:
    with pytest.raises(EngineStartFault, match=reason):
        devices.load(wire.Start(model=str(path), kv_bytes=1 << 22, **changed), lambda _: None)


def test_a_card_that_is_too_small_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "look", lambda: devices.Card("A card", 1 << 20, (9, 0)))
    start = wire.Start(model=str(path), device="auto", kv_bytes=1 << 22)
    with caplog.at_level(logging.INFO, "zjournal.engine"):
        loaded = devices.load(start, lambda _: None)
    assert isinstance(loaded, Runner)
    assert any("A card has 1.00 MiB free, and the model needs" in message for message in caplog.messages)
    loaded.close()
