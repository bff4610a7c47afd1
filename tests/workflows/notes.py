"""Texts of the notes inside the example workflows."""

from __future__ import annotations

DEMO_TEXT = """## There and back again

Needs no downloads and runs on a CPU. Press **Run**.

The small demo model draws a made-up world of named places. The camera starts in *oslo*, visits three other places and \
comes back. What a place looks like is said **once**, when it is first shown; at frame 157 the prompt only says *to \
oslo*, so the model has to find the looks in its memory, the key/value cache.

The video grows in the sampler node and is a playable file after every block.

### Try
- `cache` = *sink_window*, `window` = 9, `sink` = 1: on the way back the place is out of sight.
- other lists and all words it knows: `example_workflows/models/MODEL_CARD.md` in the pack's folder.
"""

DEMO_MEMORY = """## A long memory in a small cache

Needs no downloads and runs on a CPU. Press **Run**.

Half a minute through seven places, with three returns; the last one goes back to *oslo*, out of sight for 99 latent frames, and \
the prompt says no more than its name. **FAST-AR TempCache** keeps what repeats only once: its cache holds 18 latent frames \
instead of 121, and the places are still found.

### Try
- `preset` = *small*: 9 latent frames.
- `preset` = *off*, and in the sampler `cache` = *sink_window*, `window` = 21, `sink` = 1: a larger cache without merging. \
The places come back wrong.
- The *report* of the sampler holds groups, merges and the step recall of every block.
"""

DEMO_IMAGE = """## A start picture

Needs no downloads and runs on a CPU. Press **Run**.

The video starts from a picture. The prompt gives the place a name but not its looks: those come from the picture. The \
camera leaves for another place and returns.

For models of your own use *Load Image* in place of *FAST-AR Demo Picture*.
"""

_WAN_FILES = """- `umt5_xxl_fp8_e4m3fn_scaled.safetensors` to `models/text_encoders`, and `wan_2.1_vae.safetensors` to \
`models/vae`, both from Comfy-Org/Wan_2.1_ComfyUI_repackaged
"""

_FILES = """### Files, by Hugging Face repository
"""

SELF_FORCING = f"""## Self-Forcing, 832 x 480

{_FILES}- `checkpoints/self_forcing_dmd.pt` from gdhe17/Self-Forcing to `models/diffusion_models`
{_WAN_FILES}
### Good to know
- 81 frames are what the model was trained on, with everything kept: the cache takes 6.04 GB in bf16.
- Longer: set `cache` to *sink_window*, `window` 12, `sink` 3 (3.45 GB at any length). Quality beyond 81 frames is not \
promised by its authors.
- The Causal-Forcing files (zhuhz22/Causal-Forcing) run in the same workflow with their own `preset`.
"""

ROLLING_FORCING = f"""## Rolling-Forcing, 832 x 480

{_FILES}- `checkpoints/rolling_forcing_dmd.pt` from TencentARC/RollingForcing to `models/diffusion_models`
{_WAN_FILES}
### Good to know
- Five blocks are denoised together, each less noisy than the next; the first block is finished after five steps, then \
one block per step.
- The cache holds 24 latent frames at any length: 6.90 GB in bf16. The authors show up to 126 latent \
frames (501 frames).
- No start image and no change of prompt: the model was not made for them.
"""

LONGLIVE = f"""## LongLive with two prompts, 832 x 480

{_FILES}- `models/longlive_base.pt` from Efficient-Large-Model/LongLive-1.3B to `models/diffusion_models`
- `models/lora.pt` from there to `models/loras`
{_WAN_FILES}
### Good to know
- Both files of the model are needed: the base and its LoRA.
- At 7.5 s the second prompt takes over at the next block; the last 12 latent frames are computed anew under it, so \
the scene goes on instead of being cut.
- The window is 12 latent frames with a sink of 3, so the cache takes 3.45 GB in bf16 at any length.
"""
