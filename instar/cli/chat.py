"""`instar chat`: talk to a version of a run's model, or to two versions at once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Literal

import typer
from rich.console import Console

from instar.backends.resolve import resolve_run
from instar.cli.config_file import load_run_config
from instar.cli.model import fetch_model
from instar.cli.options import Agent, AsJson, Overrides, RunDir
from instar.cli.output import print_json
from instar.cli.run_store import open_run_store
from instar.cluster.layout import RunFolder, engine_names, engine_process_config
from instar.cluster.versions import choose_policy_id, find_policy
from instar.config import LocalEngineConfig, RunConfig, VllmEngineConfig
from instar.engines.base import Engine
from instar.engines.factory import create_engine
from instar.errors import ConfigError, InstarError
from instar.models import resolve_tokenizer
from instar.record.base import Renderer, ReplyDelta
from instar.types import Message, Policy, SamplingParams

PARSER_PROMPT_TOKENS = 64
"""The parser looks for the start of the reasoning in this many tokens at the end of the prompt."""


def chat(
    run_dir: RunDir,
    version: Annotated[
        int | None, typer.Option(min=0, help="Version to talk to instead of the newest; 0 is the first one.")
    ] = None,
    agent: Agent = None,
    compare: Annotated[
        Literal["base"] | None, typer.Option(help="base: also show the answers of version 0.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Sampling temperature; 0 always chooses the likeliest token.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")] = 1024,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Messages are read from the terminal, or from a pipe with one message per line. The model is loaded for
    this chat, and nothing is recorded."""
    console = Console(stderr=True)
    config = _prepare_config(load_run_config(run_dir, overrides or ()), console)
    is_interactive = sys.stdin.isatty() and not as_json
    with asyncio.Runner() as runner:
        policies = runner.run(_find_policies(config, agent, version, compare == "base"))
        with console.status("Loading the model ...") if is_interactive else nullcontext():
            renderer = Renderer.load(resolve_tokenizer(config.model.name), config.model)
            engine = runner.run(_start_engine(config))
        try:
            renderer.max_prompt_tokens = engine.info.max_context
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                stop_token_ids=renderer.stop_token_ids,
                logprobs=False,
            )
            messages = [] if system is None else [Message(role="system", content=system)]
            conversations = [
                Conversation(engine, renderer, policy, params, [*messages]) for policy in policies
            ]
            if is_interactive:
                _chat_in_terminal(runner, conversations)
            else:
                _answer_lines(runner, conversations, as_json)
        finally:
            runner.run(engine.close())


def _prepare_config(config: RunConfig, console: Console) -> RunConfig:
    """Return the config of one engine process for the chat."""
    if not engine_names(config):
        raise ConfigError(
            "engine.type: a provider serves this run's model; chat with the provider, or start "
            "`instar serve` and use its URL"
        )
    config, _ = resolve_run(config, os.environ)
    config = engine_process_config(config, 0)
    engine = config.engine
    if isinstance(engine, VllmEngineConfig) and engine.servers:
        raise ConfigError(
            "engine.servers: a chat would change the version that these servers serve to other users; start "
            "`instar serve` and use its URL"
        )
    if isinstance(engine, LocalEngineConfig):
        config = config.model_copy(update={"engine": engine.model_copy(update={"max_batch": 1})})
    fetch_model(config, console)
    return config


async def _find_policies(
    config: RunConfig, agent: str | None, version: int | None, with_base: bool
) -> list[Policy]:
    """Return the policies to talk to: the chosen version and, if ``with_base`` is True, version 0."""
    policy_id = choose_policy_id(config, agent)
    async with open_run_store(config.run_dir, read_only=True) as (_, store):
        chosen = await find_policy(store, policy_id, version)
        base = await find_policy(store, policy_id, 0)
    if with_base and chosen.version == 0:
        raise ConfigError(
            "--compare base: the chosen version is version 0 itself; train the run first, or choose another "
            "version with --version"
        )
    return [chosen, base] if with_base else [chosen]


async def _start_engine(config: RunConfig) -> Engine:
    engine = create_engine(config)
    try:
        await engine.start(RunFolder(config.run_dir).log("chat"), lambda _: None)
    except BaseException:  # including cancellation: no one else can close the engine
        await engine.close()
        raise
    return engine


@dataclass(eq=False)
class Conversation:
    engine: Engine
    renderer: Renderer
    policy: Policy
    params: SamplingParams
    messages: list[Message] = field(default_factory=list[Message])
    is_loaded: bool = False
    """True if the engine has loaded the policy. A new engine reports version 0, even if it serves the base
    model and the run starts from an adapter."""

    @property
    def label(self) -> str:
        is_base = self.policy.version == 0 and self.policy.artifact.kind == "base"
        return "base" if is_base else f"version {self.policy.version}"

    async def answer(self, text: str, *, streamed: bool = False) -> str:
        """Return the model's answer, and print it while it is sampled if ``streamed`` is True. If the answer
        fails or is cancelled, the conversation is unchanged."""
        is_new = not self.is_loaded and self.policy.artifact.kind != "base"
        if is_new or (await self.engine.status()).version != self.policy.version:
            await self.engine.load(self.policy)
        self.is_loaded = True
        messages = [*self.messages, Message(role="user", content=text)]
        prompt = self.renderer.render(messages)
        parser = self.renderer.stream(prompt_ids=prompt[-PARSER_PROMPT_TOKENS:], eager=True)
        async with aclosing(self.engine.generate(prompt, self.params)) as chunks:
            async for chunk in chunks:
                if streamed:
                    _print_deltas(parser.feed(chunk.token_ids))
                else:
                    parser.feed(chunk.token_ids)
        deltas = parser.finish()
        if streamed:
            _print_deltas(deltas)
        self.messages = [*messages, parser.message]
        return parser.message["content"]


def _print_deltas(deltas: Sequence[ReplyDelta]) -> None:
    for delta in deltas:
        typer.echo(typer.style(delta.reasoning, dim=True) if delta.reasoning else delta.text, nl=False)
    sys.stdout.flush()


def _chat_in_terminal(runner: asyncio.Runner, conversations: Sequence[Conversation]) -> None:
    labels = " and ".join(conversation.label for conversation in conversations)
    typer.echo(f"Chat with {labels}. Ctrl-C stops an answer, Ctrl-D ends the chat.")
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        for conversation in conversations if text else ():
            if len(conversations) > 1:
                typer.secho(f"{conversation.label}:", fg="cyan")
            try:
                runner.run(conversation.answer(text, streamed=True))
            except KeyboardInterrupt:
                typer.secho(" (stopped)", fg="yellow", nl=False)
            except InstarError as error:
                typer.secho(f"error: {error}", fg="red", err=True)
            typer.echo()


def _answer_lines(runner: asyncio.Runner, conversations: Sequence[Conversation], as_json: bool) -> None:
    """Answer each line of standard input that is not empty, as one conversation."""
    for text in _read_lines():
        answers = {
            conversation.label: runner.run(conversation.answer(text)) for conversation in conversations
        }
        if as_json:
            print_json({"message": text, "answers": answers})
            continue
        for label, answer in answers.items():
            typer.echo(f"{label}: {answer}" if len(answers) > 1 else answer)
        sys.stdout.flush()


def _read_lines() -> Iterator[str]:
    return filter(None, (line.strip() for line in sys.stdin))
