"""Prompt cache diagnostics: the reason and the counts, from the tokens of two prompts."""

import pytest

from zjournal.api.responses_cache import diagnose
from zjournal.link import wire
from zjournal.sessions.diff import Rendered, Source


def prompt(*parts: tuple[str, str], vocabulary: bytes = b"v") -> Rendered:
    """One token for each letter of the parts' texts, which stand at their paths."""
    ids, sources = [], []
    for path, text in parts:
        sources.append(Source(len(ids), len(ids) + len(text), path, "resp_1", "", text))
        ids += [ord(letter) for letter in text]
    return Rendered(ids=wire.pack_ids(ids), sources=tuple(sources), vocabulary_name=vocabulary)


TOOLS, RULES, ONE = ("tools[0]", "abcd"), ("instructions", "rules"), ("input", "one")
BASE = prompt(TOOLS, RULES, ONE)


@pytest.mark.parametrize("now", [BASE, prompt(TOOLS, RULES, ONE, ("input[1]", "two"))])
def test_a_prompt_that_goes_on_is_a_hit(now):
    assert diagnose(BASE, now, same_model=True) == {"type": "cache_hit"}


@pytest.mark.parametrize(
    ("now", "reason", "reusable"),
    [
        (prompt(("tools[0]", "abXd"), RULES, ONE), "tools_changed", 2),
        (prompt(("input[0].tools[0]", "abXd"), RULES, ONE), "tools_changed", 2),
        (prompt(TOOLS, ("instructions", "rulez"), ONE), "input_changed", 8),
        (prompt(TOOLS, RULES, ("input", "two")), "input_changed", 9),
        (prompt(TOOLS, RULES, ("input[0].encrypted_content", "sum")), "context_compacted", 9),
        (prompt(TOOLS, RULES, ONE, vocabulary=b"w"), "model_changed", 0),
    ],
)
def test_a_miss_tells_its_reason_and_every_token(now, reason, reusable):
    assert diagnose(BASE, now, same_model=True) == {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": now.count - reusable,
        "comparison_reusable_tokens": reusable,
    }


def test_another_model_shares_nothing_though_the_tokens_are_equal():
    assert diagnose(BASE, BASE, same_model=False)["reason"] == "model_changed"
