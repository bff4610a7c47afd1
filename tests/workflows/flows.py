"""The example workflows: which nodes, with which values, and what the notes beside them say."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from demo.example_prompts import EXAMPLE_PROMPTS
from workflows import notes
from workflows.graph import Graph, Info, Node

MODEL, STORY, VIDEO = "#3f789e", "#8a8", "#b58b2a"
DEMO_LATENTS, PICTURE_LATENTS, LONG_LATENTS = 49, 25, 121
LOAD_ROOM, VIDEO_ROOM, SQUARE_VIDEO_ROOM = 170, 390, 560  # for the report and the video, which appear in the nodes
TEXT_ENCODER, VAE = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
LONG_WAY = (
    (0, "at oslo with sand lined ground and a red disc"), (4, "at oslo"),
    (10, "to mira with teal plain ground and a yellow triangle"), (13, "at mira"),
    (19, "to lund with rose checked ground and a blue cross"), (22, "at lund"),
    (28, "to visby with dusk barred ground and a white ring"), (31, "at visby"),
    (40, "to kolar with fog plain ground and a black square"), (43, "at kolar"),
    (52, "to zadar with moss lined ground and a green diamond"), (55, "at zadar"),
    (64, "to mira"), (67, "at mira"),
    (76, "to visby"), (79, "at visby"),
    (88, "to petra with clay checked ground and a blue ring"), (91, "at petra"),
    (103, "to oslo"), (106, "at oslo"),
)  # fmt: skip
PICTURE = "moss_lined_red_ring.png"
SAILING = (
    "A small wooden sailing boat leaves a stone harbour at sunrise, seen from the quay. The camera follows it slowly "
    "past the lighthouse, gulls circle above, low golden light lies on the waves, realistic film look."
)
MARKET = (
    "A walk through a covered market hall in the morning, at eye level. Fruit stands on both sides, people in light "
    "clothes, steam rises from a tea stall, sun falls through the glass roof, smooth forward camera movement."
)
VALLEY = (
    "A red hot-air balloon floats over a green valley with a winding river, seen from the air, clear morning light, "
    "slow camera movement, realistic film look."
)
SNOW = (
    "A red hot-air balloon floats over the same valley while heavy snow falls, the meadows and the river turn white, "
    "grey winter light, slow camera movement, realistic film look."
)


def pixel_frame(latent_frame: int) -> int:
    """The first pixel frame that a latent frame decodes to."""
    return 0 if latent_frame == 0 else 4 * latent_frame - 3


def pixel_length(latents: int) -> int:
    """Pixel frames of a video of so many latent frames."""
    return 4 * latents - 3


def prompt_lines(name: str, latents: int) -> str:
    """A list of EXAMPLE_PROMPTS as text for FAST-AR Prompts, as far as a video of `latents` latent frames reaches."""
    return lines_of((at, text) for at, text in EXAMPLE_PROMPTS[name] if at < latents)


def lines_of(listed: Iterable[tuple[int, str]]) -> str:
    """(latent frame, text) pairs as text for FAST-AR Prompts."""
    return "\n".join(f"{pixel_frame(at)}: {text}" for at, text in listed)


def _demo_models(graph: Graph) -> tuple[Node, Node, Node]:
    graph.column("1  Demo model", MODEL)
    model = graph.node("FastARLoadModel", 420, LOAD_ROOM, model_name="fastar_demo_dit.safetensors")
    text = graph.node("FastARDemoText", file="fastar_demo_text.safetensors")
    vae = graph.node("FastARDemoVAE", file="fastar_demo_vae.safetensors")
    return model, text, vae


def _wan_models(graph: Graph, file: str, preset: str, lora: str = "none") -> tuple[Node, Node, Node]:
    graph.column("1  Your models", MODEL)
    model = graph.node("FastARLoadModel", 420, LOAD_ROOM, model_name=file, preset=preset, lora=lora)
    text = graph.node("CLIPLoader", 420, clip_name=TEXT_ENCODER, type="wan")
    vae = graph.node("VAELoader", 420, vae_name=VAE)
    return model, text, vae


def _sampler(graph: Graph, parts: tuple[Node, Node, Node], prefix: str, **inputs: object) -> None:
    graph.column("3  The video", VIDEO)
    model, _, vae = parts
    room = SQUARE_VIDEO_ROOM if inputs["width"] == inputs["height"] else VIDEO_ROOM
    graph.node(
        "FastARStreamingSampler", 420, room, model=(model, "model"), vae=(vae, _first_output(graph, vae)),
        frames_to="file", filename_prefix=f"video/{prefix}", **inputs,
    )  # fmt: skip


def _first_output(graph: Graph, node: Node) -> str:
    return str(graph.info[node.kind]["output_name"][0])


def _prompts(graph: Graph, text_encoder: Node, lines: str, width: int, room: int, table: int) -> Node:
    graph.column("2  What happens", STORY)
    source = (text_encoder, _first_output(graph, text_encoder))
    prompts = graph.node("FastARPrompts", width, room, clip=source, text=lines)
    graph.node("PreviewAny", width, table, "Prompt list as it was read", source=(prompts, "table"))
    return prompts


def demo_text_to_video(info: Info) -> Graph:
    """The demo model walks through four places and returns to the first one."""
    graph = Graph("demo_text_to_video", info)
    graph.column()
    graph.note(notes.DEMO_TEXT)
    parts = _demo_models(graph)
    slate = graph.node("FastARDemoSlate", file="fastar_demo_slate.safetensors")
    prompts = _prompts(graph, parts[1], prompt_lines("there_and_back", DEMO_LATENTS), 500, 220, 420)
    _sampler(
        graph, parts, "demo", positive=(prompts, "first"), prompts=(prompts, "prompts"), start_latent=(slate, "latent"),
        width=128, height=128, length=pixel_length(DEMO_LATENTS), seed=1,
    )  # fmt: skip
    return graph


def demo_long_memory(info: Info) -> Graph:
    """Thirty seconds through seven places, remembered in a cache of 18 latent frames by TempCache."""
    graph = Graph("demo_long_memory", info)
    graph.column()
    graph.note(notes.DEMO_MEMORY)
    model, text, vae = _demo_models(graph)
    slate = graph.node("FastARDemoSlate", file="fastar_demo_slate.safetensors")
    memory = graph.node("FastARTempCache", 420, 120, model=(model, "model"), preset="balanced")
    prompts = _prompts(graph, text, lines_of(LONG_WAY), 500, 420, 620)
    _sampler(
        graph, (memory, text, vae), "demo_long_memory", positive=(prompts, "first"), prompts=(prompts, "prompts"),
        start_latent=(slate, "latent"), width=128, height=128, length=pixel_length(LONG_LATENTS), seed=1,
    )  # fmt: skip
    return graph


def demo_image_to_video(info: Info) -> Graph:
    """The demo model starts from a picture, leaves it and comes back."""
    graph = Graph("demo_image_to_video", info)
    graph.column()
    graph.note(notes.DEMO_IMAGE)
    parts = _demo_models(graph)
    picture = graph.node("FastARDemoPicture", picture=PICTURE)
    graph.node("PreviewImage", 340, 240, "Start picture", images=(picture, "image"))
    prompts = _prompts(graph, parts[1], prompt_lines("from_a_picture", PICTURE_LATENTS), 500, 140, 260)
    _sampler(
        graph, parts, "demo_image", positive=(prompts, "first"), prompts=(prompts, "prompts"),
        start_image=(picture, "image"), width=128, height=128, length=pixel_length(PICTURE_LATENTS), seed=1,
    )  # fmt: skip
    return graph


def _one_prompt(info: Info, name: str, note: str, file: str, preset: str, length: int, text: str) -> Graph:
    graph = Graph(name, info)
    graph.column()
    graph.note(note, 440, 440, "What you need")
    parts = _wan_models(graph, file, preset)
    graph.column("2  What happens", STORY)
    positive = graph.node("CLIPTextEncode", 420, 180, "Prompt", clip=(parts[1], "CLIP"), text=text)
    _sampler(graph, parts, name, positive=(positive, "CONDITIONING"), width=832, height=480, length=length, seed=1)
    return graph


def self_forcing_480p(info: Info) -> Graph:
    """Self-Forcing as its authors run it: 81 frames, everything kept."""
    return _one_prompt(
        info, "self_forcing_480p", notes.SELF_FORCING, "self_forcing_dmd.pt", "self_forcing", 81, SAILING
    )


def rolling_forcing(info: Info) -> Graph:
    """Rolling-Forcing: five blocks are denoised at once, the window moves on."""
    return _one_prompt(
        info, "rolling_forcing", notes.ROLLING_FORCING, "rolling_forcing_dmd.pt", "rolling_forcing", 249, MARKET
    )


def longlive_two_prompts(info: Info) -> Graph:
    """LongLive with a prompt that changes in the middle."""
    graph = Graph("longlive_two_prompts", info)
    graph.column()
    graph.note(notes.LONGLIVE, 440, 460, "What you need")
    parts = _wan_models(graph, "longlive_base.pt", "longlive1", "lora.pt")
    prompts = _prompts(graph, parts[1], f"0: {VALLEY}\n7.5s: {SNOW}", 500, 220, 300)
    _sampler(
        graph, parts, "longlive_two_prompts", positive=(prompts, "first"), prompts=(prompts, "prompts"),
        width=832, height=480, length=237, seed=1,
    )  # fmt: skip
    return graph


FLOWS: tuple[Callable[[Info], Graph], ...] = (
    demo_text_to_video, demo_image_to_video, demo_long_memory, self_forcing_480p, rolling_forcing, longlive_two_prompts,
)  # fmt: skip
