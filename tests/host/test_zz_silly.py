"""ad hoc"""
import pytest, torch, json
from host.stream_parts import *
pytestmark = pytest.mark.cpu
CASES = {
 "window over length": dict(cache="sink_window", window=100, sink=50),
 "huge sink": dict(cache="sink_window", window=100, sink=99),
 "len1": dict(length=1), "len2": dict(length=2), "w16": dict(width=16, height=16), "odd": dict(width=40, height=24),
 "w8": dict(width=8, height=8),
 "cfg0": dict(cfg=0.0, negative=text(2)), "cfgneg": dict(cfg=-1.0, negative=text(2)), "cfgnan": dict(cfg=float("nan"), negative=text(2)),
 "batch2 img2": dict(batch_size=2, start_image=torch.rand(2, 20, 30, 3)),
 "img gray": dict(start_image=torch.rand(1, 20, 30, 1)),
 "img 1x1": dict(start_image=torch.rand(1, 1, 1, 3)),
 "img nan": dict(start_image=torch.full((1, 8, 8, 3), float("nan"))),
 "latent nan": dict(start_latent={"samples": torch.full((1,16,1,4,6), float("nan"))}),
 "latent no samples": dict(start_latent={}),
 "seed neg": dict(seed=-5),
 "model none": dict(model=None), "vae none": dict(vae=None), "positive none": dict(positive=None),
 "prompts late": dict(prompts=[(0, text(1)), (50, text(2))]),
 "fps nan": dict(fps=float("nan")),
 "fps neg": dict(fps=-2.0),
 "file odd": dict(width=40, height=24, frames_to="file", batch_size=2),
 "causal frame": dict(preset="causal_forcing_frame_4"),
 "text dim": dict(positive=[[torch.randn(1, 7, 32), {}]]),
 "pooled": dict(positive=[[torch.randn(1, 7, 64), {"pooled_output": torch.randn(1, 5)}]]),
 "rows of text": dict(positive=[[torch.randn(3, 7, 64), {}]], batch_size=2),
}
@pytest.mark.parametrize("name", CASES)
def test_x(name, host, capsys):
    g = dict(CASES[name])
    m = g.pop("model", 0); v = g.pop("vae", 0)
    m = tiny_model() if m == 0 else m; v = tiny_wan_vae() if v == 0 else v
    try:
        l, i, vid, r = sample(host, m, v, **g)
        s = f"OK latent {tuple(l.shape)} images {tuple(i.shape)} {json.loads(r)['warnings']} finite={bool(torch.isfinite(l).all())}"
    except Exception as e:
        s = f"{type(e).__name__}: {str(e)[:260]}"
    with capsys.disabled():
        print(f"\n{name}: {s}")
