"""Makes folders that look like a ComfyUI; their main.py answers /system_stats or dies, as the test wants."""

from __future__ import annotations

from pathlib import Path

SERVES = """
import http.server, json, pathlib, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
pathlib.Path("started.json").write_text(json.dumps({"argv": sys.argv[1:]}))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"system": {"comfyui_version": "0.3.80"}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("Starting server", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DIES = "import sys\nprint('Traceback ...')\nprint('ImportError: no module called torchsde')\nsys.exit(1)\n"
DEAF = "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"


def make_host(folder: Path, main: str = SERVES, version: str = "0.3.80") -> Path:
    """A folder that is_comfyui() takes for one."""
    (folder / "comfy").mkdir(parents=True)
    (folder / "custom_nodes").mkdir()
    for name in ("nodes.py", "execution.py", "comfy/sd.py"):
        (folder / name).touch()
    (folder / "main.py").write_text(main, encoding="utf-8")
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
    return folder
