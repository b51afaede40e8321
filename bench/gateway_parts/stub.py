"""The stub behind every proxy: nginx, which reads the whole request and responds immediately."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Generator
from pathlib import Path

from gateway_parts.processes import MeasurementError, find_free_port, start_process, wait_until_up

INSTALL_COMMAND = "apt-get install nginx libnginx-mod-http-lua wrk"
MODULES = Path("/usr/lib/nginx/modules")
REPLY = (
    "One by one the numbers are added, first the small ones and then the large, "
    "and the sum of them is what was asked for at the start."
)
"""31 tokens with the default model, plus an end-of-sequence token."""
WORDS = REPLY.split()

CONFIG = """
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_max_body_size 64m;
  client_body_buffer_size 2m;
  keepalive_requests 100000000;
  keepalive_timeout 600s;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  init_by_lua_block {{
    local function read(name)
      local file = assert(io.open("{folder}/" .. name, "rb"))
      local text = file:read("*a")
      file:close()
      return text
    end
    completion, events = read("completion.json"), read("events.sse")
  }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{ return 200 '{{"object":"list","data":[]}}'; }}
    location /v1/chat/completions {{
      content_by_lua_block {{
        ngx.req.read_body()
        -- Clients put the setting before or after the messages.
        local body = ngx.req.get_body_data() or ""
        local ends = body:sub(1, 600) .. body:sub(-600)
        if ends:find('"stream"%s*:%s*true') then
          ngx.header.content_type = "text/event-stream"
          ngx.print(events)
        else
          ngx.header.content_type = "application/json"
          ngx.header.content_length = #completion
          ngx.print(completion)
        end
      }}
    }}
  }}
}}
"""


@contextlib.contextmanager
def start_stub(folder: Path) -> Generator[str]:
    """Run the stub and yield its base URL, which ends in ``/v1``."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None or not (MODULES / "ngx_http_lua_module.so").is_file():
        raise MeasurementError(f"nginx with its Lua module is not installed; run {INSTALL_COMMAND}")
    folder.mkdir(parents=True)
    port = find_free_port()
    (folder / "completion.json").write_text(json.dumps(make_completion()))
    (folder / "events.sse").write_text(make_event_stream())
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port, modules=MODULES))
    log_path = folder / "log"
    with start_process([program, "-p", folder, "-c", folder / "nginx.conf"], log_path) as process:
        wait_until_up(process, f"http://127.0.0.1:{port}/", log_path)
        yield f"http://127.0.0.1:{port}/v1"


def make_completion() -> dict[str, object]:
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 1790000000,
        "model": "bench",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": REPLY}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 250, "completion_tokens": len(WORDS), "total_tokens": 250 + len(WORDS)},
    }


def make_event_stream() -> str:
    """Return the completion as a stream with one event per word."""
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word if n == 0 else f" {word}"} for n, word in enumerate(WORDS)]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    head = {
        "id": "chatcmpl-stub",
        "object": "chat.completion.chunk",
        "created": 1790000000,
        "model": "bench",
    }
    events = [json.dumps({**head, "choices": [choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
