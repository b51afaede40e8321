"""What `backend: verl` must do, run by an interpreter that has verl: two ranks under FSDP on the CPU.

The scenes of `instar.conformance` are played on the local backend and on verl and compared; then what those
leave open. Prints one line for each check and exits with 1 when one failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file

from instar.backends.verl.backend import VerlBackend
from instar.config import LossConfig, ModelConfig, RunConfig, VerlBackendConfig
from instar.conformance.batches import make_sample, tree_samples
from instar.conformance.cases import ADAM
from instar.conformance.compare import BackendRecord, CheckResult, compare, difference
from instar.conformance.runner import build_job, run_cases
from instar.conformance.tiny import make_tiny_model
from instar.errors import BackendError, BackendLost, NonFiniteError

CONTEXT = 256
TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
"""Of weights after five steps: Adam divides small gradients by their own size, rounding and all. The local
backend differs from itself by 1.6e-5 when it adds up its gradient in other passes."""
LORA = {"rank": 4, "alpha": 8.0}


class CheckReport:
    def __init__(self) -> None:
        self.failed = 0

    def add(self, check: CheckResult) -> None:
        self.failed += not check.passed
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name}  {check.detail}", flush=True)

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.add(CheckResult(name, passed, detail))


def make_backend(model: ModelConfig, **settings: object) -> VerlBackend:
    section = {"type": "verl", "ranks": 2, "lora": LORA, "deadline": 240.0} | settings
    return VerlBackend(model, VerlBackendConfig.model_validate(section), seed=3)


async def check_against_local(checks: CheckReport, model: ModelConfig, folder: Path) -> None:
    plays: list[BackendRecord] = []
    trained: list[dict[str, np.ndarray]] = []
    for section in ({"type": "local", "lora": LORA}, {"type": "verl", "lora": LORA, "ranks": 2}):
        config = RunConfig.model_validate(build_job(model, section, seed=3))
        work = folder / section["type"]
        work.mkdir()
        shown, arrays = await run_cases(config, work, lambda name: print(f"     {name}", flush=True))
        weights = load_file(Path(shown.artifacts["five"].path) / "adapter_model.safetensors")
        plays.append(BackendRecord(shown, arrays, None))
        trained.append(weights)
    for check in compare(*plays, CONTEXT, TOLERANCE):
        checks.add(check)
    gap = max(
        difference(trained[0][name], trained[1][name]) for name in trained[0].keys() | trained[1].keys()
    )
    checks.check("the adapter after five steps", gap < WEIGHT_TOLERANCE, f"{gap:.1e}")


def check_listeners(checks: CheckReport) -> None:
    found = [
        connection.laddr.ip
        for pid in (
            *list_rank_pids(),
            *(child.pid for child in psutil.Process().children(recursive=True)),
        )
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    others = {ip for ip in found if not ip_address(ip.removeprefix("::ffff:")).is_loopback}
    checks.check(
        "Ray and its workers listen on loopback", bool(found) and not others, f"{len(found)} {others}"
    )


async def check_resume_and_non_finite(checks: CheckReport, backend: VerlBackend, folder: Path) -> None:
    await backend.start()
    check_listeners(checks)
    for number in range(2):
        await backend.forward_backward(tree_samples(number), LossConfig())
        await backend.optim_step(ADAM)
    await backend.save_state(folder / "two")
    published: list[dict[str, bytes]] = []
    for name in ("straight", "again"):
        for number in range(2, 5):
            await backend.forward_backward(tree_samples(number), LossConfig())
            await backend.optim_step(ADAM)
        published.append(read_all(Path((await backend.publish(folder / name)).path)))
        await backend.load_state(folder / "two")
    checks.check("a saved state continues bit for bit", published[0] == published[1])

    far = make_sample("far", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
    norms: list[float] = []
    for with_bad in (False, True):
        await backend.load_state(folder / "two")
        await backend.forward_backward(tree_samples(), LossConfig())
        if with_bad:
            named = await catch(
                NonFiniteError, backend.forward_backward([*tree_samples(1), far], LossConfig())
            )
            checks.check("a loss that is not finite names its sample", "far" in str(named), str(named))
        norms.append((await backend.optim_step(ADAM)).grad_norm)
    checks.check("a loss that is not finite adds nothing", norms[0] == norms[1], str(norms))

    before = await backend.forward(tree_samples())
    huge = make_sample("huge", [4, 5, 6, 7], 2, advantages=np.full(4, 1e37, np.float32))
    await backend.forward_backward([huge], LossConfig(name="cross_entropy"))
    checks.check(
        "a gradient that is not finite", await catch(NonFiniteError, backend.optim_step(ADAM)) is not None
    )
    after = await backend.forward(tree_samples())
    checks.check(
        "... changes nothing", all(map(np.array_equal, [x[1:] for x in before], [x[1:] for x in after]))
    )
    checks.check("... and is cleared", "gradient" in str(await catch(BackendError, backend.optim_step(ADAM))))

    (alone,) = await backend.forward([tree_samples()[3]])
    gap = difference(before[3], alone)
    checks.check("one sample for two ranks", gap < TOLERANCE, f"{gap:.1e}")


async def check_killed_rank(checks: CheckReport, backend: VerlBackend, folder: Path) -> None:
    """A rank killed in mid-call is BackendLost, soon; a saved state begins new ranks."""
    expected = await backend.forward(tree_samples())
    await backend.save_state(folder / "alive")
    work = asyncio.create_task(train_repeatedly(backend))
    await asyncio.sleep(1.0)
    began = time.monotonic()
    os.kill(list_rank_pids()[-1], signal.SIGKILL)
    lost = await catch(BackendLost, work)
    checks.check(
        "a killed rank is BackendLost", lost is not None, f"{time.monotonic() - began:.1f} s: {lost}"
    )
    checks.check(
        "... until a state is loaded", await catch(BackendLost, backend.forward(tree_samples())) is not None
    )
    await backend.load_state(folder / "alive")
    found = await backend.forward(tree_samples())
    checks.check(
        "... into new ranks", all(np.array_equal(a[1:], b[1:]) for a, b in zip(expected, found, strict=True))
    )


async def train_repeatedly(backend: VerlBackend) -> None:
    for number in range(2000):
        await backend.forward_backward(tree_samples(number), LossConfig())


async def check_close(checks: CheckReport, backend: VerlBackend) -> None:
    await backend.close()
    await backend.close()
    checks.check("a closed backend says so", "closed" in str(await catch(BackendError, backend.forward([]))))
    checks.check("no worker is left", not list_rank_pids())


async def check_full_finetuning(checks: CheckReport, model: ModelConfig, folder: Path) -> None:
    """And in small passes."""
    from instar.backends.local.backend import LocalBackend
    from instar.config import LocalBackendConfig

    forwards: list[np.ndarray] = []
    weights: list[dict[str, np.ndarray]] = []
    passes = 0.0
    handed = True
    for name, backend in {
        "local": LocalBackend(model, LocalBackendConfig(lora=None), seed=3),
        "verl": make_backend(model, lora=None, micro_batch_tokens=60),
    }.items():
        try:
            await backend.start()
            for number in range(3):
                done = await backend.forward_backward(tree_samples(number), LossConfig())
                passes = done.metrics["micro_batches"]
                # Weights that were gathered for this must not be used again after the step.
                await backend.forward(tree_samples(number))
                await backend.optim_step(ADAM)
            forwards.append(np.concatenate(await backend.forward(tree_samples())))
            artifact = await backend.publish(folder / f"full-{name}")
            assert artifact.kind == "weights"
            weights.append(load_file(Path(artifact.path) / "model.safetensors"))
            live = {key: tensor.numpy() async for key, tensor in backend.tensors()}
            handed &= live.keys() == weights[-1].keys()
            handed &= all(np.array_equal(live[key], weights[-1][key]) for key in live)
        finally:
            await backend.close()
    checks.check("all weights: handed out as published", handed, "")
    checks.check("all weights: in several passes", passes > 3, f"{passes:.0f}")
    gap = difference(forwards[0], forwards[1])
    checks.check("all weights: logprobs after three steps", gap < 1e-4, f"{gap:.1e}")
    checks.check("all weights: the same tensors are published", weights[0].keys() == weights[1].keys())
    gap = max(
        difference(weights[0][name], weights[1][name]) for name in weights[0].keys() & weights[1].keys()
    )
    checks.check("all weights: as the local backend's", gap < 1e-4, f"{gap:.1e}")


async def check_merged_tensors(checks: CheckReport, backend: VerlBackend, folder: Path, base: Path) -> None:
    """The weights of an engine that serves no adapters: what is published, merged into the base model's."""
    await backend.forward_backward(tree_samples(0), LossConfig())
    await backend.optim_step(ADAM)
    live = {name: tensor.numpy() async for name, tensor in backend.tensors()}
    artifact = await backend.publish(folder / "merged")
    adapter = load_file(Path(artifact.path) / "adapter_model.safetensors")
    merged = load_file(base / "model.safetensors")
    for name in [name for name in adapter if name.endswith("lora_A.weight")]:
        delta = adapter[name.replace("lora_A", "lora_B")] @ adapter[name] * (LORA["alpha"] / LORA["rank"])
        merged[name.removeprefix("base_model.model.").replace("lora_A.", "")] += delta
    checks.check("handed out: the same tensors", live.keys() == merged.keys())
    gap = max(difference(live[name], merged[name]) for name in live.keys() & merged.keys())
    checks.check("handed out: the adapter merged", gap < 1e-6, f"{gap:.1e}")


async def catch(kind: type[Exception], work: object) -> Exception | None:
    try:
        await work  # type: ignore[misc]
    except kind as error:
        return error
    return None


def list_rank_pids() -> list[int]:
    """Ray names its actors' processes after their class."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            title = (entry / "cmdline").read_bytes()
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdigit() and title.startswith(b"ray::InstarWorker"):
            found.append(int(entry.name))
    return sorted(found)


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


async def main() -> int:
    checks = CheckReport()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = make_tiny_model(folder / "tiny", context=CONTEXT)
        model = ModelConfig.model_validate(
            {"name": str(path), "dtype": "fp32", "device": "cpu", "max_context": CONTEXT}
        )
        await check_against_local(checks, model, folder)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        backend = make_backend(model)
        try:
            await check_resume_and_non_finite(checks, backend, folder)
            await check_merged_tensors(checks, backend, folder, path)
            await check_killed_rank(checks, backend, folder)
        finally:
            await check_close(checks, backend)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        await check_full_finetuning(checks, model, folder)
    print(f"{checks.failed} checks failed, {time.monotonic() - began:.0f} s")
    return int(checks.failed > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
