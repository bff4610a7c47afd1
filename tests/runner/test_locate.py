"""Which ComfyUI and which interpreter; and the pack made visible without touching the user's folder."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from _runner import link, locate, provision
from _runner.errors import Exit, RunnerError
from _runner.paths import Cache
from _runner.talk import Talk

from runner.fake_host import make_host

pytestmark = pytest.mark.cpu


def make_pack(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}\n", encoding="utf-8")
    return folder


def listing(folder: Path) -> list[tuple[str, float]]:
    return sorted((str(path), path.stat().st_mtime) for path in folder.rglob("*"))


def test_the_variable_comes_before_the_parent(tmp_path: Path) -> None:
    named, parent = make_host(tmp_path / "named"), make_host(tmp_path / "parent")
    pack = make_pack(parent / "custom_nodes" / "any name")
    found = locate.find_installation(pack, {"COMFYUI_PATH": str(named)})
    assert found is not None
    assert (found.path, found.why, found.holds_pack) == (named, "COMFYUI_PATH", False)
    found = locate.find_installation(pack, {})
    assert found is not None
    assert (found.path, found.holds_pack, found.version) == (parent, True, "0.3.80")


def test_a_linked_pack_is_seen(tmp_path: Path) -> None:
    host, pack = make_host(tmp_path / "host"), make_pack(tmp_path / "elsewhere" / "pack")
    (host / "custom_nodes" / "linked").symlink_to(pack, target_is_directory=True)
    assert locate.find_installation(pack, {}) is None
    through_link = locate.find_installation(host / "custom_nodes" / "linked", {})
    assert through_link is not None
    assert through_link.holds_pack
    named = locate.find_installation(pack, {"COMFYUI_PATH": str(host)})
    assert named is not None
    assert named.holds_pack


def test_other_folders_are_no_host(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "custom_nodes" / "pack")
    assert locate.find_installation(pack, {}) is None
    with pytest.raises(RunnerError, match=r"main\.py") as caught:
        locate.find_installation(pack, {"COMFYUI_PATH": str(tmp_path)})
    assert caught.value.code == Exit.SETUP


@pytest.mark.parametrize(("version", "ok"), [("0.3.74", False), ("0.3.75", True), ("0.4.0", True), ("0.27.0", True)])
def test_too_old_a_host_is_refused(tmp_path: Path, version: str, ok: bool) -> None:
    host, pack = make_host(tmp_path / "host", version=version), make_pack(tmp_path / "pack")
    if ok:
        assert locate.find_installation(pack, {"COMFYUI_PATH": str(host)}) is not None
    else:
        with pytest.raises(RunnerError, match=r"0\.3\.74.*expected 0\.3\.75 or newer"):
            locate.find_installation(pack, {"COMFYUI_PATH": str(host)})


def test_the_order_of_interpreters(tmp_path: Path) -> None:
    windows = locate.candidates(tmp_path / "ComfyUI", "win32")
    assert windows[0] == Path(sys.executable)
    assert windows[1:] == [
        tmp_path / "ComfyUI" / "venv" / "Scripts" / "python.exe",
        tmp_path / "ComfyUI" / ".venv" / "Scripts" / "python.exe",
        tmp_path / "ComfyUI" / "python_embeded" / "python.exe",
        tmp_path / "python_embeded" / "python.exe",
    ]
    assert locate.candidates(tmp_path, "linux")[1] == tmp_path / "venv" / "bin" / "python"


def test_the_first_that_has_everything_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {Path(sys.executable): ("av",), tmp_path / "a": (), tmp_path / "b": ()}
    monkeypatch.setattr(locate, "candidates", lambda host: [*lacking])
    monkeypatch.setattr(locate, "ask", lambda path: locate.Python(path, lacking[path]))
    (tmp_path / "b").touch()
    assert locate.find_python(tmp_path).path == tmp_path / "b"
    (tmp_path / "a").touch()
    assert locate.find_python(tmp_path).path == tmp_path / "a"


def test_an_error_names_all_that_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "ask", lambda path: locate.Python(path, ("torch", "av")))
    with pytest.raises(RunnerError, match="--python PATH") as caught:
        locate.find_python(tmp_path / "ComfyUI")
    text = str(caught.value)
    assert f"{sys.executable}: lacks torch, av" in text
    assert text.count("not there") == 4
    with pytest.raises(RunnerError, match="lacks torch, av"):
        locate.find_python(tmp_path / "ComfyUI", Path("mine"))
    monkeypatch.setattr(locate, "ask", lambda path: locate.Python(path, ("does not run: bad",)))
    with pytest.raises(RunnerError, match=r"it does not run: bad\. Name another"):
        locate.find_python(tmp_path / "ComfyUI", Path("mine"))


def test_this_interpreter_is_asked_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "NEEDS", (*locate.NEEDS, "no_such_module"))
    locate.ask.cache_clear()
    found = locate.ask(Path(sys.executable))
    locate.ask.cache_clear()
    assert found.torch
    assert found.version == sys.version.split()[0]
    assert found.missing == ("no_such_module",)


def test_an_interpreter_that_does_not_run_says_why(tmp_path: Path) -> None:
    assert locate.ask(tmp_path / "none").missing[0].startswith("does not run")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho bad >&2\nexit 3\n", encoding="utf-8")
    broken.chmod(0o755)
    if sys.platform != "win32":
        assert locate.ask(broken).missing == ("does not run: bad",)


def test_a_users_host_is_not_written_to(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    host, pack = make_host(tmp_path / "host"), make_pack(tmp_path / "pack")
    monkeypatch.setenv("COMFYUI_PATH", str(host))
    monkeypatch.setattr(provision, "find_python", lambda *_: locate.Python(Path(sys.executable), ()))
    before = listing(host)
    prepared = provision.prepare(cache, provision.Wishes(), Talk(stream=io.StringIO()), pack)
    assert listing(host) == before
    assert not prepared.own
    assert prepared.output == host / "output"
    assert "--cpu" in prepared.arguments
    assert "--extra-model-paths-config" in prepared.arguments
    monkeypatch.setattr(provision, "find_python", lambda *_: locate.Python(Path(sys.executable), (), "cuda"))
    inside = make_pack(host / "custom_nodes" / "pack")
    prepared = provision.prepare(cache, provision.Wishes(), Talk(stream=io.StringIO()), inside)
    assert "--cpu" not in prepared.arguments
    assert "--extra-model-paths-config" not in prepared.arguments


def test_every_pack_folder_gets_its_own_link(tmp_path: Path) -> None:
    first, second = make_pack(tmp_path / "one" / "pack"), make_pack(tmp_path / "two" / "pack")
    configs = [link.extra_paths(pack, tmp_path / "links") for pack in (first, second, first)]
    assert configs[0] == configs[2] != configs[1]
    for pack, config in zip((first, second), configs):
        assert (config.parent / "custom_nodes" / link.NAME).resolve() == pack


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    first, second, place = make_pack(tmp_path / "one"), make_pack(tmp_path / "two"), tmp_path / "link"
    assert link.link_folder(first, place) == "link"
    assert link.link_folder(second, place) == "link"
    assert place.resolve() == second
    link.remove_link(place)
    assert (first / "__init__.py").exists()
    assert (second / "__init__.py").exists()


def test_where_links_are_forbidden_a_fresh_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", forbidden)
    pack, place = make_pack(tmp_path / "pack"), tmp_path / "place"
    (pack / ".git").mkdir()
    assert link.link_folder(pack, place) == "copy"
    assert [path.name for path in place.iterdir()] == ["__init__.py"]
    (pack / "__init__.py").write_text("changed = 1\n", encoding="utf-8")
    assert link.link_folder(pack, place) == "copy"
    assert (place / "__init__.py").read_text(encoding="utf-8") == "changed = 1\n"


def test_run_py_starts_without_any_library() -> None:
    """-I -S: no site-packages at all."""
    script = Path(provision.__file__).parents[1] / "run.py"
    code = "import sys, runpy; sys.path.insert(0, sys.argv[1]); sys.argv[1:] = ['--help']; runpy.run_path(sys.argv[0])"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{code.replace('sys.argv[0]', repr(str(script)))}", str(script.parent)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
