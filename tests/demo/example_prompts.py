"""Prompt lists for the demo workflows as (latent frame, text); latent frame l > 0 begins at video frame 4 l - 3.

Text-to-video starts with the slate latent (one latent frame), image-to-video with the picture, so block borders are
1 + 3k. A line holds until the next one. A place's looks are named once; coming back, its name alone must do.
"""

from __future__ import annotations

EXAMPLE_PROMPTS: dict[str, tuple[tuple[int, str], ...]] = {
    "there_and_back": (
        (0, "at oslo with sand lined ground and a red disc"),
        (4, "at oslo"),
        (10, "to mira with teal plain ground and a yellow triangle"),
        (13, "at mira"),
        (19, "to lund with rose checked ground and a blue cross"),
        (22, "at lund"),
        (28, "to visby with dusk barred ground and a white ring"),
        (31, "at visby"),
        (40, "to oslo"),
        (43, "at oslo"),
        (49, "to mira"),
        (52, "at mira"),
    ),
    "hard_cuts": (
        (0, "at quito with moss plain ground and a white diamond"),
        (4, "at quito"),
        (7, "at petra with clay lined ground and a green square"),
        (10, "at petra"),
        (16, "at nara with sky checked ground and a black triangle"),
        (19, "at nara"),
        (31, "at quito"),
        (40, "at petra"),
        (49, "at nara"),
    ),
    "long_prompts": (
        (0, "past wells at elmet with fog barred ground and a green ring long after tarfa"),
        (4, "not near sines at elmet without seeing ravna"),
        (10, "beyond hova to kolar with rose plain ground and a black square"),
        (13, "at kolar past hova beyond istra long after galle not near sines without seeing ravna past ulm"),
        (22, "to zadar with moss lined ground and a red cross not near wells"),
        (25, "long after istra at zadar"),
        (40, "past tarfa to elmet beyond istra"),
        (43, "at elmet not near galle"),
    ),
    "from_a_picture": (
        (0, "at oslo"),
        (7, "to lund with clay checked ground and a yellow diamond"),
        (10, "at lund"),
        (16, "to oslo"),
        (19, "at oslo"),
    ),
}
