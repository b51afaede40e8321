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
WEIGHTS = 1e-4
"""Of weights after five steps: Adam divides small gradients by their own size, rounding and all. The local
backend differs from itself by 1.6e-5 when it adds up its gradient in other passes."""
LORA = {"rank": 4, "alpha": 8.0}


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def note(self, check: CheckResult) -> None:
        self.failed += not check.passed
        print(f"{'ok  ' if check.passed else 'FAIL'} {check.name}  {check.detail}", flush=True)

    def that(self, name: str, passed: bool, detail: str = "") -> None:
        self.note(CheckResult(name, passed, detail))


def verl(model: ModelConfig, **settings: object) -> VerlBackend:
    section = {"type": "verl", "ranks": 2, "lora": LORA, "deadline": 240.0} | settings
    return VerlBackend(model, VerlBackendConfig.model_validate(section), seed=3)


async def follows_local(checks: Checks, model: ModelConfig, folder: Path) -> None:
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
        checks.note(check)
    gap = max(
        difference(trained[0][name], trained[1][name]) for name in trained[0].keys() | trained[1].keys()
    )
    checks.that("the adapter after five steps", gap < WEIGHTS, f"{gap:.1e}")


def listens_on_loopback(checks: Checks) -> None:
    found = [
        connection.laddr.ip
        for pid in (
            *ranks_of_this_process(),
            *(child.pid for child in psutil.Process().children(recursive=True)),
        )
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    others = {ip for ip in found if not ip_address(ip.removeprefix("::ffff:")).is_loopback}
    checks.that(
        "Ray and its workers listen on loopback", bool(found) and not others, f"{len(found)} {others}"
    )


async def resumes_and_refuses(checks: Checks, backend: VerlBackend, folder: Path) -> None:
    await backend.start()
    listens_on_loopback(checks)
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
    checks.that("a saved state continues bit for bit", published[0] == published[1])

    far = make_sample("far", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
    norms: list[float] = []
    for with_bad in (False, True):
        await backend.load_state(folder / "two")
        await backend.forward_backward(tree_samples(), LossConfig())
        if with_bad:
            named = await raised(
                NonFiniteError, backend.forward_backward([*tree_samples(1), far], LossConfig())
            )
            checks.that("a loss that is not finite names its sample", "far" in str(named), str(named))
        norms.append((await backend.optim_step(ADAM)).grad_norm)
    checks.that("a loss that is not finite adds nothing", norms[0] == norms[1], str(norms))

    before = await backend.forward(tree_samples())
    huge = make_sample("huge", [4, 5, 6, 7], 2, advantages=np.full(4, 1e37, np.float32))
    await backend.forward_backward([huge], LossConfig(name="cross_entropy"))
    checks.that(
        "a gradient that is not finite", await raised(NonFiniteError, backend.optim_step(ADAM)) is not None
    )
    after = await backend.forward(tree_samples())
    checks.that(
        "... changes nothing", all(map(np.array_equal, [x[1:] for x in before], [x[1:] for x in after]))
    )
    checks.that("... and is cleared", "gradient" in str(await raised(BackendError, backend.optim_step(ADAM))))

    (alone,) = await backend.forward([tree_samples()[3]])
    gap = difference(before[3], alone)
    checks.that("one sample for two ranks", gap < TOLERANCE, f"{gap:.1e}")


async def survives_death(checks: Checks, backend: VerlBackend, folder: Path) -> None:
    """A rank killed in mid-call is BackendLost, soon; a saved state begins new ranks."""
    expected = await backend.forward(tree_samples())
    await backend.save_state(folder / "alive")
    work = asyncio.create_task(train_on(backend))
    await asyncio.sleep(1.0)
    began = time.monotonic()
    os.kill(ranks_of_this_process()[-1], signal.SIGKILL)
    lost = await raised(BackendLost, work)
    checks.that("a killed rank is BackendLost", lost is not None, f"{time.monotonic() - began:.1f} s: {lost}")
    checks.that(
        "... until a state is loaded", await raised(BackendLost, backend.forward(tree_samples())) is not None
    )
    await backend.load_state(folder / "alive")
    found = await backend.forward(tree_samples())
    checks.that(
        "... into new ranks", all(np.array_equal(a[1:], b[1:]) for a, b in zip(expected, found, strict=True))
    )


async def train_on(backend: VerlBackend) -> None:
    for number in range(2000):
        await backend.forward_backward(tree_samples(number), LossConfig())


async def closes(checks: Checks, backend: VerlBackend) -> None:
    await backend.close()
    await backend.close()
    checks.that("a closed backend says so", "closed" in str(await raised(BackendError, backend.forward([]))))
    checks.that("no worker is left", not ranks_of_this_process())


async def full_finetuning(checks: Checks, model: ModelConfig, folder: Path) -> None:
    """And in small passes."""
    from instar.backends.local.backend import LocalBackend
    from instar.config import LocalBackendConfig

    forwards: list[np.ndarray] = []
    weights: list[dict[str, np.ndarray]] = []
    passes = 0.0
    handed = True
    for name, backend in {
        "local": LocalBackend(model, LocalBackendConfig(lora=None), seed=3),
        "verl": verl(model, lora=None, micro_batch_tokens=60),
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
    checks.that("all weights: handed out as published", handed, "")
    checks.that("all weights: in several passes", passes > 3, f"{passes:.0f}")
    gap = difference(forwards[0], forwards[1])
    checks.that("all weights: logprobs after three steps", gap < 1e-4, f"{gap:.1e}")
    checks.that("all weights: the same tensors are published", weights[0].keys() == weights[1].keys())
    gap = max(
        difference(weights[0][name], weights[1][name]) for name in weights[0].keys() & weights[1].keys()
    )
    checks.that("all weights: as the local backend's", gap < 1e-4, f"{gap:.1e}")


async def hands_out_merged(checks: Checks, backend: VerlBackend, folder: Path, base: Path) -> None:
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
    checks.that("handed out: the same tensors", live.keys() == merged.keys())
    gap = max(difference(live[name], merged[name]) for name in live.keys() & merged.keys())
    checks.that("handed out: the adapter merged", gap < 1e-6, f"{gap:.1e}")


async def raised(kind: type[Exception], work: object) -> Exception | None:
    try:
        await work  # type: ignore[misc]
    except kind as error:
        return error
    return None


def ranks_of_this_process() -> list[int]:
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
    checks = Checks()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = make_tiny_model(folder / "tiny", context=CONTEXT)
        model = ModelConfig.model_validate(
            {"name": str(path), "dtype": "fp32", "device": "cpu", "max_context": CONTEXT}
        )
        await follows_local(checks, model, folder)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        backend = verl(model)
        try:
            await resumes_and_refuses(checks, backend, folder)
            await hands_out_merged(checks, backend, folder, path)
            await survives_death(checks, backend, folder)
        finally:
            await closes(checks, backend)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        await full_finetuning(checks, model, folder)
    print(f"{checks.failed} checks failed, {time.monotonic() - began:.0f} s")
    return int(checks.failed > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
