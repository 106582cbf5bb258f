"""Counters add up and keep their names."""

from prometheus_client.parser import text_string_to_metric_families

from zjournal.api.metrics import Metrics
from zjournal.ask import Broke, Ended, Usage
from zjournal.link.wire import Gauges, Looped, Matched


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_numbers_follow_what_happened():
    metrics = Metrics()
    metrics.request("chat", 200)
    metrics.request("chat", 200)
    metrics.request("responses", 400)
    metrics.matched(Matched("r1", cached=30, prompt=42, tier="ssd", restored=20, restored_host=5))
    metrics.matched(Matched("r2", cached=0, prompt=8))
    metrics.purged("quota", 3)
    metrics.ttft(0.2)
    metrics.ended(Ended("stop", Usage(42, 30, 7)))
    metrics.ended(Broke("engine_error", "x", Usage(8, 0, 2)))
    for action in ("excluded", "excluded", "ended"):
        metrics.looped(Looped(request="r1", kind="pattern", action=action, at=9, begin=0, period=3, times=3))
    for outcome in ("whole", "faulty", "whole"):
        metrics.called(outcome)
    metrics.running(2)
    metrics.gauges(Gauges(running=1, waiting=1, kv_blocks=64, kv_blocks_free=60, states=3))
    found = samples(metrics)
    assert found["zj_requests_total", "chat", "200"] == 2
    assert found["zj_requests_total", "responses", "400"] == 1
    assert found["zj_prompt_tokens_total", "vram"] == 10
    assert found["zj_prompt_tokens_total", "ssd"] == 15
    assert found["zj_prompt_tokens_total", "host"] == 5
    assert found["zj_snapshot_evictions_total", "quota"] == 3
    assert found["zj_prompt_tokens_total", "computed"] == 20
    assert found[("zj_output_tokens_total",)] == 9
    assert found["zj_responses_total", "stop"] == 1
    assert found["zj_responses_total", "failed"] == 1
    assert found["zj_loops_total", "excluded", "pattern"] == 2
    assert found["zj_loops_total", "ended", "pattern"] == 1
    assert found["zj_tool_calls_total", "whole"] == 2
    assert found["zj_tool_calls_total", "faulty"] == 1
    assert found[("zj_ttft_seconds_count",)] == 1
    assert found[("zj_accepted",)] == 2
    assert (found[("zj_running",)], found[("zj_waiting",)]) == (1, 1)
    assert (found[("zj_kv_blocks",)], found[("zj_kv_blocks_free",)], found[("zj_resident_states",)]) == (64, 60, 3)


def test_nothing_runs_in_an_idle_or_dead_engine():
    metrics = Metrics()
    metrics.gauges(Gauges(running=1, waiting=1, kv_blocks=64, kv_blocks_free=60, states=3))
    metrics.running(0)
    assert samples(metrics)[("zj_running",)] == 0
    metrics.engine_crashed()
    found = samples(metrics)
    assert found[("zj_kv_blocks",)] == 0
    assert found[("zj_engine_crashes_total",)] == 1


def test_counts_of_the_engine_add_up_over_its_lives():
    metrics = Metrics()
    told = {"running": 0, "waiting": 0, "kv_blocks": 64, "kv_blocks_free": 64, "states": 0}
    metrics.gauges(Gauges(**told, preemptions=2, recomputed=30, drafted=10, accepted=7))
    metrics.gauges(Gauges(**told, preemptions=3, recomputed=30, drafted=12, accepted=7, backups_lost=4))
    metrics.engine_crashed()
    metrics.gauges(Gauges(**told, preemptions=1, recomputed=5, drafted=1, accepted=1))
    found = samples(metrics)
    assert found[("zj_preemptions_total",)] == 4
    assert found[("zj_recomputed_tokens_total",)] == 35
    assert found["zj_draft_tokens_total", "accepted"] == 8
    assert found["zj_draft_tokens_total", "rejected"] == 5
    assert found[("zj_snapshot_backups_lost_total",)] == 4


def test_two_servers_do_not_share_numbers():
    first, second = Metrics(), Metrics()
    first.engine_crashed()
    assert samples(second)[("zj_engine_crashes_total",)] == 0


def test_the_log_is_asked_for_at_each_render():
    metrics = Metrics()
    sizes = iter((7, 9))
    metrics.journal(lambda: next(sizes), lambda: 42, lambda: 8192)
    assert [samples(metrics)["zj_journal_wal_bytes",] for _ in range(2)] == [7, 9]
    metrics.journal(lambda: 0, lambda: 42, lambda: 8192)
    assert samples(metrics)["zj_journal_bytes",] == 8192
    assert samples(metrics)["zj_journal_blocking_reader_pid",] == 42


def test_causes_of_forks_are_there_before_the_first():
    metrics = Metrics()
    metrics.forked("branch")
    found = {labels[1]: value for labels, value in samples(metrics).items() if labels[0] == "zj_prefix_forks_total"}
    assert found == {
        "answer_changed": 0, "thoughts_dropped": 0, "input_changed": 0, "branch": 1, "other_conversation": 0
    }  # fmt: skip
