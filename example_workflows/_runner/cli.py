"""run.py from the command line to the exit code."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

from .api import Api
from .errors import Exit, RunnerError
from .graph import DEFAULT, Prompt, Workflow, find_workflow, known_workflows, load_workflow
from .options import Options, parse
from .outputs import check_target, count_frames, find_outputs, find_report, save_outputs
from .paths import Cache, cache_folder
from .progress import Progress
from .provision import Wishes, prepare
from .server import Server
from .settings import ObjectInfo, assign, set_frames, set_seed, split_assignment
from .talk import Talk, clock
from .ui_convert import check_known, to_api
from .watch import Run


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    options = parse(arguments)
    talk = Talk(options.json)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        if options.list:
            return _list(options.json)
        result = _run(options, talk)
    except KeyboardInterrupt:
        return _fail(options, talk, RunnerError(Exit.INTERRUPTED, "interrupted"))
    except RunnerError as error:
        return _fail(options, talk, error)
    if options.json:
        print(json.dumps(result), flush=True)
    return Exit.OK


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _fail(options: Options, talk: Talk, error: RunnerError) -> int:
    talk.clear()
    Talk(stream=sys.stderr).say(f"Error: {error}" if error.code != Exit.INTERRUPTED else str(error))
    if options.json:
        print(json.dumps({"workflow": options.workflow, "error": str(error), "exit_code": int(error.code)}), flush=True)
    return int(error.code)


def _list(as_json: bool) -> int:
    known = known_workflows()
    if as_json:
        listed = [{"name": name, "files": [str(path) for path in paths]} for name, paths in known.items()]
        print(json.dumps({"workflows": listed, "default": DEFAULT}))
        return Exit.OK
    if not known:
        print("No workflow lies in this pack's example_workflows folder.")
    for name, paths in known.items():
        forms = " and ".join("API" if path.parent.name == "api" else "UI" for path in paths)
        print(f"{name} ({forms} form)" + (" - the default" if name == DEFAULT else ""))
    return Exit.OK


def _run(options: Options, talk: Talk) -> dict[str, Any]:
    workflow = load_workflow(find_workflow(options.workflow))
    check_target(options.output)
    for text in options.settings:  # a typing error must not cost a set-up and a start of the server
        split_assignment(text)
    with _server(options, talk) as (api, server):
        info = api.get("/object_info")
        prompt = _prompt(workflow, info, options, server)
        run = Run(api, prompt, Progress(prompt, talk), (lambda: server.alive) if server else (lambda: True))
        try:
            done = _follow(run, workflow, options, talk, server)
        except RunnerError as error:
            if error.code == Exit.LOST and server is not None:
                raise RunnerError(Exit.LOST, f"{error}\n{server.last_words()}\nAll of it: {server.log}") from error
            raise
        finally:
            run.close()
        talk.clear()
        local = server.prepared.output if server else None
        saved = save_outputs(find_outputs(done.outputs), options.output, local, api, talk)
        version = api.version()
    report = find_report(done.outputs)
    frames = count_frames(saved, report)
    for path in saved:
        talk.say(f"Saved {path.absolute()}")
    talk.say(f"{frames if frames is not None else 'no'} frames in {clock(done.seconds)}.")
    return {
        "workflow": workflow.name,
        "frames": frames,
        "seconds": round(done.seconds, 3),
        "outputs": [str(path.absolute()) for path in saved],
        "report": report,
        "host_version": version,
    }


def _follow(run: Run, workflow: Workflow, options: Options, talk: Talk, server: Server | None) -> Any:
    run.submit(workflow.ui)
    for warning in run.warnings:
        talk.say(f"Left out by the server:{warning}")
    try:
        return run.follow(options.timeout)
    except KeyboardInterrupt:
        talk.say("Interrupting: the server closes the file it is writing.")
        run.interrupt()
        _tell_kept(server, talk)
        raise
    except RunnerError as error:
        if error.code == Exit.TIMEOUT:
            _tell_kept(server, talk)
        raise


def _tell_kept(server: Server | None, talk: Talk) -> None:
    """After a run of our own server was stopped: where its frames are."""
    if server is not None and (kept := server.kept()):
        talk.say(kept[0].upper() + kept[1:])


def _prompt(workflow: Workflow, info: ObjectInfo, options: Options, server: Server | None) -> Prompt:
    """The workflow in API form with the user's changes."""
    try:
        prompt = workflow.prompt if workflow.prompt is not None else to_api(workflow.ui or {}, info)
        check_known({node["class_type"] for node in prompt.values()}, info)
    except RunnerError as error:
        if error.code == Exit.REFUSED and server is not None:
            raise RunnerError(Exit.REFUSED, f"{error} Its log: {server.log}") from error
        raise
    if options.frames is not None:
        set_frames(prompt, info, options.frames)
    if options.seed is not None:
        set_seed(prompt, info, options.seed)
    for text in options.settings:
        assign(prompt, info, text)
    return prompt


@contextlib.contextmanager
def _server(options: Options, talk: Talk) -> Iterator[tuple[Api, Server | None]]:
    """The server of --host, or one of our own that is stopped at the end whatever happens."""
    if options.host is not None:
        api = Api(options.host)
        if not api.answers():
            raise RunnerError(
                Exit.SERVER,
                f"--host {options.host}: no ComfyUI answers there. Check the address and that the server runs.",
            )
        yield api, None
        return
    cache = Cache(cache_folder())
    prepared = prepare(cache, Wishes(options.python, options.offline), talk)
    talk.say(f"Using {prepared}.")
    with Server(prepared, cache, talk) as server:
        yield server.api, server


def run_script() -> None:
    """Entry point of run.py; text that the console cannot show must not end the run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    sys.exit(main())
