"""What is kept when a run ends early: files are closed and named, finished latents saved, exceptions keep their type."""

from __future__ import annotations

import logging
from pathlib import Path

import folder_paths
import safetensors.torch
import torch
from comfy.model_management import InterruptProcessingException

from .frames_out import FramesOut

logger = logging.getLogger(__name__)


def close_after(failure: BaseException, frames: FramesOut, latents: list[torch.Tensor], prefix: str,
                decoded: int) -> None:
    """Closes the files of a run that ended with ``failure`` and says what is safe, in the log and in the message.

    ``latents``: finished blocks [B, 16, n, h, w], saved when an error (not the user) ended the run before they were all
    in a file; ``decoded`` counts the latent frames whose pictures are. Never raises: the failure must reach the host.
    """
    notes = []
    try:
        frames.close()
    except Exception as second:  # the first failure is the one to report
        logger.warning("FAST-AR: closing the video file failed too: %s", second)
    files = frames.files()
    notes += [f"{count} frames are safe in {path}" for path, count in files]
    stopped = isinstance(failure, (InterruptProcessingException, KeyboardInterrupt))
    finished = sum(block.shape[2] for block in latents)
    if finished and not stopped and (not files or decoded < finished):
        saved = _save_latents(torch.cat(latents, 2), prefix)
        if saved is not None:
            notes.append(f"the {finished} finished latent frames are saved in {saved} (move it to the input folder and "
                         "use Load Latent)")
    note = "; ".join(notes) or "nothing was finished yet"
    logger.warning("FAST-AR: run %s: %s", "interrupted" if stopped else f"failed ({type(failure).__name__})", note)
    if notes and not stopped:
        _extend(failure, note)


def _extend(failure: BaseException, note: str) -> None:
    """Adds the note to the message that the host shows; the exception object and its type stay the same."""
    if len(failure.args) == 1 and isinstance(failure.args[0], str):
        failure.args = (f"{failure.args[0]}\nFAST-AR: {note}",)


def _save_latents(samples: torch.Tensor, prefix: str) -> Path | None:
    """Writes a .latent file as the host's Save Latent does; None (and a log line) when that fails."""
    try:
        output = folder_paths.get_output_directory()
        folder, name, counter, _, _ = folder_paths.get_save_image_path(f"{prefix}_latents", output)
        path = Path(folder) / f"{name}_{counter:05}_.latent"
        tensors = {"latent_tensor": samples.contiguous(), "latent_format_version_0": torch.tensor([])}
        safetensors.torch.save_file(tensors, str(path))
    except Exception as reason:  # a full disk must not hide the failure that brought us here
        logger.warning("FAST-AR: the finished latents could not be saved: %s", reason)
        return None
    return path
