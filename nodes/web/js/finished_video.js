// The web interface shows a node's preview picture in place of its finished video for as long as there is a preview.
// When our sampler has finished, its last preview is dropped, so that the video appears in the node.

import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

const PREVIEW_WIDGET = "$$canvas-image-preview";
const SETTLED_MS = 1000; // a preview that was still loading when the run ended has arrived by then

function dropPreview(id) {
  if (app.nodePreviewImages) delete app.nodePreviewImages[id];
  const node = app.graph?.getNodeById?.(Number(id));
  const place = node?.widgets?.findIndex((widget) => widget.name === PREVIEW_WIDGET) ?? -1;
  if (place < 0) return;
  node.widgets[place].onRemove?.();
  node.widgets.splice(place, 1);
  node.imgs = undefined;
  node.setDirtyCanvas?.(true);
}

app.registerExtension({
  name: "fastar.finishedVideo",
  setup() {
    api.addEventListener("executed", ({ detail }) => {
      if (!detail?.output?.fastar_report || !detail.output.images?.length) return;
      const id = String(detail.display_node ?? detail.node);
      dropPreview(id);
      setTimeout(() => dropPreview(id), SETTLED_MS);
    });
  },
});
