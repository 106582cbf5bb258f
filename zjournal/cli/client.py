"""`zj client`: what a client needs to know to use the server that runs here.

Each command asks the server for its model, so that the name and the context are those in force, and prints a file or
lines for a shell. Nothing is written anywhere but to the standard output, and no key is printed: the client takes it
from the environment.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shlex
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from zjournal.cli import options
from zjournal.config import KEY_VARIABLE, Config, client_key, is_loopback
from zjournal.errors import ServerGone

ANSWER_S = 5.0
ANSWER_BYTES_MAX = 1 << 20
STREAM_IDLE_MS = 600_000  # twice what Codex waits by itself; a sign of life comes every 10 s
OUTPUT_MAX = 32_000  # what Claude Code asks for; a short context is better left to the server

Url = Annotated[str | None, typer.Option(help="The server's address, if it is not the configured one.")]
Catalog = Annotated[bool, typer.Option("--catalog", help="Print the model catalogue instead.")]


@options.with_config("host", "port")
def codex(
    config: Config,
    url: Url = None,
    catalog: Catalog = False,
    catalog_file: Annotated[str, typer.Option(help="Where the catalogue will be.")] = "~/.codex/zjournal-models.json",
) -> None:
    """Print a profile for Codex; with --catalog its model catalogue, which tells it the context of the model.

    `zj client codex --catalog > ~/.codex/zjournal-models.json`, `zj client codex > ~/.codex/zjournal.config.toml`, then
    `codex --profile zjournal`: a file of its own, so that a config.toml that is there stays as it is.
    """
    base = _base(config, url)
    told = _ask(base)
    if catalog:
        typer.echo(json.dumps({"models": told["models"]}, indent=2))
        return
    model = told["data"][0]["id"]
    lines = [
        f"model = {json.dumps(model)}",
        'model_provider = "zjournal"',
        f"model_catalog_json = {json.dumps(os.path.expanduser(catalog_file))}",
        "",
        "[model_providers.zjournal]",
        'name = "zjournal"',
        f"base_url = {json.dumps(base + '/v1')}",
        'wire_api = "responses"',
        *([f'env_key = "{KEY_VARIABLE}"'] if client_key(os.environ) else []),  # else Codex insists on the variable
        f"supports_websockets = {json.dumps(_upgrades(base))}",
        f"stream_idle_timeout_ms = {STREAM_IDLE_MS}",
    ]
    typer.echo("\n".join(lines))


@options.with_config("host", "port")
def claude(config: Config, url: Url = None) -> None:
    """Print lines for the shell that starts Claude Code: `lines=$(zj client claude) && eval "$lines"`."""
    base = _base(config, url)
    model = _ask(base)["data"][0]
    exports = {
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_MODEL": model["id"],
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": model["id"] for tier in ("HAIKU", "SONNET", "OPUS")},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(model["max_input_tokens"]),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(OUTPUT_MAX, model["max_input_tokens"] // 4)),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(STREAM_IDLE_MS),
    }
    for name, value in exports.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(f'export ANTHROPIC_AUTH_TOKEN="${{{KEY_VARIABLE}:-none}}"')


@options.with_config("host", "port")
def opencode(config: Config, url: Url = None) -> None:
    """Print an opencode.json."""
    base = _base(config, url)
    model = _ask(base)["data"][0]
    context = model["max_input_tokens"]
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "zjournal",
        "options": {"baseURL": f"{base}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {model["id"]: {"name": model["id"], "limit": {"context": context, "output": context // 4}}},
    }
    told = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"zjournal": provider},
        "model": f"zjournal/{model['id']}",
    }
    typer.echo(json.dumps(told, indent=2))


@options.with_config("host", "port")
def openwebui(config: Config, url: Url = None) -> None:
    """Print lines for the shell that starts Open WebUI: `lines=$(zj client openwebui) && eval "$lines"`."""
    base = _base(config, url)
    _ask(base)
    exports = {"ENABLE_OLLAMA_API": "false", "ENABLE_OPENAI_API": "true", "OPENAI_API_BASE_URL": f"{base}/v1"}
    for name, value in exports.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    typer.echo(f'export OPENAI_API_KEY="${{{KEY_VARIABLE}:-none}}"')


def _base(config: Config, url: str | None) -> str:
    """The server's address without a trailing slash."""
    if url is not None:
        return url.rstrip("/").removesuffix("/v1")
    host = config.host if is_loopback(config.host) or config.host not in ("0.0.0.0", "::") else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}"


def _upgrades(base: str) -> bool:
    """Whether the server speaks Responses over WebSocket, as it answers to who asks for it."""
    address = urllib.parse.urlsplit(base)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    nonce = base64.b64encode(os.urandom(16)).decode()
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    headers |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": nonce}
    if key := client_key(os.environ):
        headers["Authorization"] = f"Bearer {key}"
    connection = kind(address.netloc, timeout=ANSWER_S)
    try:
        connection.request("GET", f"{address.path}/v1/responses", headers=headers)
        return connection.getresponse().status == http.HTTPStatus.SWITCHING_PROTOCOLS
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _ask(base: str) -> dict[str, Any]:
    """The server's list of models. Raises ServerGone where there is no server, or none with a model."""
    request = urllib.request.Request(f"{base}/v1/models")
    if key := client_key(os.environ):
        request.add_header("authorization", f"Bearer {key}")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ANSWER_S) as answer:
            told = json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        wanted = f"; it wants a key, set {KEY_VARIABLE}" if error.code == 401 else ""
        raise ServerGone(f"{base} answers {error.code}{wanted}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerGone(f"{base} cannot be asked for its model ({reason}); start zj serve, or give --url") from None
    if not isinstance(told, dict) or not told.get("data") or "models" not in told:
        raise ServerGone(f"{base} has no model yet; try again when it is ready")
    return told
