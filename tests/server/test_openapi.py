"""Our description of the API, and what is made from it at random: no 5xx, every error in its shape, the next one works.

The random part is bounded by the number of cases, so that it takes about as long wherever it runs; `pytest -m soak`
has a longer one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from litestar.routes import HTTPRoute
from schemathesis.config import SchemathesisConfig

from tests.api.desk import FakeDesk
from tests.server.test_restart import verify
from tests.serving import Server, scripted
from zjournal.api import fields
from zjournal.api.app import create_app
from zjournal.api.openapi import document, shapes

EXAMPLES, EXAMPLES_LONG = 8, 400  # random cases of each route; those on the edge of what is allowed come in any case
FLOWS, FLOWS_LONG, STEPS = 20, 500, 6
CONTEXT = 4000
LIMITS, OUTPUT = ("max_tokens", "max_completion_tokens", "max_output_tokens"), 50
# How Anthropic's begin.
PATH = re.compile(r"[a-z_]+(?:[.\[]\S+|\[\"(?:[^\"\\]|\\.)*\"\])?: |prompt is too long|input length")
WHOLE = ("The request body", "Invalid request body", "Invalid HTTP request")  # no field is to blame
# A body that is allowed may still ask for what cannot be, such as a choice of a tool that is not there.
CHECKS = {
    "positive_data_acceptance": {"enabled": False},
    "use_after_free": {"enabled": True},
}
# Their bodies are those of other routes: what is on the edge is tried there.
SAME_BODY = (
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/v1/messages/count_tokens",
    "/v1/conversations/{conversation_id}/items",
)
NO_EDGES = [{"include-path": path, "phases": {"coverage": {"enabled": False}}} for path in SAME_BODY]


def described(*operations: dict[str, Any]) -> Any:
    """The description as schemathesis has it, with what is special to some routes."""
    settings = {"generation": {"deterministic": True}, "checks": CHECKS, "operations": list(operations)}
    return schemathesis.openapi.from_dict(document.document("test"), config=SchemathesisConfig.from_dict(settings))


SCHEMA, SCHEMA_LONG = described(*NO_EDGES), described()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("openapi")
    model = scripted(folder, {"text": "one two three"}, context=CONTEXT)
    with Server(folder / "data", model=model) as running:
        yield running
        assert "Traceback" not in running.log.read_text()
        running.kill()
        verify(folder / "data")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as kept:
        yield kept


def made_possible(case: schemathesis.Case) -> None:
    """Names and limits made at random would end nearly all requests where they begin."""
    if isinstance(case.body, dict):
        if case.body.get("model") and isinstance(case.body["model"], str):
            case.body["model"] = "default"
        for name in LIMITS:
            if type(case.body.get(name)) is int and OUTPUT < case.body[name] <= fields.TOKENS_MAX:
                case.body[name] = OUTPUT


def tried(server: Server, session: requests.Session, case: schemathesis.Case) -> None:
    """Sends a case; whatever comes back is as it was described, and an error is told in the protocol's own shape."""
    made_possible(case)
    response = case.call_and_validate(base_url=str(server.http.base_url), session=session)
    if response.status_code < 400 or not response.content or response.json().get("status") is not None:
        return
    told = response.json()["error"]
    assert told["message"]
    assert told["type"]
    if response.status_code == 400:
        anthropic = response.json().get("type") == "error"
        path = PATH.match(told["message"]) if anthropic else told["param"]
        assert path or told["message"].startswith(WHOLE), told


def made_at_random(schema: Any, examples: int) -> Iterator[tuple[str, Callable[..., None]]]:
    """A test of each operation. Of one test for all of them the items share their id, and parallel workers run one."""
    for found in schema.get_all_operations():
        label = found.ok().label
        only = schema.exclude(lambda context, label=label: context.operation.label != label)

        @only.parametrize()
        @hypothesis.settings(max_examples=examples, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
        def test(case: schemathesis.Case, server: Server, session: requests.Session) -> None:
            tried(server, session, case)

        yield re.sub(r"\W+", "_", label).strip("_").lower(), test


for name, made in made_at_random(SCHEMA, EXAMPLES):
    globals()[f"test_what_is_made_at_random_{name}"] = made
for name, made in made_at_random(SCHEMA_LONG, EXAMPLES_LONG):
    globals()[f"test_more_that_is_made_at_random_{name}"] = pytest.mark.soak(made)


@pytest.mark.parametrize("flows", [FLOWS, pytest.param(FLOWS_LONG, marks=pytest.mark.soak)])
def test_what_is_made_is_found_and_gone_when_it_is_deleted(server: Server, flows: int) -> None:
    """Requests one after the other, each about what the ones before it made."""
    schema = described()
    schema.config.update(base_url=str(server.http.base_url))

    class Flow(schema.as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: schemathesis.Case) -> None:
            made_possible(case)

    checks = list(hypothesis.HealthCheck)
    Flow.run(
        settings=hypothesis.settings(
            max_examples=flows, stateful_step_count=STEPS, deadline=None, suppress_health_check=checks, derandomize=True
        )
    )


def test_the_next_request_works(server: Server) -> None:
    """After all of the above."""
    assert server.respond(input="still there?")["output"][0]["content"][0]["text"] == "one two three"


def test_every_route_is_described() -> None:
    app: Any = create_app(FakeDesk([]), host="127.0.0.1", port=1, body_max=1000)
    inner = app
    while not hasattr(inner, "routes"):
        inner = inner._app
    served = {
        (re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path), method.lower())
        for route in inner.routes
        if isinstance(route, HTTPRoute)
        for method in route.methods
        if method != "OPTIONS"
    }
    told = document.document("test")["paths"]
    assert {(path, method) for path, methods in told.items() for method in methods} == served


def test_it_is_served(server: Server) -> None:
    reply = server.http.get(document.PATH)
    assert reply.status_code == 200
    assert reply.json()["paths"] == document.document("test")["paths"]
    assert reply.json()["info"]["version"]


@pytest.mark.parametrize("path", ["/v1/responses/x", "/v1/conversations/x", "/v1/messages", "/readyz"])
def test_options_names_each_method(server: Server, path: str) -> None:
    reply = server.http.request("OPTIONS", path)
    refused = server.http.request("PATCH", path)
    described = next(
        methods
        for known, methods in document.document("test")["paths"].items()
        if known.split("{")[0] == path[:-1] or known == path
    )
    methods = {name.upper() for name in described} | ({"HEAD"} if "get" in described else set()) | {"OPTIONS"}
    assert (reply.status_code, refused.status_code) == (204, 405)
    assert set(reply.headers["allow"].split(", ")) == set(refused.headers["allow"].split(", ")) == methods


def test_a_schema_says_what_the_struct_says() -> None:
    with pytest.raises(AssertionError):
        shapes.of(bytes)
    body = document.document("test")["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    assert set(schema["required"]) == {"model", "messages"}
    assert schema["properties"]["temperature"] == shapes.nullable({"type": "number", "minimum": 0.0, "maximum": 2.0})
