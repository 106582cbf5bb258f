"""Reading a request body: JSON to typed fields, with the JSON path of whatever is wrong.

The protocols share the limits and the small fields (stop, sampling, the session's name), so they are read here once.
Fields that this version cannot honour are refused by name, never ignored; fields of the future, which nobody here
knows, pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from zjournal import ask
from zjournal.api import json_paths
from zjournal.ask import Sampling
from zjournal.errors import BadRequest

STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 256
METADATA_PAIRS_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
CACHE_SALT_CHARS_MAX = 256
TOKENS_MAX = ask.INT_MAX
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
LOGPROB_MIN = -9999.0  # what OpenAI tells of a token that is as good as impossible

# In the order in which they decide; the first that is there names the session.
SESSION_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-id",
    "x-session-affinity",
    "x-client-request-id",
)

CLIENT_HEADERS = ("user-agent", "originator")  # beside the one that names the session
CLIENT_CHARS_MAX = 256  # of each value that is kept
# What a credential looks like where none belongs.
_CREDENTIAL = re.compile(
    r"(?i)\b(?:bearer|basic)\s|\b(?:password|passwd|secret|token|key|api[-_]?key)\s*[:=]|\bsk-|://[^/\s]*@"
)

Name = Annotated[str, msgspec.Meta(min_length=1)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
Seed = Annotated[int, msgspec.Meta(ge=SEED_MIN, le=SEED_MAX)]
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=CACHE_SALT_CHARS_MAX)]
MetadataKey = Annotated[str, msgspec.Meta(max_length=METADATA_KEY_CHARS_MAX)]
MetadataValue = Annotated[str, msgspec.Meta(max_length=METADATA_VALUE_CHARS_MAX)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], msgspec.Meta(max_length=METADATA_PAIRS_MAX)]

# What is one number, in its range of ask.RANGES.
NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
T = TypeVar("T")
_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_IN_MAP = re.compile(r" - at `\$\.(?P<map>\w+)\[\.\.\.\]`$")  # a value of a map that is a field of the body
_MISSING = re.compile(r"missing required field `([^`]+)`")


class SamplingFields(msgspec.Struct, kw_only=True):
    """How to sample, in both protocols' bodies: theirs, and those of other servers that many clients send."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Seed | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    best_of: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


# Fields of other servers that change what is sampled, and what they may hold when they ask for nothing. A client that
# sends one counts on it: to ignore it would be to answer another question.
FOREIGN: dict[str, tuple[Any, ...]] = {
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "echo": (False,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


def background(body: SamplingFields) -> bool:
    """Whether the client can wait: `service_tier: flex` asks for the work to yield to everybody else's."""
    return body.service_tier == "flex"


class Kind(msgspec.Struct):
    """Only the `type` of an item or a tool, to choose how the rest is read."""

    type: str | None = None


kind_decoder = msgspec.json.Decoder(Kind)
any_decoder = msgspec.json.Decoder()
# Of what is written again: fractions stay as they were sent, for a float may have no room for them.
exact_decoder = msgspec.json.Decoder(float_hook=lambda digits: msgspec.Raw(digits.encode()))


def parse(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, at: str = "") -> T:
    """Decodes `raw`, which stands at the JSON path `at` of the body. Raises BadRequest with the path as `param`."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as fault:
        raise _refused(_with_key(str(fault), decoder, raw), at) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        where = f"The value of `{at}`" if at else "The request body"
        if (half := json_paths.lone_surrogate(raw)) is not None:
            path = join(at, half.path)
            said = f"`{half.escape}` at byte {half.byte} is half of a surrogate pair, which is no character"
            raise BadRequest(f"{where} is not valid JSON: {said}.", param=path or None) from None
        raise BadRequest(f"{where} is not valid JSON: {fault}.", param=at or None) from None
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.", param=at or None) from None


def _with_key(sentence: str, decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw) -> str:
    """msgspec's sentence with the key of a map's value, which it writes as `[...]`."""
    match = _IN_MAP.search(sentence)
    if match is None:
        return sentence

    def refuses(text: bytes) -> str | None:
        try:
            decoder.decode(text)
        except msgspec.ValidationError as fault:
            found = str(fault)
            return found if _IN_MAP.search(found) else None
        return None

    key = json_paths.refused_key(raw, match["map"], refuses)
    path = match["map"] if key is None else json_paths.below(match["map"], key)
    return f"{sentence[: match.start()]} - at `$.{path}`"


def _refused(sentence: str, at: str) -> BadRequest:
    """A BadRequest from msgspec's sentence, such as "Expected `str`, got `int` - at `$.messages[2].content`"."""
    match = _AT.match(sentence)
    assert match is not None, sentence
    what = match["what"]
    path = join(at, (match["path"] or "$").removeprefix("$").removeprefix("."))
    missing = _MISSING.search(what)
    if missing:
        path = join(path, missing[1])
        return BadRequest(f"Missing required field `{path}`.", param=path)
    what = what[:1].lower() + what[1:]
    if not path:
        return BadRequest(f"Invalid request body: {what}.")
    return BadRequest(f"Invalid value for `{path}`: {what}.", param=path)


def join(at: str, path: str) -> str:
    """`path` below `at`: ("input[3]", "content[0].text") gives "input[3].content[0].text"."""
    if not at or not path:
        return at or path
    return f"{at}{path}" if path.startswith("[") else f"{at}.{path}"


def require_object(value: Any, at: str) -> None:
    """Raises BadRequest unless the value, which stands at the JSON path `at`, is an object, as a schema is."""
    if not isinstance(value, dict):
        raise BadRequest(f"Invalid value for `{at}`: expected a JSON Schema object.", param=at)


def require_neutral(body: msgspec.Struct, neutral: Mapping[str, Sequence[Any]], at: str = "") -> None:
    """Refuses each field that holds anything but None or a value that asks for nothing. Raises BadRequest.

    `at`: the JSON path of the struct.
    """
    for name, values in neutral.items():
        value = getattr(body, name)
        # 0 is not false here, and true is not 1.
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            path = join(at, name)
            raise BadRequest(f"`{path}` is not supported with this value by this server.", param=path)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings; at most STOP_STRINGS_MAX, none empty. Raises BadRequest."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > STOP_STRINGS_MAX:
        raise BadRequest(f"`stop` takes at most {STOP_STRINGS_MAX} strings, got {len(strings)}.", param="stop")
    for index, text in enumerate(strings):
        at = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not text:
            raise BadRequest(f"`{at}` is empty.", param=at)
        if len(text) > STOP_CHARS_MAX:
            raise BadRequest(f"`{at}` is longer than {STOP_CHARS_MAX} characters.", param=at)
    return strings


def sampling(body: SamplingFields, logprobs: int) -> Sampling:
    """Sampling with the protocols' defaults in place of what the client left out. Raises BadRequest.

    `logprobs`: alternatives to tell beside each token, -1 for none at all; each protocol asks for them in its own way.
    """
    given: dict[str, Any] = {"logprobs": logprobs, "logit_bias": _logit_bias(body.logit_bias)}
    for name in NUMBERS:
        value = getattr(body, name)
        if value is None or (name == "top_k" and value == -1):  # which other servers call off
            continue
        least, most = ask.RANGES[name]
        if not least <= value <= most:
            raise BadRequest(f"Invalid value for `{name}`: expected a number from {least:g} to {most:g}.", param=name)
        given[name] = value
    return Sampling(seed=body.seed, **given)


def _logit_bias(biases: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Token ids with their biases, by id. Whether there are such tokens is known only to the model: see submit."""
    found: dict[int, float] = {}
    if len(biases or ()) > ask.LOGIT_BIAS_MAX:
        raise BadRequest(f"`logit_bias` takes at most {ask.LOGIT_BIAS_MAX} tokens.", param="logit_bias")
    for key, bias in (biases or {}).items():
        at = json_paths.below("logit_bias", key)
        if not _TOKEN_ID.fullmatch(key):
            raise BadRequest(f"Invalid key `{key}` in `logit_bias`: expected a token id.", param="logit_bias")
        if abs(bias) > ask.BIAS_MAX:
            most = ask.BIAS_MAX
            raise BadRequest(f"Invalid value for `{at}`: expected a number from {-most:g} to {most:g}.", param=at)
        found[int(key)] = float(bias)
    return tuple(sorted(found.items()))


def top_logprobs(count: int | None) -> int:
    """`top_logprobs`, 0 if it was left out. Raises BadRequest."""
    if count is not None and not 0 <= count <= ask.TOP_LOGPROBS_MAX:
        most = ask.TOP_LOGPROBS_MAX
        raise BadRequest(f"Invalid value for `top_logprobs`: expected a number from 0 to {most}.", param="top_logprobs")
    return count or 0


def logprob_object(one: ask.Logprob) -> dict[str, Any]:
    """A token's logprobs, as both protocols spell them."""
    return {**_logprob(one.token, one.logprob), "top_logprobs": [_logprob(*other) for other in one.top]}


def _logprob(token: bytes, logprob: float) -> dict[str, Any]:
    """A token may be a part of a character: then its text is U+FFFD, and its bytes tell what it is."""
    text = token.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, LOGPROB_MIN), "bytes": list(token)}


def progress(waiting: ask.Waiting) -> dict[str, Any]:
    """How far the prompt is, beside what a protocol says to a client that waits. The name is llama.cpp's."""
    done = {"total": waiting.prompt, "processed": waiting.done, "queued": waiting.queued}
    return {"prompt_progress": done}


def session_key(headers: Mapping[str, str], prompt_cache_key: str | None) -> str | None:
    """What the client calls its session: the first header that says so, else `prompt_cache_key`. Lower-case names."""
    for name in SESSION_HEADERS:
        if value := headers.get(name):
            return value
    return prompt_cache_key or None


def client(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The headers that say who asks, cut to CLIENT_CHARS_MAX characters each. Lower-case names.

    They are journaled, so a value with the request's own key, or with what looks like a credential, is left out.
    """
    _, _, bearer = headers.get("authorization", "").partition(" ")
    keys = [key for key in (bearer.strip(), headers.get("x-api-key", "").strip()) if key]
    named = next((name for name in SESSION_HEADERS if headers.get(name)), "")
    kept = []
    for name in (*CLIENT_HEADERS, named):
        value = headers.get(name, "")
        if value and not _CREDENTIAL.search(value) and not any(key in value for key in keys):
            kept.append((name, value[:CLIENT_CHARS_MAX]))
    return tuple(kept)
