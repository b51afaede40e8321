"""Runs the model's code (the answer) in its own sandbox. The tests in another sandbox call it remotely."""

from __future__ import annotations

import io
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from instar.rewards.rules.sandbox_rpc import ConnectionLost, Encoder, Peer


class AnswerPeer(Peer):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        # The tests may redirect the output of a call, so each reply contains the output.
        self.output = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self.output, encoding="utf-8", write_through=True)

    def take_output(self) -> str:
        text = self.output.getvalue().decode(errors="replace")
        self.output.seek(0)
        self.output.truncate()
        return text


def encode_global(peer: Peer, name: str, value: Any) -> Any:
    """Encode a global of the answer. Modules become ``["module", name]``, and objects from the standard
    library ``["library", module]``, because the tests import their own copies."""
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    module = str(getattr(value, "__module__", ""))
    if module in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is value:
        return ["library", module]
    return Encoder(peer).encode(value)


def main(descriptor: str, file: str) -> None:
    peer = AnswerPeer(int(descriptor))
    message: dict[str, Any] = {}
    try:
        module = types.ModuleType(Path(file).stem)
        sys.modules[module.__name__] = module
        source = Path(file).read_text(encoding="utf-8")
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
        message["names"] = {
            name: encode_global(peer, name, value)
            for name, value in vars(module).items()
            if not name.startswith("__")
        }
        message["module"] = Encoder(peer).encode(module)
    except BaseException:  # noqa: BLE001 - an answer that raises SystemExit fails, too
        message = {"error": traceback.format_exc(limit=-1)}
    try:
        peer.send({**message, "output": peer.take_output()})
        peer.serve()
    except ConnectionLost:  # the tests have ended, but the answer's threads may still be running
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
