"""Generations under a fence: random tools and modes, an engine without a socket, and what is wrong with what came out.

The model is the demo model. Dialects whose tags must be tokens get its tokenizer with unused control tokens renamed,
so that ids and logits are its own. Tools are those of tools.json, written after public servers of tools.
"""

from __future__ import annotations

import functools
import json
import random
import select
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import msgspec

from tests import smollm2
from zjournal import ask, loops
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects import choose, dsml, glm, llama3
from zjournal.dialects.base import Dialect
from zjournal.dialects.prompt import assemble
from zjournal.engine.decoding.speculation import PromptLookup
from zjournal.engine.decoding.steering import Fences as Compiled
from zjournal.engine.decoding.vocabulary import Vocabulary
from zjournal.engine.runner import Runner
from zjournal.engine.scheduler import Limits, Scheduler
from zjournal.link import wire
from zjournal.sessions.fences import Fences

TEMPERATURE = 1.5
BATCH = 8
MAX_TOKENS = 500
CONTEXT = 8192
KV_BYTES = 1 << 30
SETS = 12  # of tools, of each dialect: so that prompts share their beginnings, as an agent's do
WAIT_MS = 60_000  # for the thread that compiles
TAGS = (*glm.TAGS, "<think>", "</think>", dsml.MARKER, llama3.TAG)
UNUSED = ("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>", "<issue_start>", "<issue_comment>")
UNUSED = (*UNUSED, "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>")
TOOLS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "tools.json").read_text())
SCHEMAS = {tool["name"]: tool["parameters"] for tool in TOOLS}

# What is tried: the dialect's name, and whether its tags are tokens.
SPOKEN = (
    ("chatml", False),
    ("chatml", True),
    ("glm-4.5", True),
    ("glm-4.7", True),
    ("dsml-v3.2", True),
    ("dsml-v4", True),
    ("dsml-v4.1", True),
    ("qwen-xml", False),
    ("qwen-xml", True),
    ("llama3", True),
)


@functools.cache
def tokenizer(tags: bool) -> Tokenizer:
    """The demo model's; with `tags` its unused control tokens are called as the dialects' tags."""
    if not tags:
        return smollm2.tokenizer()
    header = smollm2.header()
    names = dict(zip(UNUSED, TAGS, strict=False))
    assert len(names) == len(TAGS)
    tokens = [names.get(token, token) for token in header.array("tokenizer.ggml.tokens", str)]
    kinds = header.array("tokenizer.ggml.token_type", int)
    merges = header.array("tokenizer.ggml.merges", str)
    ends = smollm2.tokenizer().eos_ids
    roles = {role: smollm2.tokenizer().control[text] for role, text in smollm2.tokenizer().special_texts.items()}
    return Tokenizer.byte_level(tokens, kinds, merges, header.value("tokenizer.ggml.pre", str), ends, roles)


class Voice:
    """One dialect under one tokenizer: what it asks and how it reads."""

    def __init__(self, name: str, tags: bool) -> None:
        self.name = f"{name}{'' if tags else ', tags as text'}"
        self.tags = tags
        self.tokenizer = tokenizer(tags)
        self.dialect: Dialect = choose.named(name, self.tokenizer)
        self.fences = Fences(self.dialect, self.tokenizer.control)

    def cases(self, seed: int, count: int) -> Iterator[Case]:
        """Requests for this dialect."""
        dice = random.Random(f"{self.name} {seed}")
        sets = [tuple(dice.sample(TOOLS, dice.randint(1, 4))) for _ in range(SETS)]
        for number in range(count):
            yield self.case(f"{self.name} {seed} {number}", sets[number % SETS], number // SETS, dice)

    def case(self, name: str, tools: Sequence[Mapping[str, Any]], number: int, dice: random.Random) -> Case:
        """A request with these tools: required, one call alone, a named tool, some of them, or a text of a format."""
        names = tuple(tool["name"] for tool in tools)
        specs = tuple(
            ask.ToolSpec(tool["name"], tool["description"], json.dumps(tool["parameters"]).encode(), f"tools[{at}]")
            for at, tool in enumerate(tools)
        )
        choice = (
            ask.ToolChoice("required"),
            ask.ToolChoice("required", parallel=False),
            ask.ToolChoice("required", (dice.choice(names),), parallel=False),
            ask.ToolChoice("required", tuple(dice.sample(names, dice.randint(1, len(names))))),
            ask.ToolChoice("none"),
        )[number % 5]
        form = None
        if choice.mode == "none":
            schema = json.dumps(dice.choice(tools)["parameters"]).encode()
            form = ask.Format("json_schema", "answer", schema, True, "response_format.json_schema")
            specs = ()
        request = ask.Ask(
            protocol="chat",
            model="m",
            items=(ask.Message("user", (ask.Text(f"Please {tools[0]['description'].lower()}"),)),),
            tools=specs,
            choice=choice,
            format=form,
        )
        prompt = assemble(request, smollm2.template(), self.tokenizer, self.dialect)
        return Case(name, request, tuple(prompt.ids), dice.getrandbits(40))

    def asked(self, case: Case, fenced: bool = True, max_tokens: int = MAX_TOKENS) -> wire.Generate:
        """What the engine is told."""
        fence = self.fences.of(case.request).fence
        assert fence is not None
        return wire.Generate(
            request=case.name,
            tokens=wire.pack_ids(case.prompt),
            namespace=self.name,
            sampling=wire.Sampling(TEMPERATURE, 1.0, 0, case.seed),
            max_tokens=max_tokens,
            end_tokens=self.tokenizer.eos_ids,
            fence=fence if fenced else None,
            guard=wire.Guard(*loops.limits("on")) if fenced else None,
        )

    def read(self, case: Case, tokens: Sequence[int]) -> Read:
        """What the dialect's parser makes of the tokens of an answer, without the one that ended it."""
        parser = self.dialect.parser(case.request.tools)
        control = set(self.tokenizer.control.values())
        deltas: list[ask.Delta] = []
        for token in tokens:
            deltas += parser.feed(self.tokenizer.token_bytes(token), token in control)
        deltas += parser.end()
        return Read.of(deltas)

    def wrong(self, case: Case, tokens: Sequence[int], cut: bool = False) -> str:
        """What is wrong with an answer, in words; "" if nothing is. `cut`: the end is missing, and must be missed."""
        read, choice = self.read(case, tokens), case.request.choice
        if case.request.format is not None:
            if read.calls:
                return "it calls, and no tool may be called"
            return "" if cut else _wrong_value(read.text, json.loads(case.request.format.schema))
        if read.text.strip() and not cut:  # the beginning of a call is text until its name is there
            return f"text beside the calls: {read.text[:80]!r}"
        if (not read.calls and not cut) or (len(read.calls) > 1 and not choice.parallel):
            return f"{len(read.calls)} calls"
        allowed = choice.allowed or tuple(tool.name for tool in case.request.tools)
        for call in read.calls:
            if cut and call is read.calls[-1] and call.truncated:
                continue
            if call.fault or call.truncated or call.name not in allowed:
                return f"a call of {call.name!r}: {call.fault or 'truncated or not allowed'}"
            if wrong := _wrong_value(call.arguments, SCHEMAS[call.name]):
                return f"a call of {call.name!r}: {wrong}"
        return ""


class Case(NamedTuple):
    """A request, its prompt, and the seed of its answer."""

    name: str
    request: ask.Ask
    prompt: tuple[int, ...]
    seed: int


class Called(msgspec.Struct):
    """A call as it was read."""

    name: str
    arguments: str = ""
    fault: str = ""
    truncated: bool = False


class Read(NamedTuple):
    """An answer as a client sees it."""

    text: str
    calls: tuple[Called, ...]

    @classmethod
    def of(cls, deltas: Iterable[ask.Delta]) -> Read:
        text, calls = "", []
        for delta in deltas:
            match delta:
                case ask.TextDelta():
                    text += delta.text
                case ask.CallStarted():
                    calls.append(Called(delta.name, fault="" if delta.known else "unknown"))
                case ask.CallArguments():
                    calls[delta.index].arguments += delta.text
                case ask.CallEnded():
                    calls[delta.index].fault = calls[delta.index].fault or delta.fault
                    calls[delta.index].truncated = delta.truncated
        return cls(text, tuple(calls))


def _wrong_value(text: str, schema: Mapping[str, Any]) -> str:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON ({error}): {text[:80]!r}"
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    found = next(validator.iter_errors(value), None)
    return "" if found is None else f"{found.message[:120]} at {found.json_path}"


class Answer(msgspec.Struct):
    """What the engine said of a request. `reason` as wire.Finished has it, or the code of a fault."""

    tokens: list[int]
    reason: str = ""


class Engine:
    """A worker without a socket, for one tokenizer."""

    def __init__(self, runner: Runner, tags: bool, *, batch: int = BATCH, drafts_max: int = 0) -> None:
        words = tokenizer(tags)
        texts = [words.token_bytes(token) for token in range(words.vocab_size)]
        self._runner = runner
        self.fences = Compiled(
            lambda: Vocabulary(texts, words.control.values(), runner.vocab_size, words.encode_unkept)
        )
        limits = Limits(runner.context, batch, 512, 1 << 20, drafts_max)
        drafter = PromptLookup(drafts_max) if drafts_max else None
        self.scheduler = Scheduler(limits, runner.block_count, words.token_bytes, drafter)
        self._poll = select.poll()
        self._poll.register(self.fences.fileno(), select.POLLIN)
        self.loops: list[wire.Looped] = []

    def run(self, asks: Iterable[wire.Generate]) -> dict[str, Answer]:
        """All answers."""
        answers: dict[str, Answer] = {}
        for one in asks:
            answers[one.request] = Answer([])
            self._tell(self.scheduler.submit(one, 0, self.fences.open(one)), answers)
        while not self.scheduler.idle:
            self.step(answers)
        self.scheduler.check()
        return answers

    def step(self, answers: Mapping[str, Answer]) -> list[int]:
        """One step; how many tokens each slice of it had. Waits where there is nothing to do but to compile."""
        self.fences.settle()
        plan = self.scheduler.plan(0)
        for copy in plan.copies:
            self._runner.copy_block(copy.source, copy.target, copy.count)
        self._tell(plan.events, answers)
        if plan.slices:
            self._tell(self.scheduler.apply(plan, self._runner.step(plan.slices), 0), answers)
        elif not self.scheduler.idle:
            assert self._poll.poll(WAIT_MS), "nothing is compiled"
        return [len(part.tokens) for part in plan.slices]

    def close(self) -> None:
        """Ends its threads; the runner stays."""
        self.fences.close()

    def _tell(self, events: Iterable[wire.FromEngine], answers: Mapping[str, Answer]) -> None:
        for event in events:
            match event:
                case wire.Tokens():
                    answers[event.request].tokens += wire.unpack_ids(event.ids)
                case wire.Looped():
                    self.loops.append(event)
                case wire.Finished():
                    answers[event.request].reason = event.reason
                    if event.reason == "stop":
                        answers[event.request].tokens.pop()
                case wire.Failed():
                    answers[event.request].reason = event.code


def runner(threads: int = 0) -> Runner:
    """The demo model, loaded. `threads` 0: all cores."""
    start = wire.Start(model=str(smollm2.path()), kv_bytes=KV_BYTES, context=CONTEXT, threads=threads)
    return Runner.load(start, lambda _: None)


__all__ = ["SPOKEN", "Answer", "Case", "Engine", "Voice", "runner"]
