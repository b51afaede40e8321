"""Tests for vLLM replies, weight changes, launch commands and config. Most of them use a fake server.

The tests in tests/integration/vllm use real servers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from instar.cluster.layout import engine_names, engine_process_config, engine_python
from instar.config import RunConfig, VllmEngineConfig
from instar.engines.factory import resolve_vllm_config
from instar.engines.pool import EnginePool
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.command import VllmInstallation, VllmLaunch, find_vllm, round_up_rank
from instar.engines.vllm.merge import check_same_shapes, merge_adapter
from instar.engines.vllm.reply import VllmReply
from instar.engines.vllm.weights import NO_VERSION, ServerWeights, require_served
from instar.engines.vllm.wire import GENERATE_PATH, encode_generate_request
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.subprocess_guard import guard_command
from instar.types import OPTIONAL_SAMPLING_FIELDS, SamplingParams, TokenChunk
from tests.tiny import make_tiny_model, make_tiny_tokenizer
from tests.unit.engines.fake_vllm import END_EVENT, FakeVllm, make_event
from tests.unit.engines.test_conformance import create_local_engine, create_scripted_engine

TOKENIZER = make_tiny_tokenizer()


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with FakeVllm().serving() as server:
        yield server


@pytest.fixture
async def client(vllm: FakeVllm) -> AsyncIterator[VllmClient]:
    client = VllmClient(vllm.url)
    yield client
    await client.close()


async def start_reply(client: VllmClient, weights: ServerWeights, **params: Any) -> VllmReply:
    reply = VllmReply(
        await client.stream(GENERATE_PATH, b"{}"),
        SamplingParams(**params),
        client=client,
        get_version=lambda: weights.version,
        end_ids=(2,),
        tokenizer=TOKENIZER,
    )
    weights.replies.add(reply)
    return reply


async def test_weight_change_splits_a_reply_by_version(vllm: FakeVllm, client: VllmClient) -> None:
    """The first tokens arrive before the change but are read after it."""
    weights = ServerWeights(client)
    reply = await start_reply(client, weights)
    vllm.events.put_nowait(make_event(5) + make_event(6))
    async with asyncio.timeout(30):
        while not reply.received_bytes:  # noqa: ASYNC110 - the socket has no event
            await asyncio.sleep(0.01)
    async with weights.pause_sampling() as change:
        change.start()
        change.finish(4)
    vllm.events.put_nowait(make_event(7) + make_event(8, finish="length") + END_EVENT)
    vllm.events.put_nowait(None)
    chunks = [chunk async for chunk in reply.stream_chunks()]
    assert [t for c in chunks for t in c.token_ids] == [5, 6, 7, 8]
    assert [v for c in chunks for v in c.versions] == [0, 0, 4, 4]
    assert vllm.paths == [GENERATE_PATH, "/pause", "/resume"]


async def test_weight_change_that_fails_after_start_invalidates_the_version(
    vllm: FakeVllm, client: VllmClient
) -> None:
    weights = ServerWeights(client)
    reply = await start_reply(client, weights)
    vllm.events.put_nowait(make_event(5))
    stream = reply.stream_chunks()
    await anext(stream)
    vllm.failing_paths.add("/collective_rpc")
    with pytest.raises(EngineError, match="requested by the test"):  # noqa: PT012 - the pause must be inside
        async with weights.pause_sampling() as change:
            change.start()
            await client.rpc("reload_weights")
    assert weights.version == NO_VERSION
    with pytest.raises(EngineUnavailable):
        require_served(weights.version)
    with pytest.raises(EngineUnavailable):
        await anext(stream)
    assert "/resume" not in vllm.paths
    async with weights.pause_sampling() as change:
        change.finish(3)
    assert weights.version == 3
    assert vllm.paths[-1] == "/resume"


async def test_weight_change_that_fails_before_start_keeps_the_version(
    vllm: FakeVllm, client: VllmClient
) -> None:
    weights = ServerWeights(client)
    with pytest.raises(RuntimeError):
        async with weights.pause_sampling():
            raise RuntimeError
    assert weights.version == 0
    assert vllm.paths == ["/pause", "/resume"]


async def test_reply_has_nan_for_missing_logprobs_and_zero_for_greedy_behavior(
    vllm: FakeVllm, client: VllmClient
) -> None:
    weights = ServerWeights(client)
    event_without_logprob = make_event(5).replace(b"-1.0", b"-9999.0")
    vllm.events.put_nowait(event_without_logprob + make_event(6, finish="length") + END_EVENT)
    vllm.events.put_nowait(None)
    (chunk,) = [c async for c in (await start_reply(client, weights, temperature=0)).stream_chunks()]
    assert math.isnan(chunk.logprobs[0])
    assert chunk.logprobs[1] == -1.0
    assert chunk.behavior_logprobs == [0.0, 0.0]
    vllm.events.put_nowait(make_event(5, finish="length", logprobs=None) + END_EVENT)
    vllm.events.put_nowait(None)
    reply = await start_reply(client, weights, top_p=0.5, logprobs=False)
    (chunk,) = [c async for c in reply.stream_chunks()]
    assert np.isnan(chunk.logprobs).all()
    assert np.isnan(chunk.behavior_logprobs or []).all()
    vllm.events.put_nowait(make_event(5, finish="length") + END_EVENT)
    vllm.events.put_nowait(None)
    reply = await start_reply(client, weights, presence_penalty=0.5)
    (chunk,) = [c async for c in reply.stream_chunks()]
    assert chunk.logprobs == [-1.0]
    assert np.isnan(chunk.behavior_logprobs or [0.0]).all(), "vLLM does not return the penalized logprobs"


async def test_reply_finds_the_stop_string_if_vllm_omits_it(vllm: FakeVllm, client: VllmClient) -> None:
    ids = TOKENIZER.encode("The answer is 893")
    for fields, expected in (({}, "893"), ({"stop_reason": "answer"}, "answer")):
        vllm.events.put_nowait(
            make_event(*ids[:-1]) + make_event(ids[-1], finish="stop", **fields) + END_EVENT
        )
        vllm.events.put_nowait(None)
        reply = await start_reply(client, ServerWeights(client), stop=("absent", "893"))
        last: TokenChunk = [chunk async for chunk in reply.stream_chunks()][-1]
        assert (last.finish_reason, last.stop) == ("stop", expected)


@pytest.mark.parametrize(
    "events",
    [make_event(5), make_event(5) + b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'],
)
async def test_incomplete_reply_raises_unavailable(events: bytes, vllm: FakeVllm, client: VllmClient) -> None:
    vllm.events.put_nowait(events)
    vllm.events.put_nowait(None)
    with pytest.raises(EngineUnavailable):
        async for _ in (await start_reply(client, ServerWeights(client))).stream_chunks():
            pass


def test_generate_request_has_the_sampling_params_and_detokenizes_only_for_stop_strings() -> None:
    def encode_params(**params: Any) -> dict[str, Any]:
        prompt = np.asarray([5, 6], np.int32)
        sampling_params = SamplingParams(max_tokens=50, **params)
        request = encode_generate_request(
            prompt, sampling_params, context_left=7, eos_ids=[2], model=None, send_seed=True
        )
        return json.loads(request)["sampling_params"]

    plain = encode_params(seed=-(2**70) - 1, stop_token_ids=(9,))
    assert plain["max_tokens"] == 7
    assert plain["stop_token_ids"] == [2, 9]
    assert plain["detokenize"] is False
    assert 0 <= plain["seed"] < 2**63
    assert plain["logprobs"] == 0
    assert encode_params(stop=("x",))["detokenize"] is True
    assert "logprobs" not in encode_params(logprobs=False)
    assert not set(OPTIONAL_SAMPLING_FIELDS) & set(plain)
    settings = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.1}
    adjusted = encode_params(**settings, logit_bias={7: -100.0, 8: 1.5})
    expected = settings | {"logit_bias": {"7": -100.0, "8": 1.5}}
    assert {name: adjusted[name] for name in OPTIONAL_SAMPLING_FIELDS} == expected


def test_merge_adapter_matches_peft(tiny_model: Path, adapter: Path) -> None:
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), adapter
    ).merge_and_unload()
    with merge_adapter(tiny_model, adapter, "fp32") as folder:
        check_same_shapes(folder, tiny_model)
        actual = load_file(folder / "model.safetensors")
    assert not folder.exists()
    expected = merged.state_dict()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)
    with merge_adapter(tiny_model, adapter, "bf16") as folder:
        dtypes = {str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()}
    assert dtypes == {"torch.float32", "torch.bfloat16"}, "weights without an adapter must keep their dtype"


def test_check_same_shapes_rejects_a_different_architecture(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", layers=1)
    with pytest.raises(EngineError, match="architecture of the base model"):
        check_same_shapes(other, tiny_model)
    with pytest.raises(EngineError, match="does not have"), merge_adapter(other, adapter, "fp32"):
        pass


def build_launch(config: VllmEngineConfig, *, cpu: bool = True, adapters: bool = False) -> VllmLaunch:
    installation = VllmInstallation("python", "0.32.0+cpu" if cpu else "0.26.0", needs_scale_out_flag=cpu)
    return VllmLaunch(config, installation, Path("model"), "bf16", 512, adapters, core_count=2)


def test_launch_passes_the_key_in_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTAR_ADMIN_KEY", "gateway-key")
    launch = build_launch(VllmEngineConfig(env={"EXTRA": "1"}, args=["--seed", "3"]))
    environment = launch.build_environment("server-key", Path("package"))
    assert environment["VLLM_API_KEY"] == "server-key"
    assert environment["EXTRA"] == "1"
    assert "gateway-key" not in environment.values()
    command = launch.build_command(1234)
    assert "server-key" not in command
    assert command[-2:] == ["--seed", "3"]
    assert "127.0.0.1" in command


def test_launch_command_depends_on_adapters_and_device() -> None:
    gpu_command = build_launch(
        VllmEngineConfig(gpu_memory=0.4, lora_rank=20), cpu=False, adapters=True
    ).build_command(1)
    assert gpu_command[gpu_command.index("--max-lora-rank") + 1] == "32"
    assert "0.4" in gpu_command
    assert "--enforce-eager" not in gpu_command
    assert "--enable-scale-out" not in gpu_command, "vLLM 0.26 lacks this flag"
    cpu_command = build_launch(VllmEngineConfig()).build_command(1)
    assert {"--enforce-eager", "--no-enable-chunked-prefill", "--enable-scale-out"} <= set(cpu_command)
    assert "--enable-lora" not in cpu_command
    with pytest.raises(ConfigError, match="512"):
        round_up_rank(513)


def test_find_vllm_rejects_an_interpreter_without_vllm() -> None:
    for python in (sys.executable, "/missing/python"):
        with pytest.raises(ConfigError, match=r"engine\.python"):
            find_vllm(python)


def test_find_vllm_reports_why_the_interpreter_fails(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'cannot load libpython' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"cannot find out whether .* has vLLM: cannot load libpython"):
        find_vllm(str(python))
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        find_vllm(sys.executable)


GUARDED_SCRIPT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_guard_kills_the_process_tree_when_the_process_that_started_it_dies() -> None:
    starter_script = f"""
import subprocess, sys, time
guard = subprocess.Popen({guard_command([sys.executable, "-c", GUARDED_SCRIPT])!r},
                         stdin=subprocess.PIPE, start_new_session=True)
time.sleep(60)
"""
    starter = subprocess.Popen([sys.executable, "-c", starter_script], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    grandchild_pid = int(starter.stdout.readline())
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    deadline = time.monotonic() + 15
    while _is_alive(grandchild_pid):
        assert time.monotonic() < deadline, "the grandchild is still running"
        time.sleep(0.05)
    starter.stdout.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_engine_process_config_selects_the_part_of_a_mixed_engine() -> None:
    servers = ["http://a:1", "http://b:2"]
    parts = [
        {"type": "scripted", "count": 2, "python": "p"},
        {"type": "vllm", "servers": servers},
        {"type": "vllm", "python": "v"},
    ]
    config = RunConfig.model_validate({"engine": {"type": "mixed", "parts": parts}})
    assert engine_names(config) == [f"engine-{index}" for index in range(5)]
    configs = [engine_process_config(config, index) for index in range(5)]
    assert [part.engine.type for part in configs] == ["scripted", "scripted", "vllm", "vllm", "vllm"]
    assert [part.engine.servers for part in configs[2:]] == [["http://a:1"], ["http://b:2"], []]  # type: ignore[union-attr]
    assert [engine_python(part) for part in configs] == ["p", "p", None, None, None]


def test_vllm_config_rejects_a_count_that_differs_from_the_number_of_servers() -> None:
    with pytest.raises(ValueError, match=r"must match the number of `servers` \(2\), got"):
        VllmEngineConfig.model_validate({"servers": ["http://a:1", "http://b:2"], "count": 3})


def test_resolve_vllm_config_fills_defaults_from_the_run_config() -> None:
    def resolve(**run: Any) -> VllmEngineConfig:
        return resolve_vllm_config(VllmEngineConfig(), RunConfig.model_validate(run))

    assert resolve().policy == "auto"
    assert resolve(backend={"type": "local", "lora": {"rank": 8}}).lora_rank == 8
    assert resolve(backend={"type": "local", "lora": None}).policy == "merged"
    assert resolve(sync={"route": "ipc"}).policy == "merged"
    live = {"data": "live", "agents": {"support": {"mode": "learn"}}}
    assert resolve(**live).policy == "adapter"
    assert resolve().gpu_memory == 0.9


async def test_pool_of_different_engine_types_has_kind_mixed(tiny_model: Path) -> None:
    pool = EnginePool([create_local_engine(tiny_model), create_scripted_engine(tiny_model)])
    await pool.connect()
    assert pool.info.kind == "mixed"
    assert set(pool.info.artifacts) == {"adapter", "weights", "base"}
    replies = [[c async for c in pool.generate([5, 6], SamplingParams(max_tokens=2))] for _ in range(4)]
    assert all(chunks[-1].finish_reason for chunks in replies)
    await pool.close()
