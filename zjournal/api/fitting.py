"""What a request has to fit: the model, the tenant, its own conversation, and the room that there is. Pure."""

from __future__ import annotations

from zjournal import ask, errors
from zjournal.api import compaction
from zjournal.link import wire
from zjournal.sessions import chain
from zjournal.sessions.items import orphaned
from zjournal.sessions.served import Served


def check_model(request: ask.Ask, served: Served) -> None:
    """Raises ModelNotFound, or BadRequest for a token that the model does not have."""
    if not served.accepts(request.model):
        names = ", ".join((served.id, *served.aliases))
        raise errors.ModelNotFound(
            f"The model '{request.model}' does not exist here; what is served goes by {names}.", param="model"
        )
    _check_bias(request, served.tokenizer.vocab_size)


def _check_bias(request: ask.Ask, vocab_size: int) -> None:
    """Raises BadRequest for a bias of a token that the model does not have."""
    for token, _ in request.sampling.logit_bias:
        if token >= vocab_size:
            raise errors.BadRequest(
                f"`logit_bias` names token {token}; this model's tokens are 0 to {vocab_size - 1}.",
                param=f"logit_bias.{token}",
            )


def check_sealed(request: ask.Ask, secret: bytes, tenant: str) -> None:
    """Raises BadRequest for a text that only we can write, and have not written for this tenant."""
    for sealed in request.sealed:
        compaction.genuine(sealed.blob, sealed.path, secret, tenant)


def check_results(place: chain.Place, request: ask.Ask) -> None:
    """Raises BadRequest for the result of a call that is nowhere in the conversation, in protocols that say so."""
    continues = request.previous is not None
    orphan = orphaned(place.items, place.new if continues else request.items, continues)
    if orphan is not None and request.protocol == "messages":
        raise errors.BadRequest(
            f"Unexpected `tool_use_id` in a `tool_result` block: {orphan.call_id}. There is no `tool_use` block of it.",
            param=f"{orphan.path}.tool_use_id",
        )
    if orphan is not None and request.protocol == "chat":
        raise errors.BadRequest(
            f"No message before this one has a tool call with the id {orphan.call_id!r}.",
            param=f"{orphan.path}.tool_call_id",
        )
    if orphan is not None:
        raise errors.BadRequest(
            f"No tool call found for function call output with call_id {orphan.call_id}.",
            param=f"{orphan.path}.call_id",
        )


def prompt_field(request: ask.Ask) -> str:
    """Where the prompt stands in the client's body."""
    return "input" if request.protocol == "responses" else "messages"


def room(ready: wire.Ready) -> int:
    """The tokens that a prompt and its answer may have together."""
    return min(ready.context, ready.kv_tokens)


def output_limit(request: ask.Ask, prompt: int, ready: wire.Ready) -> int:
    """How many tokens may be sampled behind a prompt of so many: what was asked, else what fits; never cut.

    Raises ContextTooLong, and BadRequest for a least number of tokens that is above it.
    """
    limit = _output_limit(request, prompt, ready)
    if request.sampling.min_tokens > limit:
        raise errors.BadRequest(
            f"`min_tokens` is {request.sampling.min_tokens}, and there can be {limit}.", param="min_tokens"
        )
    return limit


def _output_limit(request: ask.Ask, prompt: int, ready: wire.Ready) -> int:
    field = prompt_field(request)
    limit = room(ready)
    place = "model's context window" if ready.context <= ready.kv_tokens else "server's KV memory (`kv_memory`)"
    if prompt + 1 > limit:
        raise errors.ContextTooLong(
            f"The prompt has {prompt} tokens; this {place} holds {limit}, the answer included.",
            param=field,
            prompt=prompt,
            limit=limit,
        )
    if request.warm:
        return 0
    if request.max_tokens is None:
        return limit - prompt
    if prompt + request.max_tokens > limit:
        raise errors.ContextTooLong(
            f"The prompt has {prompt} tokens and up to {request.max_tokens} were asked for; "
            f"this {place} holds {limit}.",
            param=field,
            prompt=prompt,
            asked=request.max_tokens,
            limit=limit,
        )
    return request.max_tokens
