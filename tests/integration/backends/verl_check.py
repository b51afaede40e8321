"""Check the verl backend with two FSDP ranks on the CPU, in an environment that has verl.

The program runs the cases of `instar.conformance` on the local backend and on verl, compares the results,
and then runs further checks. It prints one line for each check and exits with 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file

from instar.backends.verl.backend import VerlBackend
from instar.config import LossConfig, ModelConfig, RunConfig, VerlBackendConfig
from instar.conformance.batches import make_sample, make_tree_samples
from instar.conformance.cases import ADAM, FIVE_STEPS, LOSS
from instar.conformance.compare import BackendRecord, CheckResult, compare, compute_difference
from instar.conformance.runner import build_job, run_cases
from instar.conformance.tiny import make_tiny_model
from instar.errors import BackendError, BackendLost, NonFiniteError

CONTEXT = 256
TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
"""The tolerance for the weights after five steps. Adam divides small gradients by their own size, which
amplifies rounding errors: the local backend differs from itself by 1.6e-5 with different micro batches."""
LORA = {"rank": 4, "alpha": 8.0}


class CheckReport:
    def __init__(self) -> None:
        self.failed_count = 0

    def add(self, check: CheckResult) -> None:
        self.failed_count += not check.passed
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name}  {check.detail}", flush=True)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.add(CheckResult(name, passed, detail))


def make_backend(model: ModelConfig, **settings: object) -> VerlBackend:
    section = {"type": "verl", "ranks": 2, "lora": LORA, "deadline": 240.0} | settings
    return VerlBackend(model, VerlBackendConfig.model_validate(section), seed=3)


async def check_against_local(checks: CheckReport, model: ModelConfig, folder: Path) -> None:
    records: list[BackendRecord] = []
    adapters: list[dict[str, np.ndarray]] = []
    for section in ({"type": "local", "lora": LORA}, {"type": "verl", "lora": LORA, "ranks": 2}):
        config = RunConfig.model_validate(build_job(model, section, seed=3))
        backend_folder = folder / section["type"]
        backend_folder.mkdir()
        result, arrays = await run_cases(
            config, backend_folder, lambda name: print(f"     {name}", flush=True)
        )
        adapters.append(load_file(Path(result.artifacts[FIVE_STEPS].path) / "adapter_model.safetensors"))
        records.append(BackendRecord(result, arrays, None))
    for check in compare(*records, CONTEXT, TOLERANCE):
        checks.add(check)
    expected, actual = adapters
    gap = max(compute_difference(expected[name], actual[name]) for name in expected.keys() | actual.keys())
    checks.check(
        "the adapter after five steps equals that of the local backend", gap < WEIGHT_TOLERANCE, f"{gap:.1e}"
    )


def check_listeners(checks: CheckReport) -> None:
    addresses = [
        connection.laddr.ip
        for pid in (
            *list_rank_pids(),
            *(child.pid for child in psutil.Process().children(recursive=True)),
        )
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    exposed = {ip for ip in addresses if not ip_address(ip.removeprefix("::ffff:")).is_loopback}
    checks.check(
        "Ray and its workers listen on loopback",
        bool(addresses) and not exposed,
        f"{len(addresses)} listeners, exposed on: {', '.join(sorted(exposed)) or 'none'}",
    )


async def check_training(checks: CheckReport, backend: VerlBackend, folder: Path) -> None:
    """Check listening addresses, training from a saved state, non-finite values, and a single sample."""
    await backend.start()
    check_listeners(checks)
    for number in range(2):
        await backend.forward_backward(make_tree_samples(number), LOSS)
        await backend.optim_step(ADAM)
    await backend.save_state(folder / "two")
    published: list[dict[str, bytes]] = []
    for name in ("uninterrupted", "resumed"):
        for number in range(2, 5):
            await backend.forward_backward(make_tree_samples(number), LOSS)
            await backend.optim_step(ADAM)
        published.append(read_files(Path((await backend.publish(folder / name)).path)))
        await backend.load_state(folder / "two")
    checks.check("training from a loaded state is bit-identical", published[0] == published[1])

    far = make_sample("far", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
    norms: list[float] = []
    for adds_non_finite_loss in (False, True):
        await backend.load_state(folder / "two")
        await backend.forward_backward(make_tree_samples(), LOSS)
        if adds_non_finite_loss:
            error = await catch(NonFiniteError, backend.forward_backward([*make_tree_samples(1), far], LOSS))
            checks.check("the error for a non-finite loss names the sample", "far" in str(error), str(error))
        norms.append((await backend.optim_step(ADAM)).grad_norm)
    checks.check("a non-finite loss adds nothing to the gradient", norms[0] == norms[1], str(norms))

    before = await backend.forward(make_tree_samples())
    huge = make_sample("huge", [4, 5, 6, 7], 2, advantages=np.full(4, 1e37, np.float32))
    await backend.forward_backward([huge], LossConfig(name="cross_entropy"))
    checks.check(
        "a non-finite gradient raises NonFiniteError",
        await catch(NonFiniteError, backend.optim_step(ADAM)) is not None,
    )
    after = await backend.forward(make_tree_samples())
    checks.check(
        "a non-finite gradient does not change the weights",
        all(map(np.array_equal, [x[1:] for x in before], [x[1:] for x in after])),
    )
    checks.check(
        "a non-finite gradient is cleared",
        "gradient" in str(await catch(BackendError, backend.optim_step(ADAM))),
    )

    (alone,) = await backend.forward([make_tree_samples()[3]])
    gap = compute_difference(before[3], alone)
    checks.check("a single sample on two ranks has the same logprobs", gap < TOLERANCE, f"{gap:.1e}")


async def check_killed_rank(checks: CheckReport, backend: VerlBackend, folder: Path) -> None:
    """Check that calls raise BackendLost after a rank is killed, and that loading a state replaces it."""
    expected = await backend.forward(make_tree_samples())
    await backend.save_state(folder / "alive")
    training_task = asyncio.create_task(train_repeatedly(backend))
    await asyncio.sleep(1.0)
    killed_at = time.monotonic()
    os.kill(list_rank_pids()[-1], signal.SIGKILL)
    error = await catch(BackendLost, training_task)
    seconds = time.monotonic() - killed_at
    checks.check("a killed rank raises BackendLost", error is not None, f"{seconds:.1f} s: {error}")
    checks.check(
        "every later call raises BackendLost until a state is loaded",
        await catch(BackendLost, backend.forward(make_tree_samples())) is not None,
    )
    await backend.load_state(folder / "alive")
    actual = await backend.forward(make_tree_samples())
    checks.check(
        "loading a state starts new ranks",
        all(np.array_equal(a[1:], b[1:]) for a, b in zip(expected, actual, strict=True)),
    )


async def train_repeatedly(backend: VerlBackend) -> None:
    for number in range(2000):
        await backend.forward_backward(make_tree_samples(number), LOSS)


async def check_close(checks: CheckReport, backend: VerlBackend) -> None:
    await backend.close()
    await backend.close()  # closing a closed backend must succeed
    checks.check(
        "a closed backend raises BackendError",
        "closed" in str(await catch(BackendError, backend.forward([]))),
    )
    checks.check("no worker is left", not list_rank_pids())


async def check_full_finetuning(checks: CheckReport, model: ModelConfig, folder: Path) -> None:
    """Check full fine-tuning with small micro batches."""
    from instar.backends.local.backend import LocalBackend
    from instar.config import LocalBackendConfig

    final_logprobs: list[np.ndarray] = []
    published_weights: list[dict[str, np.ndarray]] = []
    micro_batches = 0.0
    tensors_match = True
    for name, backend in {
        "local": LocalBackend(model, LocalBackendConfig(lora=None), seed=3),
        "verl": make_backend(model, lora=None, micro_batch_tokens=60),
    }.items():
        try:
            await backend.start()
            for number in range(3):
                result = await backend.forward_backward(make_tree_samples(number), LOSS)
                micro_batches = result.metrics["micro_batches"]
                # The weights gathered for this forward pass must not be used after the step.
                await backend.forward(make_tree_samples(number))
                await backend.optim_step(ADAM)
            final_logprobs.append(np.concatenate(await backend.forward(make_tree_samples())))
            artifact = await backend.publish(folder / f"full-{name}")
            assert artifact.kind == "weights"
            published_weights.append(load_file(Path(artifact.path) / "model.safetensors"))
            live = {key: tensor.numpy() async for key, tensor in backend.tensors()}
            tensors_match &= live.keys() == published_weights[-1].keys()
            tensors_match &= all(np.array_equal(live[key], published_weights[-1][key]) for key in live)
        finally:
            await backend.close()
    checks.check("full fine-tuning: tensors() equals the published weights", tensors_match, "")
    checks.check(
        "full fine-tuning: a batch is split into micro batches", micro_batches > 3, f"{micro_batches:.0f}"
    )
    gap = compute_difference(final_logprobs[0], final_logprobs[1])
    checks.check("full fine-tuning: the logprobs equal those of the local backend", gap < 1e-4, f"{gap:.1e}")
    checks.check(
        "full fine-tuning: the same tensors are published",
        published_weights[0].keys() == published_weights[1].keys(),
    )
    gap = max(
        compute_difference(published_weights[0][name], published_weights[1][name])
        for name in published_weights[0].keys() & published_weights[1].keys()
    )
    checks.check("full fine-tuning: the weights equal those of the local backend", gap < 1e-4, f"{gap:.1e}")


async def check_merged_tensors(checks: CheckReport, backend: VerlBackend, folder: Path, base: Path) -> None:
    """Check that tensors() returns the published adapter merged into the base weights."""
    await backend.forward_backward(make_tree_samples(0), LOSS)
    await backend.optim_step(ADAM)
    live = {name: tensor.numpy() async for name, tensor in backend.tensors()}
    artifact = await backend.publish(folder / "merged")
    adapter = load_file(Path(artifact.path) / "adapter_model.safetensors")
    merged = load_file(base / "model.safetensors")
    for name in [name for name in adapter if name.endswith("lora_A.weight")]:
        delta = adapter[name.replace("lora_A", "lora_B")] @ adapter[name] * (LORA["alpha"] / LORA["rank"])
        merged[name.removeprefix("base_model.model.").replace("lora_A.", "")] += delta
    checks.check("tensors(): the names equal those of the base model", live.keys() == merged.keys())
    gap = max(compute_difference(live[name], merged[name]) for name in live.keys() & merged.keys())
    checks.check("tensors(): the adapter is merged", gap < 1e-6, f"{gap:.1e}")


async def catch(error_type: type[Exception], awaitable: Awaitable[object]) -> Exception | None:
    """Return the error of this type that the awaitable raises, or None if it succeeds."""
    try:
        await awaitable
    except error_type as error:
        return error
    return None


def list_rank_pids() -> list[int]:
    """Return the process ids of the ranks. Ray names an actor's process after its class."""
    pids: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and title.startswith(b"ray::InstarWorker"):
            pids.append(int(entry.name))
    return sorted(pids)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


async def main() -> int:
    checks = CheckReport()
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = make_tiny_model(folder / "tiny", context=CONTEXT)
        model = ModelConfig.model_validate(
            {"name": str(path), "dtype": "fp32", "device": "cpu", "max_context": CONTEXT}
        )
        await check_against_local(checks, model, folder)
        print(f"{time.monotonic() - started_at:.0f} s elapsed", flush=True)
        backend = make_backend(model)
        try:
            await check_training(checks, backend, folder)
            await check_merged_tensors(checks, backend, folder, path)
            await check_killed_rank(checks, backend, folder)
        finally:
            await check_close(checks, backend)
        print(f"{time.monotonic() - started_at:.0f} s elapsed", flush=True)
        await check_full_finetuning(checks, model, folder)
    print(f"{checks.failed_count} checks failed, {time.monotonic() - started_at:.0f} s")
    return int(checks.failed_count > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
