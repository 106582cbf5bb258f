"""The neutral shapes: what every protocol's request becomes, and what every answer is made of.

A protocol ends where an `Ask` begins. Nothing here knows a wire format, a template or a token, except
`Output`: an earlier answer of this server, which is replayed as the very tokens that were sampled.
Every text carries the JSON path it came from, so that each prompt token can be traced to the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

TOP_LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 1024  # tokens that one request may bias
BIAS_MAX = 100.0
INT_MAX = 2**31 - 1
CHOICES_MAX = 16  # answers that one request may ask for

# The least and the most of each setting of Sampling that is one number.
RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "temperature": (0.0, 2.0),
        "top_p": (0.0, 1.0),
        "top_k": (0, INT_MAX),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.01, 10.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "min_tokens": (0, INT_MAX),
        "logprobs": (-1, TOP_LOGPROBS_MAX),
    }
)

Role = Literal["system", "developer", "user", "assistant"]


class Text(msgspec.Struct, frozen=True):
    """A piece of text and the JSON path of the request it stands at, such as `messages[3].content[0].text`."""

    text: str
    path: str = ""


class Message(msgspec.Struct, frozen=True, tag="message"):
    """One message; its parts are joined without a separator when rendered."""

    role: Role
    parts: tuple[Text, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A tool call that the client sends back; `arguments` is the client's string, byte for byte."""

    call_id: str
    name: str
    arguments: str
    path: str = ""


class Result(msgspec.Struct, frozen=True, tag="result"):
    """What a tool returned for `call_id`."""

    call_id: str
    parts: tuple[Text, ...] = ()
    path: str = ""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class Thought(msgspec.Struct, frozen=True, tag="thought"):
    """What an assistant thought before the message or the calls behind it, as the client sends it back."""

    parts: tuple[Text, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


class Output(msgspec.Struct, frozen=True, tag="output"):
    """An earlier answer of ours: its items as a client sees them and the token ids that were sampled.

    `tokens` is packed little-endian uint32 without the end-of-turn token; the prompt replays it unchanged, with the
    `thoughts` that are in it, unless the dialect keeps thoughts no longer: then it is written anew from its items.
    """

    response: str
    items: tuple[Message | Call, ...]
    tokens: bytes
    thoughts: str = ""


Item = Message | Call | Result | Thought | Output


class Grammar(msgspec.Struct, frozen=True):
    """What the input of a custom tool must be, in the client's own words."""

    syntax: Literal["lark", "regex"]
    definition: str
    path: str = ""


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool the model may call. `parameters` holds the client's JSON bytes, so that key order survives.

    `strict`: a schema that cannot be kept to the letter is an error. `kind` custom: the tool takes one text, of
    `grammar` if there is one; a model is told of it as a function with the one parameter `input`.
    """

    name: str
    description: str | None = None
    parameters: bytes = b"{}"
    path: str = ""
    strict: bool = False
    kind: Literal["function", "custom"] = "function"
    grammar: Grammar | None = None
    namespace: str = ""  # what the client calls the group that the tool belongs to; it is a part of `name`


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tools may be called, and whether one must be. A named tool is `required` with one name in `allowed`.

    `allowed` None: all. The prompt does not depend on any of it. `parallel`: more than one call in one answer, and at
    most `most` of them (None: as many as it likes).
    """

    mode: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True
    path: str = "tool_choice"
    most: int | None = None

    @property
    def again(self) -> str:
        """How often a call may follow the first one, as a grammar repeats it; "" for not at all."""
        if not self.parallel or self.most == 1:
            return ""
        return "*" if self.most is None else f"{{0,{self.most - 1}}}"


class Format(msgspec.Struct, frozen=True):
    """What the text of the answer must be. `schema` holds the client's JSON bytes."""

    kind: Literal["json_object", "json_schema"]
    name: str = ""
    schema: bytes = b"{}"
    strict: bool = False
    path: str = ""


class Sampling(msgspec.Struct, frozen=True):
    """How to choose a token, within RANGES. The defaults change nothing.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; seed None: the server draws one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0  # of the best token's probability
    repetition_penalty: float = 1.0  # divides logits of tokens in prompt and output, as transformers does
    presence_penalty: float = 0.0  # off the logits of tokens in the output; frequency: times their count
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens
    min_tokens: int = 0  # output tokens before an end token may come
    logprobs: int = -1  # alternatives told beside each token; -1: no logprobs at all


class Sealed(msgspec.Struct, frozen=True):
    """A text of ours that a client keeps for us, as it sends it back: it must prove where it comes from."""

    blob: str
    path: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, free of its protocol."""

    protocol: Literal["chat", "responses", "messages"]
    model: str
    items: tuple[Item, ...]
    instructions: Text | None = None
    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = ToolChoice()
    format: Format | None = None  # None: any text
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    choices: int = 1  # so many answers, each with a seed of its own
    stop: tuple[str, ...] = ()
    store: bool = True
    stream: bool = False
    previous: str | None = None  # previous_response_id
    local: bool = False  # `previous` need not be stored: it was made over the very connection that names it
    session_key: str | None = None  # what the client calls its session, if it says so
    cache_salt: str | None = None  # its KV is shared only with requests that have the same
    background: bool = False  # it can wait: everybody else's work goes first
    detached: bool = False  # it goes on when its client leaves, and is asked for later
    warm: bool = False  # only the prompt is to be read, for a request to come: no token is told
    nameless: bool = False  # its calls have no ids: the client knows them by the names of their functions
    goes_on: bool = False  # the answer goes on with the last item, which is an assistant's message
    ignored: tuple[str, ...] = ()  # rules by which a part of the body is not in the prompt, by name
    skipped: tuple[str, ...] = ()  # types of tools and items that no model can be told of, each once
    sealed: tuple[Sealed, ...] = ()  # texts in the items that only this server can have written
    client: tuple[tuple[str, str], ...] = ()  # headers that say who asks, by lower-case name; no credentials


class Logprob(msgspec.Struct, frozen=True):
    """One token of a text: its bytes, its logprob in the model's own distribution, and the best `top` beside it."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class TextDelta(msgspec.Struct, frozen=True, tag="text"):
    """More text of the open message; if they were asked for, the logprobs of the tokens that it completes."""

    text: str
    logprobs: tuple[Logprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """More of what the model thinks before it answers."""

    text: str


class CallStarted(msgspec.Struct, frozen=True, tag="call_started"):
    """The model begins a tool call. `index` counts the calls of the response from 0, whatever stands between them.

    `known` is false where no tool of the request has the name; the name is then what the model said, letter by letter.
    """

    index: int
    name: str
    known: bool = True


class CallArguments(msgspec.Struct, frozen=True, tag="call_arguments"):
    """More of the call's arguments; joined, they are the text of a JSON object, unless its CallEnded says else."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, tag="call_ended"):
    """The call is over.

    `truncated`: the output ended inside it, so it must not be run. `fault`: what was wrong with its form, for a person;
    "" if nothing was. Arguments that are no JSON object are always a fault.
    """

    index: int
    truncated: bool = False
    fault: str = ""


Delta = TextDelta | ReasoningDelta | CallStarted | CallArguments | CallEnded

# loop: the model said the same again and again (the guard); fence: no token was left that the fence allows
EndReason = Literal["stop", "stop_string", "length", "cancelled", "loop", "fence"]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one response. prompt = cached + computed, always. `reasoning`: thoughts among `output`."""

    prompt: int
    cached: int
    output: int
    reasoning: int = 0


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The request was admitted: this much of its prompt came from the cache."""

    cached: int
    prompt: int


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """There was nothing to tell for a while. Durable, and told again at the same place.

    `position`: output tokens before it. `done` of the `prompt` tokens have KV; `queued`: it is not admitted yet.
    """

    position: int
    done: int
    prompt: int
    queued: bool = False


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The response is complete and durable."""

    reason: EndReason
    usage: Usage
    at: int | None = None  # Unix seconds of the fact that says so
    stop: str = ""  # of `stop_string`: the one that was met


class Broke(msgspec.Struct, frozen=True, tag="broke"):
    """The response failed; `code` and `message` as of a Fault. Durable as well."""

    code: str
    message: str
    usage: Usage
    at: int | None = None


# What a follower yields for a response, in order: at most one Progress, deltas, then one Ended or Broke; and Waiting
# anywhere before the end.
Step = Progress | Delta | Waiting | Ended | Broke
