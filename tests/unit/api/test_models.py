"""The list of models: one body that three kinds of clients read."""

import json

import anthropic.types
import openai.types
import pytest

from zjournal.api import models
from zjournal.api.submit import ModelCard
from zjournal.errors import BadRequest, ModelNotFound, NotFound

CARDS = [ModelCard("smol", 1_764_000_000, 8192, ("org/smol",)), ModelCard("large", 1_764_000_001, 32768, ())]


def listed(query: dict[str, str], *, anthropic: bool = False) -> dict:
    return json.loads(models.listing(CARDS, query, anthropic))


def test_each_entry_is_a_model_of_openai_and_of_anthropic() -> None:
    body = listed({})
    assert body["object"] == "list" and body["has_more"] is False
    assert (body["first_id"], body["last_id"]) == ("smol", "large")
    for entry, card in zip(body["data"], CARDS, strict=True):
        assert openai.types.Model.model_validate(entry).created == card.created
        told = anthropic.types.ModelInfo.model_validate(entry)
        assert told.created_at.timestamp() == card.created
        assert (told.max_input_tokens, told.lifecycle) == (card.context, "active")
    assert [(entry["slug"], entry["context_window"]) for entry in body["models"]] == [("smol", 8192), ("large", 32768)]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({"limit": "1"}, ["smol"], True),
        ({"limit": "1", "after_id": "smol"}, ["large"], False),
        ({"after_id": "large"}, [], False),
        ({"before_id": "large", "limit": "5"}, ["smol"], False),
        ({"before_id": "smol"}, [], False),
        ({"client_version": "0.171.0"}, ["smol", "large"], False),
    ],
)
def test_pages(query: dict[str, str], ids: list[str], more: bool) -> None:
    body = listed(query)
    assert [entry["id"] for entry in body["data"]] == ids
    assert body["has_more"] is more
    assert (body["first_id"], body["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "²", "9" * 5000, "0" * 5000, "000000001999"])
def test_a_limit_that_cannot_be(limit: str) -> None:
    with pytest.raises(BadRequest) as caught:
        listed({"limit": limit})
    assert caught.value.param == "limit"


def test_pages_that_do_not_exist() -> None:
    with pytest.raises(NotFound, match="gone"):
        listed({"after_id": "gone"})
    with pytest.raises(BadRequest, match="combined"):
        listed({"after_id": "smol", "before_id": "large"})


def test_a_client_of_anthropic_finds_a_name_that_it_looks_for() -> None:
    ids = [entry["id"] for entry in listed({}, anthropic=True)["data"]]
    assert ids == ["smol", "large", "claude-smol", "claude-large"]
    assert json.loads(models.one(CARDS, "claude-opus-9"))["id"] == "smol"
    assert json.loads(models.one(CARDS, "org/smol"))["id"] == "smol"
    with pytest.raises(ModelNotFound):
        models.one(CARDS, "gpt-9")


def test_the_tag_changes_with_the_body() -> None:
    one, other = models.etag(b"a"), models.etag(b"b")
    assert one != other and one == models.etag(b"a") and one.startswith('"') and one.endswith('"')
